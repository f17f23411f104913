"""One session as its clients see it: requests that begin a turn or join one, retries, limits, tools, the end.

It knows no HTTP: server.py reads and writes it. The tree of turns is the session's (session.py).
"""

import asyncio
import bisect
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from uuid import uuid4

from verl_ext.episode import CallResult
from verl_ext.gateway.asked import Asked
from verl_ext.gateway.clock import Clock
from verl_ext.gateway.messages import TOO_LONG, TURN_LIMIT, Refused, normal
from verl_ext.gateway.session import Generate, Node, Sampled, Session

logger = logging.getLogger(__name__)

CallTool = Callable[[str, dict[str, Any]], Awaitable[CallResult]]  # the name of a tool, and its arguments

MAX_REFUSALS = 32  # of those that end an episode, in a row
_USUAL_CHARACTERS = 6  # of a token, at most, in a usual text
_PIECE = 4096  # characters that are encoded at a time
_PIECE_EXTRA = 64  # tokens that a piece may have more because it was cut out


@dataclass(eq=False)
class Answer:
    """A turn as a client is told it.

    Attributes:
        stop: the client's stop string that ended the turn.
        log_probs: text and log-prob of each token if the request asked for them. A token may be a part of a character,
            for which U+FFFD stands.
    """

    asked: Asked
    node: Node
    model: str
    stop: str | None = None
    log_probs: list[tuple[str, float]] | None = None
    id: str = field(default_factory=lambda: uuid4().hex)
    created_s: int = field(default_factory=lambda: int(time.time()))

    @property
    def prompt_tokens(self) -> int:
        return len(self.node.all_ids()) - len(self.node.ids)


@dataclass(eq=False)
class Pending:
    """A turn that runs or has been made, for a body with this digest, and how many requests wait for it."""

    task: "asyncio.Task[Answer]"
    digest: bytes
    waiting: int = 0

    @contextmanager
    def waited_for(self) -> Iterator[None]:
        self.waiting += 1
        try:
            yield
        finally:
            self.waiting -= 1

    @property
    def is_lost(self) -> bool:
        return self.task.done() and (self.task.cancelled() or self.task.exception() is not None)

    @property
    def is_delivered(self) -> bool:
        return self.task.done() and not self.is_lost and self.task.result().node.delivered


def ended() -> Refused:
    return Refused("There is no such session, or it has ended: no further turn is taken.", 410, "session_ended")


def failed() -> Refused:
    return Refused("The gateway itself failed; the log of the run says how.", 500, "gateway_error")


def _texts(content: Any) -> list[str]:
    parts = content if isinstance(content, list) else [{"text": content}]
    return [part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str)]


@contextmanager
def _refusing_deep_nesting() -> Iterator[None]:
    """Refuse messages or tools that are nested too deeply to be rendered."""
    try:
        yield
    except RecursionError:
        raise Refused("The messages or tools are nested too deeply.") from None


