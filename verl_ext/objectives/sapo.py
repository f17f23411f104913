"""SAPO (arXiv:2511.20347, Eq. 5-6): preset sapo.

    (4 / tau) sigmoid(tau (r - 1)) A,   tau = tau_pos where A > 0, else tau_neg

a soft gate instead of a clip: its slope is 1 at r = 1. tau_pos = 1, tau_neg = 1.05. Mean over a response's tokens, then
over responses. The same as verl's `sapo` (core_algos.py:1623, 0.9.1). Departures: log r is held within +-20.
"""

import torch

from verl_ext.objectives.terms import Terms, Tokens, log_ratio, none_of


def sapo(tokens: Tokens, *, tau_pos: float, tau_neg: float) -> Terms:
    """Return the objective of each token. Nothing is clipped."""
    ratio = log_ratio(tokens).exp()
    tau = torch.where(tokens.advantages > 0, ratio.new_tensor(tau_pos), ratio.new_tensor(tau_neg))
    gate = 4 / tau * torch.sigmoid(tau * (ratio - 1))
    return Terms(gate * tokens.advantages, none_of(ratio), none_of(ratio), none_of(ratio))
