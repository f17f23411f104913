"""IcePop as in GLM-5's reasoning RL (arXiv:2602.15763, section 3.2): preset icepop.

    pop(pi_old / pi_rollout, 1/beta, beta) x min(r A, clip(r, 1 - low, 1 + high) A)
    pop(x, a, b) = x where a <= x <= b (closed), else 0

pi_old is the trainer's, pi_rollout the inference engine's; beta = 2, low = .2, high = .28, no KL term. First: "Small
leak can sink a great ship" (ringtech.notion.site/icepop, 2025), with the bounds .5 and 5.
The mean is over each response, then over responses; dropped tokens stay in its denominator.
Training takes these weights from verl (trainer/ppo/rollout_corr_helper.py); a test compares them with `pop`.
Departures: log-ratios are held within +-20.
"""

import torch
from torch import Tensor

from verl_ext.objectives.ppo import ppo
from verl_ext.objectives.terms import Terms, Tokens, weighted


def pop(ratio: Tensor, lower: float, upper: float) -> Tensor:
    """Return the ratio where lower <= ratio <= upper, else 0."""
    return torch.where((ratio >= lower) & (ratio <= upper), ratio, 0)


def icepop(tokens: Tokens, *, low: float, high: float) -> Terms:
    """Return the objective of each token; `tokens.weights` are `pop(pi_old / pi_rollout, 1/beta, beta)`."""
    return weighted(ppo(tokens, low=low, high=high), tokens.weights)
