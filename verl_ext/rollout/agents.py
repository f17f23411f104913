"""The agent loop of an agent that only has a base_url: `retool.agent.run` names it, and the gateway answers it.

An episode opens its environment and a session of this worker's gateway. The agent is started (starters.py), asks the
model as often as it likes, may call the environment's tools, and ends. Then the session is sealed, its tree of turns
becomes the rows, and the environment or a verifier scores. Nothing that an agent sends is a reward.

Who was at fault is decided in `_end`: what the model's text can cause is the model's, a failed server or tool is the
infrastructure's, and an agent that cannot even begin is ours.
"""

import array
import asyncio
import hashlib
import json
import logging
import os
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from omegaconf import OmegaConf

from verl_ext.environments.base import selected
from verl_ext.episode import CallResult, Episode, EpisodeKey, TokenRow, ToolUse, TurnCall
from verl_ext.gateway.messages import TOO_LONG, TURN_LIMIT
from verl_ext.gateway.server import Endpoint, Gateway
from verl_ext.gateway.session import Sampled, Session
from verl_ext.gateway.template import Template
from verl_ext.outcome import INFRASTRUCTURE_FAILURES, RolloutEnd
from verl_ext.protocols.base import ERROR_TOKENS, Call, MalformedCall, SegmentEncoder, cut_reply, decoded
from verl_ext.protocols.call_json import short, what_is_wrong
from verl_ext.records.problem import as_plain, id_of
from verl_ext.rollout.agent_turns import turns_of
from verl_ext.rollout.base import EpisodeLoop
from verl_ext.rollout.lives import Life
from verl_ext.rollout.loop import RetoolAgentLoop
from verl_ext.rollout.outside import NotTaken, OutsideStarter
from verl_ext.rollout.response import CallCounts
from verl_ext.rollout.sampled import sampled
from verl_ext.rollout.starters import AgentCrashed, CommandStarter, FunctionStarter, Starter
from verl_ext.rollout.stops import end_id
from verl_ext.rollout.ways import Way
from verl_ext.settings import OUTSIDE, AgentSettings
from verl_ext.settings.checks import read_settings

logger = logging.getLogger(__name__)
logger.setLevel(os.getenv("VERL_LOGGING_LEVEL", "WARN"))

SHOWN_CRASHES = 5  # of a worker, with their tracebacks; of further ones, only every hundredth
_RUN = "run"  # among the parameters of a session: its episode
_TRY = "Try it without training: retool doctor lets it play one episode."


class AgentFailed(RuntimeError):
    """The agent, or the run around it, is broken: it ended before the model had answered anything."""


def loop_of_run(*args: Any, trainer_config: Any, **kwargs: Any) -> EpisodeLoop:
    """Return the agent loop that a run's `retool.agent.run` asks for; arguments as of `EpisodeLoop`."""
    is_own = OmegaConf.select(trainer_config.config, "retool.agent.run") is not None
    return (AgentLoop if is_own else RetoolAgentLoop)(*args, trainer_config=trainer_config, **kwargs)


@dataclass(eq=False)
class _Run:
    """One episode while its agent runs."""

    task: Mapping[str, Any]
    life: Life
    way: Way
    tools: dict[str, dict]
    sampling_params: dict[str, Any]
    priority: int
    prompt_ids: list[int]
    use: ToolUse = field(default_factory=ToolUse)
    called: list[TurnCall] = field(default_factory=list)  # the environment's tools, in order
    asked: Counter = field(default_factory=Counter)  # prompts, by digest
    errors: dict[str, Exception] = field(default_factory=dict)  # by prompt: what the servers' client raised for it
    end: "asyncio.Future[RolloutEnd]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def __post_init__(self) -> None:
        self.counts = CallCounts(self.use)

    @property
    def key(self) -> EpisodeKey:
        return EpisodeKey(self.task["uid"], self.task["session_id"])

    @property
    def has_called(self) -> bool:
        """Tell whether a call has reached the environment, so that the environment may have changed."""
        return any(not call.malformed for call in self.called)

    def stop(self, reason: RolloutEnd | Exception) -> None:
        """Let the episode end now; its agent is cancelled."""
        if self.end.done():
            return
        if isinstance(reason, Exception):
            self.end.set_exception(reason)
            self.end.exception()  # seen: another error may be raised in its place
        else:
            self.end.set_result(reason)


