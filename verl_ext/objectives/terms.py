"""What the objectives share: the tokens that they see, the terms that they return, and ratios of probabilities.

Shapes: B responses, T tokens. A tensor of the wrong side of `mask` is never read.
"""

from typing import NamedTuple

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0  # as verl: e^20 is 4.9e8, which bf16 and float32 hold


class Tokens(NamedTuple):
    """The tokens of some responses.

    Attributes:
        log_prob: float[B, T], of the policy that is trained; has the gradient.
        old_log_prob: float[B, T], of the policy that the ratio is taken to; of the rollout engine where the objective
            says so.
        advantages: float[B, T].
        mask: bool[B, T], tokens that the policy sampled and that count.
        weights: float[B, T], of the trainer's old policy against the rollout engine; None where the objective has none.
    """

    log_prob: Tensor
    old_log_prob: Tensor
    advantages: Tensor
    mask: Tensor
    weights: Tensor | None = None


class Terms(NamedTuple):
    """An objective, token by token.

    Attributes:
        objective: float[B, T], maximised: the loss is minus its mean. Read where `mask` is on.
        clipped_low: bool[B, T], the ratio was below its bound, and the token has another gradient for it.
        clipped_high: bool[B, T], the same above.
        dropped: bool[B, T], the token has no gradient, as it is too far from the rollout engine.
    """

    objective: Tensor
    clipped_low: Tensor
    clipped_high: Tensor
    dropped: Tensor


def none_of(tensor: Tensor) -> Tensor:
    """bool[B, T], false: no token was clipped or dropped."""
    return torch.zeros_like(tensor, dtype=torch.bool)


def log_ratio(tokens: Tokens) -> Tensor:
    """log(pi / pi_old) of each token, held within +-20; beyond that it has no gradient."""
    return (tokens.log_prob - tokens.old_log_prob).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def response_mean(values: Tensor, mask: Tensor) -> Tensor:
    """float[B, 1]: mean over the tokens of each response; 0 of a response without tokens."""
    total = torch.where(mask, values, 0).sum(-1, keepdim=True)
    return total / mask.sum(-1, keepdim=True).clamp(min=1)


def clipped(ratio: Tensor, advantages: Tensor, low: float, high: float) -> Terms:
    """min(r A, clip(r, 1 - low, 1 + high) A) of PPO (arXiv:1707.06347, Eq. 7), with two bounds (DAPO, Eq. 10)."""
    unbounded, bounded = ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages
    is_clipped = bounded < unbounded
    return Terms(
        torch.minimum(unbounded, bounded), is_clipped & (advantages < 0), is_clipped & (advantages > 0), none_of(ratio)
    )


def weighted(terms: Terms, weights: Tensor) -> Terms:
    """Terms times weights that have no gradient; a token of weight 0 is dropped, and counts as that alone."""
    kept = weights.detach()
    dropped = kept == 0
    return Terms(terms.objective * kept, terms.clipped_low & ~dropped, terms.clipped_high & ~dropped, dropped)
