"""PPO's clipped objective on tokens: presets dapo, grpo, dr_grpo, maxrl, simpletir, grpo_roc, tir_otb.

    min(r A, clip(r, 1 - low, 1 + high) A),   r = pi / pi_old

GRPO: arXiv:2402.03300, Eq. 3, without its KL term (beta = 0); low = high = .2; mean over a response's tokens, then over
responses. DAPO: arXiv:2503.14476, Eq. 8; low .2, high .28; mean over tokens. The presets differ in advantages, in the
mean and in the rollouts that they use.
Departures: log r is held within +-20. Dual clip (arXiv:1912.09729, Eq. 5) is an option that neither paper has: where
A < 0 the objective is at least `dual_clip` x A. From 4.9e8 on, e^20, it never acts: 1e9 is off.
"""

import torch

from verl_ext.objectives.terms import Terms, Tokens, clipped, log_ratio


def ppo(tokens: Tokens, *, low: float, high: float, dual_clip: float = 1e9) -> Terms:
    """Return the objective of each token; `clipped_low` and `clipped_high` count the dual clip too."""
    ratio = log_ratio(tokens).exp()
    terms = clipped(ratio, tokens.advantages, low, high)
    floor = dual_clip * tokens.advantages
    is_bounded = (tokens.advantages < 0) & (terms.objective < floor)
    return terms._replace(
        objective=torch.where(is_bounded, floor, terms.objective), clipped_high=terms.clipped_high | is_bounded
    )
