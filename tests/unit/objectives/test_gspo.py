"""GSPO: the ratio of a response."""

import math

import pytest

from tests.unit.objectives.cases import RESPONSES, evaluate, tokens
from verl_ext.objectives.gspo import gspo


def test_two_responses_by_hand():
    """log r .1 and .3: s = e^.2; one token of log r .4: s = e^.4. A 1, -1; bounds 1 -+ .5, so that nothing is clipped.

    loss -(e^.2 - e^.4) / 2 = .1352110. The slope of each token is -s A / |y| / 2: -e^.2 / 4 twice, e^.4 / 2.
    """
    given = tokens(
        [[math.exp(0.1), math.exp(0.3)], [math.exp(0.4), 1.0]],
        [[1.0, 1.0], [-1.0, -1.0]],
        mask=[[True, True], [True, False]],
    )
    loss, gradient, _ = evaluate(gspo, given, mode=RESPONSES, low=0.5, high=0.5)
    assert loss == pytest.approx(-(math.exp(0.2) - math.exp(0.4)) / 2) and loss == pytest.approx(0.1352110, abs=1e-7)
    assert gradient[0] == pytest.approx([-math.exp(0.2) / 4] * 2)
    assert gradient[1] == pytest.approx([math.exp(0.4) / 2, 0.0])


def test_all_tokens_of_a_response_are_clipped_together():
    """log r .1 and -.05: s = e^.025 = 1.0253 > 1.0004: with A = 1 loss -1.0004 and no slope, even where r < 1."""
    given = tokens([math.exp(0.1), math.exp(-0.05)], [1.0, 1.0])
    loss, gradient, terms = evaluate(gspo, given, mode=RESPONSES, low=3e-4, high=4e-4)
    assert loss == pytest.approx(-1.0004) and gradient == [0.0, 0.0] and terms.clipped_high.all()
