"""Advantages against the mean of a group."""

import pytest
import torch

from tests.unit.objectives.cases import float64
from verl_ext.objectives.group_mean import group_mean


def test_one_right_of_sixteen():
    """Mean -.875, sample std .5: 1.875 / .5 = 3.75, -.125 / .5 = -.25; 1e-6 in the denominator."""
    found = group_mean(float64([1.0] + [-1.0] * 15), ["a"] * 16, by_std=True).tolist()
    assert found == pytest.approx([3.75] + [-0.25] * 15, abs=1e-4)


def test_equal_answers_train_on_the_length_penalty_alone():
    """What docs/objectives.md warns of. Mean -1.0625, sample std .25: .0625 / .25 and -.9375 / .25."""
    found = group_mean(float64([-1.0] * 15 + [-2.0]), ["a"] * 16, by_std=True).tolist()
    assert found == pytest.approx([0.25] * 15 + [-3.75], abs=1e-4)


@pytest.mark.parametrize("by_std", [False, True])
def test_a_group_of_one_and_an_equal_group_have_0(by_std):
    assert group_mean(float64([1.0, 0.5, 0.5]), ["a", "b", "b"], by_std=by_std).tolist() == [0.0, 0.0, 0.0]


def test_groups_may_be_mixed_and_the_rewards_stay_as_they_are():
    rewards = float64([1.0, 4.0, 0.0, 2.0])
    assert group_mean(rewards, ["a", "b", "a", "b"], by_std=False).tolist() == [0.5, 1.0, -0.5, -1.0]
    assert rewards.tolist() == [1.0, 4.0, 0.0, 2.0]


@pytest.mark.parametrize("by_std", [False, True])
@pytest.mark.parametrize("number,reward", [(8, -0.9), (16, -0.6), (12, -0.8)])
def test_equal_rewards_that_no_binary_number_is_have_exactly_0(number, reward, by_std):
    """In float32 eight times -.9 have the mean -.9 + 6e-8, and would get .056 each."""
    found = group_mean(torch.full((number,), reward), ["a"] * number, by_std=by_std)
    assert found.tolist() == [0.0] * number
