"""The rollout with tools: the model writes, calls a tool, reads its answer and continues.

Token-in, token-out: the loop keeps the sampled tokens as they are, and encodes only the text between two turns of the
model (mask 0, log-prob 0). The settings are `retool.*` in the run's YAML. agent_loops.yaml registers the loop as
`retool`, with the protocol of `retool.protocol`. For samples that name a protocol in a column `agent_name`, it also
registers `retool_code` and `retool_hermes`.
"""

import logging
import math
import os
import time
from collections.abc import Mapping
from typing import Any
from uuid import uuid4

from verl.workers.rollout.replica import TokenOutput

from verl_ext.environments.base import selected
from verl_ext.episode import CallResult, Episode, EpisodeKey, Turn, TurnCall
from verl_ext.outcome import INFRASTRUCTURE_FAILURES, RolloutEnd
from verl_ext.protocols.base import (
    ERROR_TOKENS,
    Call,
    MalformedCall,
    SegmentEncoder,
    cut_reply,
    decoded,
)
from verl_ext.protocols.thinking import THINK_STOP
from verl_ext.rollout.base import EpisodeLoop
from verl_ext.rollout.lives import Life
from verl_ext.rollout.response import Rollout
from verl_ext.rollout.sampled import sampled
from verl_ext.rollout.stops import end_id
from verl_ext.rollout.ways import Way
from verl_ext.rollout.weight_versions import joined, spans_of

logger = logging.getLogger(__name__)
logger.setLevel(os.getenv("VERL_LOGGING_LEVEL", "WARN"))

_CUT_STEP = 8  # tokens; if a reply does not fit, this many more than the excess are cut from each output


