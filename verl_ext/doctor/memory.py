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

from verl_ext.doctor.finding import Finding, Topic
from verl_ext.doctor.machine import Machine
from verl_ext.doctor.run import GIB, Run, count, size
from verl_ext.doctor.shape import ModelShape

topic = Topic("memory")
TOLERANCE = 1.12  # a sum that is so much too large is refused: the estimate is known to be within 12%
RESERVED = 1.06  # torch's reserved over allocated memory: 226.8 / 214.8 GB in the published run's log
CONTEXT_GIB = 3.0  # CUDA contexts and NCCL's buffers of actor and vLLM, beside what torch counts; an assumption
PROCESS_GIB = 8.0  # of host memory for each GPU: actor, vLLM server, agent loops; an assumption


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
    fsdp = "actor_rollout_ref.actor.fsdp_config" if run.is_rl else "engine"
    model = "actor_rollout_ref.model" if run.is_rl else "model"
    weight_bytes = 2 if run.get(f"{fsdp}.model_dtype") in ("bf16", "bfloat16", "fp16", "float16") else 4
    mixed = run.get(f"{fsdp}.mixed_precision", {})
    compute_bytes = 4 if mixed.get("param_dtype") in ("fp32", "float32") else 2
    fsdp_size = run.get(f"{fsdp}.fsdp_size", -1)
    world = fsdp_size if 0 < fsdp_size < run.gpus else run.gpus
    tokens = _tokens_per_gpu(run)
    total, root, layer = shape.parameters, shape.embedding_parameters, shape.layer_parameters
    sharded = (weight_bytes + 4 + 8) * total / world
    if not run.get(f"{fsdp}.reshard_after_forward", True):
        gathered = compute_bytes * total
    else:
        gathered = compute_bytes * (root + 2 * layer) + 4 * layer
    deferred = 0
    if run.get(f"{fsdp}.use_no_sync_for_gradient_accumulation"):
        is_fsdp2 = run.get("actor_rollout_ref.actor.strategy" if run.is_rl else "engine.strategy") == "fsdp2"
        deferred = total * (4 if is_fsdp2 else compute_bytes)
    layer_work = compute_bytes * tokens * (12 * shape.hidden + 6 * shape.intermediate)
    logits = 2 * compute_bytes * tokens * shape.vocabulary
    if run.get(f"{model}.enable_gradient_checkpointing", True):
        activations, work = compute_bytes * shape.layers * tokens * shape.hidden, max(logits, layer_work)
    else:
        saved = compute_bytes * tokens * (12 * shape.hidden + 4 * shape.intermediate)
        activations, work = shape.layers * saved, max(logits, layer_work - saved)
    training = sharded + gathered + deferred + activations + work

    offloads = {name: bool(run.get(f"{fsdp}.{name}_offload")) for name in ("param", "optimizer")}
    resident = sum(
        size * total / world
        for name, size in (("param", weight_bytes), ("optimizer", 8))
        if run.is_rl and not offloads[name]
    )
    tensor_parallel = run.get("actor_rollout_ref.rollout.tensor_model_parallel_size", 1) if run.is_rl else 1
    rollout_bytes = 4 if run.get("actor_rollout_ref.rollout.dtype") == "float32" else 2
    vllm_weights = rollout_bytes * total / tensor_parallel if run.is_rl else 0
    sync = vllm_weights + weight_bytes * total / world + (0 if offloads["optimizer"] else 8 * total / world)

    ranks_of_node = min(run.gpus_per_node, run.gpus)
    offloaded = sum(
        size * total * ranks_of_node / world
        for name, size in (("param", weight_bytes), ("optimizer", 8))
        if offloads[name]
    )
    # from_pretrained: rank 0 reads the weights, or every rank where embedding and head are tied (fsdp_utils.py:64)
    loading = weight_bytes * total * (ranks_of_node if shape.tied else 1)
    reference = _reference_bytes(run) * total * ranks_of_node / world
    processes = PROCESS_GIB * GIB * ranks_of_node
    unsharded = f"unsharded gradients {size(deferred)}, " * bool(deferred)
    terms = {
        "training": (
            f"({weight_bytes} + 4 + 8) x {count(total)} parameters / {world} GPUs = {size(sharded)}, unsharded weights "
            f"{size(gathered)}, {unsharded}activations of {tokens:,} tokens {size(activations)}, peak of the backward "
            f"pass {size(work)}"
        ),
        "host": (
            f"offloaded {size(offloaded)}, or {size(loading)} while the weights are read, "
            + f"the reference model {size(reference)}, " * bool(reference)
            + f"and {PROCESS_GIB:g} GiB x {ranks_of_node} for the processes"
        ),
        "checkpoint": f"({weight_bytes} + 8) x {count(total)} parameters",
    }
    return Memory(
        training=training,
        resident=resident,
        sync=sync,
        vllm_weights=vllm_weights,
        weights_on_host=max(offloaded, loading) + reference,
        host=max(offloaded, loading) + reference + processes,
        checkpoint=(weight_bytes + 8) * total,
        terms=terms,
    )


