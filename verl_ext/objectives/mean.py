"""Means over tokens and responses, exact however a mini-batch is split into micro-batches and ranks.

A loss is computed for each micro-batch of each rank. Gradients of micro-batches are added, and those of ranks averaged,
so each part is divided by numbers of the whole mini-batch and multiplied by the number of ranks.

The unit of a token mean (`actor.policy_loss.unit`) says whose tokens are in the denominator:

- `mini_batch`: those of the mini-batch, as in verl. A token weighs more in a mini-batch with few tokens.
- `batch`: those of the batch, which all updates of a step share (OlmoRL's text).
- `group`: those of its group, then the mean over the groups of the batch (DAPO, arXiv:2503.14476, Eq. 8).

For `batch` and `group`, multiply the advantages by `unit_factors(...)`; `mean_loss` then sums instead of averaging. The
mean over the updates of a step is then exactly the mean over the batch, however it is split into mini-batches, because
every objective here is linear in a positive factor of the advantages.

A response may be an episode of several rows, each of which trains other tokens of it. `mean_loss` knows only rows:
multiply the advantages by `episode_factors(...)`, and an episode counts once, whatever its rows.
"""

from collections import Counter
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

UNITS = ("mini_batch", "batch", "group")
MODES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")  # verl's names


def mean_loss(
    objective: Tensor,
    mask: Tensor,
    *,
    mode: str,
    unit: str = "mini_batch",
    ranks: int = 1,
    tokens: int | None = None,
    responses: int | None = None,
    scale: float | None = None,
) -> Tensor:
    """Return this micro-batch's part of minus the mean of an objective over the tokens of `mask`; 0 without a token.

    Args:
        objective: float[B, T], of a micro-batch.
        mask: bool[B, T].
        mode: one of MODES. `seq-mean-token-sum-norm` divides a response's sum by `scale` (Dr. GRPO, arXiv:2503.20783).
        unit: one of UNITS; any but `mini_batch` requires `token-mean`.
        ranks: data-parallel ranks, whose gradients are averaged.
        tokens: of the mini-batch, over all ranks; None: those of `mask`.
        responses: of the mini-batch; None: those with a token.
        scale: tokens, the same in every step, as `data.max_response_length`.
    Raises:
        ValueError: mode, unit or scale do not fit.
    """
    if mode not in MODES or unit not in UNITS or (unit != "mini_batch" and mode != "token-mean"):
        raise ValueError(
            f"actor.loss_agg_mode={mode} with policy_loss.unit={unit}: expected one of {', '.join(MODES)}, and a unit "
            f"of {', '.join(UNITS)}; the last two need token-mean."
        )
    if (mode == "seq-mean-token-sum-norm") != (scale is not None):
        raise ValueError(
            f"actor.loss_agg_mode={mode} with loss_scale_factor={scale}: seq-mean-token-sum-norm needs a fixed number "
            "of tokens (data.max_response_length), and no other mode has one."
        )
    sums = torch.where(mask, objective, 0).sum(-1)
    if mode == "token-mean":
        if unit != "mini_batch":
            return -sums.sum() * ranks
        return -sums.sum() / max(int(mask.sum()) if tokens is None else tokens, 1) * ranks
    lengths = mask.sum(-1)
    if mode == "seq-mean-token-mean":
        sums = sums / lengths.clamp(min=1)
    count = int((lengths > 0).sum()) if responses is None else responses
    return -sums.sum() / max(count, 1) * ranks / (scale or 1)


def unit_factors(lengths: Tensor, groups: list[str], *, unit: str, updates: int) -> Tensor:
    """Return the factors, float64[B], by which the advantages of each response of a batch are multiplied.

    Args:
        lengths: int[B], number of tokens that count in each response.
        groups: the group of each response.
        updates: mini-batches of the batch.
    """
    lengths = lengths.double()
    if unit == "mini_batch":
        return torch.ones_like(lengths)
    if unit == "batch":
        return torch.full_like(lengths, updates / max(float(lengths.sum()), 1.0))
    of: dict[str, float] = {}
    for group, length in zip(groups, lengths.tolist(), strict=True):
        of[group] = of.get(group, 0.0) + length
    used = sum(tokens > 0 for tokens in of.values())  # verl's padding is a group without tokens
    factors = [updates / (used * of[group]) if of[group] else 0.0 for group in groups]
    return torch.tensor(factors, dtype=torch.float64)


def episode_factors(lengths: Tensor, episodes: Sequence[Hashable], *, mode: str) -> Tensor:
    """Return the factors, float64[B], by which the advantages of each row of a batch are multiplied.

    The B rows of a batch, as many in each of its mini-batches, are then a mean over its episodes: rows per episode, and
    where a response's tokens have a mean, that of a row weighs by the row's share of the episode's tokens.

    Args:
        lengths: number of tokens that count in each row.
        episodes: the episode of each row; None of a row that only fills up the batch.
        mode: one of MODES, or another of verl's, which has no mean over responses.
    """
    if not mode.startswith("seq-mean"):
        return torch.ones(len(episodes), dtype=torch.float64)
    real = {episode for episode in episodes if episode is not None}
    factors = torch.full((len(episodes),), len(episodes) / max(len(real), 1), dtype=torch.float64)
    if mode == "seq-mean-token-mean" and len(real) < len(episodes) - episodes.count(None):
        tokens: Counter[Hashable] = Counter()
        for episode, length in zip(episodes, lengths.tolist(), strict=True):
            tokens[episode] += length
        own = torch.tensor([tokens[episode] for episode in episodes], dtype=torch.float64)
        factors *= lengths.clamp(min=1) / own.clamp(min=1)
    return factors
