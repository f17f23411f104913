"""MaxRL: the advantage by the mean."""

import pytest

from tests.unit.objectives.cases import float64
from verl_ext.objectives.maxrl import maxrl


@pytest.mark.parametrize(
    "rewards,expected",
    [
        ([1.0, -1.0, -1.0, -1.0], [3.0, -1.0, -1.0, -1.0]),  # mean 1/4: (1 - 1/4) / (1/4) = 3, (0 - 1/4) / (1/4) = -1
        ([1.0, 0.0, 0.0, 0.0], [3.0, -1.0, -1.0, -1.0]),  # the same with rewards of 0 and 1
        ([1.0, 0.7, -1.0, -1.2], [1.0, 1.0, -1.0, -1.0]),  # with length penalties: two right of four, 1/2
        ([-1.0, -1.0], [0.0, 0.0]),  # none right
        ([1.0, 1.0], [0.0, 0.0]),
        ([1.0], [0.0]),  # a group of one
    ],
)
def test_by_hand(rewards, expected):
    assert maxrl(float64(rewards), ["a"] * len(rewards)).tolist() == pytest.approx(expected)


def test_the_advantages_sum_to_0_and_the_right_ones_share_what_they_are_rare_by():
    """k right of n: (n - k) / k each, and -1 each of the n - k wrong ones."""
    for right in (1, 2, 3):
        found = maxrl(float64([1.0] * right + [-1.0] * (4 - right)), ["a"] * 4)
        assert found[0].item() == pytest.approx((4 - right) / right) and found.sum().item() == pytest.approx(0)
