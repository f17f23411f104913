"""The rollout with tools: the model writes, calls a tool, reads its answer and continues.

Token-in, token-out: the loop keeps the sampled tokens as they are, and encodes only the text between two turns of the
model (mask 0, log-prob 0). The settings are `retool.*` in the run's YAML. agent_loops.yaml registers the loop as
`retool`, with the protocol of `retool.protocol`. For samples that name a protocol in a column `agent_name`, it also
registers `retool_code` and `retool_hermes`.
"""

import asyncio
import functools
import logging
import math
import os
import pkgutil
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any
from uuid import uuid4

from cachetools import LRUCache
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput, ToolListWrap

from verl_ext.environments.toolbox import CallResult, Toolbox
from verl_ext.outcome import RolloutEnd
from verl_ext.protocols.base import (
    ERROR_TOKENS,
    TEMPLATE_ERRORS,
    Call,
    MalformedCall,
    SegmentEncoder,
    checked_kwargs,
    cut_reply,
)
from verl_ext.protocols.by_name import make_protocol
from verl_ext.protocols.hermes import HermesProtocol
from verl_ext.protocols.thinking import THINK_STOP
from verl_ext.rollout.log_probs import check_log_probs_are_sent, checked_log_probs, wants_log_probs
from verl_ext.rollout.response import Rollout
from verl_ext.rollout.seeds import seed_of
from verl_ext.rollout.stops import Stops
from verl_ext.rollout.weight_versions import joined, noted_attempts, spans_of
from verl_ext.settings import Retool
from verl_ext.settings.checks import check

logger = logging.getLogger(__name__)
logger.setLevel(os.getenv("VERL_LOGGING_LEVEL", "WARN"))

# Stop reasons of a request that ended by neither the model nor its budget (vllm/v1/engine/__init__.py:43).
FAILED_STOPS = ("aborted", "abort", "error")
_FINAL_ONLY = "vllm.sampling_params:RequestOutputKind.FINAL_ONLY"
RETRY_PAUSE_S = 2.0  # before a failed part of a validation sample is retried; each pause is longer by this much
_CUT_STEP = 8  # tokens; if a reply does not fit, this many more than the excess are cut from each output


class _FinalOutputOnly:
    """Unpickles in vLLM's process as the enum that asks for one message per request instead of one per token.

    To use the enum itself, this process would have to import vLLM, which takes 3 s.
    """

    def __reduce__(self) -> tuple:
        return pkgutil.resolve_name, (_FINAL_ONLY,)