class AgentLoop(EpisodeLoop):
    """See the module's docstring, and `EpisodeLoop` for arguments and errors."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.settings = read_settings(self.config, "agent", AgentSettings)
        folder = OmegaConf.select(self.config, "trainer.default_local_dir") or "."
        self.starter = make_starter(self.settings, folder)
        template = Template(self.tokenizer, self.apply_chat_template_kwargs)
        self.gateway = Gateway(self._generate, template, host=self.settings.host)
        if isinstance(self.starter, OutsideStarter):
            self.starter.add_routes(self.gateway.app)
        self._starting: asyncio.Future[None] | None = None
        self._encoder = SegmentEncoder(self.tokenizer)
        self._shown_tools: set[tuple[str, ...]] = {()}  # names that a prompt has shown
        self._crashes = 0

    async def aclose(self) -> None:
        """End all sessions and listen no more."""
        if isinstance(self.starter, OutsideStarter):
            self.starter.withdraw()
        await self.gateway.stop()

    async def play(
        self, life: Life, way: Way, sampling_params: dict[str, Any], priority: int, task: Mapping[str, Any]
    ) -> Episode:
        """Return the episode.

        Raises:
            AgentFailed: the agent ended before the model had answered.
            Exception: what the environment or the servers' client raised.
        """
        tools = selected(life.opening.tools, task)
        messages, schemas = way.protocol.prompt(life.opening.messages), way.protocol.schemas(tools)
        prompt_ids = await self.prompts.ids(task["uid"], messages, schemas)
        run = _Run(task, life, way, tools, sampling_params, priority, prompt_ids)
        episode = Episode(run.key, use=run.use)
        if self.is_recorded:
            episode.opening = {"messages": messages, "tools": list(tools.values())}
        if life.failure:
            logger.warning("an environment could not be opened: %s", life.failure)
            episode.exception = life.failure
            return self._without_turn(run, episode, RolloutEnd.SANDBOX_FAILURE)
        session, reason, episode.exception = await self._let_play(run, messages)
        return await self._finish(run, episode, session, reason)

    async def _let_play(self, run: _Run, messages: list[dict]) -> tuple[Session, RolloutEnd, str | None]:
        """Let an agent play; return what the gateway knows of it, why it ended, and what it raised."""
        await self._start()
        told = task_of(run.task, messages, run.tools)
        limit = len(run.prompt_ids) + run.way.limits.response_tokens
        while True:
            async with self.starter.place() as play:
                endpoint = self.gateway.open(
                    run.sampling_params | {_RUN: run},
                    limit,
                    max_turns=self.settings.max_turns,
                    call=lambda name, arguments: self._call(run, name, arguments),
                )
                agent = asyncio.ensure_future(play(told, endpoint))
                try:
                    is_late = await self._wait(run, endpoint, agent)
                finally:
                    agent.cancel()
                    session = await self.gateway.seal(endpoint)
                    await asyncio.wait([agent])
            if not self._is_lost(run, endpoint, session, agent, is_late):
                return session, *self._end(run, endpoint, session, agent, is_late)
            run.errors.clear()

    async def _start(self) -> None:
        if self._starting is None:
            self._starting = asyncio.ensure_future(self._listen())
        await asyncio.shield(self._starting)

    async def _listen(self) -> None:
        url = await self.gateway.start()
        if isinstance(self.starter, OutsideStarter):
            self.starter.announce(url)

    async def _wait(self, run: _Run, endpoint: Endpoint, agent: asyncio.Future) -> bool:
        """Wait until the agent has ended, or is to end; return whether its time is over."""
        clock = asyncio.ensure_future(endpoint.room.clock.reach(self.settings.timeout_s))
        spent = asyncio.ensure_future(endpoint.room.is_spent.wait())
        try:
            await asyncio.wait([agent, run.end, clock, spent], return_when=asyncio.FIRST_COMPLETED)
            return clock.done() and not agent.done() and not run.end.done()
        finally:
            clock.cancel()
            spent.cancel()

    def _is_lost(self, run: _Run, endpoint: Endpoint, session: Session, agent: asyncio.Future, is_late: bool) -> bool:
        """Return whether an agent from outside has gone with its task, before the model had answered it, and before it
        could change the environment."""
        is_over = run.end.done() or run.has_called or any(node.delivered for node in session.nodes)
        if is_over or not isinstance(self.starter, OutsideStarter):
            return False
        has_gone = not agent.cancelled() and isinstance(agent.exception(), NotTaken)
        if is_late and not has_gone:
            logger.warning(
                "An agent took a task and has asked nothing for %g s: the task is handed out again.",
                self.settings.timeout_s,
            )
        return has_gone or is_late

    def _end(
        self, run: _Run, endpoint: Endpoint, session: Session, agent: asyncio.Future, is_late: bool
    ) -> tuple[RolloutEnd, str | None]:
        """Return why the episode ended, and what the agent raised.

        Raises:
            AgentFailed, Exception: see `play`.
        """
        crash = None if agent.cancelled() else agent.exception()
        of_starter = None if isinstance(crash, AgentCrashed) else crash
        for error in (*run.errors.values(), endpoint.room.error, of_starter):
            if error is not None:
                raise error
        if session.failed is not None:
            return RolloutEnd.ABORTED, session.failed
        answered = [node for node in session.nodes if node.delivered]
        if run.end.done() and (answered or run.end.result() in INFRASTRUCTURE_FAILURES):
            return run.end.result(), None
        if is_late and not answered and run.has_called and isinstance(self.starter, OutsideStarter):
            why = "an agent from outside called tools, and then asked the model nothing"
            logger.warning("%s for %g s", why, self.settings.timeout_s)
            return RolloutEnd.ABORTED, why
        if not answered:
            raise AgentFailed(self._why_without_answer(run, session, crash, is_late))
        if is_late:
            return RolloutEnd.TIMEOUT, None
        if session.last_refusal == TURN_LIMIT:
            return RolloutEnd.MAX_TURNS, None
        if session.last_refusal == TOO_LONG:
            return RolloutEnd.MAX_TOKENS, None
        if crash is not None:
            self._log_crash(crash)
            return RolloutEnd.AGENT_ERROR, str(crash)
        return RolloutEnd.MAX_TOKENS if answered[-1].finish == "length" else RolloutEnd.ANSWER, None

    def _why_without_answer(self, run: _Run, session: Session, crash: BaseException | None, is_late: bool) -> str:
        what = f"The agent {self.settings.run!r}"
        if session.last_refusal:
            limit = f"prompt and answer have {session.max_context} tokens, the task's and data.max_response_length"
            return f"{what} got no answer of the model: its request was refused with {session.last_refusal} ({limit})."
        if crash is not None:
            return f"{what} crashed before the model had answered: {crash}"
        if run.end.done():
            return f"{what} made calls that ended the episode ({run.end.result()}) before the model had answered."
        if is_late:
            return f"{what} got no answer of the model within {self.settings.timeout_s:g} s of its own."
        if session.use.requests:
            return f"{what} ended before the model had answered its {session.use.requests} request(s). {_TRY}"
        return f"{what} ended and had asked the model nothing. {_TRY}"

    def _log_crash(self, crash: BaseException) -> None:
        self._crashes += 1
        if self._crashes <= SHOWN_CRASHES or self._crashes % 100 == 0:
            logger.warning(
                "An agent crashed after an answer of the model (%d so far in this process). The response is scored as "
                "it is, because the model's text may be the cause: %s",
                *(self._crashes, crash),
            )

    async def _finish(self, run: _Run, episode: Episode, session: Session, reason: RolloutEnd) -> Episode:
        self._check_tools(session)
        leaves = session.rows(self.settings.max_rows)
        episode.agent = session.use
        if not leaves:  # the servers or a tool failed before an answer
            return self._without_turn(run, episode, reason)
        episode.rows = [leaf.row for leaf in leaves]
        episode.turns = turns_of(leaves, run.called, run.use, self.tokenizer)
        newest = leaves[-1].nodes[-1]
        episode.from_server = newest.sampled.from_server
        nodes = {node: None for leaf in leaves for node in leaf.nodes}
        episode.lost_servers = [name for node in nodes for name in node.sampled.lost]
        run.use.generate_s = sum(node.generate_s for node in nodes)
        self.ended(episode, reason, run.sampling_params)
        if reason not in INFRASTRUCTURE_FAILURES:
            episode.score = await run.life.score(episode)
        return episode

    def _check_tools(self, session: Session) -> None:
        """Raise AgentFailed if the agent gave the model tools of which the chat template shows nothing."""
        for node in session.nodes:
            names = tuple(tool["function"]["name"] for tool in node.place.tools or ())
            if node.parent is not None or names in self._shown_tools:
                continue
            prompt = decoded(self.tokenizer, node.context)
            if missing := [name for name in names if name not in prompt]:
                raise AgentFailed(
                    f"The agent gives the model the tools {', '.join(names)}, but the chat template shows no "
                    f"{missing[0]}, nor the calls of earlier turns. Let the agent write and read calls in text, as "
                    "docs/own_agent/code_agent.py does, or set model.custom_chat_template."
                )
            self._shown_tools.add(names)

    def _without_turn(self, run: _Run, episode: Episode, reason: RolloutEnd) -> Episode:
        """Return an episode in which the model wrote nothing; verl's tensors need a token, and nothing trains on it."""
        episode.rows = [TokenRow(run.prompt_ids, [end_id(self.tokenizer)], [0], [0.0])]
        return self.ended(episode, reason, run.sampling_params)

    async def _generate(self, request_id: str, prompt_ids: list[int], params: dict[str, Any]) -> Sampled:
        """Let the servers write one turn; see `gateway.session.Generate`."""
        run: _Run = params.pop(_RUN)
        digest = hashlib.blake2b(array.array("q", prompt_ids).tobytes(), digest_size=8).hexdigest()
        run.asked[digest] += 1  # the order of an agent's parallel requests must not matter
        names = (run.key.uid, run.key.session, digest, run.asked[digest])
        try:
            params = self.request_params(params, *names)
            output = await self.server_manager.generate(
                request_id=request_id, prompt_ids=prompt_ids, sampling_params=params, priority=run.priority
            )
            written = sampled(output, params)
        except Exception as error:  # whatever it is: the episode raises it, unless a further try succeeds
            run.errors[digest] = error
            return Sampled(failed=repr(error))
        run.errors.pop(digest, None)
        return written

    async def _call(self, run: _Run, name: str, arguments: dict[str, Any]) -> CallResult:
        """Call a tool of the environment for the agent; a failure of it ends the episode."""
        try:
            return await self._call_in(run, name, arguments)
        except Exception as error:  # of the environment, which is ours
            run.stop(error)
            raise

    async def _call_in(self, run: _Run, name: str, arguments: dict[str, Any]) -> CallResult:
        noted = TurnCall(name, arguments, started_s=time.time())
        run.called.append(noted)
        if wrong := _what_is_wrong(run.tools, name, arguments):
            malformed = MalformedCall(*wrong)
            run.use.malformed[malformed.kind] += 1
            run.counts.pass_malformed()
            noted.malformed, noted.result = malformed.kind, CallResult(str(malformed), error=malformed.kind)
            return noted.result
        call, started = Call(name, arguments, 0), time.perf_counter()
        [(result, seconds)] = await run.life.run([call], run.task.get("call_retries", 0))
        run.use.tool_s += time.perf_counter() - started
        noted.result, noted.queue_s = result, max(0.0, seconds - result.run_s)
        run.use.queue_s += seconds if result.failure else result.queue_s
        run.use.run_s += result.run_s
        run.use.replays += result.replays
        if result.failure:
            logger.warning("a tool failed: %s", result.failure)
            run.stop(RolloutEnd.SANDBOX_FAILURE)
            return result
        run.counts.add(call, result.error)
        if run.life.is_over_time:
            run.stop(RolloutEnd.TIMEOUT)
        elif result.ends:
            run.stop(result.ends)
        return replace(result, output=self._cut(run, result))

    def _cut(self, run: _Run, result: CallResult) -> str:
        """Return a tool's output as the agent gets it, within `max_tool_response_tokens`."""
        limit = run.way.limits.max_tool_response_tokens
        share = max(limit, ERROR_TOKENS) if result.complaint else limit
        encode = self._encoder.encode_output
        shown = cut_reply(self.tokenizer, result.output, result.complaint, limit=limit, share=share, encode=encode)
        run.use.outputs_cut += shown != result.output
        return shown


