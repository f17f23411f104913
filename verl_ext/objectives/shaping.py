"""Terms that are added to the reward of +1/-1, as pure tensor functions: no config, no logging.

Each term is off unless the run's YAML names it.
"""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

PIECEWISE = ((8_000, 0.0), (12_000, -0.04), (16_384, -0.2592))  # tokens, penalty: slopes -0.01 and -0.05 per 1,000
TOOL_BONUS_PER_CALL = 0.1
TOOL_BONUS_CEILING = -0.6  # highest reward of a wrong answer with the bonus


def overlong_penalty(response_length: Tensor, *, max_length: int, buffer: int) -> Tensor:
    """Return the soft length penalty: 0 up to `max_length - buffer` tokens, then a straight line down to -1.

    Source: DAPO (arXiv:2503.14476), Eq. 13, with L_max = max_length and L_cache = buffer.

    Args:
        response_length: int64[num_responses], tokens, tool output included.
        max_length: tokens; equal to `data.max_response_length`.
        buffer: tokens; 0 < buffer <= max_length.
    Returns:
        float32[num_responses] in [-1, 0]. (16384, 4096): 12288 -> 0, 14336 -> -0.5, 16384 -> -1.
    Raises:
        ValueError: buffer is outside (0, max_length].
    """
    if not 0 < buffer <= max_length:
        raise ValueError(
            f"The overlong buffer is {buffer} tokens with a maximum length of {max_length}: expected 0 < buffer <= "
            f"max_length. Set reward.reward_kwargs.overlong_buffer_cfg.len accordingly."
        )
    excess = response_length - (max_length - buffer)
    return -(excess.to(torch.float32) / buffer).clamp(0.0, 1.0)


def piecewise_length_penalty(response_length: Tensor, points: Sequence[tuple[float, float]] = PIECEWISE) -> Tensor:
    """Return a mild length penalty: straight lines between points, constant beyond the last.

    The default is 0 below 8,000 tokens, -0.01 per 1,000 up to 12,000, -0.05 per 1,000 up to 16,384, as the write-up of
    the published run recommends (bojieli/ai-agent-book@99cee91, chapter7/retool/README.md, without a run as evidence).

    Args:
        response_length: int64[num_responses], tokens.
        points: (tokens, penalty), at least two, tokens ascending, penalties from 0 downwards.
    Returns:
        float32[num_responses] in [-0.2592, 0]. 10000 -> -0.02, 12000 -> -0.04, 14000 -> -0.14, 16384 -> -0.2592.
    Raises:
        ValueError: the points do not have that form.
    """
    starts, penalties = [start for start, _ in points], [penalty for _, penalty in points]
    if len(points) < 2 or penalties[0] != 0 or sorted(set(starts)) != starts or sorted(penalties)[::-1] != penalties:
        raise ValueError(
            f"length_penalty has the points {list(points)!r}: expected two or more [tokens, penalty] pairs, with "
            "ascending tokens and with penalties that fall from 0."
        )
    length = response_length.to(torch.float64)
    penalty = torch.zeros_like(length)
    for (start, before), (end, after) in itertools.pairwise(points):
        penalty += (after - before) * ((length - start) / (end - start)).clamp(0.0, 1.0)
    return penalty.to(torch.float32)


def tool_bonus(tool_calls: Tensor) -> Tensor:
    """Return the bonus of a wrong answer for its calls, by the published run's reward, min(-0.6, -1 + 0.1 x calls).

    Source: verl-recipe@48ea0a7, retool/retool.py, `compute_score`, which counts calls as (num_turns - 2) / 2. The paper
    has no such term. A right answer gets no bonus.

    Args:
        tool_calls: int64[num_responses] of wrong responses.
    Returns:
        float32[num_responses] in [0, 0.4], to be added to -1. 0 calls -> 0, 3 -> 0.3, 4 and more -> 0.4.
    """
    return (TOOL_BONUS_PER_CALL * tool_calls.to(torch.float32)).clamp(max=1.0 + TOOL_BONUS_CEILING)
