"""GMPO: the geometric mean of a response's ratios."""

import math

import pytest
import torch

from tests.unit.objectives.cases import RESPONSES, evaluate, tokens
from verl_ext.objectives.gmpo import gmpo
from verl_ext.objectives.mean import mean_loss


def test_two_tokens_by_hand():
    """log r .2 and .6, held at .4, A = 1: exp((.2 + .4) / 2) = e^.3 = 1.3498588; slopes -e^.3 / 2 and 0."""
    given = tokens([math.exp(0.2), math.exp(0.6)], [1.0, 1.0])
    loss, gradient, terms = evaluate(gmpo, given, mode=RESPONSES, low=0.4, high=0.4)
    assert loss == pytest.approx(-1.3498588) and gradient == pytest.approx([-math.exp(0.3) / 2, 0.0])
    assert terms.clipped_high.tolist() == [[False, True]] and not terms.clipped_low.any()


def test_a_wrong_answer_is_held_from_below():
    """A = -1, log r -.6 and .6: max(-.6, -.4) = -.4 and .6; mean .1: loss e^.1; slopes 0 and e^.1 / 2."""
    given = tokens([math.exp(-0.6), math.exp(0.6)], [-1.0, -1.0])
    loss, gradient, terms = evaluate(gmpo, given, mode=RESPONSES, low=0.4, high=0.4)
    assert loss == pytest.approx(math.exp(0.1)) and gradient == pytest.approx([0.0, math.exp(0.1) / 2])
    assert terms.clipped_low.tolist() == [[True, False]]


@pytest.mark.parametrize("parts", [1, 2, 8])
def test_micro_batches_do_not_change_the_gradient(parts):
    """8 responses of one token, r = A = 1: each has slope -1 / 8, in all -1. verl's geo_mean: -1, -2, -8."""
    total = 0.0
    for rows in torch.arange(8).chunk(parts):
        given = tokens([[1.0]] * len(rows), [[1.0]] * len(rows))
        terms = gmpo(given, low=0.4, high=0.4)
        loss = mean_loss(terms.objective, given.mask, mode=RESPONSES, tokens=8, responses=8)
        total += torch.autograd.grad(loss, given.log_prob)[0].sum().item()
    assert total == pytest.approx(-1.0)