def _reference_bytes(run: Run) -> int:
    """Of a parameter of the reference model; 0 where there is none (trainer_base.py:234-237, ppo/utils.py:75)."""
    wanted = run.get("algorithm.use_kl_in_reward") or run.get("actor_rollout_ref.actor.use_kl_loss")
    model = "actor_rollout_ref.model"
    if not wanted or any(run.get(f"{model}.{key}") for key in ("lora.rank", "lora_rank", "lora_adapter_path")):
        return 0
    return 4 if run.get("actor_rollout_ref.ref.fsdp_config.model_dtype") in ("fp32", "float32") else 2


def kv_tokens(run: Run, shape: ModelShape, gpu_gib: float) -> float:
    """Tokens of KV cache of one vLLM server: what its GPUs have beside weights and CONTEXT_GIB."""
    rollout = "actor_rollout_ref.rollout"
    parallel = run.get(f"{rollout}.tensor_model_parallel_size", 1)
    free = run.get(f"{rollout}.gpu_memory_utilization") * gpu_gib * GIB - CONTEXT_GIB * GIB
    per_gpu = shape.kv_bytes_per_token / min(parallel, shape.kv_heads)
    return (free - estimate(run, shape).vllm_weights) / per_gpu


def check_memory(run: Run, machine: Machine, gpu_gib: float | None = None) -> Iterator[Finding]:
    """The estimate, against this machine's GPUs where there are any, or against GPUs of `gpu_gib`."""
    try:
        shape = run.shape
    except (ValueError, KeyError) as error:
        yield topic.warn(f"no estimate: {run.model_path}/config.json: {error}", "Watch the first steps' memory.")
        return
    if shape is None:
        yield topic.warn(
            f"no estimate: {run.model_path} is no folder with a config.json", "Set the model's path, or fetch it first."
        )
        return
    memory = estimate(run, shape)
    if run.get("algorithm.adv_estimator") == "gae":
        yield topic.warn(
            "algorithm.adv_estimator=gae trains a critic, whose memory is not in this estimate",
            "Count (4 + 4 + 8) bytes for each of its parameters over the GPUs, and its activations.",
        )
    if run.is_on_cpu:
        need = memory.training * run.gpus + memory.host
        yield topic.ok(f"training about {size(memory.training)} a rank: {memory.terms['training']}")
        if need > machine.memory_bytes:
            yield topic.warn(
                f"about {need / GIB:.0f} GiB are needed; the host has {machine.memory_bytes / GIB:.0f}",
                "Take less ranks.",
            )
        return
    yield from _check_host(memory, machine)
    gpu_gib = gpu_gib or min((gpu.total_gib for gpu in machine.gpus if gpu.total_gib is not None), default=None)
    need = memory.training * RESERVED / GIB + CONTEXT_GIB
    text = (
        f"training peaks at about {need:.0f} GiB of a GPU: {memory.terms['training']}; torch reserves {RESERVED:g} "
        f"times the sum, and {CONTEXT_GIB:g} GiB go to contexts"
    )
    if gpu_gib is None:
        here = "the GPUs' memory is unknown" if machine.gpus else "no GPU here to compare with"
        yield topic.ok(f"{text} ({here})")
        return
    fewer = "More GPUs, a larger Ulysses size with a smaller token budget per GPU, or fused kernels for the logits."
    if memory.training / GIB > TOLERANCE * gpu_gib:
        yield topic.fail(f"{text}; there are {gpu_gib:.0f}", fewer)
    elif need > 0.9 * gpu_gib:
        yield topic.warn(f"{text}; there are {gpu_gib:.0f}", fewer)
    else:
        yield topic.ok(f"{text}; there are {gpu_gib:.0f}")
    if run.is_rl:
        yield from _check_rollout(run, shape, memory, gpu_gib)


