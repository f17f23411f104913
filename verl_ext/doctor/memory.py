"""How much memory a run needs: GPU while it trains and while it generates, host, and disk for a checkpoint.

Counted are dense decoders under FSDP. What is measured about these formulas: tests/unit/doctor/test_memory.py
(parameters, gradients, optimizer and activations of a real FSDP model; the published run's log).

Of verl's own figures, verl 0.9.1: `actor/perf/max_memory_allocated_gb` is torch's peak of the actor's process
(workers/engine_workers.py:219), never reset, of one rank: metrics of data-parallel ranks are not gathered but the first
is taken (utils/tensordict_utils.py:243), and its mini-batches reduced by `max` (utils/metric/utils.py:52).
`perf/cpu_memory_used_gb` (engine_workers.py:221) is the node's, of all processes, at the end of an update, when what is
offloaded is on the GPU; it is reduced by `mean`. In 0.9.1 vLLM has processes of its own, whose memory is not in it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from verl_ext.doctor.finding import Finding, fail, ok, warn
from verl_ext.doctor.machine import Machine
from verl_ext.doctor.run import ACTOR, GIB, ROLLOUT, Run, count, size
from verl_ext.doctor.shape import ModelShape

TOLERANCE = 1.12  # a sum that is so much too large is refused: the estimate is known to be within 12%
RESERVED = 1.06  # torch's reserved over allocated memory: 226.8 / 214.8 GB in the published run's log
CONTEXT_GIB = 3.0  # CUDA contexts and NCCL's buffers of actor and vLLM, beside what torch counts; an assumption
PROCESS_GIB = 8.0  # of host memory for each GPU: actor, vLLM server, agent loops; an assumption
FP32, HALF = ("fp32", "float32"), ("bf16", "bfloat16", "fp16", "float16")
FEWER = "More GPUs, a larger Ulysses size with a smaller token budget per GPU, or fused kernels for the logits."


@dataclass(frozen=True)
class Memory:
    """Bytes, of one GPU unless said otherwise; `terms` holds the formula of each phase with its numbers."""

    training: float
    resident: float  # of the actor, while vLLM generates
    sync: float  # of the actor, while vLLM takes its weights
    vllm_weights: float
    weights_on_host: float  # of a node: offloaded or being read, and the reference model's
    host: float  # of a node, processes included
    checkpoint: float  # of the whole run, on disk
    terms: dict[str, str]


def estimate(run: Run, shape: ModelShape) -> Memory:
    """Of a run with a dense model under FSDP.

    P parameters over W GPUs, T tokens of a micro-batch on a GPU, L layers of width H and MLP width I, vocabulary V:
        weights, gradients, Adam   (b + 4 + 8) P / W         b = 4 (model_dtype fp32), gradients and moments fp32
        unsharded weights          2 (E + 2 l) + 4 l         bf16: FSDP's root E (embedding, head) and two layers of l;
                                                             fp32: the gradients of a layer on their way
        unsharded gradients        2 P (fsdp), 4 P (fsdp2)   only with use_no_sync_for_gradient_accumulation
        activations                2 L T H                   inputs of the layers, bf16, with gradient checkpointing;
                                   2 L T (12 H + 4 I)        all, without it
        peak of the backward pass  max(4 T V, 2 T (12 H + 6 I))   logits and their gradient, or one layer computed anew

    12, 6 and 4 are fitted to what torch's memory tracker counts of Hugging Face's Qwen2. The reference model of a KL
    term is on the host: FSDP offloads what is forward only (engine/fsdp/transformer_impl.py:432, 459), and its forward
    pass takes less of the GPU than training does.
    """

    def of_engine(key: str, default: Any = None) -> Any:
        return run.get(f"{run.engine}.{key}", default)

    weight_bytes = 2 if of_engine("model_dtype") in HALF else 4
    compute_bytes = 4 if of_engine("mixed_precision", {}).get("param_dtype") in FP32 else 2
    fsdp_size = of_engine("fsdp_size", -1)
    world = fsdp_size if 0 < fsdp_size < run.gpus else run.gpus
    tokens = run.tokens_per_gpu if run.is_dynamic else (run.micro_batch or 1) * run.longest // run.ulysses
    total, root, layer = shape.parameters, shape.embedding_parameters, shape.layer_parameters
    sharded = (weight_bytes + 4 + 8) * total / world
    gathered = compute_bytes * (root + 2 * layer) + 4 * layer
    if not of_engine("reshard_after_forward", True):
        gathered = compute_bytes * total
    deferred = 0
    if of_engine("use_no_sync_for_gradient_accumulation"):
        is_fsdp2 = run.get(f"{ACTOR}.strategy" if run.is_rl else "engine.strategy") == "fsdp2"
        deferred = total * (4 if is_fsdp2 else compute_bytes)
    layer_work = compute_bytes * tokens * (12 * shape.hidden + 6 * shape.intermediate)
    logits = 2 * compute_bytes * tokens * shape.vocabulary
    if run.get(f"{run.model}.enable_gradient_checkpointing", True):
        activations, work = compute_bytes * shape.layers * tokens * shape.hidden, max(logits, layer_work)
    else:
        saved = compute_bytes * tokens * (12 * shape.hidden + 4 * shape.intermediate)
        activations, work = shape.layers * saved, max(logits, layer_work - saved)

    of_rank = {"param": weight_bytes * total / world, "optimizer": 8 * total / world}
    offloaded = sum(each for name, each in of_rank.items() if of_engine(f"{name}_offload"))
    rollout_bytes = 4 if run.get(f"{ROLLOUT}.dtype") == "float32" else 2
    vllm_weights = rollout_bytes * total / run.tensor_parallel if run.is_rl else 0
    sync = vllm_weights + of_rank["param"] + (0 if of_engine("optimizer_offload") else of_rank["optimizer"])

    ranks = min(run.gpus_per_node, run.gpus)  # of a node
    # from_pretrained: rank 0 reads the weights, or every rank where embedding and head are tied (fsdp_utils.py:64)
    loading = weight_bytes * total * (ranks if shape.tied else 1)
    reference = _reference_bytes(run) * total * ranks / world
    on_host = max(offloaded * ranks, loading) + reference
    unsharded = f"unsharded gradients {size(deferred)}, " * bool(deferred)
    referred = f"the reference model {size(reference)}, " * bool(reference)
    terms = {
        "training": (
            f"({weight_bytes} + 4 + 8) x {count(total)} parameters / {world} GPUs = {size(sharded)}, unsharded weights "
            f"{size(gathered)}, {unsharded}activations of {tokens:,} tokens {size(activations)}, peak of the backward "
            f"pass {size(work)}"
        ),
        "host": (
            f"offloaded {size(offloaded * ranks)}, or {size(loading)} while the weights are read, {referred}and "
            f"{PROCESS_GIB:g} GiB x {ranks} for the processes"
        ),
        "checkpoint": f"({weight_bytes} + 8) x {count(total)} parameters",
    }
    return Memory(
        training=sharded + gathered + deferred + activations + work,
        resident=sum(of_rank.values()) - offloaded if run.is_rl else 0,
        sync=sync,
        vllm_weights=vllm_weights,
        weights_on_host=on_host,
        host=on_host + PROCESS_GIB * GIB * ranks,
        checkpoint=(weight_bytes + 8) * total,
        terms=terms,
    )


def _reference_bytes(run: Run) -> int:
    """Of a parameter of the reference model; 0 where there is none (trainer_base.py:234-237, ppo/utils.py:75)."""
    wanted = run.get("algorithm.use_kl_in_reward") or run.get(f"{ACTOR}.use_kl_loss")
    if not wanted or any(run.get(f"{run.model}.{key}") for key in ("lora.rank", "lora_rank", "lora_adapter_path")):
        return 0
    return 4 if run.get("actor_rollout_ref.ref.fsdp_config.model_dtype") in FP32 else 2


def kv_tokens(run: Run, shape: ModelShape, gpu_gib: float) -> float:
    """Tokens of KV cache of one vLLM server: what its GPUs have beside weights and CONTEXT_GIB."""
    free = (run.get(f"{ROLLOUT}.gpu_memory_utilization") * gpu_gib - CONTEXT_GIB) * GIB
    per_gpu = shape.kv_bytes_per_token / min(run.tensor_parallel, shape.kv_heads)
    return (free - estimate(run, shape).vllm_weights) / per_gpu


def check_memory(run: Run, machine: Machine, gpu_gib: float | None = None) -> Iterator[Finding]:
    """The estimate, against this machine's GPUs where there are any, or against GPUs of `gpu_gib`."""
    shape, why = run.shape_or_why
    if shape is None:
        yield warn(f"no estimate: {why}")
        return
    memory = estimate(run, shape)
    if run.get("algorithm.adv_estimator") == "gae":
        yield warn("""algorithm.adv_estimator=gae trains a critic, whose memory is not in this estimate
            -> Count (4 + 4 + 8) bytes for each of its parameters over the GPUs, and its activations.""")
    if run.device == "cpu":
        need = memory.training * run.gpus + memory.host
        yield ok(f"training about {size(memory.training)} a rank: {memory.terms['training']}")
        if need > machine.memory_bytes:
            yield warn(f"""about {need / GIB:.0f} GiB are needed; the host has {machine.memory_bytes / GIB:.0f}
                -> Take less ranks.""")
        return
    yield _check_host(memory, machine)
    gpu_gib = gpu_gib or min((gpu.total_gib for gpu in machine.gpus if gpu.total_gib is not None), default=None)
    need = memory.training * RESERVED / GIB + CONTEXT_GIB
    text = f"""training peaks at about {need:.0f} GiB of a GPU: {memory.terms["training"]}; torch reserves {RESERVED:g}
        times the sum, and {CONTEXT_GIB:g} GiB go to contexts"""
    if gpu_gib is None:
        here = "the GPUs' memory is unknown" if machine.gpus else "no GPU here to compare with"
        yield ok(f"{text} ({here})")
        return
    text += f"; there are {gpu_gib:.0f}"
    if memory.training / GIB > TOLERANCE * gpu_gib:
        yield fail(f"{text} -> {FEWER}")
    else:
        yield warn(f"{text} -> {FEWER}") if need > 0.9 * gpu_gib else ok(text)
    if run.is_rl:
        yield from _check_rollout(run, shape, memory, gpu_gib)


