"""GLM-5's double-sided importance sampling."""

import math

import pytest
import torch

from tests.unit.objectives.cases import BOUNDS, evaluate, float64, tokens
from verl_ext.objectives.glm5_async import double_sided, glm5_async
from verl_ext.objectives.ppo import ppo


def test_the_interval_is_open():
    assert double_sided(float64([0.8, 0.81, 1.0, 1.27, 1.28]), 0.2, 0.28).tolist() == [0.0, 0.81, 1.0, 1.27, 0.0]


def test_four_tokens_by_hand():
    """r 1.5 1.1 .9 .7: f = 0 1.1 .9 0. log pi = log r - 1; A 2 2 -1 -1.

    f A log pi: 0, 2.2 (.0953102 - 1) = -1.9903176, -.9 (-.1053605 - 1) = .9948245, 0; sum -.9954931; loss .2488733.
    Slopes -f A / 4: 0, -.55, .225, 0.
    """
    loss, gradient, terms = evaluate(glm5_async, tokens([1.5, 1.1, 0.9, 0.7], [2.0, 2.0, -1.0, -1.0]), **BOUNDS)
    assert loss == pytest.approx(-(2.2 * (math.log(1.1) - 1) - 0.9 * (math.log(0.9) - 1)) / 4, abs=1e-12)
    assert loss == pytest.approx(0.2488733, abs=1e-7)
    assert gradient == pytest.approx([0.0, -0.55, 0.225, 0.0], abs=1e-12)
    assert terms.dropped.tolist() == [[True, False, False, True]]


def test_it_leaves_out_what_ppo_keeps():
    """r = .7 with A = 1 and r = 1.5 with A = -1: PPO has slopes -.35 and .75, GLM-5 none."""
    given = tokens([0.7, 1.5], [1.0, -1.0])
    assert evaluate(glm5_async, given, **BOUNDS)[1] == [0.0, 0.0]
    assert evaluate(ppo, given, **BOUNDS)[1] == pytest.approx([-0.35, 0.75])


def test_the_weight_has_no_gradient():
    """log pi = -3, r = 1, A = 1: slope -1. With a gradient of f it would be -(1 + log pi) = 2, the wrong way."""
    assert evaluate(glm5_async, tokens([1.0], [1.0], old=-3.0), **BOUNDS)[1] == [-1.0]
    log_prob = torch.tensor(-3.0, requires_grad=True)
    (-(log_prob + 3).exp() * log_prob).backward()
    assert log_prob.grad == 2.0
