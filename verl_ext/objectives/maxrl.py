"""MaxRL (arXiv:2602.02710, Theorem 2 and its control variate): preset maxrl.

    A = (r - mean) / mean,   r in {0, 1};   0 if none of the group is right

The mean over successful rollouts of their score function is an unbiased estimate of the gradient of the maximum
likelihood objective, truncated at the size n of the group: (sum over k < n of (1 - p)^k) x gradient of p. Minus the
mean over all rollouts, that is the A above. A group without a right answer gets 0, not the negative of its mean, so
the order is n - 1.
Departures: a reward above 0 is right and counts as 1, any other as 0: +1 and -1 would have a mean of 0 or less. A right
answer whose length penalty takes its whole reward counts as wrong. A group of one gets 0.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from verl_ext.objectives.group_mean import rows_of_groups


def maxrl(rewards: Tensor, groups: Sequence[str]) -> Tensor:
    """Return the advantages, float[B]. `rewards` is float[B], `groups` names the group of each response."""
    right = (rewards > 0).to(rewards.dtype)
    result = torch.zeros_like(rewards)
    for rows in rows_of_groups(groups):
        mean = right[rows].mean()
        if mean > 0 and len(rows) > 1:
            result[rows] = (right[rows] - mean) / mean
    return result
