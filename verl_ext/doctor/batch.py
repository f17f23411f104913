"""Whether batches divide among GPUs, and sequences fit into what is set aside for them."""

from collections.abc import Iterator

from verl_ext.doctor.finding import Finding, Topic
from verl_ext.doctor.run import Run

topic = Topic("batch")


def check_batch(run: Run) -> Iterator[Finding]:
    problems = [*(_check_rl(run) if run.is_rl else _check_sft(run)), *_check_heads(run)]
    yield from problems
    if problems:
        return
    if run.is_rl:
        prompts, n = run.get("data.train_batch_size"), run.get("actor_rollout_ref.rollout.n")
        updates = prompts // run.get("actor_rollout_ref.actor.ppo_mini_batch_size")
        yield topic.ok(
            f"{prompts} prompts x {n} = {prompts * n} responses and {updates} updates a step on {run.gpus} GPU(s): "
            f"{run.data_parallel} data-parallel x {run.ulysses} that share a sequence"
        )
    else:
        batch = run.get("data.train_batch_size")
        yield topic.ok(
            f"{batch} traces a step on {run.gpus} GPU(s): {run.data_parallel} data-parallel x {run.ulysses} that share "
            f"a sequence, {batch // run.data_parallel} traces for each"
        )


def _check_rl(run: Run) -> Iterator[Finding]:
    section = "actor_rollout_ref"
    prompts, n = run.get("data.train_batch_size"), run.get(f"{section}.rollout.n")
    mini = run.get(f"{section}.actor.ppo_mini_batch_size")
    per_server = run.get(f"{section}.rollout.tensor_model_parallel_size", 1) * run.get(
        f"{section}.rollout.pipeline_model_parallel_size", 1
    )
    longest = run.get("data.max_prompt_length") + run.get("data.max_response_length")
    if run.is_separate:
        yield from _check_separate(run, per_server)
    elif prompts % mini:
        yield topic.fail(
            f"data.train_batch_size={prompts} is no multiple of ppo_mini_batch_size={mini} (prompts, both)",
            f"Take a mini-batch that divides it, such as {_divisor(prompts, mini)}.",
        )
    yield from _check_gpus(run)
    if run.has_hybrid_servers and run.gpus % per_server:
        yield topic.fail(
            f"{run.gpus} GPUs are no multiple of the {per_server} of one vLLM server",
            "Change tensor_model_parallel_size.",
        )
    if mini * n % run.data_parallel:
        yield topic.fail(
            f"a mini-batch of {mini} prompts x {n} = {mini * n} responses does not divide among {run.data_parallel} "
            "data-parallel ranks",
            "Change ppo_mini_batch_size, rollout.n or the Ulysses size.",
        )
    yield from _check_tokens(
        run,
        dynamic=run.get(f"{section}.actor.use_dynamic_bsz"),
        key=f"{section}.actor.ppo_max_token_len_per_gpu",
        micro_key=f"{section}.actor.ppo_micro_batch_size_per_gpu",
        longest=longest,
    )
    if run.get(f"{section}.rollout.log_prob_use_dynamic_bsz"):
        yield from _check_tokens(
            run,
            dynamic=True,
            key=f"{section}.rollout.log_prob_max_token_len_per_gpu",
            micro_key="",
            longest=longest,
        )
    max_model_len = run.get(f"{section}.rollout.max_model_len")
    if max_model_len is not None and max_model_len < longest:
        yield topic.fail(
            f"rollout.max_model_len={max_model_len} is below prompt + response = {longest} tokens: vLLM would refuse",
            f"Set it to {longest}, or to null.",
        )
    response, reply = run.get("data.max_response_length"), run.get("retool.max_tool_response_tokens", 0)
    if reply >= response:
        yield topic.fail(
            f"retool.max_tool_response_tokens={reply} leaves nothing of a response of {response} tokens", "Lower it."
        )
    buffer = run.get("reward.reward_kwargs.overlong_buffer_cfg", {})
    limit = run.get("reward.reward_kwargs.max_resp_len", response)
    if buffer.get("enable") and not 0 < buffer.get("len", 0) <= limit:
        yield topic.fail(
            f"overlong_buffer_cfg.len={buffer.get('len')} is outside of (0, max_resp_len={limit}]",
            "Take a quarter of it.",
        )
    if limit != response:
        yield topic.warn(
            f"the length penalty counts from reward_kwargs.max_resp_len={limit}, but responses end at "
            f"{response} tokens",
            "Leave it at ${data.max_response_length}.",
        )


