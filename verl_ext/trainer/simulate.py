"""Count the memory of a training step instead of estimating it: the step runs on tensors with a shape but no content.

FSDP2 shards the model in a world whose other ranks do not exist, and torch's memory tracker counts what each operation
allocates and frees. A deep model's peak is extrapolated linearly from two shallower models: each further layer adds the
same while the peak is at the same moment; if it is not, the result is too low. The wrapping (`apply_fsdp2`) and the
exchange of heads in Ulysses are verl's own code. Functions that allocate the same replace GPU-only code:
flash-attention's kernels and its cross entropy, and verl's entropy as torch.compile makes it.

Not covered: FSDP1, LoRA, padding, the critic, fused kernels for the logits, the entropy without torch.compile, a
temperature other than 1, internal memory of kernels and NCCL, CUDA's contexts, and what torch reserves beyond that.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, cast
from unittest import mock

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.testing._internal.distributed.fake_pg import FakeStore

from verl_ext.memory.estimate import Plan

# Layers of the two models that a deeper one is extrapolated from; a shallower one runs as it is. With few tokens, a
# shallow model peaks where the embedding's gradient is sent and a deep one elsewhere: the 4B with 4,096 tokens on 8
# ranks from 12 layers on. 64 layers of 32B take two minutes, these two ten seconds.
DEPTHS = (15, 16)
DTYPES = {2: torch.bfloat16, 4: torch.float32}  # by their bytes
_ATTENTION = "by_size"


@dataclass(frozen=True)
class Parts:
    """Bytes of one rank at a peak, by kind.

    `temporary` has unsharded weights and gradients, buffers of collectives, gradients of activations, and what the
    optimizer's step allocates besides its state. `activations` are the tensors that the backward pass needs, including
    those of a layer that is recomputed.
    """

    weights: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    temporary: float

    @property
    def total(self) -> float:
        return sum(asdict(self).values())


@dataclass(frozen=True)
class Simulation:
    """The two peaks of a step; the larger one is the peak of the step."""

    backward: Parts  # of forward and backward passes
    update: Parts  # of clipping and the optimizer's step

    @property
    def peak(self) -> Parts:
        return max(self.backward, self.update, key=lambda parts: parts.total)


def simulate(plan: Plan) -> Simulation:
    """Return one rank's peaks in a step of two micro-batches, with the optimizer's state in place. Always FSDP2."""
    layers, (fewer, more) = plan.shape.layers, DEPTHS
    with _fake_world(plan.ranks):
        if layers <= more:
            return _run(plan)
        low, high = (_run(replace(plan, shape=replace(plan.shape, layers=depth))) for depth in DEPTHS)

    def at_depth(low: Parts, high: Parts) -> Parts:
        share = (layers - fewer) / (more - fewer)
        return Parts(**{name: at + share * (getattr(high, name) - at) for name, at in asdict(low).items()})

    return Simulation(at_depth(low.backward, high.backward), at_depth(low.update, high.update))


@contextlib.contextmanager
def _fake_world(ranks: int) -> Iterator[None]:
    """Run the block as rank 0 of `ranks`, with tensors that have no content."""
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        with FakeTensorMode(), mock.patch("torch.optim.adam._get_value", lambda step: 1.0):  # noqa: PT008  no number here; a mock keeps its calls
            yield
    finally:
        dist.destroy_process_group()


def _run(plan: Plan) -> Simulation:
    """Simulate a model with all layers of its shape."""
    model, optimizer = build(plan)
    tracker = FSDPMemTracker(model, optimizer)

    def micro_batch(is_last: bool) -> None:
        forward_backward(model, plan, is_last=is_last, on_logits=lambda logits: tracker.track_inputs((logits,)))
        tracker.reset_mod_stats()

    def peak(state: int) -> Parts:
        seen = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]
        kinds = {str(kind).rpartition(".")[2]: number for kind, number in seen.items()}
        named = {
            "weights": kinds["SHARDED_PARAM"],
            "gradients": kinds["SHARDED_GRAD"],
            "optimizer": min(kinds["OPT"], state),  # what its step allocates is also counted there
            "activations": kinds["ACT"] + kinds["BUFFER"],
            "logits": kinds["INP"],
        }
        return Parts(**named, temporary=kinds["Total"] - sum(named.values()))

    def set_gradients() -> None:
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)

    set_gradients()
    update(model, optimizer)  # makes the optimizer's state
    if not plan.defers_gradients:
        set_gradients()  # of the first micro-batch
    with tracker:
        now = tracker.get_tracker_snapshot()[torch.device("cpu")]
        if plan.defers_gradients:  # the tracker must see them being made
            micro_batch(False)
        micro_batch(True)
    state = next(number for kind, number in now.items() if str(kind).endswith(".OPT"))
    backward = peak(state)
    with tracker:  # which forgets the peak
        update(model, optimizer)
    return Simulation(backward, peak(state))


# The step, on fake or real tensors ------------------------------------------------------------------------------------


def build(plan: Plan) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Build model and optimizer as verl 0.9.1's FSDP2 engine does (workers/engine/fsdp/transformer_impl.py:479)."""
    from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
    from verl.utils.fsdp_utils import apply_fsdp2
    from verl.utils.ulysses import set_ulysses_sequence_parallel_group

    AttentionInterface.register(_ATTENTION, _attention)
    config = AutoConfig.for_model(**plan.shape.config(), use_cache=False)
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation=_ATTENTION, dtype=DTYPES[plan.weight_bytes]
    ).train()
    if plan.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    with unset_fake_temporarily():  # a mesh needs real tensors for its ranks
        mesh = init_device_mesh("cpu", (plan.ranks,), mesh_dim_names=("fsdp",))
        sharing = init_device_mesh("cpu", (plan.ranks // plan.ulysses, plan.ulysses), mesh_dim_names=("dp", "sp"))
        set_group: Callable[..., None] = set_ulysses_sequence_parallel_group  # whose annotation lacks None, no group
        set_group(sharing["sp"].get_group() if plan.ulysses > 1 else None)
    options = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype=DTYPES[plan.compute_bytes], reduce_dtype=torch.float32),
        "reshard_after_forward": plan.reshards,
    }
    apply_fsdp2(model, options, {})
    return model, torch.optim.AdamW(model.parameters(), fused=plan.fused, foreach=not plan.fused)