class RetoolAgentLoop(AgentLoopBase):
    """See the module's docstring.

    Args:
        tools: those of `rollout.multi_turn.tool_config_path`, for the hermes protocol. Of one that is called
            `code_interpreter`, only the schema is used; code always runs by `retool.sandbox`.
        protocol: "code" or "hermes"; None takes `retool.protocol`.
    Raises:
        ValueError: a setting of `retool` is unknown, missing or out of range, or the trainer needs log-probs that no
            server is asked for.
    """

    shared = True  # `run` keeps a sample's state in local variables, so LeanAgentLoopWorker uses one instance for all

    def __init__(self, *args: Any, tools: ToolListWrap | None = None, protocol: str | None = None, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.apply_chat_template_kwargs = checked_kwargs(self.tokenizer, self.apply_chat_template_kwargs)
        self.continuous_token_builder.chat_template_kwargs = self.apply_chat_template_kwargs
        check_log_probs_are_sent(self.config)
        settings = self.config.retool
        check(settings, Retool)
        self.max_tool_calls = settings.max_tool_calls
        self.run_last_code = settings.run_last_code
        self.max_malformed_calls = settings.max_malformed_calls
        self.max_tool_response_tokens = settings.max_tool_response_tokens
        self.is_recorded = settings.recorder.enable
        self.response_length = self.rollout_config.response_length
        self.protocol = make_protocol(
            protocol or settings.protocol,
            self.tokenizer,
            self.apply_chat_template_kwargs,
            max_parallel_calls=self.rollout_config.multi_turn.max_parallel_calls,
            repair_json=settings.repair_json,
        )
        self._encoder, self._stops = SegmentEncoder(self.tokenizer), Stops(self.protocol, self.tokenizer)
        can_call_tools = isinstance(self.protocol, HermesProtocol)
        self.tools = Toolbox(settings, tools.tools if tools and can_call_tools else [])
        self.end_ids = set(self.tokenizer.all_special_ids)
        # vLLM stops at every end token of generation_config.json, and not all of them have a name in the tokenizer
        # (Llama 3 has three). A special token that ends a turn before its budget is used up is one of them.
        added = self.tokenizer.added_tokens_decoder.items()
        stops = (self.protocol.stop, THINK_STOP)
        self.special_ids = {i for i, token in added if token.special and token.content not in stops}
        self._prompts: LRUCache = LRUCache(maxsize=1024)  # uid -> task; the samples of a group share their prompt
        self._prompt_text = functools.lru_cache(maxsize=1024)(lambda ids: self.tokenizer.decode(list(ids)))
        self._output_kind = pkgutil.resolve_name(_FINAL_ONLY) if "vllm" in sys.modules else _FinalOutputOnly()
        self._seeds = {"data": self.data_config.get("seed"), "rollout": self.rollout_config.get("seed")}
        self._is_repeatable = settings.get("repeatable", False)

    async def run(self, sampling_params: dict[str, Any], priority: int = 0, **kwargs: Any) -> AgentLoopOutput:
        """Roll out one sample; see `AgentLoopBase.run`.

        Args:
            kwargs: columns of the data set. The loop reads `raw_prompt`, `uid`, `tools_kwargs`, and
                `extra_info.tool_selection`, the names of the tools that this sample may use (none named: all). In
                validation the worker adds `call_retries` (`_run_call`).
        Returns:
            `extra_fields` holds `finish_reason` (of `RolloutEnd`), `model_spans` (the [start, end) pairs of response
            tokens that the model sampled), the counts that the reward manager logs, `tool_use` (see there), and
            `trajectory` if it is recorded.
        Raises:
            ValueError: the sample selects a tool that does not exist, or that the protocol cannot call.
        """
        schemas = self.tools.select((kwargs.get("extra_info") or {}).get("tool_selection"))
        prompt_ids = await self._encode_prompt(
            kwargs["uid"], list(kwargs["raw_prompt"]), self.protocol.schemas(schemas)
        )
        rollout = Rollout(limit=self.response_length, stop=self.protocol.stop)
        request_id = uuid4().hex
        reason = None
        while reason is None:
            params = sampling_params | {"output_kind": self._output_kind} | self._stops.params(rollout.stop)
            if self._is_repeatable:  # a separate seed per request, so neither their order nor their batch matters
                params["seed"] = seed_of(self._seeds["rollout"], kwargs["uid"], kwargs["session_id"], rollout.requests)
            text, ended, aborted = await self._model_turn(rollout, prompt_ids, params, request_id, priority)
            if rollout.is_turn_open:
                continue
            thinking = rollout.begins_thinking
            calls = [] if aborted else self.protocol.parse(text, schemas, ended=ended, thinking=thinking)
            if calls:
                reason = await self._tool_turn(rollout, text, calls, ended, kwargs)
            elif aborted:
                reason = RolloutEnd.ABORTED
            else:
                reason = RolloutEnd.ANSWER if ended else RolloutEnd.MAX_TOKENS
            is_void = not any(isinstance(call, Call) for call in calls) and "\\boxed{" not in text
            rollout.use.void_turns += is_void and not aborted
        return self._output(prompt_ids, rollout, reason, sampling_params)

    async def _model_turn(
        self, rollout: Rollout, prompt_ids: list[int], params: dict[str, Any], request_id: str, priority: int
    ) -> tuple[str, bool, bool]:
        """Let the model write up to a stop, an end token or the budget's end; `rollout.is_turn_open` says whether the
        turn continues from there.

        Returns:
            The turn's text, whether it ended by an end token, and whether it was aborted.
        """
        started, started_s = time.perf_counter(), time.time()
        before = prompt_ids + rollout.ids
        with noted_attempts() as attempts:
            output = await self.server_manager.generate(
                request_id=request_id,
                prompt_ids=before,
                sampling_params=dict(params, max_tokens=rollout.room),
                priority=priority,
            )
        seconds = time.perf_counter() - started
        rollout.use.generate_s += seconds
        rollout.requests += 1
        start = rollout.turn_start
        if not rollout.is_turn_open:
            rollout.begins_thinking = self._stops.begins_thinking(before)
        thinking, so_far = rollout.begins_thinking, rollout.ids[start:]
        ids = list(output.token_ids)
        log_probs = checked_log_probs(output.log_probs, ids) if wants_log_probs(params) else [0.0] * len(ids)
        aborted = output.stop_reason in FAILED_STOPS
        text = self.tokenizer.decode(so_far + ids)
        if not aborted and (kept := self._stops.length(so_far + ids, text, thinking) - len(so_far)) < len(ids):
            ids, log_probs = ids[:kept], log_probs[:kept]
            text = self.tokenizer.decode(so_far + ids)
        told = attempts or [(len(ids), output.extra_fields.get("global_steps"))]  # the client is not verl's
        spans = spans_of(told, len(rollout.ids), len(ids))
        rollout.version_spans = joined(rollout.version_spans, spans)
        rollout.from_server = output.extra_fields
        rollout.lost_servers += attempts.lost
        note = {"text": text, "tokens": len(so_far) + len(ids), "start": start, "calls": [], "server": attempts.server}
        rollout.add_to_turn(ids, log_probs, note | {"started_s": started_s, "generate_s": seconds})
        end_ids = self.end_ids | self.special_ids if rollout.room else self.end_ids
        ended = bool(ids) and ids[-1] in end_ids
        is_over = ended or aborted or not rollout.room
        following = None if is_over else self._stops.next(text, self.tokenizer.decode(ids), thinking)
        rollout.is_turn_open, rollout.stop = following is not None, following or self.protocol.stop
        return text, ended, aborted

    async def _tool_turn(
        self, rollout: Rollout, text: str, calls: list[Call | MalformedCall], ended: bool, sample: Mapping[str, Any]
    ) -> RolloutEnd | None:
        """Run the calls of a turn and append what the tools say; return why the rollout ends here, or None."""
        use, entries = rollout.use, rollout.turns[-1]["calls"]
        to_run = [call for call in calls if isinstance(call, Call)]
        for call in calls:
            if isinstance(call, MalformedCall):
                use.add_malformed(call.kind)
                entries.append({"malformed": call.kind, "output": str(call)})
            else:
                entries.append({"tool": call.tool, "arguments": call.arguments})
        surplus = use.malformed["two_blocks"]  # well formed, but beyond the number that a turn may run
        if use.malformed.total() - surplus > self.max_malformed_calls:
            return RolloutEnd.MALFORMED_LIMIT
        is_last = use.calls + len(to_run) > self.max_tool_calls
        if is_last and not self.run_last_code:
            return RolloutEnd.MAX_TURNS
        answer_tokens = 0 if is_last else 1  # the minimum that is kept free
        if rollout.room <= answer_tokens:
            return RolloutEnd.MAX_TURNS if is_last else RolloutEnd.MAX_TOKENS

        started, started_s = time.perf_counter(), time.time()
        settings, retries = sample.get("tools_kwargs") or {}, sample.get("call_retries", 0)
        ran = await asyncio.gather(*(self._run_call(call, settings, retries) for call in to_run))
        use.tool_s += time.perf_counter() - started
        results = [result for result, _ in ran]
        for entry, (result, seconds) in zip([entry for entry in entries if "tool" in entry], ran, strict=True):
            entry |= vars(result) | {"started_s": started_s, "queue_s": max(0.0, seconds - result.run_s)}
            use.queue_s += seconds if result.failure else result.queue_s
            use.run_s += result.run_s
        failure = next((result.failure for result in results if result.failure), None)
        if failure is not None:
            logger.warning("a tool failed: %s", failure)
            return RolloutEnd.SANDBOX_FAILURE
        if to_run and use.first_call_token is None:
            start, end = rollout.spans[-1]
            use.first_call_token = start + round((end - start) * to_run[0].start / max(len(text), 1))
        remaining, texts, errors = iter(results), [], []
        for call in calls:
            if isinstance(call, MalformedCall):
                use.pass_malformed()
                texts.append(_encodable(str(call)))
                errors.append(texts[-1])
                continue
            result = next(remaining)
            use.add_call(call, result.error)
            texts.append(_encodable(result.output))
            errors.append(_encodable(result.complaint))
            if result.reward is not None:
                rollout.tool_rewards.append(result.reward)
        reply, text, was_cut = self._encode_reply(texts, errors, ended, rollout.room - answer_tokens)
        use.outputs_cut += was_cut
        if reply is None:
            return RolloutEnd.MAX_TURNS if is_last else RolloutEnd.MAX_TOKENS
        rollout.add_reply(reply, text)
        return RolloutEnd.MAX_TURNS if is_last else None

    async def _run_call(self, call: Call, tools_kwargs: Mapping[str, Any], retries: int) -> tuple[CallResult, float]:
        """Return what the tool said, and after how many seconds; a call that failed because of the infrastructure is
        repeated at most `retries` times.

        The response stays as it is: sampling it anew would, with a dead sandbox, favour responses without calls.
        """
        started = time.perf_counter()
        result = await self.tools.run(call, tools_kwargs)
        for number in range(1, retries + 1):
            if not result.failure:
                break
            logger.warning("a tool failed; calling it again (%d of %d): %s", number, retries, result.failure)
            await asyncio.sleep(RETRY_PAUSE_S * number)
            lost_s, attempts = time.perf_counter() - started, result.attempts
            again = await self.tools.run(call, tools_kwargs)
            result = replace(again, attempts=attempts + again.attempts, queue_s=again.queue_s + lost_s)
        return result, time.perf_counter() - started

    def _encode_reply(
        self, texts: list[str], errors: list[str], ended: bool, room: int
    ) -> tuple[list[int] | None, str, int]:
        """Return what the tools say, as at most `room` tokens (None if no cut makes it fit) and as text, and how many
        outputs were cut.

        Outputs together take at most half of the room, so that the rest is left to answer with. `errors` has one entry
        per text, see `cut_reply`.
        """
        limit = self.max_tool_response_tokens
        share = min(max(limit, ERROR_TOKENS) if any(errors) else limit, max(room // (2 * len(texts)), 0))
        while True:
            shown = [
                cut_reply(self.tokenizer, *each, limit=limit, share=share, encode=self._encoder.encode_output)
                for each in zip(texts, errors, strict=True)
            ]
            reply = self.protocol.reply(shown, ended=ended)
            ids = self._encoder.encode(reply)
            excess = len(ids) - room
            if excess <= 0:
                return ids, "".join(reply), sum(cut != text for cut, text in zip(shown, texts, strict=True))
            if share == 0:
                return None, "", 0
            share = max(0, share - math.ceil(excess / len(texts)) - _CUT_STEP)

    async def _encode_prompt(self, uid: str, messages: list[dict], schemas: list[dict] | None) -> list[int]:
        if uid not in self._prompts:
            self._prompts[uid] = asyncio.ensure_future(self.ct_build_initial_tokens(messages, tools=schemas))
        try:
            return list(await asyncio.shield(self._prompts[uid]))
        except TEMPLATE_ERRORS as error:
            raise ValueError(f"the chat template rejects the prompt {uid}, {messages!r:.200}: {error}") from error

    def _output(
        self, prompt_ids: list[int], rollout: Rollout, reason: RolloutEnd, sampling_params: Mapping[str, Any]
    ) -> AgentLoopOutput:
        use, length = rollout.use, len(rollout.ids)
        if not rollout.ids:  # aborted before its first token; verl's tensors need one, and nothing trains on it
            rollout.add_reply([self.tokenizer.eos_token_id])
        versions = [version for *_, version in rollout.version_spans if version is not None]
        extra_fields = {
            **rollout.from_server,
            "version_spans": rollout.version_spans,
            "lost_servers": rollout.lost_servers,
            "min_global_steps": min(versions, default=None),
            "max_global_steps": max(versions, default=None),
            "tool_calls": use.calls,
            "tool_errors": use.errors.total(),
            "tool_timeouts": use.errors["timeout"],
            "model_turns": len(rollout.spans),
            "finish_reason": reason.value,
            "model_spans": rollout.spans,
            "response_tokens": sum(rollout.mask),
            "truncated": float(reason == RolloutEnd.MAX_TOKENS),
            "tool_use": use.as_dict(),
            "turn_scores": [],
            "tool_rewards": rollout.tool_rewards,
        }
        if self.is_recorded:
            extra_fields["trajectory"] = {
                "prompt": self._prompt_text(tuple(prompt_ids)),
                "turns": rollout.turns,
                "seeds": self._seeds,
                "sampling": {name: sampling_params.get(name) for name in ("temperature", "top_p", "top_k")},
            }
        return AgentLoopOutput(
            prompt_ids=prompt_ids,
            response_ids=rollout.ids,
            response_mask=rollout.mask,
            response_logprobs=rollout.log_probs if wants_log_probs(sampling_params) else None,
            multi_modal_data={},
            # user, model turns, tool turns
            num_turns=1 + len(rollout.spans) + sum(end < length for _, end in rollout.spans),
            metrics=AgentLoopMetrics(generate_sequences=use.generate_s, tool_calls=use.tool_s),
            extra_fields=extra_fields,
        )


def _encodable(text: str) -> str:
    """Return `text` with lone surrogates spelt out: a model can write one in JSON, and a tool may repeat it."""
    return text.encode("utf-8", "backslashreplace").decode()
