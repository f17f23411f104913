"""OlmoRL (Olmo 3, arXiv:2512.13961, section 4.4, "OlmoRL"): preset olmorl.

    min(pi_old / pi_rollout, rho) x min(r A, clip(r, 1 - low, 1 + high) A),   A = R - mean of the group

with a mean over all tokens of the batch (`unit: batch`), no KL term, no division by the standard deviation, and groups
of equal rewards replaced. pi_rollout is the inference engine's.
rho = 2 and high = .272 are in the authors' script (allenai/open-instruct@0483eb1, scripts/train/olmo3/7b_think_rl.sh).
Training takes these weights from verl (trainer/ppo/rollout_corr_helper.py); a test compares them with `truncate`.
Departures: log-ratios are held within +-20.
"""

from torch import Tensor

from verl_ext.objectives.ppo import ppo
from verl_ext.objectives.terms import Terms, Tokens, weighted


def truncate(ratio: Tensor, rho: float) -> Tensor:
    """Return min(ratio, rho): truncated importance sampling."""
    return ratio.clamp(max=rho)


def olmorl(tokens: Tokens, *, low: float, high: float) -> Terms:
    """Return the objective of each token; `tokens.weights` are `truncate(pi_old / pi_rollout, rho)`."""
    return weighted(ppo(tokens, low=low, high=high), tokens.weights)