class Room:
    """See the module's docstring.

    Args:
        session: of which the room takes all requests.
        generate: see `Gateway`. model: the name that answers give it if the request has none.
        max_turns, call: see `Gateway.open`.
    Attributes:
        clock: the agent's own seconds.
        is_spent: whether the agent asks on and on for what is refused, which would hold up the other sessions.
        error: an exception that is ours, not a client's, the model's or a server's: the episode cannot be used.
    """

    def __init__(self, session: Session, generate: Generate, *, model: str, max_turns: int, call: CallTool | None):
        self.session, self.clock = session, Clock()
        self.is_spent, self._refusals = asyncio.Event(), 0
        self.error: BaseException | None = None
        self._generate, self._model, self._call = generate, model, call
        self._decode = session.template.decode
        self._max_turns, self._turns = max_turns, 0  # that were begun and have not failed
        self._pending: dict[str, list[Pending]] = {}  # of an idempotency key, or of a body's digest
        self._tasks: set[asyncio.Task] = set()
        # Servers know a conversation by its request id, and keep what they computed of it. One is used once at a time.
        self._request_ids: dict[Node | None, str] = {}
        self._used_request_ids: set[str] = set()

    def begin(self, asked: Asked, digest: bytes, *, key: str | None, is_retry: bool) -> Pending:
        """Begin the turn that a request asks for, or join an earlier request if this one is its retry.

        A retry has the key or the body of the request that it repeats. Among equal ones, it joins one that nobody waits
        for and nobody got. An equal body that is no retry is a new sample.

        Raises:
            Refused: the session has ended or has had its turns, or the key is another request's.
        """
        if self.session.is_sealed:
            raise ended()
        use, name = self.session.use, digest.hex() if key is None else f"key {key}"
        use.requests += 1
        earlier = [pending for pending in self._pending.get(name, ()) if not pending.is_lost]
        if any(pending.digest != digest for pending in earlier):
            raise Refused("This Idempotency-Key was sent with another body.", code="idempotency_error")
        if earlier and (is_retry or key is not None):
            use.joined += 1
            return min(earlier, key=lambda pending: (pending.waiting > 0, pending.is_delivered))
        use.repeats += bool(earlier)
        if self._turns >= self._max_turns:
            raise Refused(f"This session may have {self._max_turns} turns, and has had them.", code=TURN_LIMIT)
        self._turns += 1
        pending = Pending(self._run(self._turn(asked)), digest)
        self._pending[name] = [*earlier, pending]
        pending.task.add_done_callback(lambda _: pending.is_lost and self._forget(name, pending))
        return pending

    def refuse(self, code: str) -> None:
        """Note a refusal after which the episode may end."""
        self.session.last_refusal, self._refusals = code, self._refusals + 1
        if self._refusals >= MAX_REFUSALS:
            self.is_spent.set()

    async def call_tool(self, name: str, arguments: dict[str, Any]) -> CallResult:
        """Call a tool of the run.

        Raises:
            Refused: the session has no tools, or has ended.
        """
        if self.session.is_sealed:
            raise ended()
        if self._call is None:
            raise Refused("This session has no tools.", 404)
        task = self._run(self._call(name, arguments))
        await asyncio.wait([task])  # it goes on if the client hangs up: to break it off could break its world
        return self.result_of(task)

    def result_of(self, task: "asyncio.Task[Any]") -> Any:
        """Return what a task of `begin` made. Raises Refused if it failed, or if the session ended."""
        if task.cancelled():
            raise ended()
        error = task.exception()
        if error is None:
            return task.result()
        if isinstance(error, Refused):
            raise error.with_traceback(None)
        raise failed()

    def count_tokens(self, asked: Asked) -> int:
        """Return the length of a prompt, which is not recorded. Raises Refused as `Session.place` does."""
        template = self.session.template
        with _refusing_deep_nesting():
            return len(template.encode(template.rendered([*map(normal, asked.messages)], asked.tools)))

    async def seal(self) -> Session:
        """Take no further request and give up those that run; see `Gateway.seal`."""
        self.session.seal()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.clock.stop()
        use = self.session.use
        use.agent_s, use.undelivered = self.clock.seconds(), sum(not node.is_kept for node in self.session.nodes)
        return self.session

    def _run(self, work: Awaitable[Any]) -> asyncio.Task:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._note)
        return task

    def _note(self, task: asyncio.Task) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, Refused):
            logger.error("the gateway failed", exc_info=error)
            self.error = self.error or error

    def _forget(self, name: str, lost: Pending) -> None:
        """Forget a turn that is lost: what it raised has the body of the request in its traceback."""
        self._turns -= 1
        left = [pending for pending in self._pending.pop(name, ()) if pending is not lost]
        if left:
            self._pending[name] = left

    async def _turn(self, asked: Asked) -> Answer:
        session = self.session
        self._check_length(asked.messages)
        with _refusing_deep_nesting():
            place = session.place(asked.messages, asked.tools, is_open=asked.is_open)
        prompt_ids = place.prompt_ids
        room = session.max_context - len(prompt_ids)
        max_tokens = min(asked.max_tokens or room, room)
        params = session.params | {"max_tokens": max_tokens}
        if asked.stops:
            params |= {"stop": asked.stops, "include_stop_str_in_output": True}
        started_s, started = time.time(), time.perf_counter()
        with self._request_id(place.parent) as request_id:
            sampled = await self._generate(request_id, prompt_ids, params)
        seconds = time.perf_counter() - started
        if asked.stops and len(sampled.spans) > 1 and not sampled.failed:
            sampled = self._until_stop(sampled, asked.stops)
        node = session.add(
            place,
            sampled,
            max_tokens=max_tokens,
            stop=asked.stops,
            may_call=asked.may_call,
            started_s=started_s,
            generate_s=seconds,
        )
        self._request_ids[node], self._refusals = request_id, 0
        stop = next((each for each in asked.stops if node.text.startswith(each, len(node.told))), None)
        values = sampled.log_probs if asked.log_probs else None  # an evaluation asks the servers for none
        texts = map(self._decode, ([i] for i in node.ids))
        log_probs = None if values is None else [*zip(texts, values, strict=True)]
        asked = replace(asked, messages=[], tools=None)  # else a session's memory would be quadratic in its turns
        return Answer(asked, node, asked.model or self._model, stop, log_probs)

    def _check_length(self, messages: list[dict[str, Any]]) -> None:
        """Raise Refused if texts cannot fit. To render and encode them whole, in vain, would hold up other sessions."""
        limit, tokens = self.session.max_context, 0
        texts = [text for message in messages for text in _texts(message.get("content"))]
        if sum(map(len, texts)) <= _USUAL_CHARACTERS * limit:
            return
        for text in texts:
            for start in range(0, len(text), _PIECE):
                tokens += max(0, len(self.session.template.encode([text[start : start + _PIECE]])) - _PIECE_EXTRA)
                if tokens > limit:
                    sentence = f"the prompt has over {tokens} tokens, and the limit of prompt and answer is {limit}"
                    raise Refused(sentence, code=TOO_LONG)

    @contextmanager
    def _request_id(self, parent: Node | None) -> Iterator[str]:
        """Yield the id of the conversation, or a new one if another turn uses it at the same time."""
        name = self._request_ids.get(parent)
        if name is None or name in self._used_request_ids:
            name = uuid4().hex
        self._used_request_ids.add(name)
        try:
            yield name
        finally:
            self._used_request_ids.discard(name)

    def _until_stop(self, sampled: Sampled, stops: list[str]) -> Sampled:
        """Return a turn that took several requests up to the token that completes a stop string.

        The engine stops there, except if new weights interrupted the turn within the string: it looks for stops in the
        part that follows. Tokens beyond the stop answer what no client asked.
        """

        def has_stop(count: int) -> bool:
            text = self._decode(sampled.ids[:count])
            return any(stop in text for stop in stops)

        if not has_stop(len(sampled.ids) - 1):
            return sampled
        kept = bisect.bisect_left(range(len(sampled.ids)), True, key=has_stop)
        spans = [(begin, min(end, kept), version) for begin, end, version in sampled.spans if begin < kept]
        log_probs = sampled.log_probs and sampled.log_probs[:kept]
        return replace(sampled, ids=sampled.ids[:kept], log_probs=log_probs, spans=spans)
