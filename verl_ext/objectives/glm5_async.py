"""GLM-5's asynchronous agentic RL (arXiv:2602.15763, Eq. 3-5): preset glm5_async.

    f(r) A log pi,   r = pi / pi_rollout,   f(x) = x where 1 - low < x < 1 + high (open), else 0

There is no pi_old: the ratio is taken to the log-probs that the rollout engine recorded. low = .2, high = .28.
f(r) has no gradient: if it had, the gradient would be f(r) A (1 + log pi) times that of log pi, which changes its sign
where log pi < -1. The advantage is r - mean(r) (section 4.1). Mean over tokens; dropped ones stay in its denominator.
Departures: log r is held within +-20. The optimizer is not reset when the inference engine gets new weights (section
4.1.1). Responses are dropped by their age (w' - w0 > tau, section 4.1.2) only if a run sets `max_staleness`.
"""

import torch
from torch import Tensor

from verl_ext.objectives.terms import Terms, Tokens, log_ratio, none_of


def double_sided(ratio: Tensor, low: float, high: float) -> Tensor:
    """Return the ratio where 1 - low < ratio < 1 + high, else 0."""
    return torch.where((ratio > 1 - low) & (ratio < 1 + high), ratio, 0)


def glm5_async(tokens: Tokens, *, low: float, high: float) -> Terms:
    """Return the objective of each token; `tokens.old_log_prob` are the rollout engine's."""
    weight = double_sided(log_ratio(tokens).exp().detach(), low, high)
    return Terms(
        weight * tokens.advantages * tokens.log_prob, none_of(tokens.mask), none_of(tokens.mask), dropped=weight == 0
    )
