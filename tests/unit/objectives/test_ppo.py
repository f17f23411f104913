"""PPO's clip, as dapo, grpo, dr_grpo and others have it."""

import pytest

from tests.unit.objectives.cases import BOUNDS, evaluate, tokens
from verl_ext.objectives.ppo import ppo


def test_a_wrong_token_of_ratio_12_costs_12():
    """min(12 x -1, 1.28 x -1) = -12: loss and slope are 12. Dual clip at 3: max(-12, 3 x -1) = -3, flat."""
    assert evaluate(ppo, tokens([12.0], [-1.0]), **BOUNDS)[:2] == (pytest.approx(12.0), [pytest.approx(12.0)])
    loss, gradient, terms = evaluate(ppo, tokens([12.0], [-1.0]), **BOUNDS, dual_clip=3.0)
    assert (loss, gradient) == (pytest.approx(3.0), [0.0]) and terms.clipped_high.all()


def test_four_tokens_by_hand():
    """r 1.5 1.1 .9 .7, A 1 1 -1 -1: min(rA, clip A) = 1.28 1.1 -.9 -.8, sum .68, loss -.17.

    The slopes are -rA / 4 where the clip does not act: 0, -.275, .225, 0.
    """
    loss, gradient, terms = evaluate(ppo, tokens([1.5, 1.1, 0.9, 0.7], [1.0, 1.0, -1.0, -1.0]), **BOUNDS)
    assert loss == pytest.approx(-0.17) and gradient == pytest.approx([0.0, -0.275, 0.225, 0.0])
    assert terms.clipped_high.tolist() == [[True, False, False, False]]
    assert terms.clipped_low.tolist() == [[False, False, False, True]]


def test_the_clip_lets_a_ratio_come_back():
    """r = .7 with A = 1 and r = 1.5 with A = -1 are outside, and keep their gradients -rA / 2 = -.35 and .75."""
    _, gradient, terms = evaluate(ppo, tokens([0.7, 1.5], [1.0, -1.0]), **BOUNDS)
    assert gradient == pytest.approx([-0.35, 0.75]) and not (terms.clipped_low | terms.clipped_high).any()


def test_beyond_e_20_a_ratio_has_no_gradient():
    """log r = 30 is held at 20, A = -1: loss e^20 = 485165195.4, slope 0."""
    given = tokens([1.0], [-1.0], old=-31.0)
    loss, gradient, _ = evaluate(ppo, given._replace(log_prob=given.log_prob + 30.0), **BOUNDS)
    assert loss == pytest.approx(485165195.41) and gradient == [0.0]
