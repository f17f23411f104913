"""Whether batches divide evenly among GPUs, and sequences fit into the space reserved for them."""

from collections.abc import Iterator

from verl_ext.doctor.finding import Finding, fail, ok, warn
from verl_ext.doctor.run import ACTOR, FLASH_ATTN, ROLLOUT, Run


def check_batch(run: Run) -> Iterator[Finding]:
    problems = [*_check_ranks(run), *(_check_rl(run) if run.is_rl else _check_sft(run))]
    if problems:
        yield from problems
        return
    ranks = f"{run.gpus} GPU(s): {run.data_parallel} data-parallel ranks x {run.ulysses} GPU(s) that share a sequence"
    if run.is_rl:
        updates = run.batch // run.get(f"{ACTOR}.ppo_mini_batch_size")
        size = f"{run.batch} prompts x {run.n} = {run.batch * run.n} responses and {updates} updates a step on {ranks}"
    else:
        size = f"{run.batch} traces a step on {ranks}, {run.batch // run.data_parallel} traces for each"
    yield ok(size)


def _check_rl(run: Run) -> Iterator[Finding]:
    prompts, n, mini = run.batch, run.n, run.get(f"{ACTOR}.ppo_mini_batch_size")
    per_server = run.tensor_parallel * run.get(f"{ROLLOUT}.pipeline_model_parallel_size", 1)
    if run.is_separate:
        yield from _check_separate(run, mini, per_server)
    elif prompts % mini:
        yield fail(f"""data.train_batch_size={prompts} is not a multiple of ppo_mini_batch_size={mini} (in prompts)
            -> Choose a mini-batch that divides it, such as {_divisor(prompts, mini)}.""")
    if run.has_hybrid_servers and run.gpus % per_server:
        yield fail(f"""{run.gpus} GPUs are not a multiple of the {per_server} that one vLLM server takes
            -> Change tensor_model_parallel_size.""")
    if mini * n % run.data_parallel:
        yield fail(f"""a mini-batch of {mini} prompts x {n} = {mini * n} responses cannot be divided evenly among
            {run.data_parallel} data-parallel ranks -> Change ppo_mini_batch_size, rollout.n or the Ulysses size.""")
    share = mini * n // run.data_parallel
    yield from _check_tokens(run, ACTOR, "ppo_max_token_len_per_gpu", "ppo_micro_batch_size_per_gpu", share)
    if run.get(f"{ROLLOUT}.log_prob_use_dynamic_bsz"):
        yield from _check_tokens(run, ROLLOUT, "log_prob_max_token_len_per_gpu")
    yield from _check_model_len(run)
    response, reply = run.get("data.max_response_length"), run.get("retool.max_tool_response_tokens", 0)
    if reply >= response:
        yield fail(f"""retool.max_tool_response_tokens={reply} leaves no room in a response of {response} tokens
            -> Lower it.""")
    buffer = run.get("reward.reward_kwargs.overlong_buffer_cfg", {})
    limit = run.get("reward.reward_kwargs.max_resp_len", response)
    if buffer.get("enable") and not 0 < buffer.get("len", 0) <= limit:
        yield fail(f"""overlong_buffer_cfg.len={buffer.get("len")} is outside (0, max_resp_len={limit}]
            -> Set it to a quarter of max_resp_len.""")
    if limit != response:
        yield warn(f"""the length penalty assumes reward_kwargs.max_resp_len={limit}, but responses end at
            {response} tokens -> Leave it at ${{data.max_response_length}}.""")


def _check_model_len(run: Run) -> Iterator[Finding]:
    """Refuse what verl 0.9.1 refuses once the cluster is up: workers/rollout/vllm_rollout/vllm_async_server.py:1107."""
    longest, positions, given = run.longest, run.positions, run.get(f"{ROLLOUT}.max_model_len")
    if given is None:
        yield warn(f"""rollout.max_model_len is null: vLLM takes the model's maximum, and refuses to start if its
            KV cache cannot hold a sequence of that length
            -> Set it to {longest}, or leave it as in configs/shared/rl.yaml.""")
    elif given < longest:
        yield fail(f"""rollout.max_model_len={given} is below prompt + response = {longest} tokens, so vLLM would
            refuse to start -> Set it to {longest}, or leave it as in configs/shared/rl.yaml.""")
    if positions is not None and positions < max(longest, given or 0):
        less = f"Set rollout.max_model_len={longest}."
        if longest > positions:
            less = f"""Lower data.max_response_length by {longest - positions}, or use a model with more positions. verl
                reads max_position_embeddings from its config.json, regardless of rope scaling."""
        yield fail(f"""prompt + response = {longest} and rollout.max_model_len={given} tokens, but the model has
            max_position_embeddings={positions}: verl would stop the run once its cluster is up -> {less}""")


