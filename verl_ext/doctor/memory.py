"""Whether GPUs and host have the memory that a run needs; verl_ext/memory says how much that is."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from verl_ext.doctor.finding import Finding, fail, ok, warn
from verl_ext.doctor.run import ACTOR, ROLLOUT, Run
from verl_ext.memory.estimate import CONTEXT_GIB, RESERVED, TOLERANCE, Memory, Plan, estimate, kv_tokens
from verl_ext.memory.words import GIB, size
from verl_ext.runs.machine import Machine

FP32, HALF = ("fp32", "float32"), ("bf16", "bfloat16", "fp16", "float16")
FEWER = "Use more GPUs, or a larger Ulysses size with a smaller token budget per GPU"


def plan_of(run: Run) -> Plan:
    """Return the plan of a run. Raises ValueError if its model's shape is unknown: `Run.shape_or_why`."""
    if (shape := run.shape) is None:
        raise ValueError(run.shape_or_why[1])

    def of_engine(key: str, default: Any = None) -> Any:
        return run.get(f"{run.engine}.{key}", default)

    shards = of_engine("fsdp_size", -1)
    targets, excluded = (run.get(f"{run.model}.{key}") for key in ("target_modules", "exclude_modules"))
    # a KL term has no reference model if adapters are trained (trainer_base.py:234-237, ppo/utils.py:75)
    is_lora = any(run.get(f"{run.model}.{key}") for key in ("lora.rank", "lora_rank", "lora_adapter_path"))
    has_reference = (run.get("algorithm.use_kl_in_reward") or run.get(f"{ACTOR}.use_kl_loss")) and not is_lora
    bytes_of_reference = 4 if run.get("actor_rollout_ref.ref.fsdp_config.model_dtype") in FP32 else 2
    return Plan(
        shape=shape,
        tokens=run.tokens_per_gpu if run.is_dynamic else (run.micro_batch or 1) * run.longest // run.ulysses,
        padded=0 if run.is_packed else run.micro_batch or 1,
        ranks=shards if 0 < shards < run.gpus else run.gpus,
        ranks_per_node=min(run.gpus_per_node, run.gpus),
        ulysses=run.ulysses,
        weight_bytes=2 if of_engine("model_dtype") in HALF else 4,
        compute_bytes=4 if of_engine("mixed_precision", {}).get("param_dtype") in FP32 else 2,
        checkpointing=run.get(f"{run.model}.enable_gradient_checkpointing", True),
        reshards=of_engine("reshard_after_forward", True),
        defers_gradients=bool(of_engine("use_no_sync_for_gradient_accumulation")),
        is_fsdp2=run.get(f"{ACTOR}.strategy" if run.is_rl else "engine.strategy") == "fsdp2",
        fused=bool((run.get(f"{run.optim}.override_optimizer_config") or {}).get("fused")),
        adapters=shape.adapter_parameters(run.lora_rank, targets or "all-linear", excluded),
        entropy=run.is_rl and bool(run.get(f"{ACTOR}.calculate_entropy") or run.get(f"{ACTOR}.entropy_coeff")),
        offloads_weights=bool(of_engine("param_offload")),
        offloads_optimizer=bool(of_engine("optimizer_offload")),
        reference_bytes=bytes_of_reference if has_reference else 0,
        vllm_bytes=(4 if run.get(f"{ROLLOUT}.dtype") == "float32" else 2) / run.tensor_parallel if run.is_rl else 0,
        # with adapters vLLM sleeps at level 1, which moves its weights to the host (vllm_async_server.py:1303)
        vllm_sleeps_on_host=run.sends_adapters and run.has_hybrid_servers,
    )


def check_memory(run: Run, machine: Machine, gpu_gib: float | None = None) -> Iterator[Finding]:
    """Compare the estimate with this machine's GPUs, if there are any, or with GPUs of `gpu_gib`."""
    shape, why = run.shape_or_why
    if shape is None:
        yield warn(f"the memory cannot be estimated: {why}")
        return
    plan = plan_of(run)
    memory = estimate(plan)
    if run.get("algorithm.adv_estimator") == "gae":
        yield warn("""algorithm.adv_estimator=gae trains a critic, whose memory is not in this estimate
            -> Add (4 + 4 + 8) bytes for each of its parameters over the GPUs, and its activations.""")
    if run.device == "cpu":
        need = memory.training * run.gpus + memory.host
        yield ok(f"training takes about {size(memory.training)} on each rank: {memory.terms['training']}")
        if need > machine.memory_bytes:
            yield warn(f"""the run needs about {need / GIB:.0f} GiB, but the host has {machine.memory_bytes / GIB:.0f}
                -> Use fewer ranks.""")
        return
    if run.is_dynamic and not run.is_packed:
        yield warn("""use_dynamic_bsz does not count the padding that use_remove_padding=false adds: a micro-batch may
            take several times the estimate -> Set use_dynamic_bsz=false and micro_batch_size_per_gpu=1.""")
    yield _check_host(memory, machine)
    gpu_gib = gpu_gib or min((gpu.total_gib for gpu in machine.gpus if gpu.total_gib is not None), default=None)
    need = memory.training * RESERVED / GIB + CONTEXT_GIB
    text = f"""training peaks at about {need:.0f} GiB on each GPU: {memory.terms["training"]}; torch reserves
        {RESERVED:g} times the sum, and CUDA contexts take {CONTEXT_GIB:g} GiB"""
    if gpu_gib is None:
        here = "the GPUs' memory is unknown" if machine.gpus else "there is no GPU here to compare with"
        yield ok(f"{text} ({here})")
        return
    text += f"; a GPU has {gpu_gib:.0f}"
    advice = FEWER + ", or set override_optimizer_config.fused=true" * (not plan.fused)
    if memory.training / GIB > TOLERANCE * gpu_gib:
        yield fail(f"{text} -> {advice}.")
    else:
        yield warn(f"{text} -> {advice}.") if need > 0.9 * gpu_gib else ok(text)
    if run.is_rl:
        yield from _check_rollout(run, plan, memory, gpu_gib)


