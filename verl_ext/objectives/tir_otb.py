"""Optimal token baseline for tool-integrated reasoning: preset tir_otb. The same as verl's `tir_optimal_token_baseline`
(core_algos.py:991, 0.9.1), whose source is yingru.notion.site/The-Optimal-Token-Baseline.

    A_t = G_t - sum_i G_t W_t / sum_i W_t over the group,   W_t = sum_{j <= t} (1 - 2 pi_j + sum_v pi_v^2)

G_t is the reward from token t on, W_t the squared norm of the gradient by logits so far. t counts the policy's own
tokens: those of a tool are left out before responses are laid side by side. From the t at which only one response is
left, its baseline is 0. With weights against the rollout engine, each term of W_t is multiplied by their square.
Departures: 1e-8 in the denominator, as in verl; a group of one gets 0, while verl gives it its reward. Equal G_t are
their own baseline, which rounding, and 1e-8 against a W_t as small, would miss. verl puts a score at a response's last
token. If a tool wrote that token (`retool.run_last_code`), verl's function drops the score; trainer/advantages.py moves
it to the policy's last token. A log-prob that is not a number adds nothing to W_t.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from verl_ext.objectives.group_mean import rows_of_groups

# Names of algorithm.adv_estimator, verl's and ours, that give each token a separate advantage.
OF_TOKENS = ("tir_otb", "optimal_token_baseline", "tir_optimal_token_baseline")


def at_last_own(scores: Tensor, mask: Tensor) -> Tensor:
    """Return `scores` (float[B]) at the last token of `mask` in each response, 0 elsewhere: float[B, T]."""
    is_last = mask & (mask.flip(-1).cumsum(-1).flip(-1) == 1)
    return torch.where(is_last, scores.unsqueeze(-1), 0)


def tir_otb(
    rewards: Tensor,
    mask: Tensor,
    groups: Sequence[str],
    log_prob: Tensor,
    sum_pi_squared: Tensor,
    weights: Tensor | None = None,
) -> Tensor:
    """Return the advantages, float[B, T]; 0 outside `mask`.

    Args:
        rewards: float[B, T], of tokens.
        mask: bool[B, T], tokens that the policy sampled.
        groups: the group of each response.
        log_prob: float[B, T], of the sampled tokens.
        sum_pi_squared: float[B, T], sum over the vocabulary of squared probabilities.
        weights: float[B, T], pi_old / pi_rollout, or None.
    """
    to_go = torch.where(mask, rewards, 0).flip(-1).cumsum(-1).flip(-1)
    energy = 1 - 2 * log_prob.exp() + sum_pi_squared
    if weights is not None:
        energy = energy * weights**2
    energy = torch.where(mask & energy.isfinite(), energy, 0).cumsum(-1)
    result = torch.zeros_like(to_go)
    for rows in rows_of_groups(groups):
        tokens = mask[rows].sum(-1)
        lengths = sorted(tokens.tolist())
        if sum(length > 0 for length in lengths) < 2:
            continue
        longest, shared = lengths[-1], lengths[-2]
        returns, norms = to_go.new_zeros(len(rows), longest), to_go.new_zeros(len(rows), longest)
        for place, row in enumerate(rows):
            own = mask[row]
            returns[place, : own.sum()], norms[place, : own.sum()] = to_go[row][own], energy[row][own]
        baseline = (returns * norms).sum(0) / (norms.sum(0) + 1e-8)
        absent = torch.arange(longest, device=tokens.device) >= tokens[:, None]
        least, most = returns.masked_fill(absent, torch.inf).amin(0), returns.masked_fill(absent, -torch.inf).amax(0)
        baseline = torch.where(least == most, least, baseline)
        baseline[shared:] = 0
        for place, row in enumerate(rows):
            own = mask[row]
            result[row, own] = returns[place, : own.sum()] - baseline[: own.sum()]
    return result
