"""GRPO-RoC: which half of a group is kept."""

import random

import pytest

from verl_ext.objectives.grpo_roc import keep, penalty

RIGHT = [True, False, True, False, True, False, True, False]
PENALTIES = [1.0, 1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0]  # right and wrong ones: two clean, two with errors each


def test_the_penalty_is_the_share_of_failed_calls():
    assert [penalty(4, 1), penalty(2, 2), penalty(0, 0)] == [0.25, 1.0, 0.5]


def test_the_released_code_keeps_the_cleanest_of_both():
    """4 of 8 right, 4 are kept: two right ones, 2 and 6, and two wrong ones, 3 and 7, all without errors."""
    assert keep(RIGHT, PENALTIES, 4, rule="code", rng=random.Random(0)) == [2, 3, 6, 7]


def test_the_paper_draws_clean_right_ones_and_any_wrong_ones():
    """Weights 1 / .01 = 100 and 1 / 1.01 = .990. Both clean right ones: 200 / 201.98 x 100 / 101.98 = .97097.

    Wrong ones: one pair of 6, 1/6 = .167. Of 4,000 draws, within three standard deviations: .008 and .018.
    """
    rng = random.Random(0)
    draws = [keep(RIGHT, PENALTIES, 4, rule="paper", rng=rng) for _ in range(4000)]
    assert {len(draw) for draw in draws} == {4}
    assert sum({2, 6} <= set(draw) for draw in draws) / 4000 == pytest.approx(0.97097, abs=0.008)
    assert sum({3, 7} <= set(draw) for draw in draws) / 4000 == pytest.approx(1 / 6, abs=0.018)


@pytest.mark.parametrize(
    ("right", "kept_right"),
    [(0, 0), (1, 1), (2, 1), (4, 2), (7, 3), (8, 4)],  # of 8, of which 4 are kept; at least one of each kind
)
@pytest.mark.parametrize("rule", ["paper", "code"])
def test_both_kinds_have_their_share(right, kept_right, rule):
    kinds = [True] * right + [False] * (8 - right)
    kept = keep(kinds, [0.5] * 8, 4, rule=rule, rng=random.Random(1))
    assert len(set(kept)) == 4 and sum(kinds[i] for i in kept) == kept_right


@pytest.mark.parametrize("arguments", [([True], [0.0], 2, "paper"), ([True], [0.0], 1, "best")])
def test_too_few_responses_or_another_rule_are_refused(arguments):
    right, penalties, n, rule = arguments
    with pytest.raises(ValueError, match="paper or code"):
        keep(right, penalties, n, rule=rule, rng=random.Random(0))
