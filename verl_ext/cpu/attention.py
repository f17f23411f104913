"""A CPU stand-in for flash-attention 2, so that verl's default, `attn_implementation: flash_attention_2`, just works.

It is necessary, not a speed-up: verl/workers/config/model.py:185 (0.9.1) asks for flash-attention, and verl's Ulysses
replaces only this attention (models/transformers/monkey_patch.py:544); with `sdpa`, each rank would silently attend to
its own part of a sequence. Only the two kernels are replaced, by PyTorch's SDPA; configs and checkpoints do not change.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
) -> Tensor:
    """Compute `flash_attn.flash_attn_func` with SDPA.

    Args:
        q: [batch, query length, heads, head dim].
        k, v: [batch, key length, key heads, head dim]; heads is a multiple of key heads.
        causal: the last query sees the last key (bottom-right alignment, as in flash-attention >= 2.1).
    Returns:
        [batch, query length, heads, head dim].
    Raises:
        ValueError: a sliding window or soft-capping is asked for.
    """
    _refuse(window_size, softcap)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _attend(q, k, v, dropout_p, softmax_scale, causal)

    return _in_full_precision(attend, q, k, v)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
) -> Tensor:
    """Compute `flash_attn.flash_attn_varlen_func` with SDPA: attention within each sequence packed along dimension 0.

    Args:
        q: [tokens, heads, head dim].
        k, v: [key tokens, key heads, head dim].
        cu_seqlens_q, cu_seqlens_k: int32[sequences + 1], where each sequence's queries and keys start, and the end.
        max_seqlen_q, max_seqlen_k: tokens.
    Returns:
        [tokens, heads, head dim].
    Raises:
        ValueError: a sliding window or soft-capping is asked for.
    """
    _refuse(window_size, softcap)
    queries, keys = cu_seqlens_q.diff().tolist(), cu_seqlens_k.diff().tolist()

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        segments = zip(q.split(queries), k.split(keys), v.split(keys), strict=True)
        each = (_attend(q[None], k[None], v[None], dropout_p, softmax_scale, causal)[0] for q, k, v in segments)
        return torch.cat(list(each))

    return _in_full_precision(attend, q, k, v)


def _refuse(window_size: tuple[int, int], softcap: float) -> None:
    if tuple(window_size) != (-1, -1) or softcap:
        raise ValueError(
            f"The CPU stand-in for flash-attention has no sliding window and no soft-capping (got {window_size=}, "
            f"{softcap=}). Set `+model.override_config.attn_implementation=eager` for this model."
        )


def _attend(q: Tensor, k: Tensor, v: Tensor, dropout_p: float, scale: float | None, causal: bool) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    queries, keys = q.shape[2], k.shape[2]
    mask = None
    if causal and queries != keys:
        mask, causal = torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril(keys - queries), False
    gqa = q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(q, k, v, mask, dropout_p, causal, scale=scale, enable_gqa=gqa)
    return out.transpose(1, 2)


def _in_full_precision(attend: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """Return `attend(*inputs)` without the rounding to bf16 that other products may have (patches.py:`round_products`).

    SDPA computes many small products, each of which takes less time than oneDNN's preparation for it.
    """
    if torch.get_float32_matmul_precision() == "highest":
        return attend(*inputs)
    if torch.is_grad_enabled():
        return _InFullPrecision.apply(attend, *inputs)
    with _full_precision():
        return attend(*inputs)


@contextmanager
def _full_precision() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


class _InFullPrecision(torch.autograd.Function):
    """Full precision in the backward pass as well."""

    @staticmethod
    def forward(ctx: Any, attend: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        with _full_precision(), torch.enable_grad():
            ctx.inputs = [each.detach().requires_grad_() for each in inputs]
            ctx.out = attend(*ctx.inputs)
        return ctx.out.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        inputs, out = ctx.inputs, ctx.out
        del ctx.inputs, ctx.out  # autograd frees only saved tensors, and a kept loss would keep these
        with _full_precision():
            return None, *torch.autograd.grad(out, inputs, gradient)
