"""What the objectives share: the tokens that they see, the terms that they return, and ratios of probabilities.

Shapes: B responses, T tokens. Values where `mask` is off are never read.
"""

from typing import NamedTuple

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0  # as verl: e^20 is 4.9e8, which bf16 and float32 hold


class Tokens(NamedTuple):
    """The tokens of some responses.

    Attributes:
        log_prob: float[B, T], of the policy that is trained; has the gradient.
        old_log_prob: float[B, T], of the policy that the ratio is taken to; of the rollout engine if the objective
            says so.
        advantages: float[B, T].
        mask: bool[B, T], tokens that the policy sampled and that count.
        weights: float[B, T], of the trainer's old policy against the rollout engine; None if the objective has none.
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
        clipped_low: bool[B, T], the ratio was below its bound, which changed the token's gradient.
        clipped_high: bool[B, T], the same above.
        dropped: bool[B, T], the token has no gradient, because it is too far from the rollout engine.
    """

    objective: Tensor
    clipped_low: Tensor
    clipped_high: Tensor
    dropped: Tensor


def none_of(tensor: Tensor) -> Tensor:
    """Return bool[B, T], all false: no token was clipped or dropped."""
    return torch.zeros_like(tensor, dtype=torch.bool)


def log_ratio(tokens: Tokens) -> Tensor:
    """Return log(pi / pi_old) of each token, held within +-20; beyond that it has no gradient."""
    return (tokens.log_prob - tokens.old_log_prob).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def response_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Return the mean over the tokens of each response, float[B, 1]; 0 for a response without tokens."""
    total = torch.where(mask, values, 0).sum(-1, keepdim=True)
    return total / mask.sum(-1, keepdim=True).clamp(min=1)


def clipped(ratio: Tensor, advantages: Tensor, low: float, high: float) -> Terms:
    """Return PPO's min(r A, clip(r, 1 - low, 1 + high) A) (arXiv:1707.06347, Eq. 7), with two bounds (DAPO, Eq. 10)."""
    unbounded, bounded = ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages
    is_clipped = bounded < unbounded
    return Terms(
        torch.minimum(unbounded, bounded), is_clipped & (advantages < 0), is_clipped & (advantages > 0), none_of(ratio)
    )


def weighted(terms: Terms, weights: Tensor | None) -> Terms:
    """Multiply terms by weights without gradient; a token of weight 0 counts only as dropped, not as clipped."""
    assert weights is not None, "An objective with weights needs `Tokens.weights`."
    kept = weights.detach()
    dropped = kept == 0
    return Terms(terms.objective * kept, terms.clipped_low & ~dropped, terms.clipped_high & ~dropped, dropped)
