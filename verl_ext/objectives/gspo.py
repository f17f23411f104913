"""GSPO (arXiv:2507.18071, Eq. 5-7): preset gspo.

    min(s A, clip(s, 1 - low, 1 + high) A),   s = (pi(y) / pi_old(y))^(1 / |y|)

of a response y, then the mean over responses: `loss_agg_mode: seq-mean-token-mean`, as every token of a response has
the same term. low = 3e-4, high = 4e-4 (section 5.1). The same as verl's `gspo` (core_algos.py:1545, 0.9.1) in this
mean. Departures: the log-ratio of a token is held within +-20.
"""

from verl_ext.objectives.terms import Terms, Tokens, clipped, log_ratio, response_mean


def gspo(tokens: Tokens, *, low: float, high: float) -> Terms:
    """Return the objective of each token: that of its response."""
    ratio = response_mean(log_ratio(tokens), tokens.mask).exp().expand_as(tokens.log_prob)
    return clipped(ratio, tokens.advantages, low, high)
