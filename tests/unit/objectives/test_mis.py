"""Masked importance sampling, of tokens and of responses."""

import pytest
import torch

from tests.unit.objectives.cases import BOUNDS, evaluate, float64, tokens
from verl_ext.objectives.mis import masked, mis, response_ratio


def test_tokens_a_weight_on_the_bound_is_kept():
    """pi_old / pi_vllm 2, 2.01, .1: weights 2, 0, .1. r = 1, A = 1: loss -(2 + 0 + .1) / 3 = -.7; slopes -w / 3."""
    weights = masked(float64([2.0, 2.01, 0.1]), 2.0)
    assert weights.tolist() == [2.0, 0.0, 0.1]
    loss, gradient, terms = evaluate(mis, tokens([1.0] * 3, [1.0] * 3, weights=weights.tolist()), **BOUNDS)
    assert loss == pytest.approx(-0.7) and gradient == pytest.approx([-2 / 3, 0.0, -0.1 / 3])
    assert terms.dropped.tolist() == [[False, True, False]]


def test_responses_are_kept_or_left_as_a_whole():
    """Ratios 1.6, 1.2 and a tool's token: product 1.92, kept. 1.6, 1.5: 2.4, left out, though each is below 2.

    r = 1, A = 1, four tokens that count: loss -(2 x 1.92) / 4 = -.96.
    """
    ratios = float64([[1.6, 9.0, 1.2], [1.6, 9.0, 1.5]])
    mask = torch.tensor([[True, False, True]] * 2)
    weights = masked(response_ratio(ratios.log(), mask), 2.0)
    assert weights[0].tolist() == pytest.approx([1.92] * 3) and weights[1].tolist() == [0.0] * 3
    ones = [[1.0] * 3] * 2
    loss, _, terms = evaluate(mis, tokens(ones, ones, mask=mask.tolist(), weights=weights.tolist()), **BOUNDS)
    assert loss == pytest.approx(-0.96) and terms.dropped.tolist() == [[False] * 3, [True] * 3]