def _check_separate(run: Run, mini: int, per_server: int) -> Iterator[Finding]:
    """Check what verl 0.9.1 asserts: trainer/ppo/v1/trainer_separate_async.py:55-70."""
    sync_step = run.get("trainer.v1.separate_async.parameter_sync_step")
    if run.batch != sync_step * mini:
        yield fail(f"""data.train_batch_size={run.batch} is not
            trainer.v1.separate_async.parameter_sync_step={sync_step} x ppo_mini_batch_size={mini} = {sync_step * mini};
            separate_async would refuse to start
            -> Set data.train_batch_size={sync_step * mini}, or change the others.""")
    if run.rollout_gpus < 1 or run.rollout_gpus % per_server:
        yield fail(f"""actor_rollout_ref.rollout.nnodes x n_gpus_per_node = {run.rollout_gpus} GPUs for
            separate_async's servers, each of which takes {per_server}
            -> Give rollouts a multiple of {per_server} GPUs.""")
    if run.sends_adapters:  # workers/engine_workers.py:764; the modes that share the actor's GPUs send the adapters
        yield fail(f"""model.lora_rank={run.lora_rank} with separate_async: verl 0.9.1 sends the servers no adapters, so
            every rollout would come from the untrained model
            -> Set trainer.v1.trainer_mode=colocate_async, or actor_rollout_ref.model.lora.merge=true, which has been
            tested only on a CPU.""")


def _check_sft(run: Run) -> Iterator[Finding]:
    ranks = run.data_parallel
    if run.batch % ranks:
        yield fail(f"""data.train_batch_size={run.batch} cannot be divided evenly among {ranks} data-parallel ranks
            -> Choose a multiple of {ranks}.""")
    yield from _check_tokens(run, "data", "max_token_len_per_gpu", "micro_batch_size_per_gpu", run.batch // ranks)


def _check_tokens(run: Run, section: str, key: str, micro: str = "", rows: int = 0) -> Iterator[Finding]:
    """Check that a token budget times Ulysses holds the longest sequence, or that a fixed `micro` divides `rows`."""
    tokens = (run.get(f"{section}.{key}") or 0) * run.ulysses
    if micro and not run.get(f"{section}.use_dynamic_bsz"):
        size = run.get(f"{section}.{micro}")
        if size is None:
            yield fail(f"{section}.{micro} is null, and dynamic batches are off -> Set it, or use_dynamic_bsz=true.")
        elif rows % size:
            yield fail(f"""{rows} sequences of each data-parallel rank are not a multiple of {section}.{micro}={size}
                -> Choose a size that divides {rows}, such as {_divisor(rows, size)}.""")
    elif tokens < run.longest:
        yield fail(f"""{section}.{key}={run.get(f"{section}.{key}")} x Ulysses {run.ulysses} = {tokens} tokens is less
            than the longest sequence, {run.longest} -> Set it to {-(-run.longest // run.ulysses)} or more.""")


def _check_ranks(run: Run) -> Iterator[Finding]:
    """Check what verl 0.9.1 asserts (models/transformers/monkey_patch.py:343) and vLLM refuses; heads if known."""
    if run.gpus % run.ulysses:
        yield fail(f"""{run.gpus} GPUs are not a multiple of ulysses_sequence_parallel_size={run.ulysses}
            -> Change one of them.""")
    if run.ulysses > 1 and not run.get(f"{run.model}.use_remove_padding"):
        yield fail("Ulysses needs model.use_remove_padding=true, and verl refuses to start without it -> Set it.")
    if run.ulysses > 1 and run.attention != FLASH_ATTN:
        yield fail("""Ulysses needs flash_attention_2; with another attention each GPU sees only its part of a sequence
            -> Set ulysses_sequence_parallel_size=1, or remove override_config.attn_implementation.""")
    if (shape := run.shape) is None:
        return
    if shape.heads % run.ulysses or (shape.kv_heads % run.ulysses and run.ulysses % shape.kv_heads):
        yield fail(f"""{shape.heads} heads and {shape.kv_heads} key-value heads cannot be divided among
            ulysses_sequence_parallel_size={run.ulysses} -> Choose a divisor of both.""")
    if shape.heads % run.tensor_parallel:
        yield fail(f"""{shape.heads} heads cannot be divided among tensor_model_parallel_size={run.tensor_parallel}
            -> Choose a divisor.""")


def _divisor(whole: int, near: int) -> int:
    """Return the divisor of `whole` that is nearest to `near`."""
    return min((d for d in range(1, whole + 1) if whole % d == 0), key=lambda d: abs(d - near))
