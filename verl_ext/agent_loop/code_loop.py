"""The ReTool rollout: the model writes, stops at `</code>`, reads the interpreter's answer, goes on, all in one turn.

Token-in, token-out: what the model sampled is kept as it was sampled; only the interpreter's text is encoded (mask 0).
The settings are `retool.*` in the run's YAML. Registered by agent_loops.yaml under the name `retool_code`.
"""

import asyncio
import logging
import os
import signal
import sys
from typing import Any
from uuid import uuid4

from cachetools import LRUCache
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput
from verl.utils.profiler import simple_timer

from verl_ext.agent_loop.protocol import CODE_STOP, MalformedCall, extract_code, format_output, interpreter_block
from verl_ext.sandbox.client import RunResult, SandboxClient

logger = logging.getLogger(__name__)
logger.setLevel(os.getenv("VERL_LOGGING_LEVEL", "WARN"))

_clients: dict[tuple, SandboxClient] = {}


def _shared_client(urls: tuple[str, ...], max_concurrency: int) -> SandboxClient:
    """One client per process: its bound on concurrent calls must hold over all rollouts of the worker."""
    return _clients.setdefault((urls, max_concurrency), SandboxClient(urls, max_concurrency=max_concurrency))


class _FinalOutputOnly:
    """Unpickles, in vLLM's process, to the enum that asks for one message a request instead of one a token.

    The enum itself would cost this process the import of vLLM (3 s).
    """

    def __reduce__(self) -> tuple:
        return _final_output_only, ()


def _final_output_only() -> Any:
    from vllm.sampling_params import RequestOutputKind

    return RequestOutputKind.FINAL_ONLY