def forward_backward(
    model: torch.nn.Module,
    plan: Plan,
    *,
    is_last: bool,
    on_logits: Callable[[torch.Tensor], Any] = lambda logits: None,
) -> None:
    """Run one micro-batch; the last one of a step sends the gradients in any case."""
    ids = torch.zeros((1, plan.tokens), dtype=torch.long)
    positions = torch.arange(plan.tokens).unsqueeze(0)
    sharded = cast(FSDPModule, model)
    sharded.set_requires_gradient_sync(is_last or not plan.defers_gradients)
    sharded.set_reshard_after_backward(is_last or not plan.defers_gradients or plan.reshards)
    logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits.squeeze(0)
    on_logits(logits)
    entropy = _Entropy.apply(logits).sum() if plan.entropy else 0  # first, as in verl
    loss = _CrossEntropy.apply(logits, not (plan.keeps_logits or plan.entropy)).sum() + entropy
    del logits, entropy
    loss.backward()


def update(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def _attention(module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> tuple[torch.Tensor, None]:
    """Attend over (1, heads, tokens, size of a head), which Hugging Face's models pass and verl's patch exchanges."""
    from verl.models.transformers import monkey_patch

    def by_size(query: Any, key: Any, value: Any, *args: Any, **options: Any) -> torch.Tensor:
        return _FlashAttention.apply(query, key, value)

    parts = (each.transpose(1, 2) for each in (query, key, value))
    with mock.patch.object(monkey_patch, "_flash_attention_forward", by_size):
        positions = options["position_ids"]
        return monkey_patch._ulysses_flash_attention_forward(*parts, None, query.shape[2], position_ids=positions), None


class _FlashAttention(torch.autograd.Function):
    """Allocates what flash-attn 2.8.3 does for packed sequences (csrc/flash_attn/flash_api.cpp, mha_varlen_fwd, _bwd).

    Tensors are (1, tokens, heads, size of a head); the result and the gradients are zero.
    """

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        _, tokens, heads, _ = query.shape
        out, sums = torch.zeros_like(query), query.new_zeros((heads, tokens), dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, sums)
        return out

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor, ...]:
        query, key, value = ctx.saved_tensors[:3]
        gradients = tuple(torch.zeros_like(each) for each in (query, key, value))
        _, tokens, heads, size = query.shape
        work = [  # softmax_d, dq_accum
            query.new_zeros((heads, tokens + 128), dtype=torch.float32),
            query.new_zeros((tokens + 128, heads, size), dtype=torch.float32),
        ]
        if key.shape[2] != heads:  # grouped queries: dk_expanded, dv_expanded
            work += [torch.zeros_like(query), torch.zeros_like(query)]
        return gradients


class _CrossEntropy(torch.autograd.Function):
    """Allocates what flash-attn's cross entropy does: a loss per token, and the gradient, in place or not."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, in_place: bool) -> torch.Tensor:
        sums = logits.new_zeros(len(logits), dtype=torch.float32)
        ctx.save_for_backward(logits, sums)
        ctx.in_place = in_place
        return torch.zeros_like(sums)

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor, None]:
        logits, _ = ctx.saved_tensors
        return (logits if ctx.in_place else torch.zeros_like(logits)), None


class _Entropy(torch.autograd.Function):
    """Allocates what verl's `entropy_from_logits` does when compiled by torch: three numbers per token, the gradient.

    tests/unit/memory/test_simulate.py checks the saved tensors.
    """

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor) -> torch.Tensor:
        rows = [logits.new_zeros(len(logits), dtype=torch.float32) for _ in range(3)]
        ctx.save_for_backward(logits, *rows)
        return torch.zeros_like(rows[0])

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(ctx.saved_tensors[0])
