"""MaxRL: the advantage by the mean."""

import itertools

import pytest

from tests.unit.objectives.cases import float64
from verl_ext.objectives.maxrl import maxrl


@pytest.mark.parametrize(
    ("rewards", "expected"),
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


@pytest.mark.parametrize(("size", "order"), [(2, 1), (3, 2), (4, 3)])
def test_the_expected_gradient_is_that_of_maximum_likelihood_truncated_at_one_less_than_the_group(size, order):
    """p = .3 = sigmoid(logit): scores .7 and -.3 by the logit, dp = .21. Three responses: (1 + .7) x .21 = .357."""
    p, expected = 0.3, 0.0
    for group in itertools.product((1.0, 0.0), repeat=size):
        advantages = maxrl(float64(group), ["a"] * size).tolist()
        scores = [right - p for right in group]
        chance = p ** sum(group) * (1 - p) ** (size - sum(group))
        expected += chance * sum(a * score for a, score in zip(advantages, scores, strict=True)) / size
    assert expected == pytest.approx(sum((1 - p) ** k for k in range(order)) * p * (1 - p))
