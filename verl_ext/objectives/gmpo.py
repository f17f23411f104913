"""GMPO (arXiv:2507.20673, Eq. 4): preset gmpo.

    A x (prod_t min(r^s, clip(r, e^-low, e^high)^s))^(s / |y|),   s = sign(A)

the geometric mean of the clipped ratios of a response, then the mean over responses: `loss_agg_mode:
seq-mean-token-mean`. The bounds apply to log r: low = high = .4.
verl's `geo_mean` (core_algos.py:1929, 0.9.1) takes the mean over a micro-batch, so that 8 micro-batches have 8 times
the gradient; here it is over the mini-batch. Departures: log r is held within +-20.
"""

import torch

from verl_ext.objectives.terms import Terms, Tokens, log_ratio, none_of, response_mean


def gmpo(tokens: Tokens, *, low: float, high: float) -> Terms:
    """Return the objective of each token: that of its response. Advantages are one number per response."""
    ratio, sign = log_ratio(tokens), tokens.advantages.sign()
    bounded = ratio.clamp(-low, high)
    least = sign * torch.minimum(sign * ratio, sign * bounded)
    mean = response_mean(least, tokens.mask).exp()
    is_clipped = least != ratio
    return Terms(
        (mean * response_mean(tokens.advantages, tokens.mask)).expand_as(ratio),
        is_clipped & (sign < 0),
        is_clipped & (sign > 0),
        none_of(ratio),
    )