def _check_separate(run: Run, per_server: int) -> Iterator[Finding]:
    """As verl 0.9.1 asserts: trainer/ppo/v1/trainer_separate_async.py:55-70."""
    prompts, mini = run.get("data.train_batch_size"), run.get("actor_rollout_ref.actor.ppo_mini_batch_size")
    sync_step = run.get("trainer.v1.separate_async.parameter_sync_step")
    if prompts != sync_step * mini:
        yield topic.fail(
            f"data.train_batch_size={prompts} is not trainer.v1.separate_async.parameter_sync_step={sync_step} x "
            f"ppo_mini_batch_size={mini} = {sync_step * mini}; separate_async refuses to start",
            f"Set data.train_batch_size={sync_step * mini}, or change the others.",
        )
    if run.rollout_gpus < 1 or run.rollout_gpus % per_server:
        yield topic.fail(
            f"actor_rollout_ref.rollout.nnodes x n_gpus_per_node = {run.rollout_gpus} GPUs for separate_async's "
            f"servers, of which each takes {per_server}",
            f"Give rollouts a multiple of {per_server} GPUs.",
        )


def _check_sft(run: Run) -> Iterator[Finding]:
    batch = run.get("data.train_batch_size")
    yield from _check_gpus(run)
    if batch % run.data_parallel:
        yield topic.fail(
            f"data.train_batch_size={batch} does not divide among {run.data_parallel} data-parallel ranks",
            f"Take a multiple of {run.data_parallel}.",
        )
    yield from _check_tokens(
        run,
        dynamic=run.get("data.use_dynamic_bsz"),
        key="data.max_token_len_per_gpu",
        micro_key="data.micro_batch_size_per_gpu",
        longest=run.get("data.max_length"),
    )
    micro = run.get("data.micro_batch_size_per_gpu")
    share = batch // run.data_parallel
    if not run.get("data.use_dynamic_bsz") and micro and share % micro:
        yield topic.fail(
            f"{share} traces of each data-parallel rank are no multiple of data.micro_batch_size_per_gpu={micro}",
            f"Take one that divides {share}, such as {_divisor(share, micro)}.",
        )


def _check_gpus(run: Run) -> Iterator[Finding]:
    if run.gpus % run.ulysses:
        yield topic.fail(
            f"{run.gpus} GPUs are no multiple of ulysses_sequence_parallel_size={run.ulysses}", "Change one of them."
        )
    remove_padding = run.get("actor_rollout_ref.model.use_remove_padding" if run.is_rl else "model.use_remove_padding")
    if run.ulysses > 1 and not remove_padding:
        yield topic.fail("Ulysses needs model.use_remove_padding=true; verl refuses to start", "Set it.")


def _check_tokens(run: Run, *, dynamic: bool, key: str, micro_key: str, longest: int) -> Iterator[Finding]:
    if not dynamic:
        if run.get(micro_key) is None:
            yield topic.fail(f"{micro_key} is null, and dynamic batches are off", "Set it, or use_dynamic_bsz=true.")
        return
    budget = (run.get(key) or 0) * run.ulysses
    if budget < longest:
        yield topic.fail(
            f"{key}={run.get(key)} x Ulysses {run.ulysses} = {budget} tokens is less than the longest sequence, "
            f"{longest}",
            f"Set it to {-(-longest // run.ulysses)} or more.",
        )


def _check_heads(run: Run) -> Iterator[Finding]:
    """As verl 0.9.1 asserts (models/transformers/monkey_patch.py:343) and vLLM refuses; where the model is at hand."""
    try:
        shape = run.shape
    except (ValueError, KeyError):  # told by the memory estimate
        return
    if shape is None:
        return
    if shape.heads % run.ulysses or (shape.kv_heads % run.ulysses and run.ulysses % shape.kv_heads):
        yield topic.fail(
            f"{shape.heads} heads and {shape.kv_heads} key-value heads do not divide among "
            f"ulysses_sequence_parallel_size={run.ulysses}",
            "Take a divisor of both.",
        )
    tensor_parallel = run.get("actor_rollout_ref.rollout.tensor_model_parallel_size", 1) if run.is_rl else 1
    if shape.heads % tensor_parallel:
        yield topic.fail(
            f"{shape.heads} heads do not divide among tensor_model_parallel_size={tensor_parallel}", "Take a divisor."
        )


def _divisor(whole: int, near: int) -> int:
    """The divisor of `whole` that is nearest to `near`."""
    return min((d for d in range(1, whole + 1) if whole % d == 0), key=lambda d: abs(d - near))
