"""A step of RL's actor at the 4B's shape: the peak of memory against what the doctor says.

The step is written out as verl's FSDP engine makes it (FSDP2, weights and moments in fp32, compute in bf16, gradient
checkpointing, two micro-batches of as many tokens as the 4B's YAML allows), so that it needs no verl.
"""

import gc
import importlib.util
import time
from collections.abc import Iterator
from dataclasses import replace

from scripts.gpu_acceptance.numbers import build_model, four_b, one_rank
from scripts.gpu_acceptance.stage import Context, Row
from verl_ext.memory.estimate import TOLERANCE, Plan, estimate
from verl_ext.memory.shape import ModelShape
from verl_ext.memory.words import GIB

MICRO_BATCHES = 2
TOKENS = {"cuda": 10_240, "cpu": 128}  # of a micro-batch; the first is configs/qwen3-4b_dapo.yaml's


def log_probs_of(logits, labels):
    """Log-probability of each label, fp32[T], whose backward pass puts the gradient in the logits' place, as verl's.

    Args:
        logits: bf16[T, V].
        labels: int64[T].
    """
    import torch

    class LogProbs(torch.autograd.Function):
        @staticmethod
        def forward(ctx, logits, labels):
            totals = torch.cat([rows.float().logsumexp(-1) for rows in logits.split(256)])
            ctx.save_for_backward(logits, labels, totals)
            return logits.gather(-1, labels[:, None])[:, 0].float() - totals

        @staticmethod
        def backward(ctx, upstream):
            logits, labels, totals = ctx.saved_tensors
            for rows, total, up in zip(*(each.split(256) for each in (logits, totals, upstream)), strict=True):
                rows.copy_((rows.float() - total[:, None]).exp().mul_(-up[:, None]))
            logits[torch.arange(len(labels), device=labels.device), labels] += upstream.to(logits.dtype)
            return logits, None

    return LogProbs.apply(logits, labels)


def actor_loss(log_probs, old, advantages):
    """PPO's clipped loss, clip-higher .2/.28, mean over tokens; `old` are the log-probs of the rollout."""
    import torch

    ratio = (log_probs - old).exp()
    return torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.28)).mean()


def check_actor_step(context: Context) -> Iterator[Row]:
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    shape, tokens = four_b(context), TOKENS[context.device]
    plan = Plan(shape, tokens, checkpointing=True, keeps_logits=False)
    expected = {fused: expected_peaks(replace(plan, fused=fused), context) for fused in (True, False)}
    with one_rank(context):
        model = build_model(shape, context)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        mesh = init_device_mesh(context.device, (1,))
        for module in [*model.model.layers, model]:
            fully_shard(module, mesh=mesh, mp_policy=policy)
        gigabytes = 2**30 if context.is_cuda else 2**20
        weights = f"{shape.parameters / gigabytes * 4:.1f} {'GiB' if context.is_cuda else 'MiB'} of weights"
        yield Row("model", "", f"{weights}, {MICRO_BATCHES} x {tokens:,} tokens")
        for fused in (True, False):
            yield from _step(context, model, shape, tokens, fused=fused)
            yield from _peaks(context, expected[fused], "fused" if fused else "foreach")


def expected_peaks(plan: Plan, context: Context) -> dict[str, float]:
    """Bytes that the doctor's formula says; on a GPU, where verl is installed, its simulation's, too (30 s)."""
    peaks = {"the doctor": estimate(plan).training}
    if context.is_cuda and importlib.util.find_spec("verl"):
        from verl_ext.trainer.simulate import simulate

        peaks["the simulation"] = simulate(plan).peak.total
    return peaks


def _step(context: Context, model, shape: ModelShape, tokens: int, *, fused: bool) -> Iterator[Row]:
    """Two steps with an optimizer of their own: the first makes its state, the second is measured."""
    import torch

    name = "fused" if fused else "foreach"
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=fused or None, foreach=None if fused else True)
    generator = torch.Generator(context.device).manual_seed(0)
    ids = torch.randint(0, shape.vocabulary, (1, tokens), device=context.device, generator=generator)
    advantages = torch.randn(tokens, device=context.device, generator=generator)
    losses, seconds, stop = [], 0.0, ""
    try:
        for _ in range(2):
            gc.collect()
            if context.is_cuda:
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
                torch.cuda.synchronize()
            start = time.monotonic()
            for _ in range(MICRO_BATCHES):
                logits = model(input_ids=ids).logits.squeeze(0)
                log_probs = log_probs_of(logits, ids[0].roll(-1))
                del logits
                loss = actor_loss(log_probs, log_probs.detach(), advantages) / MICRO_BATCHES
                loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append((loss.item() * MICRO_BATCHES, norm.full_tensor().item()))
            seconds = time.monotonic() - start
    except torch.OutOfMemoryError as error:
        stop = f"out of memory: {str(error)[:200]}"
    finally:
        optimizer.zero_grad()
        del optimizer
    if stop:
        yield Row(f"{name} AdamW", "a step", stop, False)
        return
    finite = all(abs(number) < 1e6 and number == number for pair in losses for number in pair)
    text = ", ".join(f"{loss:.4f} (norm {norm:.3g})" for loss, norm in losses)
    yield Row(f"{name} AdamW: losses of two steps", "finite, with a gradient", text, finite and losses[0][1] > 0)
    yield Row(f"{name} AdamW: speed", "", f"{seconds:.2f} s a step, {MICRO_BATCHES * tokens / seconds:,.0f} tokens/s")


def _peaks(context: Context, expected: dict[str, float], name: str) -> Iterator[Row]:
    """Of the last step, as torch counts what is allocated, against what was said before."""
    import torch

    for whose, figure in expected.items():
        what = f"{name} AdamW: peak against {whose}"
        if not context.is_cuda:
            yield Row(what, f"{figure / 2**20:.1f} MiB", "torch does not count a CPU's memory")
            continue
        seen = torch.cuda.max_memory_allocated()
        wanted = f"{figure / GIB:.1f} GiB, within {TOLERANCE - 1:.0%}"
        yield Row(what, wanted, f"{seen / GIB:.1f} GiB", abs(seen / figure - 1) < TOLERANCE - 1)
    if context.is_cuda:
        yield Row(f"{name} AdamW: reserved", "", f"{torch.cuda.max_memory_reserved() / GIB:.1f} GiB")
