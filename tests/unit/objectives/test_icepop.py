"""IcePop: pop() of the trainer's old policy against the rollout engine, times PPO's clip."""

import pytest

from tests.unit.objectives.cases import BOUNDS, evaluate, float64, tokens
from verl_ext.objectives.icepop import icepop, pop


def test_pop_is_closed():
    assert pop(float64([0.49, 0.5, 1.0, 2.0, 2.01]), 0.5, 2.0).tolist() == [0.0, 0.5, 1.0, 2.0, 0.0]


def test_four_tokens_by_hand():
    """r 1.5 1.1 .7 12, A 1 1 -1 -1: min(rA, clip A) = 1.28, 1.1, -.8, -12; times pop 1.2 .5 1 0: 1.536, .55, -.8, 0.

    Sum 1.286, loss -1.286 / 4 = -.3215. The slope is -pop r A / 4 where the clip does not act: 0 (r > 1.28),
    -.5 x 1.1 / 4 = -.1375, 0 (r < .8 with A < 0), 0 (popped; without pop() the loss would have 12 / 4 more).
    """
    given = tokens([1.5, 1.1, 0.7, 12.0], [1.0, 1.0, -1.0, -1.0], weights=[1.2, 0.5, 1.0, 0.0])
    loss, gradient, terms = evaluate(icepop, given, **BOUNDS)
    assert loss == pytest.approx(-0.3215, abs=1e-12)
    assert gradient == pytest.approx([0.0, -0.1375, 0.0, 0.0], abs=1e-12)
    assert terms.dropped.tolist() == [[False, False, False, True]]


def test_a_token_is_clipped_or_dropped_and_not_both():
    """r 1.5 with A 1, and .7 with -1, are clipped where pop is not 0."""
    given = tokens([1.5, 1.5, 0.7, 0.7], [1.0, 1.0, -1.0, -1.0], weights=[1.0, 0.0, 1.0, 0.0])
    _, _, terms = evaluate(icepop, given, **BOUNDS)
    assert terms.clipped_high.tolist() == [[True, False, False, False]]
    assert terms.clipped_low.tolist() == [[False, False, True, False]]
    assert terms.dropped.tolist() == [[False, True, False, True]]
