"""Sequences that are packed into one row attend to themselves alone, and log-probs in bf16 are near those in fp32."""

import importlib.util
from collections.abc import Callable, Iterator
from itertools import accumulate

from scripts.gpu_acceptance.numbers import FOUR_B, below, build_model, four_b, relative_error
from scripts.gpu_acceptance.stage import Context, Row

LENGTHS = (300, 1, 77, 512, 128)  # tokens; one token, and lengths that fill no block of a kernel


def kernels(context: Context) -> tuple[Callable, Callable]:
    """flash_attn_func and flash_attn_varlen_func: of the package, else PyTorch's own; on a CPU our stand-in's."""
    if not context.is_cuda:
        from verl_ext.cpu.attention import flash_attn_func, flash_attn_varlen_func
    elif importlib.util.find_spec("flash_attn"):
        from flash_attn import flash_attn_func, flash_attn_varlen_func
    else:
        return torch_func, torch_varlen_func
    return flash_attn_func, flash_attn_varlen_func


def name_of_kernels(context: Context) -> str:
    names = {"flash_attn": "the package flash-attn", "verl_ext": "our stand-in for a CPU"}
    return names.get(kernels(context)[1].__module__.split(".")[0], "PyTorch's own flash-attention")


def torch_varlen_func(q, k, v, starts_q, starts_k, longest_q, longest_k, softmax_scale=None, causal=False):
    """flash_attn_varlen_func by PyTorch's kernels; keys are repeated for their queries' heads."""
    from torch.nn.attention.varlen import varlen_attn

    k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], 1) for each in (k, v))
    window = (-1, 0) if causal else (-1, -1)
    return varlen_attn(q, k, v, starts_q, starts_k, longest_q, longest_k, scale=softmax_scale, window_size=window)


def torch_func(q, k, v, causal=False):
    """flash_attn_func for one sequence [1, T, heads, head dim]."""
    import torch

    starts = torch.tensor([0, q.shape[1]], dtype=torch.int32, device=q.device)
    return torch_varlen_func(q[0], k[0], v[0], starts, starts, q.shape[1], q.shape[1], causal=causal)[None]


def check_packing(context: Context) -> Iterator[Row]:
    """One call for all sequences against one for each: outputs, gradients, and what must not matter."""
    import torch

    of_one, of_many = kernels(context)
    yield Row("attention", "", name_of_kernels(context))
    dtype, limit = (torch.bfloat16, 1e-2) if context.is_cuda else (torch.float32, 1e-5)
    shape = four_b(context)
    generator = torch.Generator(context.device).manual_seed(0)

    def random(heads: int) -> torch.Tensor:
        size = (sum(LENGTHS), heads, shape.head_dim)
        return torch.randn(size, device=context.device, generator=generator).to(dtype).requires_grad_()

    q, k, v = random(shape.heads), random(shape.kv_heads), random(shape.kv_heads)
    starts = torch.tensor([0, *accumulate(LENGTHS)], dtype=torch.int32, device=context.device)
    weight = torch.randn(q.shape, device=context.device, generator=generator).to(dtype)

    def packed(*inputs: torch.Tensor) -> torch.Tensor:
        return of_many(*inputs, starts, starts, max(LENGTHS), max(LENGTHS), causal=True)

    def separate(*inputs: torch.Tensor) -> torch.Tensor:
        parts = zip(*(each.split(LENGTHS) for each in inputs), strict=True)
        return torch.cat([of_one(*(each[None] for each in part), causal=True)[0] for part in parts])

    seen, expected = packed(q, k, v), separate(q, k, v)
    yield below("packed against separate: outputs", relative_error(seen, expected), limit)
    gradients = (torch.autograd.grad(out, (q, k, v), weight) for out in (seen, expected))
    for name, one, other in zip("qkv", *gradients, strict=True):
        yield below(f"packed against separate: gradient of {name}", relative_error(one, other), limit)
    exact = separate_in_fp64(q, k, v)
    yield below("packed against fp64", relative_error(seen, exact), limit)
    changed = [each.detach().clone() for each in (q, k, v)]
    for each in changed:
        each[: LENGTHS[0]] = 0
    same = torch.equal(packed(*changed)[LENGTHS[0] :], seen[LENGTHS[0] :])
    yield Row("another first sequence leaves the others", "bit-equal", "bit-equal" if same else "changed", same)


def separate_in_fp64(q, k, v):
    """Causal attention of each sequence by its formula, heads of keys repeated."""
    import torch

    outputs = []
    for parts in zip(*(each.detach().double().split(LENGTHS) for each in (q, k, v)), strict=True):
        one_q, one_k, one_v = (part.transpose(0, 1) for part in parts)
        one_k, one_v = (each.repeat_interleave(len(one_q) // len(one_k), 0) for each in (one_k, one_v))
        scores = one_q @ one_k.transpose(1, 2) / one_q.shape[-1] ** 0.5
        scores = scores.masked_fill(torch.ones_like(scores[0], dtype=torch.bool).triu(1), -torch.inf)
        outputs.append((scores.softmax(-1) @ one_v).transpose(0, 1))
    return torch.cat(outputs)


def check_log_probs(context: Context) -> Iterator[Row]:
    """Of a model of four layers: bf16 as it trains and samples against fp32; packed rows against separate ones (sdpa).

    The second is what a run without flash-attn does where padding is removed all the same.
    """
    import dataclasses

    import torch

    shape = dataclasses.replace(four_b(context), layers=4)
    model = build_model(shape, context).eval()
    lengths = (40, 1, 87)
    ids = torch.randint(0, shape.vocabulary, (1, sum(lengths)), device=context.device)
    positions = torch.cat([torch.arange(n, device=context.device) for n in lengths])[None]

    def log_probs(tokens: torch.Tensor, **inputs: torch.Tensor) -> torch.Tensor:
        """Of each next token, and of the first one after the last."""
        with torch.no_grad():
            logits = model(input_ids=tokens, **inputs).logits[0].float()
        return logits.log_softmax(-1).gather(-1, tokens.roll(-1, 1)[0][:, None])[:, 0]

    exact = log_probs(ids)
    yield Row("model", "", f"{shape.layers} layers of {FOUR_B if context.is_cuda else 'a tiny model'}")
    logits_of = [model(input_ids=part).logits[0].detach() for part in ids.split(lengths, 1)]
    packed = model(input_ids=ids, position_ids=positions, attention_mask=None).logits[0].detach()
    yield below("sdpa, fp32: packed against separate logits", relative_error(packed, torch.cat(logits_of)), 1e-4)
    if context.is_cuda:
        on_gpu, model = exact.cpu(), model.cpu()
        yield below(
            "fp32: GPU against CPU, largest difference", (on_gpu - log_probs(ids.cpu())).abs().max().item(), 1e-3
        )
        model = model.to(context.device)
    model = model.bfloat16()
    difference = (log_probs(ids) - exact).abs()
    yield below("bf16 against fp32: mean difference of a log-prob", difference.mean().item(), 0.05)  # .020 on a CPU
    yield below("bf16 against fp32: largest difference", difference.max().item(), 0.25)  # .062 on a CPU