def _check_rollout(run: Run, shape: ModelShape, memory: Memory, gpu_gib: float) -> Iterator[Finding]:
    share = run.get("actor_rollout_ref.rollout.gpu_memory_utilization")
    vllm, resident = share * gpu_gib, memory.resident / GIB + CONTEXT_GIB * (1 - share)
    is_shared = run.has_hybrid_servers
    say, when = (topic.warn, "validates") if run.is_separate else (topic.fail, "generates")
    if is_shared and vllm + resident > gpu_gib:
        yield say(
            f"while it {when}, vLLM takes {share:g} x {gpu_gib:.0f} = {vllm:.0f} GiB and the actor keeps "
            f"{memory.resident / GIB:.0f}",
            "Offload it (fsdp_config.param_offload, optimizer_offload), or lower rollout.gpu_memory_utilization.",
        )
    if is_shared and memory.sync / GIB + 2 * CONTEXT_GIB > gpu_gib:
        yield say(
            f"while weights are sent, vLLM's {memory.vllm_weights / GIB:.0f} GiB and the actor's make "
            f"{memory.sync / GIB:.0f}",
            "A larger tensor_model_parallel_size, or optimizer_offload.",
        )
    tokens = kv_tokens(run, shape, gpu_gib)
    longest = run.get("data.max_prompt_length") + run.get("data.max_response_length")
    parallel = run.get("actor_rollout_ref.rollout.tensor_model_parallel_size", 1)
    servers = max(1, run.rollout_gpus // parallel)
    sequences = run.get("data.train_batch_size") * run.get("actor_rollout_ref.rollout.n") / servers
    text = (
        f"a vLLM server has {share:g} x {gpu_gib:.0f} - {memory.vllm_weights / GIB:.1f} (weights) - {CONTEXT_GIB:g} "
        f"GiB on each of {parallel} GPU(s): {tokens:,.0f} tokens of KV cache, {tokens / longest:.1f} sequences of "
        f"{longest:,} tokens at once, of {sequences:,.0f} a step"
    )
    if tokens * TOLERANCE < longest:
        yield topic.fail(text, "A larger tensor_model_parallel_size or gpu_memory_utilization.")
    elif tokens < 8 * longest and sequences > tokens / longest:
        yield topic.warn(
            text, "Generation will be slow: a larger tensor_model_parallel_size leaves more for the cache."
        )
    else:
        yield topic.ok(text)


def _check_host(memory: Memory, machine: Machine) -> Iterator[Finding]:
    text = f"host memory of a node about {memory.host / GIB:.0f} GiB: {memory.terms['host']}"
    if not machine.gpus:
        yield topic.ok(f"{text} (not compared: no GPU here)")
    elif memory.host > machine.memory_bytes:
        say = topic.fail if memory.weights_on_host > machine.memory_bytes else topic.warn
        yield say(
            f"{text}; there are {machine.memory_bytes / GIB:.0f}",
            "More nodes, or switch optimizer_offload off where the GPUs have the room.",
        )
    else:
        yield topic.ok(f"{text}; there are {machine.memory_bytes / GIB:.0f}")


def _tokens_per_gpu(run: Run) -> int:
    """Of the largest micro-batch, on one GPU."""
    if run.is_rl:
        actor, longest = (
            "actor_rollout_ref.actor",
            run.get("data.max_prompt_length") + run.get("data.max_response_length"),
        )
        if run.get(f"{actor}.use_dynamic_bsz"):
            return run.get(f"{actor}.ppo_max_token_len_per_gpu")
        return (run.get(f"{actor}.ppo_micro_batch_size_per_gpu") or 1) * longest // run.ulysses
    if run.get("data.use_dynamic_bsz"):
        return run.get("data.max_token_len_per_gpu")
    return run.get("data.micro_batch_size_per_gpu") * run.get("data.max_length") // run.ulysses
