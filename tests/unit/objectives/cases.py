"""Objectives on a few tokens, in float64, without verl: what the tests of this folder share."""

import torch

from verl_ext.objectives.cispo import cispo
from verl_ext.objectives.dppo import dppo_kl, dppo_tv
from verl_ext.objectives.glm5_async import glm5_async
from verl_ext.objectives.gmpo import gmpo
from verl_ext.objectives.gspo import gspo
from verl_ext.objectives.icepop import icepop
from verl_ext.objectives.icepop_onpolicy import icepop_onpolicy
from verl_ext.objectives.mean import mean_loss
from verl_ext.objectives.mis import masked, mis, response_ratio
from verl_ext.objectives.olmorl import olmorl
from verl_ext.objectives.ppo import ppo
from verl_ext.objectives.sapo import sapo
from verl_ext.objectives.terms import Tokens

BOUNDS = {"low": 0.2, "high": 0.28}
TOKENS, RESPONSES, FIXED = "token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"
# name: objective, its settings, mean, whether it takes weights: true for one a token, "response" for one a response
OBJECTIVES = {
    "ppo": (ppo, BOUNDS, TOKENS, False),
    "ppo_dual_clip": (ppo, BOUNDS | {"dual_clip": 1.5}, TOKENS, False),
    "grpo": (ppo, BOUNDS, RESPONSES, False),
    "dr_grpo": (ppo, BOUNDS, FIXED, False),
    "olmorl": (olmorl, BOUNDS, TOKENS, True),
    "icepop": (icepop, BOUNDS, RESPONSES, True),
    "icepop_onpolicy": (icepop_onpolicy, {"low": 0.5, "high": 1.0}, RESPONSES, False),
    "glm5_async": (glm5_async, BOUNDS, TOKENS, False),
    "mis_token": (mis, BOUNDS, TOKENS, True),
    "mis_seq": (mis, BOUNDS, TOKENS, "response"),
    "gspo": (gspo, {"low": 0.05, "high": 0.07}, RESPONSES, False),
    "gmpo": (gmpo, {"low": 0.2, "high": 0.2}, RESPONSES, False),
    "sapo": (sapo, {"tau_pos": 1.0, "tau_neg": 1.05}, RESPONSES, False),
    "cispo": (cispo, {"low": 1.0, "high": 0.28}, TOKENS, False),
    "dppo_tv": (dppo_tv, {"low": 0.02, "high": 0.02, "truncation": 1.3}, TOKENS, False),
    "dppo_kl": (dppo_kl, {"low": 0.005, "high": 0.005, "truncation": 1.3}, TOKENS, False),
}


def float64(values):
    return torch.tensor(values, dtype=torch.float64)


def tokens(ratio, advantages, *, old=-1.0, mask=None, weights=None):
    """Tokens of which `ratio` is pi / pi_old, and `old` log pi_old. Lists of responses, or of one response's tokens."""
    ratio = torch.atleast_2d(float64(ratio))
    old = torch.full_like(ratio, old) if isinstance(old, float) else torch.atleast_2d(float64(old))
    return Tokens(
        (old + ratio.log()).requires_grad_(),
        old,
        torch.atleast_2d(float64(advantages)),
        torch.ones_like(ratio, dtype=torch.bool) if mask is None else torch.atleast_2d(torch.tensor(mask)).bool(),
        None if weights is None else torch.atleast_2d(float64(weights)),
    )


def evaluate(objective, given, *, mode=TOKENS, **settings):
    """(loss, d loss / d log pi of each token, terms)."""
    terms = objective(given, **settings)
    loss = mean_loss(terms.objective, given.mask, mode=mode)
    (gradient,) = torch.autograd.grad(loss, given.log_prob)
    return loss.item(), gradient.squeeze(0).tolist(), terms


def random_batch(seed=0, responses=8, width=6, weighted=False):
    """Responses of unequal length, one of a single token, with a tool's tokens in the middle of some."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    old = -0.2 - normal(responses, width).abs()
    log_prob = (old + 0.3 * normal(responses, width)).clamp(max=-0.05)
    lengths = torch.tensor([width, 1, 3, 2, width - 1, 4, width, 2])[:responses]
    mask = torch.arange(width) < lengths[:, None]
    mask[::4, 2] = False
    advantages = normal(responses, 1).expand(responses, width).contiguous()
    weights = torch.where(normal(responses, width) > 1, 0.0, normal(responses, width).exp()) if weighted else None
    if weighted == "response":
        weights = masked(response_ratio(0.4 * normal(responses, width), mask), 2.0)
    return Tokens(log_prob, old, advantages, mask, weights)
