"""GRPO with resampling on correct (GRPO-RoC; rStar2-Agent, arXiv:2508.20722, section 2.2.3): preset grpo_roc.

Generate 2n responses for a prompt and keep n, with the same share of right ones. The penalty of a response is the share
of its tool calls that failed, or 0.5 if it called no tool.

- `paper`: draw right responses with probabilities inverse to their penalties, and wrong ones uniformly.
- `code` (microsoft/rStar@73b21b5, rstar2_agent/down_sample/roc.py): sort right and wrong responses by penalty and keep
  the first ones. Nothing is drawn, and wrong answers without tool errors are preferred too.

Departures: the paper also penalises answers that repeat or lack their tags; here every right answer was found in a box.
The inverse of a penalty of 0 is unbounded, so 0.01 is added (our choice; the paper does not say).
"""

import random
from collections.abc import Sequence

FLOOR = 0.01


def penalty(calls: int, failed: int) -> float:
    """Return the share of a response's tool calls that failed; .5 for a response without calls."""
    return failed / calls if calls else 0.5


def keep(right: Sequence[bool], penalties: Sequence[float], n: int, *, rule: str, rng: random.Random) -> list[int]:
    """Return which `n` of a group's responses are kept, in order.

    Right and wrong ones keep their shares of the group, rounded; if there are some of both, at least one of each stays.

    Raises:
        ValueError: the group has fewer than n responses, or the rule is neither `paper` nor `code`.
    """
    if rule not in ("paper", "code") or len(right) < n:
        raise ValueError(
            f"GRPO-RoC keeps {n} of {len(right)} by rule {rule!r}: expected {n} or more, and paper or code."
        )
    good = [i for i, is_right in enumerate(right) if is_right]
    bad = [i for i, is_right in enumerate(right) if not is_right]
    number = round(len(good) * n / len(right))
    if good and bad and n > 1:
        number = min(max(number, 1), n - 1)
    number = max(min(number, len(good)), n - len(bad))
    if rule == "code":
        by_penalty = sorted(range(len(right)), key=lambda i: penalties[i])
        kept = [i for i in by_penalty if right[i]][:number] + [i for i in by_penalty if not right[i]][: n - number]
    else:
        kept = _draw(good, [1 / (penalties[i] + FLOOR) for i in good], number, rng) + rng.sample(bad, n - number)
    return sorted(kept)


def _draw(items: list[int], weights: list[float], number: int, rng: random.Random) -> list[int]:
    """Draw `number` of the items without replacement, each with a probability in proportion to its weight."""
    items, weights, drawn = list(items), list(weights), []
    for _ in range(number):
        place = rng.choices(range(len(items)), weights)[0]
        drawn.append(items.pop(place))
        weights.pop(place)
    return drawn