def _what_is_wrong(tools: Mapping[str, dict], name: str, arguments: dict[str, Any]) -> tuple[str, str] | None:
    """Return kind and sentence of what is wrong with a call; the model may have made up the name."""
    if name not in tools:
        return "unknown_tool", f"unknown tool {short(name)}; the tools are {', '.join(sorted(tools)) or 'none'}"
    return what_is_wrong(arguments, tools[name]["function"].get("parameters") or {}, name)


def make_starter(settings: AgentSettings, run_folder: str) -> Starter:
    """Return what starts the agents of a run. Raises ValueError if there is no such agent."""
    assert settings.run is not None, "without `retool.agent.run`, the built-in loop plays"
    if settings.run == OUTSIDE:
        return OutsideStarter(settings, run_folder)
    if isinstance(settings.run, str):
        return FunctionStarter(settings.run, settings.max_processes)
    return CommandStarter(settings.run, settings.max_processes)


def task_of(row: Mapping[str, Any], messages: list[dict], tools: Mapping[str, dict]) -> dict[str, Any]:
    """Return what an agent is told of a row of the data set: never the ground truth, and of `extra_info` only `id`,
    `index` and `agent`, which is the agent's. Plain values, which JSON can hold."""
    info = row.get("extra_info") or {}
    told = {
        "messages": messages,
        "tools": list(tools.values()),
        "id": id_of(row) or None,
        "index": info.get("index"),
        "data_source": row.get("data_source"),
        "agent": info.get("agent"),
    }
    return json.loads(json.dumps(told, default=as_plain))  # in its order: a chat template writes tools as they come
