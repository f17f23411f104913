"""Length penalties as pure tensor functions: no config, no logging."""

import torch
from torch import Tensor


def overlong_penalty(response_length: Tensor, *, max_length: int, buffer: int) -> Tensor:
    """Soft length penalty: 0 up to `max_length - buffer` tokens, then a straight line down to -1.

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
