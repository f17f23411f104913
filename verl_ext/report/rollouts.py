"""Choose the rollouts that the report shows, and the problems that it names."""

import hashlib
from collections.abc import Callable, Sequence
from itertools import zip_longest
from statistics import fmean
from typing import Any, NamedTuple

from verl_ext.evaluation.figures import is_ood
from verl_ext.evaluation.samples import Sample, sample_of
from verl_ext.pages.question import first_words

COUNT = 10  # rollouts that a page shows
WORST = 5  # problems that it names
Row = dict[str, Any]  # of the records: a response
Fits = Callable[[Sample], bool]


class ShownRollout(NamedTuple):
    """A rollout to show, and why it was chosen."""

    why: str
    where: str  # before RL | after RL | step 30 | RL step 12
    sample: Sample
    row: Row


def pick_rollouts(
    before: Sequence[Row], after: Sequence[Row], names: tuple[str, str] = ("before RL", "after RL")
) -> list[ShownRollout]:
    """Pick rollouts of each kind of behaviour: right and wrong, with and without code, repaired, out of distribution.

    Each kind is represented by the rollout whose text has the smallest SHA-256, which favours none; open places are
    filled in that order from both sides alternately. The result depends only on the rows.

    Args:
        names: of the two sides.
    """
    first, last, sides = 0, 1, (_ordered(before), _ordered(after))
    missed = next((s for s, _ in sides[first] if not is_ood(s.data_source) and s.acc == 0 and not s.tool_calls), None)

    def kind(acc: int, *, ood: bool | None = None, code: bool = False, errors: bool = False) -> Fits:
        return lambda s: (
            (s.acc == acc and not s.failure)
            and (ood is None or is_ood(s.data_source) == ood)
            and (s.tool_calls > 0 or not code)
            and (s.tool_errors > 0 or not errors)
        )

    def is_of_missed(s: Sample) -> bool:
        return missed is not None and s.problem_key() == missed.problem_key()

    kinds: list[tuple[str, int, Fits]] = [
        ("wrong without code", first, lambda s: s is missed),
        ("the same problem", last, is_of_missed),
        ("wrong with code", first, kind(0, ood=False, code=True)),
        ("right with code", first, kind(1, ood=False, code=True)),
        ("an error, repaired", first, kind(1, errors=True)),
        ("out of distribution, wrong", first, kind(0, ood=True)),
        ("right with code", last, kind(1, ood=False, code=True)),
        ("an error, repaired", last, kind(1, errors=True)),
        ("out of distribution, right", last, kind(1, ood=True)),
        ("wrong", last, kind(0)),
    ]
    picks: dict[int, tuple[int, str, tuple[Sample, Row]]] = {}
    for why, side, fits in kinds:
        if found := next((each for each in sides[side] if fits(each[0]) and id(each[1]) not in picks), None):
            picks[id(found[1])] = side, why, found
    for pair in zip_longest(*sides):
        for side, found in enumerate(pair):
            if found is not None and len(picks) < COUNT:
                picks.setdefault(id(found[1]), (side, "another", found))
    chosen = sorted(picks.values(), key=lambda pick: pick[0])
    return [ShownRollout(why, names[side], *found) for side, why, found in chosen]


def worst_problems(before: Sequence[Sample], after: Sequence[Sample]) -> list[dict[str, Any]]:
    """Return the WORST problems that are not always right, by mean acc after, or before if there is nothing after.

    Among equal ones, those that fell most come first, then a hash decides. Each has `question` (its first words), `id`,
    `data_source`, `samples` (judged ones), `acc`, and `before`, which is None if unknown.
    """
    means: list[dict[tuple[str, ...], float]] = []
    judged: dict[tuple[str, ...], list[Sample]] = {}
    for side in (before, after) if after else ([], before):
        judged = {}
        for sample in side:
            if not sample.failure:
                judged.setdefault(sample.problem_key(), []).append(sample)
        means.append(
            {key: fmean(each.acc for each in samples if each.acc is not None) for key, samples in judged.items()}
        )
    then, now = means
    wrong = [key for key in now if now[key] < 1]
    wrong.sort(key=lambda key: (now[key], now[key] - then.get(key, now[key]), _digest(*key)))
    return [
        {
            "question": first_words(next((each.prompt for each in judged[key] if each.prompt), "")) or key[1],
            "id": key[2],
        }
        | {"data_source": key[0], "samples": len(judged[key]), "acc": now[key], "before": then.get(key)}
        for key in wrong[:WORST]
    ]


def pick_training_rollouts(rows: Sequence[Row]) -> list[ShownRollout]:
    """Return the first of some training rollouts by SHA-256, in order of their steps."""
    chosen = sorted(_ordered(rows)[:COUNT], key=lambda each: each[1]["step"])
    return [ShownRollout("training", f"RL step {row['step']}", sample, row) for sample, row in chosen]


def _ordered(rows: Sequence[Row]) -> list[tuple[Sample, Row]]:
    """Return (sample, row) of each row, in the order of the hashes of their texts."""
    found = [(sample_of(row), row) for row in rows]
    return sorted(found, key=lambda each: _digest(each[0].data_source, each[0].prompt, each[0].output, each[0].uid))


def _digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()
