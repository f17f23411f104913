"""DPPO: tokens are left out by how far their probability has moved."""

import math

import pytest

from tests.unit.objectives.cases import evaluate, tokens
from verl_ext.objectives.dppo import dppo_kl, dppo_tv

TV = {"low": 0.15, "high": 0.15, "truncation": 20.0}


def test_a_rare_token_of_ratio_12_weighs_12():
    """pi_old .012, pi .144: they are .132 < .15 apart. Slopes -r A: -12 and 12. Of ratio 25 (.002, .05): 20."""
    for advantage in (1.0, -1.0):
        given = tokens([12.0], [advantage], old=math.log(0.012))
        assert evaluate(dppo_tv, given, **TV)[1] == pytest.approx([-12.0 * advantage])
    assert evaluate(dppo_tv, tokens([25.0], [1.0], old=math.log(0.002)), **TV)[1] == pytest.approx([-20.0])


def test_a_token_that_moved_too_far_is_left_out_and_one_that_comes_back_is_not():
    """pi_old .5, pi .75: .25 > .15. A = 1 goes further: no slope. A = -1 comes back: slope 1.5. The same for .25."""
    old = math.log(0.5)
    _, gradient, terms = evaluate(dppo_tv, tokens([1.5, 1.5, 0.5, 0.5], [1.0, -1.0, 1.0, -1.0], old=old), **TV)
    assert gradient == pytest.approx([0.0, 1.5 / 4, -0.5 / 4, 0.0])
    assert terms.clipped_high.tolist() == [[True, False, False, False]]
    assert terms.clipped_low.tolist() == [[False, False, False, True]]


def test_a_token_without_advantage_is_not_clipped_wherever_it_moved():
    """pi_old .5; pi .75 and .25 are .25 > .15 away. A = 0, as a filler's: no gradient is lost."""
    _, _, terms = evaluate(dppo_tv, tokens([1.5, 0.5], [0.0, 0.0], old=math.log(0.5)), **TV)
    assert not terms.clipped_high.any() and not terms.clipped_low.any()


def test_the_kl_of_a_token():
    """KL(.5, .75) = .5 ln(.5 / .75) + .5 ln(.5 / .25) = .1438410 nats: left out at .14, kept at .15."""
    given = tokens([1.5], [1.0], old=math.log(0.5))
    assert evaluate(dppo_kl, given, low=0.14, high=0.14, truncation=20.0)[1] == [0.0]
    assert evaluate(dppo_kl, given, low=0.14, high=0.15, truncation=20.0)[1] == pytest.approx([-1.5])
    loss = evaluate(dppo_kl, given, low=0.14, high=0.15, truncation=20.0)[0]
    assert loss == pytest.approx(-1.5 * math.log(0.75)) and loss == pytest.approx(0.4315231, abs=1e-6)
