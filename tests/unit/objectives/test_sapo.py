"""SAPO: a soft gate."""

import math

import pytest

from tests.unit.objectives.cases import RESPONSES, evaluate, tokens
from verl_ext.objectives.sapo import sapo

TAUS = {"tau_pos": 1.0, "tau_neg": 1.05}


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def test_by_hand():
    """r = 1.5, A = 1, tau 1: 4 sigmoid(.5) = 4 x .6224593 = 2.4898373. Slope: -4 s (1 - s) r = -1.4100223.

    A = -1, tau 1.05: 4 / 1.05 sigmoid(.525) = 3.8095238 x .6283154 = 2.3935824, the loss.
    """
    loss, gradient, _ = evaluate(sapo, tokens([1.5], [1.0]), mode=RESPONSES, **TAUS)
    s = sigmoid(0.5)
    assert loss == pytest.approx(-2.4898373, abs=1e-7) and gradient == pytest.approx([-4 * s * (1 - s) * 1.5])
    assert gradient == pytest.approx([-1.4100223], abs=1e-6)
    loss, _, _ = evaluate(sapo, tokens([1.5], [-1.0]), mode=RESPONSES, **TAUS)
    assert loss == pytest.approx(4 / 1.05 * sigmoid(0.525)) and loss == pytest.approx(2.39358, abs=1e-5)


def test_on_policy_the_slope_is_the_advantage():
    """r = 1: 4 / tau x tau / 4 = 1, for both taus; two tokens: -A / 2."""
    _, gradient, _ = evaluate(sapo, tokens([1.0, 1.0], [3.0, -2.0]), mode=RESPONSES, **TAUS)
    assert gradient == pytest.approx([-1.5, 1.0])


def test_the_temperature_has_the_precision_of_the_ratio():
    loss, _, _ = evaluate(sapo, tokens([math.exp(0.5)], [-1.0]), mode=RESPONSES, **TAUS)
    assert loss == pytest.approx(4 / 1.05 * sigmoid(1.05 * (math.exp(0.5) - 1)), abs=1e-12)
