"""Tokens per second of concurrent rollouts with tool calls, next to the same requests sent to vLLM directly.

    python scripts/bench_agent_loop.py --rollouts 64 --rounds 3

Both send the same prompts, and ask the same engine, in turns, for the same numbers of tokens. Tools answer in 0 s, so
the ratio is the cost of the loop itself. The model is the tiny one with random weights, which makes that cost as large
as it can be. Scripted turns of the same length replace what the model samples, so that they call the tool.
"""

import argparse
import asyncio
import os
import random
import statistics
import sys
import tempfile
import time
from contextvars import ContextVar
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

REPO = Path(__file__).resolve().parents[1]
os.environ["VERL_USE_EXTERNAL_MODULES"] = "verl_ext"
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
sys.path[:0] = [str(REPO), str(REPO / "data" / "tiny_tools")]

NAME: ContextVar[str] = ContextVar("name")  # of the rollout that a request belongs to
TURN_TOKENS = (40, 100)  # of a turn of the model, drawn evenly
CALLS = 3  # of a rollout, before its answer


class Engine:
    """vLLM as the agent loop's server: takes the next scripted turn, and lets the engine sample as many tokens."""

    def __init__(self, llm: Any, turns: dict[str, list[list[int]]]):
        self.llm = llm
        self.turns = turns  # by name of the rollout
        self.requests: dict[str, list[tuple[list[int], int]]] = {name: [] for name in turns}  # prompt, tokens asked for

    async def generate(self, request_id: str, *, prompt_ids: list[int], sampling_params: dict, priority: int) -> Any:
        from verl.workers.rollout.replica import TokenOutput

        name = NAME.get()
        requests = self.requests[name]
        turn = self.turns[name][len(requests)]
        requests.append((prompt_ids, len(turn)))
        final = await sample(self.llm, prompt_ids, len(turn), sampling_params)
        log_probs = [step[token].logprob for step, token in zip(final.logprobs, final.token_ids, strict=True)]
        return TokenOutput(token_ids=turn, log_probs=log_probs, stop_reason="completed", extra_fields={})


async def sample(llm: Any, prompt_ids: list[int], tokens: int, params: dict[str, Any]) -> Any:
    """Let the engine sample exactly so many tokens."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt
    from vllm.sampling_params import RequestOutputKind

    params = params | {"max_tokens": tokens, "min_tokens": tokens, "ignore_eos": True, "logprobs": 0}
    params["output_kind"] = RequestOutputKind.FINAL_ONLY
    final = None
    async for output in llm.generate(
        TokensPrompt(prompt_token_ids=prompt_ids), SamplingParams(**params), request_id=uuid4().hex
    ):
        final = output.outputs[0]
    return final


class InstantSandbox:
    async def run(self, code: str, *, timeout_s: float, memory_limit_mb: int, echo_last_expression: bool) -> Any:
        from verl_ext.sandbox.client import RunResult

        return RunResult("ok", "1234567\n", "", 0, queue_s=0.0, run_s=0.0, attempts=1, message="")


def script_turns(tokenizer: Any, rng: random.Random) -> list[list[int]]:
    """The turns of one rollout: calls, then an answer with its end token."""
    call = tokenizer.encode("<code>print(1234567)</code>")
    answer = tokenizer.encode("\\boxed{1234567}") + [tokenizer.eos_token_id]
    lengths = [rng.randint(*TURN_TOKENS) for _ in range(CALLS + 1)]
    words = range(3, 300)
    return [
        rng.choices(words, k=length - len(end)) + end
        for length, end in zip(lengths, [call] * CALLS + [answer], strict=True)
    ]


def make_loop(tokenizer: Any, engine: Engine) -> Any:
    from omegaconf import OmegaConf

    from verl_ext.rollout.loop import RetoolAgentLoop
    from verl_ext.settings import compose_run

    config = compose_run("tiny_dapo")
    retool = config.retool
    retool.max_tool_calls = CALLS
    retool.recorder.enable = False
    rollout = {"response_length": 1000, "prompt_length": 200, "multi_turn": {"max_parallel_calls": 1}}
    rollout["agent"] = config.actor_rollout_ref.rollout.agent
    loop = RetoolAgentLoop(
        trainer_config=SimpleNamespace(
            config=OmegaConf.create({"actor_rollout_ref": {"rollout": rollout}, "retool": retool})
        ),
        server_manager=engine,
        tokenizer=tokenizer,
        processor=None,
        dataset_cls=None,
        data_config=SimpleNamespace(config=OmegaConf.create({})),
        hf_model_type="qwen2",
    )
    loop.tools.sandbox = InstantSandbox()
    return loop


async def run_rollout(loop: Any, name: str) -> int:
    NAME.set(name)
    prompt = {"uid": name, "raw_prompt": [{"role": "user", "content": name}]}
    output = await loop.run({"temperature": 1.0, "logprobs": True}, **prompt)
    fields = output.extra_fields
    assert (fields["finish_reason"], fields["tool_calls"]) == ("answer", CALLS), fields
    return sum(output.response_mask)


async def run_raw(llm: Any, requests: list[tuple[list[int], int]]) -> int:
    tokens = 0
    for prompt_ids, count in requests:
        tokens += len((await sample(llm, prompt_ids, count, {"temperature": 1.0})).token_ids)
    return tokens


async def measure(llm: Any, work: list[Any]) -> float:
    """Tokens per second of all coroutines in `work` together."""
    await llm.reset_prefix_cache()
    started = time.perf_counter()
    tokens = sum(await asyncio.gather(*work))
    return tokens / (time.perf_counter() - started)


async def bench(folder: Path, rollouts: int, rounds: int) -> None:
    from build_model import build_model, build_tokenizer
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    tokenizer = build_tokenizer()
    build_model(tokenizer, seed=0).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    llm = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=str(folder), dtype="float32", max_model_len=1024, max_num_seqs=rollouts, enforce_eager=True
        )
    )
    rng = random.Random(0)
    ratios = []
    try:
        for number in range(rounds + 1):
            turns = {f"{number}: question {i}": script_turns(tokenizer, rng) for i in range(rollouts)}
            engine = Engine(llm, turns)
            loop = make_loop(tokenizer, engine)
            with_loop = await measure(llm, [run_rollout(loop, name) for name in turns])
            raw = await measure(llm, [run_raw(llm, requests) for requests in engine.requests.values()])
            if number == 0:
                continue  # warm-up
            ratios.append(with_loop / raw)
            print(f"round {number}: loop {with_loop:.0f} tok/s | raw vLLM {raw:.0f} tok/s | ratio {ratios[-1]:.3f}")
        print(f"{rollouts} rollouts of {CALLS} calls: median ratio {statistics.median(ratios):.3f}")
    finally:
        llm.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=64, help="at once (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="after one to warm up (default: %(default)s)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(bench(Path(folder), args.rollouts, args.rounds))


if __name__ == "__main__":
    main()