class RetoolAgentLoop(EpisodeLoop):
    """See the module's docstring, and `EpisodeLoop` for arguments and errors."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        settings = self.config.retool
        self.run_last_code = settings.run_last_code
        self.max_malformed_calls = settings.max_malformed_calls
        self._encoder = SegmentEncoder(self.tokenizer)
        self.end_ids = set(self.tokenizer.all_special_ids)
        # vLLM stops at every end token of generation_config.json, and not all of them have a name in the tokenizer
        # (Llama 3 has three). A special token that ends a turn before its budget is used up is one of them.
        added = self.tokenizer.added_tokens_decoder.items()
        stops = {THINK_STOP, *(way.protocol.stop for way in self.ways)}
        self.special_ids = {i for i, token in added if token.special and token.content not in stops}

    async def play(
        self, life: Life, way: Way, sampling_params: dict[str, Any], priority: int, task: Mapping[str, Any]
    ) -> Episode:
        key, tools, protocol = (
            EpisodeKey(task["uid"], task["session_id"]),
            selected(life.opening.tools, task),
            way.protocol,
        )
        messages = protocol.prompt(life.opening.messages)
        prompt_ids = await self.prompts.ids(key.uid, messages, protocol.schemas(tools))
        rollout = Rollout(key, prompt_ids, limit=way.limits.response_tokens, stop=protocol.stop)
        if self.is_recorded:
            rollout.episode.protocol = protocol.name
            rollout.episode.opening = {"messages": messages, "tools": list(tools.values())}
        if life.failure:
            logger.warning("an environment could not be opened: %s", life.failure)
            rollout.episode.exception = life.failure
            return self._ended(rollout, RolloutEnd.SANDBOX_FAILURE, sampling_params)
        request_id = uuid4().hex
        reason = None
        while reason is None:
            params = self.request_params(sampling_params, key.uid, key.session, rollout.requests)
            params |= way.stops.params(rollout.stop)
            text, ended, aborted = await self._model_turn(rollout, life, way, params, request_id, priority)
            if rollout.is_turn_open:
                continue
            thinking = rollout.begins_thinking
            has_calls = not aborted and (
                tools or not protocol.call_ends_turn
            )  # else the text is an answer, or an action
            calls = protocol.parse(text, tools, ended=ended, thinking=thinking) if has_calls else []
            if calls:
                reason = await self._tool_turn(rollout, life, way, text, calls, ended, task.get("call_retries", 0))
            elif aborted:
                reason = RolloutEnd.ABORTED
            elif not ended:
                reason = RolloutEnd.MAX_TOKENS
            else:
                reason = await self._user_turn(rollout, life, way, text)
            is_void = not any(isinstance(call, Call) for call in calls) and "\\boxed{" not in text
            rollout.use.void_turns += is_void and not aborted
        episode = self._ended(rollout, reason, sampling_params)
        if reason not in INFRASTRUCTURE_FAILURES:
            episode.score = await life.score(episode)
        return episode

    async def _user_turn(self, rollout: Rollout, life: Life, way: Way, text: str) -> RolloutEnd | None:
        """Append what the environment says to a turn without a call; return why the rollout ends here, or None."""
        messages, reason = await life.reply(text)
        if messages is None:
            return reason
        if roles := {message["role"] for message in messages} - {"user"}:
            raise ValueError(f"An environment replied as {', '.join(sorted(roles))}; expected messages of the user.")
        said = [_encodable(message["content"]) for message in messages]
        reply = way.protocol.user_reply(said)
        ids = self._encoder.encode(reply)
        if len(ids) >= rollout.room:
            return RolloutEnd.MAX_TOKENS
        rollout.add_reply(ids, "".join(reply), said, "user")
        return None

    async def generate(
        self, rollout: Rollout, life: Life, way: Way, params: dict[str, Any], request_id: str, priority: int
    ) -> TokenOutput:
        """Return what the model writes next. Another kind of server may want the conversation, not its tokens."""
        return await self.server_manager.generate(
            request_id=request_id,
            prompt_ids=rollout.row.prompt_ids + rollout.row.ids,
            sampling_params=dict(params, max_tokens=rollout.room),
            priority=priority,
        )

    async def _model_turn(
        self, rollout: Rollout, life: Life, way: Way, params: dict[str, Any], request_id: str, priority: int
    ) -> tuple[str, bool, bool]:
        """Let the model write up to a stop, an end token or the budget's end; `rollout.is_turn_open` says whether the
        turn continues from there.

        Returns:
            The turn's text, whether it ended by an end token, and whether it was aborted.
        """
        started, started_s = time.perf_counter(), time.time()
        row, episode = rollout.row, rollout.episode
        output = await self.generate(rollout, life, way, params, request_id, priority)
        seconds = time.perf_counter() - started
        rollout.use.generate_s += seconds
        rollout.requests += 1
        start = rollout.turn_start
        if not rollout.is_turn_open:
            rollout.begins_thinking = way.stops.begins_thinking(row.prompt_ids + row.ids)
        thinking, so_far = rollout.begins_thinking, row.ids[start:]
        written = sampled(output, params)
        ids, aborted = written.ids, written.failed is not None
        log_probs = [0.0] * len(ids) if written.log_probs is None else written.log_probs
        text = decoded(self.tokenizer, so_far + ids)
        if not aborted and (kept := way.stops.length(so_far + ids, text, thinking) - len(so_far)) < len(ids):
            ids, log_probs = ids[:kept], log_probs[:kept]
            text = decoded(self.tokenizer, so_far + ids)
        written_by = [(end - begin, version) for begin, end, version in written.spans]
        row.version_spans = joined(row.version_spans, spans_of(written_by, len(row.ids), len(ids)))
        episode.from_server = written.from_server
        episode.lost_servers += written.lost
        turn = Turn(text, len(so_far) + len(ids), start, written.server, started_s, seconds)
        rollout.add_to_turn(ids, log_probs, turn)
        end_ids = self.end_ids | self.special_ids if rollout.room else self.end_ids
        ended = bool(ids) and ids[-1] in end_ids
        if ended:
            episode.turns[-1].end = decoded(self.tokenizer, ids[-1:])
        is_over = ended or aborted or not rollout.room
        following = None if is_over else way.stops.next(text, decoded(self.tokenizer, ids), thinking)
        rollout.is_turn_open, rollout.stop = following is not None, following or way.protocol.stop
        return text, ended, aborted

    async def _tool_turn(
        self,
        rollout: Rollout,
        life: Life,
        way: Way,
        text: str,
        calls: list[Call | MalformedCall],
        ended: bool,
        retries: int,
    ) -> RolloutEnd | None:
        """Run the calls of a turn and append what the tools say; return why the rollout ends here, or None."""
        use, noted = rollout.use, rollout.episode.turns[-1].calls
        to_run = [call for call in calls if isinstance(call, Call)]
        for call in calls:
            if isinstance(call, MalformedCall):
                use.malformed[call.kind] += 1
                noted.append(TurnCall(None, malformed=call.kind, result=CallResult(str(call))))
            else:
                noted.append(TurnCall(call.tool, call.arguments))
        surplus = use.malformed["two_blocks"]  # well formed, but beyond the number that a turn may run
        if sum(use.malformed.values()) - surplus > self.max_malformed_calls:
            return RolloutEnd.MALFORMED_LIMIT
        is_last = use.calls + len(to_run) > way.limits.max_tool_calls
        if is_last and not self.run_last_code:
            return RolloutEnd.MAX_TURNS
        answer_tokens = 0 if is_last else 1  # the minimum that is kept free
        if rollout.room <= answer_tokens:
            return RolloutEnd.MAX_TURNS if is_last else RolloutEnd.MAX_TOKENS

        started, started_s = time.perf_counter(), time.time()
        ran = await life.run(to_run, retries)
        use.tool_s += time.perf_counter() - started
        results = [result for result, _ in ran]
        for note, (result, seconds) in zip([note for note in noted if not note.malformed], ran, strict=True):
            note.result, note.started_s, note.queue_s = result, started_s, max(0.0, seconds - result.run_s)
            use.queue_s += seconds if result.failure else result.queue_s
            use.run_s += result.run_s
            use.replays += result.replays
        failure = next((result.failure for result in results if result.failure), None)
        if failure is not None:
            logger.warning("a tool failed: %s", failure)
            return RolloutEnd.SANDBOX_FAILURE
        if to_run and use.first_call_token is None:
            start, end = rollout.row.model_spans[-1]
            use.first_call_token = start + round((end - start) * to_run[0].start / max(len(text), 1))
        remaining, texts, errors = iter(results), [], []
        for call in calls:
            if isinstance(call, MalformedCall):
                rollout.counts.pass_malformed()
                texts.append(_encodable(str(call)))
                errors.append(texts[-1])
                continue
            result = next(remaining)
            rollout.counts.add(call, result.error)
            texts.append(_encodable(result.output))
            errors.append(_encodable(result.complaint))
        if life.is_over_time:
            return RolloutEnd.TIMEOUT
        if ends := next((result.ends for result in results if result.ends), None):
            return ends
        reply, text, shown = self._encode_reply(way, texts, errors, ended, rollout.room - answer_tokens)
        if reply is None:
            return RolloutEnd.MAX_TURNS if is_last else RolloutEnd.MAX_TOKENS
        use.outputs_cut += sum(cut != whole for cut, whole in zip(shown, texts, strict=True))
        rollout.add_reply(reply, text, shown)
        return RolloutEnd.MAX_TURNS if is_last else None

    def _encode_reply(
        self, way: Way, texts: list[str], errors: list[str], ended: bool, room: int
    ) -> tuple[list[int] | None, str, list[str]]:
        """Return what the tools say, as at most `room` tokens (None if no cut makes it fit), as text, and what is shown
        of each output.

        Outputs together take at most half of the room, so that the rest is left to answer with. `errors` has one entry
        per text, see `cut_reply`.
        """
        limit = way.limits.max_tool_response_tokens
        share = min(max(limit, ERROR_TOKENS) if any(errors) else limit, max(room // (2 * len(texts)), 0))
        while True:
            shown = [
                cut_reply(self.tokenizer, *each, limit=limit, share=share, encode=self._encoder.encode_output)
                for each in zip(texts, errors, strict=True)
            ]
            reply = way.protocol.reply(shown, ended=ended)
            ids = self._encoder.encode(reply)
            excess = len(ids) - room
            if excess <= 0:
                return ids, "".join(reply), shown
            if share == 0:
                return None, "", []
            share = max(0, share - math.ceil(excess / len(texts)) - _CUT_STEP)

    def _ended(self, rollout: Rollout, reason: RolloutEnd, sampling_params: Mapping[str, Any]) -> Episode:
        if not rollout.row.ids:  # aborted before its first token; verl's tensors need one, and nothing trains on it
            rollout.add_reply([end_id(self.tokenizer)])
        return self.ended(rollout.episode, reason, sampling_params)


def _encodable(text: str) -> str:
    """Return `text` with lone surrogates spelt out: a model can write one in JSON, and a tool may repeat it."""
    return text.encode("utf-8", "backslashreplace").decode()
