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
    """What docs/guides/objectives.md warns of. Mean -1.0625, sample std .25: .0625 / .25 and -.9375 / .25."""
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
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reward", [0.95, -0.9, 0.1, 1 / 3, -1.0000001, 123.4])
def test_equal_rewards_that_no_binary_number_is_have_exactly_0(reward, dtype, by_std):
    """In float32 eight times -.9 have the mean -.9 + 6e-8, and would get .056 each."""
    for number in range(2, 65):
        found = group_mean(torch.full((number,), reward, dtype=dtype), ["a"] * number, by_std=by_std)
        assert found.tolist() == [0.0] * number


@pytest.mark.parametrize("reward", [0.95, -0.3, 100.3])
def test_rewards_that_differ_by_a_millionth_keep_their_difference(reward):
    """One of four is d above: mean d / 4, sample std d / 2, 1e-6 in the denominator. Float32 rounds the mean by d / 30
    or, of 100.3, by half of d, which is then 1.5e-5."""
    rewards = torch.tensor([reward, reward, reward, reward + max(1e-6, 1.5e-7 * abs(reward))])
    d = rewards[3].item() - rewards[0].item()
    by_hand = [-d / 4 / (d / 2 + 1e-6)] * 3 + [3 * d / 4 / (d / 2 + 1e-6)]
    assert d > 0 and group_mean(rewards, ["a"] * 4, by_std=True).tolist() == pytest.approx(by_hand, rel=1e-5)
