"""DPPO (arXiv:2602.04879): presets dppo_tv and dppo_kl.

    M sg[min(r, C)] A log pi,   M = 0 where the policy has moved away from pi_old by more than a divergence, else 1

A token is left out if A > 0 and pi > pi_old, or A < 0 and pi < pi_old, and the divergence of the two Bernoulli
distributions "this token, or another" is above its threshold: total variation |pi - pi_old| (dppo_tv) or KL(pi_old, pi)
(dppo_kl). Ratios are truncated at C = 20 (section 5.4). pi_old are the rollout engine's log-probs. The presets have the
bounds (.15 and .05), the advantages (no std) and the mean (sum over a response, by a fixed length) of verl's example,
examples/dppo_trainer/run_qwen30b_dppo.sh at 8f11888, which truncates at 10000.
The same as verl's `dppo_tv` and `dppo_kl` (core_algos.py:1379, 1460, 0.9.1), where C is clip_ratio_c, 3 by default, so
that r = 12 would weigh 3. Departures: log r is held within +-20; as in verl, the KL has 1e-8 in numerator and
denominator. A token of advantage 0 is never counted as left out; verl's pg_clipfrac counts it if its probability fell.
"""

import torch
from torch import Tensor

from verl_ext.objectives.terms import Terms, Tokens, log_ratio, none_of


def total_variation(log_prob: Tensor, old_log_prob: Tensor) -> Tensor:
    """Return |pi - pi_old| of the token."""
    return (log_prob.exp() - old_log_prob.exp()).abs()


def binary_kl(log_prob: Tensor, old_log_prob: Tensor) -> Tensor:
    """Return KL(pi_old, pi) of "this token, or another"."""
    prob, old = log_prob.exp(), old_log_prob.exp()
    return old * (old_log_prob - log_prob) + (1 - old) * ((1 - old + 1e-8) / (1 - prob + 1e-8)).log()


def _dppo(tokens: Tokens, divergence: Tensor, low: float, high: float, truncation: float) -> Terms:
    moved = (tokens.log_prob - tokens.old_log_prob).detach()
    above = (tokens.advantages > 0) & (moved > 0) & (divergence > high)
    below = (tokens.advantages < 0) & (moved < 0) & (divergence > low)
    weight = log_ratio(tokens).exp().detach().clamp(max=truncation)
    objective = torch.where(above | below, 0, weight * tokens.advantages * tokens.log_prob)
    return Terms(objective, below, above, none_of(above))


def dppo_tv(tokens: Tokens, *, low: float, high: float, truncation: float) -> Terms:
    """Return the objective of each token; `low` and `high` bound the total variation."""
    divergence = total_variation(tokens.log_prob.detach(), tokens.old_log_prob)
    return _dppo(tokens, divergence, low, high, truncation)


def dppo_kl(tokens: Tokens, *, low: float, high: float, truncation: float) -> Terms:
    """Return the objective of each token; `low` and `high` bound the KL, in nats."""
    return _dppo(tokens, binary_kl(tokens.log_prob.detach(), tokens.old_log_prob), low, high, truncation)