def _check_host(memory: Memory, machine: Machine) -> Finding:
    text = f"host memory of a node about {memory.host / GIB:.0f} GiB: {memory.terms['host']}"
    if not machine.gpus:
        return ok(f"{text} (not compared: no GPU here)")
    text += f"; there are {machine.memory_bytes / GIB:.0f}"
    if memory.host <= machine.memory_bytes:
        return ok(text)
    say = fail if memory.weights_on_host > machine.memory_bytes else warn
    return say(f"{text} -> More nodes, or switch optimizer_offload off where the GPUs have the room.")


def _check_rollout(run: Run, shape: ModelShape, memory: Memory, gpu_gib: float) -> Iterator[Finding]:
    share = run.get(f"{ROLLOUT}.gpu_memory_utilization")
    vllm, resident = share * gpu_gib, memory.resident / GIB + CONTEXT_GIB * (1 - share)
    say, when = (warn, "validates") if run.is_separate else (fail, "generates")
    if run.has_hybrid_servers and vllm + resident > gpu_gib:
        yield say(f"""while it {when}, vLLM takes {share:g} x {gpu_gib:.0f} = {vllm:.0f} GiB and the actor keeps
            {memory.resident / GIB:.0f} -> Offload it (fsdp_config.param_offload, optimizer_offload), or lower
            rollout.gpu_memory_utilization.""")
    if run.has_hybrid_servers and memory.sync / GIB + 2 * CONTEXT_GIB > gpu_gib:
        yield say(f"""while weights are sent, vLLM's {memory.vllm_weights / GIB:.0f} GiB and the actor's make
            {memory.sync / GIB:.0f} -> A larger tensor_model_parallel_size, or optimizer_offload.""")
    tokens, parallel, longest = kv_tokens(run, shape, gpu_gib), run.tensor_parallel, run.longest
    sequences = run.batch * run.n / max(1, run.rollout_gpus // parallel)
    text = f"""a vLLM server has {share:g} x {gpu_gib:.0f} - {memory.vllm_weights / GIB:.1f} (weights) - {CONTEXT_GIB:g}
        GiB on each of {parallel} GPU(s): {tokens:,.0f} tokens of KV cache, {tokens / longest:.1f} sequences of
        {longest:,} tokens at once, of {sequences:,.0f} a step"""
    if tokens * TOLERANCE < longest:
        yield fail(f"{text} -> A larger tensor_model_parallel_size or gpu_memory_utilization.")
    elif tokens < 8 * longest and sequences > tokens / longest:
        slow = "Generation will be slow: a larger tensor_model_parallel_size leaves more for the cache."
        yield warn(f"{text} -> {slow}")
    else:
        yield ok(text)