class CodeAgentLoop(AgentLoopBase):
    """`<code>` loop with one tool, the Python sandbox."""

    shared = True  # `run` keeps what belongs to a sample to itself: LeanAgentLoopWorker takes one instance for all

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        settings = self.config.retool
        self.sandbox = _shared_client(tuple(settings.sandbox.urls), settings.sandbox.max_concurrency)
        self.timeout_s = settings.sandbox.timeout_s
        self.memory_limit_mb = settings.sandbox.memory_limit_mb
        self.max_tool_calls = settings.max_tool_calls
        self.max_tool_response_tokens = settings.max_tool_response_tokens
        self.traceback = settings.traceback
        self.response_length = self.rollout_config.response_length
        # vLLM stops at every end token of generation_config.json (Qwen2.5 has two); all of them are special tokens.
        self.end_ids = set(self.tokenizer.all_special_ids)
        # Where the tag is one token the engine itself stops there; for a string it is told to by its front end, a few
        # tokens later. The string stays: the tag may also be sampled in pieces.
        stop_ids = self.tokenizer.encode(CODE_STOP, add_special_tokens=False)
        self.stop_token_ids = stop_ids if len(stop_ids) == 1 else []
        self._prompts: LRUCache = LRUCache(maxsize=1024)  # uid -> task; the samples of a group share their prompt

    async def run(self, sampling_params: dict[str, Any], priority: int = 0, **kwargs: Any) -> AgentLoopOutput:
        """Roll out one sample; see `AgentLoopBase.run`.

        Returns:
            `extra_fields` holds `finish_reason` (answer | max_turns | max_tokens | sandbox_failure | aborted),
            `model_spans` (the [start, end) pairs of response tokens that the model sampled), and the counts that the
            reward manager logs.
        """
        prompt_ids = await self._encode_prompt(kwargs["uid"], list(kwargs["raw_prompt"]))
        response_ids: list[int] = []
        mask: list[int] = []
        log_probs: list[float] = []
        spans: list[tuple[int, int]] = []
        counts = {"tool_calls": 0, "tool_errors": 0, "tool_timeouts": 0}
        timings: dict[str, float] = {"generate_sequences": 0.0, "tool_calls": 0.0}
        server_fields: dict[str, Any] = {}
        request_id = uuid4().hex
        with_log_probs = bool(sampling_params.get("logprobs"))  # `rollout.calculate_log_probs`

        while True:
            turn: dict[str, float] = {}
            with simple_timer("s", turn):
                output = await self.server_manager.generate(
                    request_id=request_id,
                    prompt_ids=prompt_ids + response_ids,
                    sampling_params=dict(
                        sampling_params,
                        stop=[CODE_STOP],
                        stop_token_ids=self.stop_token_ids,
                        include_stop_str_in_output=True,
                        max_tokens=self.response_length - len(response_ids),
                        output_kind=_final_output_only() if "vllm" in sys.modules else _FinalOutputOnly(),
                    ),
                    priority=priority,
                )
            timings["generate_sequences"] += turn["s"]
            # The versions of the weights that wrote the rollout: the first turn's oldest, the last turn's newest.
            first_version = server_fields.get("min_global_steps", output.extra_fields.get("min_global_steps"))
            server_fields = {**output.extra_fields, "min_global_steps": first_version}

            token_ids = list(output.token_ids)
            spans.append((len(response_ids), len(response_ids) + len(token_ids)))
            response_ids += token_ids
            mask += [1] * len(token_ids)
            log_probs += output.log_probs or []
            if with_log_probs and len(log_probs) != len(mask):
                raise ValueError(
                    f"The server sent {len(output.log_probs or [])} log-probs for {len(token_ids)} tokens."
                )

            text = self.tokenizer.decode(token_ids)
            room = self.response_length - len(response_ids)
            if output.stop_reason == "aborted":
                finish_reason = "aborted"
                break
            if token_ids and token_ids[-1] in self.end_ids:
                finish_reason = "answer"
                break
            if CODE_STOP not in text:
                finish_reason = "max_tokens"
                break
            if counts["tool_calls"] >= self.max_tool_calls:
                finish_reason = "max_turns"
                break
            if room <= 0:
                finish_reason = "max_tokens"
                break

            counts["tool_calls"] += 1
            turn = {}
            with simple_timer("s", turn):
                result = await self._call(text)
            timings["tool_calls"] += turn["s"]
            if result.status == "sandbox_failure":
                logger.warning("sandbox failed after %d attempts: %s", result.attempts, result.message)
                finish_reason = "sandbox_failure"
                break
            counts["tool_errors"] += result.status != "ok"
            counts["tool_timeouts"] += result.status == "timeout"
            block = self._encode_output(result)
            if len(block) >= room:  # no token would be left to answer with
                finish_reason = "max_tokens"
                break
            response_ids += block
            mask += [0] * len(block)
            log_probs += [0.0] * len(block)

        return AgentLoopOutput(
            prompt_ids=prompt_ids,
            response_ids=response_ids,
            response_mask=mask,
            response_logprobs=log_probs if with_log_probs else None,
            multi_modal_data={},
            num_turns=1 + len(spans) + sum(end < len(mask) for _, end in spans),  # user, model turns, tool turns
            metrics=AgentLoopMetrics(**timings),
            extra_fields={
                **server_fields,
                **counts,
                "finish_reason": finish_reason,
                "model_spans": spans,
                "response_tokens": sum(mask),
                "truncated": float(finish_reason == "max_tokens"),
                "turn_scores": [],
                "tool_rewards": [],
            },
        )

    async def _encode_prompt(self, uid: str, messages: list[dict]) -> list[int]:
        if uid not in self._prompts:
            self._prompts[uid] = asyncio.ensure_future(self.ct_build_initial_tokens(messages))
        return list(await asyncio.shield(self._prompts[uid]))

    async def _call(self, text: str) -> RunResult:
        """Run the code that `text` ends in; a malformed call is answered like an error of the model's code."""
        try:
            code = extract_code(text)
        except MalformedCall as error:
            return RunResult("code_error", "", str(error), None, queue_s=0.0, run_s=0.0, attempts=0, message="")
        return await self.sandbox.run(code, timeout_s=self.timeout_s, memory_limit_mb=self.memory_limit_mb)

    def _encode_output(self, result: RunResult) -> list[int]:
        """The interpreter's block as tokens, its text cut in the middle to the configured length."""
        stderr = result.stderr
        if result.status == "timeout":  # the program was killed: it could not say so itself
            stderr += f"\nTimeoutError: stopped after {self.timeout_s:g} s"
        elif result.return_code is not None and result.return_code < 0:
            stderr += f"\nKilled by signal {-result.return_code} ({signal.strsignal(-result.return_code)})"
        text = format_output(result.stdout, stderr, traceback=self.traceback)
        limit = self.max_tool_response_tokens
        # No text has more tokens than bytes, and most outputs are short.
        if len(text.encode()) > limit and len(ids := self.tokenizer.encode(text, add_special_tokens=False)) > limit:
            head, tail = ids[: limit // 2], ids[len(ids) - limit // 2 :]
            cut = f"\n[... {len(ids) - 2 * (limit // 2)} tokens cut ...]\n"
            text = self.tokenizer.decode(head) + cut + self.tokenizer.decode(tail)
        return self.tokenizer.encode(interpreter_block(text), add_special_tokens=False)
