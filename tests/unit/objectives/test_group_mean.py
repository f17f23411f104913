"""Advantages against the mean of a group."""

import pytest

from tests.unit.objectives.cases import float64
from verl_ext.objectives.group_mean import group_mean


def test_one_right_of_sixteen():
    """Mean -.875, sample std .5: 1.875 / .5 = 3.75, -.125 / .5 = -.25; 1e-6 in the denominator."""
    found = group_mean(float64([1.0] + [-1.0] * 15), ["a"] * 16, by_std=True).tolist()
    assert found == pytest.approx([3.75] + [-0.25] * 15, abs=1e-4)


@pytest.mark.parametrize("by_std", [False, True])
def test_a_group_of_one_and_an_equal_group_have_0(by_std):
    assert group_mean(float64([1.0, 0.5, 0.5]), ["a", "b", "b"], by_std=by_std).tolist() == [0.0, 0.0, 0.0]


def test_groups_may_be_mixed_and_the_rewards_stay_as_they_are():
    rewards = float64([1.0, 4.0, 0.0, 2.0])
    assert group_mean(rewards, ["a", "b", "a", "b"], by_std=False).tolist() == [0.5, 1.0, -0.5, -1.0]
    assert rewards.tolist() == [1.0, 4.0, 0.0, 2.0]
