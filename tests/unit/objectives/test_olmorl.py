"""OlmoRL: truncated weights, and advantages without a standard deviation."""

import pytest

from tests.unit.objectives.cases import BOUNDS, evaluate, float64, tokens
from verl_ext.objectives.group_mean import group_mean
from verl_ext.objectives.olmorl import olmorl, truncate


def test_a_weight_of_3_is_truncated_to_2():
    """pi_old / pi_vllm 3 .5: weights 2 .5. r 1.5 1.1, A 1 -1: 1.28, -1.1; times weights 2.56, -.55; loss -2.01 / 2.

    Slopes: 0 (clipped), .5 x 1.1 / 2 = .275.
    """
    weights = truncate(float64([3.0, 0.5]), 2.0)
    assert weights.tolist() == [2.0, 0.5]
    loss, gradient, terms = evaluate(olmorl, tokens([1.5, 1.1], [1.0, -1.0], weights=weights.tolist()), **BOUNDS)
    assert loss == pytest.approx(-1.005) and gradient == pytest.approx([0.0, 0.275]) and not terms.dropped.any()


def test_one_right_of_sixteen():
    """Rewards +1 and 15 x -1: mean -14 / 16 = -.875; 1 + .875 = 1.875 and -1 + .875 = -.125."""
    found = group_mean(float64([1.0] + [-1.0] * 15), ["a"] * 16, by_std=False)
    assert found.tolist() == [1.875] + [-0.125] * 15
