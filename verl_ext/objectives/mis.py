"""Masked importance sampling (MIS; "When Speed Kills Stability", richardli.xyz/rl-collapse, 2025): mis_token, mis_seq.

    w 1[w <= C] x min(r A, clip(r, 1 - low, 1 + high) A)

mis_token: w = pi_old / pi_rollout of the token. mis_seq: w is the product over the tokens of the response, so that a
response is kept or dropped as a whole. A weight of exactly C is kept; C = 2.
Training takes w from verl (trainer/ppo/rollout_corr_helper.py); a test compares it with `masked`.
Departures: log w is held within +-20 (for mis_seq, the sum is). Dropped tokens stay in the denominator of the mean.
"""

import torch
from torch import Tensor

from verl_ext.objectives.ppo import ppo
from verl_ext.objectives.terms import MAX_LOG_RATIO, Terms, Tokens, weighted


def masked(ratio: Tensor, upper: float) -> Tensor:
    """Return the ratio where it is at most `upper`, else 0."""
    return torch.where(ratio <= upper, ratio, 0)


def response_ratio(log_ratios: Tensor, mask: Tensor) -> Tensor:
    """Return the product of the ratios of a response's tokens, at each of its tokens: float[B, T]."""
    total = torch.where(mask, log_ratios, 0).sum(-1, keepdim=True)
    return total.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp().expand_as(log_ratios)


def mis(tokens: Tokens, *, low: float, high: float) -> Terms:
    """Return the objective of each token; `tokens.weights` are `masked` ratios, of tokens or of responses."""
    return weighted(ppo(tokens, low=low, high=high), tokens.weights)
