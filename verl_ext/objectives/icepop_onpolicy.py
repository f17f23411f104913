"""IcePop with one update per batch, without the pass for old log-probs: preset icepop_onpolicy.

    sg[pop(pi / pi_rollout, 1/beta, beta)] x (pi / sg[pi]) x A,   sg: no gradient

Its gradient is that of INTELLECT-3's objective (arXiv:2512.16144, Eq. 1, as prime-rl's pull request 2401 quotes it),
pop(pi / pi_rollout, alpha, beta) x A, except for the mean: INTELLECT-3's is over the sum of all lengths, and the preset
uses GLM-5's, and GLM-5's beta = 2. With one update pi_old = pi, so r = 1 is never clipped, and value and gradient are
those of `icepop.py` (arXiv:2602.15763, section 3.2).
A second update of the batch would train a policy that no clip restrains.
Departures: log(pi / pi_rollout) is held within +-20.
"""

from verl_ext.objectives.icepop import pop
from verl_ext.objectives.terms import Terms, Tokens, log_ratio, none_of


def icepop_onpolicy(tokens: Tokens, *, low: float, high: float) -> Terms:
    """Return the objective of each token; `tokens.old_log_prob` are the rollout engine's.

    Tokens with 1 - low <= ratio <= 1 + high are kept.
    """
    weight = pop(log_ratio(tokens).exp().detach(), 1 - low, 1 + high)
    on_policy = (tokens.log_prob - tokens.log_prob.detach()).exp()  # 1, with the gradient of log pi
    return Terms(
        weight * on_policy * tokens.advantages, none_of(tokens.mask), none_of(tokens.mask), dropped=weight == 0
    )