def check_simulation(run: Run) -> Iterator[Finding]:
    """Simulate a training step, and compare it with the estimate. Imports torch and verl."""
    shape, why = run.shape_or_why
    if shape is None:
        yield warn(f"a training step cannot be simulated: {why}")
        return
    from verl_ext.trainer.simulate import simulate

    plan = plan_of(run)
    if plan.adapters or plan.padded:
        what = "LoRA" if plan.adapters else "padding"
        yield warn(f"a training step with {what} cannot be simulated -> Watch the first steps' memory.")
        return
    seen = simulate(plan)
    where = "backward pass" if seen.peak is seen.backward else "optimizer's step"
    fsdp1 = "" if plan.is_fsdp2 else ", with fsdp2 instead of fsdp,"
    text = f"""a simulated training step{fsdp1} peaks at {size(seen.peak.total)} on each GPU, in the {where}; the
        estimate is {size(estimate(plan).training)}"""
    yield ok("\n".join([text, *(f"{name:12}{size(number):>11}" for name, number in asdict(seen.peak).items())]))


def _check_host(memory: Memory, machine: Machine) -> Finding:
    text = f"host memory of a node is about {memory.host / GIB:.0f} GiB: {memory.terms['host']}"
    if not machine.gpus:
        return ok(f"{text} (not compared: there is no GPU here)")
    text += f"; this host has {machine.memory_bytes / GIB:.0f}"
    if memory.host <= machine.memory_bytes:
        return ok(text)
    say = fail if memory.weights_on_host > machine.memory_bytes else warn
    return say(f"{text} -> Use more nodes, or switch optimizer_offload off if the GPUs have the room.")


def _check_rollout(run: Run, plan: Plan, memory: Memory, gpu_gib: float) -> Iterator[Finding]:
    share = run.get(f"{ROLLOUT}.gpu_memory_utilization")
    vllm, resident = share * gpu_gib, memory.resident / GIB + CONTEXT_GIB * (1 - share)
    say, when = (warn, "validates") if run.is_separate else (fail, "generates")
    if run.has_hybrid_servers and vllm + resident > gpu_gib:
        yield say(f"""while the run {when}, vLLM takes {share:g} x {gpu_gib:.0f} = {vllm:.0f} GiB and the actor keeps
            {memory.resident / GIB:.0f} -> Offload the actor (fsdp_config.param_offload, optimizer_offload), or lower
            rollout.gpu_memory_utilization.""")
    if run.has_hybrid_servers and memory.sync / GIB + 2 * CONTEXT_GIB > gpu_gib:
        yield say(f"""while weights are sent, vLLM's {memory.vllm_weights / GIB:.0f} GiB and the actor's weights take
            {memory.sync / GIB:.0f} together -> Use a larger tensor_model_parallel_size, or optimizer_offload.""")
    parallel, longest, room = run.tensor_parallel, run.longest, max(run.longest, run.max_model_len or 0)
    tokens = kv_tokens(plan.shape, (vllm - CONTEXT_GIB) * GIB - memory.vllm_weights, parallel)
    sequences = run.batch * run.n / max(1, run.rollout_gpus // parallel)
    text = f"""a vLLM server has {share:g} x {gpu_gib:.0f} - {memory.vllm_weights / GIB:.1f} (weights) - {CONTEXT_GIB:g}
        GiB on each of {parallel} GPU(s): {tokens:,.0f} tokens of KV cache, enough for {tokens / longest:.1f}
        sequences of {longest:,} tokens at once, out of {sequences:,.0f} in a step"""
    if tokens * TOLERANCE < room:  # vLLM refuses (v1/core/kv_cache_utils.py, `check_enough_kv_cache_memory`)
        text += f"; vLLM needs room for a sequence of max_model_len={room:,}" * (room > longest)
        lower = f", or rollout.max_model_len={longest}" * (room > longest)
        yield fail(f"{text} -> Use a larger tensor_model_parallel_size or gpu_memory_utilization{lower}.")
    elif tokens < 8 * longest and sequences > tokens / longest:
        slow = "Use a larger tensor_model_parallel_size, which leaves more for the cache, or generation is slow."
        yield warn(f"{text} -> {slow}")
    else:
        yield ok(text)
