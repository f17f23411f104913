"""CISPO: the weight is clipped, never the gradient."""

import math

import pytest

from tests.unit.objectives.cases import evaluate, tokens
from verl_ext.objectives.cispo import cispo


def test_a_ratio_of_a_tenth_weighs_a_tenth_and_one_of_2_weighs_1_28():
    """A = 1: slopes -w / 2 = -.05 and -.64. log pi = log r - 1: loss -(.1 (ln .1 - 1) + 1.28 (ln 2 - 1)) / 2."""
    loss, gradient, terms = evaluate(cispo, tokens([0.1, 2.0], [1.0, 1.0]), low=1.0, high=0.28)
    assert gradient == pytest.approx([-0.05, -0.64])
    assert loss == pytest.approx(-(0.1 * (math.log(0.1) - 1) + 1.28 * (math.log(2) - 1)) / 2)
    assert loss == pytest.approx(0.3615151, abs=1e-6)
    assert terms.clipped_high.tolist() == [[False, True]] and not terms.clipped_low.any()


def test_with_verls_lower_bound_it_would_weigh_8_tenths():
    assert evaluate(cispo, tokens([0.1], [1.0]), low=0.2, high=0.28)[1] == pytest.approx([-0.8])


def test_a_filler_is_not_clipped():
    """Its advantage is 0: no bound changes its gradient."""
    terms = evaluate(cispo, tokens([2.0, 2.0], [1.0, 0.0]), low=1.0, high=0.28)[2]
    assert terms.clipped_high.tolist() == [[True, False]]
