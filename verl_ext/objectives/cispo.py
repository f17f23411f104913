"""CISPO (MiniMax-M1, arXiv:2506.13585, Eq. 4-5): preset cispo.

    sg[clip(r, 1 - low, 1 + high)] A log pi,   sg: no gradient

No token loses its gradient; only the weight of a high ratio is bounded. The paper sets no lower bound: low = 1, so
that 1 - low is below any ratio. high = .28 is ours, because the paper gives no number. Mean over tokens.
The same as verl's `cispo` (core_algos.py:2048, 0.9.1), whose default low = .2 weighs r = .1 by .8.
Departures: log r is held within +-20. A token with advantage 0 does not count as clipped; in verl it does.
"""

from verl_ext.objectives.terms import Terms, Tokens, log_ratio, none_of


def cispo(tokens: Tokens, *, low: float, high: float) -> Terms:
    """Return the objective of each token."""
    ratio = log_ratio(tokens).exp().detach()
    weight = ratio.clamp(1 - low, 1 + high)
    objective = weight * tokens.advantages * tokens.log_prob
    trains = tokens.advantages != 0
    return Terms(objective, trains & (ratio < 1 - low), trains & (ratio > 1 + high), none_of(ratio))
