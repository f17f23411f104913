"""IcePop with one update a batch: the gradient of `icepop.py`, without old log-probs of the trainer."""

import pytest

from tests.unit.objectives.cases import BOUNDS, evaluate, float64, tokens
from verl_ext.objectives.icepop import icepop, pop
from verl_ext.objectives.icepop_onpolicy import icepop_onpolicy


def test_value_and_gradient_are_icepops_at_pi_equal_to_pi_old():
    """pi / pi_vllm 1.2 .6 1.9 12: pop 1.2 .6 1.9 0. A 1 1 -1 -1: sum 1.2 + .6 - 1.9 = -.1, loss .025.

    Slopes -pop A / 4: -.3, -.15, .475, 0.
    """
    ratio, advantages = [1.2, 0.6, 1.9, 12.0], [1.0, 1.0, -1.0, -1.0]
    loss, gradient, terms = evaluate(icepop_onpolicy, tokens(ratio, advantages), low=0.5, high=1.0)
    assert loss == pytest.approx(0.025, abs=1e-12)
    assert gradient == pytest.approx([-0.3, -0.15, 0.475, 0.0], abs=1e-12)
    assert terms.dropped.tolist() == [[False, False, False, True]]
    weights = pop(float64(ratio), 0.5, 2.0).tolist()
    same = evaluate(icepop, tokens([1.0] * 4, advantages, weights=weights), **BOUNDS)
    assert same[0] == pytest.approx(loss, abs=1e-12) and same[1] == pytest.approx(gradient, abs=1e-12)
