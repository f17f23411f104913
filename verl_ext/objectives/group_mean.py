"""Advantages against the mean of a group: presets dapo, grpo, dr_grpo, olmorl and most others.

    A = R - mean(R), and with `by_std` divided by std(R) + 1e-6

GRPO (arXiv:2402.03300, section 4.1.2) and DAPO (Eq. 9) divide by the standard deviation; Dr. GRPO (arXiv:2503.20783)
and OlmoRL do not. The paper does not say which one; here it is the sample's (n - 1), as in verl. A group of one gets 0,
while verl gives it its score. For larger groups this equals verl's `grpo` (core_algos.py:268, 0.9.1), which training
calls (trainer/advantages.py); this module serves the analysis, and a test compares the two.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor


def rows_of_groups(groups: Sequence[str]) -> Iterator[list[int]]:
    """Yield the rows of each group, in order."""
    rows: dict[str, list[int]] = {}
    for row, group in enumerate(groups):
        rows.setdefault(group, []).append(row)
    yield from rows.values()


def group_mean(rewards: Tensor, groups: Sequence[str], *, by_std: bool) -> Tensor:
    """Return the advantages, float[B]. `rewards` is float[B], `groups` names the group of each response."""
    result = torch.zeros_like(rewards)
    for rows in rows_of_groups(groups):
        if len(rows) > 1:
            own = rewards[rows] - rewards[rows[0]]  # exact for close rewards; their rounded mean over a tiny std is not
            result[rows] = (own - own.mean()) / (own.std() + 1e-6 if by_std else 1.0)
    return result
