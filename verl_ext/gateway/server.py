"""The gateway's HTTP server: an OpenAI-compatible base_url for agents, one session for each episode.

    gateway = Gateway(generate, template)
    await gateway.start()
    endpoint = gateway.open({"temperature": 1.0}, max_context=4096, max_turns=64)
    ...                                    # an agent talks to endpoint.base_url
    session = await gateway.seal(endpoint)

A session is found by the path of its URL, or by the API key; both are its random name, the only secret. Whatever a
client sends, it can hurt its session only.
"""

import asyncio
import hashlib
import json
import logging
import secrets
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import msgspec
from aiohttp import web

from verl_ext.episode import CallResult
from verl_ext.gateway import anthropic, chat
from verl_ext.gateway.asked import decoded
from verl_ext.gateway.messages import TOO_LONG, TURN_LIMIT, Refused
from verl_ext.gateway.rooms import CallTool, Room, ended, failed
from verl_ext.gateway.session import Generate, Session
from verl_ext.gateway.template import Template

logger = logging.getLogger(__name__)

KEEP_ALIVE_S = 3.0  # after which a stream begins, and between its comments while the turn is written
SAMPLING_HEADER, IGNORED_HEADER = "x-retool-sampling", "x-retool-ignored"
_BYTES_PER_TOKEN = 32  # of a body, as JSON; a body with more than that for each token of the context is not parsed
_FREE_BYTES = 1 << 17  # of a body, beyond that
_EVENTS, _JSON = "text/event-stream", "application/json"
_ROUTES = "/v1/chat/completions, /v1/messages, /v1/messages/count_tokens, /v1/models and /v1/tools/TOOL"

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Door = ModuleType  # chat or anthropic: `read`, `answer`, `events`, `refusal`, `event` of a format


class _Call(msgspec.Struct):
    """The body of a request to tools/NAME."""

    arguments: dict[str, Any]


_calls = msgspec.json.Decoder(_Call)


@dataclass(frozen=True, eq=False)
class Endpoint:
    """Where an agent of one session asks. `base_url` ends with /v1; `api_key` is the session's name, a secret."""

    base_url: str
    api_key: str
    model: str
    room: Room = field(repr=False)

    async def call(self, name: str, arguments: dict[str, Any]) -> CallResult:
        """Call a tool of the session, as a POST to tools/NAME does. Raises Refused: see `Room.call_tool`."""
        with self.room.clock.waiting():
            return await self.room.call_tool(name, arguments)


class Gateway:
    """See the module's docstring. All methods belong to the event loop that `start` was called in.

    Args:
        generate: samples one turn; it says in `Sampled.failed` that the servers failed, and raises only if we erred.
        model: the name that /v1/models tells; clients may name any.
        port: 0 takes a free one.
        keep_alive_s: see KEEP_ALIVE_S.
    Attributes:
        app: to add routes before `start`.
    """

    def __init__(
        self,
        generate: Generate,
        template: Template,
        *,
        model: str = "policy",
        host: str = "127.0.0.1",
        port: int = 0,
        keep_alive_s: float = KEEP_ALIVE_S,
    ):
        self._generate, self._template = generate, template
        self.model, self._host, self._port, self._keep_alive_s = model, host, port, keep_alive_s
        self._rooms: dict[str, Room] = {}
        self._url = ""
        self._starting: asyncio.Task[str] | None = None
        self._runner: web.AppRunner | None = None
        self.app = web.Application()
        for prefix in ("", "/s/{session}"):
            add = self.app.router.add_route
            add("POST", f"{prefix}/v1/chat/completions", self._guarded(self._serve, chat))
            add("POST", f"{prefix}/v1/messages", self._guarded(self._serve, anthropic))
            add("POST", f"{prefix}/v1/messages/count_tokens", self._guarded(self._count_tokens, anthropic))
            add("POST", f"{prefix}/v1/tools/{{tool}}", self._guarded(self._call_tool, chat))
            add("GET", f"{prefix}/v1/models", self._guarded(self._models, chat))

    async def start(self) -> str:
        """Listen, and return the base URL, without /v1. Further calls return it again."""
        if self._starting is None:
            self._starting = asyncio.ensure_future(self._listen())
        return await asyncio.shield(self._starting)

    def open(
        self,
        params: Mapping[str, Any],
        max_context: int,
        *,
        max_turns: int,
        call: CallTool | None = None,
    ) -> Endpoint:
        """Begin a session, after `start`.

        Args:
            params: of sampling, for `generate`; they win over a client's.
            max_context: tokens of a prompt and its turn.
            max_turns: that are sampled; a further request is refused with the code turn_limit.
            call: calls a tool of the run, by its name and arguments; it answers a name that it does not know.
        Raises:
            RuntimeError: the gateway was not started.
        """
        if not self._url:
            raise RuntimeError("The gateway has no address yet. Await start() before open().")
        name = secrets.token_urlsafe(24)
        session = Session(self._template, max_context, dict(params))
        room = Room(session, self._generate, model=self.model, max_turns=max_turns, call=call)
        self._rooms[name] = room
        return Endpoint(f"{self._url}/s/{name}/v1", name, self.model, room)

    async def seal(self, endpoint: Endpoint) -> Session:
        """End a session: requests that run are given up, and later ones are answered 410. It may be called again."""
        self._rooms.pop(endpoint.api_key, None)
        return await endpoint.room.seal()

    async def stop(self) -> None:
        """End all sessions, and listen no more."""
        rooms, self._rooms = self._rooms, {}
        await asyncio.gather(*(room.seal() for room in rooms.values()))
        if self._runner is not None:
            await self._runner.cleanup()

    async def _listen(self) -> str:
        self.app.router.add_route("*", "/{path:.*}", self._guarded(self._unknown, chat))  # after the routes of others
        # A handler whose client hangs up is cancelled: its answer is not delivered, and the agent's clock runs again.
        # Bodies are not unpacked: a small one may hold any size.
        self._runner = web.AppRunner(
            self.app, access_log=None, handler_cancellation=True, auto_decompress=False, shutdown_timeout=1.0
        )
        await self._runner.setup()
        await web.TCPSite(self._runner, self._host, self._port, backlog=1024).start()
        self._url = f"http://{self._host}:{self._runner.addresses[0][1]}"
        return self._url

    def _guarded(self, work: Callable[..., Awaitable[web.StreamResponse]], door: Door) -> Handler:
        """Return a handler that answers what `work` raises in the format of `door`."""

        async def handle(request: web.Request) -> web.StreamResponse:
            room = self._rooms.get(_name(request))
            try:
                return await work(request, door)
            except (ConnectionError, web.RequestPayloadError):  # the client has hung up, or its body breaks off
                return web.Response(status=400)
            except Refused as error:
                refused = error
                if room and error.code in (TOO_LONG, TURN_LIMIT):
                    room.refuse(error.code)
            except Exception as error:  # ours, whatever it is: the episode must not end as the agent's
                logger.exception("the gateway failed")
                refused = failed()
                if room:
                    room.error = room.error or error
            headers = {"x-should-retry": str(refused.status == 503).lower()}
            return _json(door.refusal(refused), headers, status=refused.status)

        return handle

    async def _serve(self, request: web.Request, door: Door) -> web.StreamResponse:
        """Answer a request for a turn, at once or by a stream, which begins after the first wait."""
        room = self._room(request)
        body = await _read(request, room.session.max_context)
        asked = door.read(body)
        retries = request.headers.get("x-stainless-retry-count", "0")
        pending = room.begin(
            asked,
            hashlib.blake2b(body, digest_size=16, key=door.__name__.encode()).digest(),
            key=request.headers.get("Idempotency-Key"),
            is_retry=retries != "0",
        )
        headers = {SAMPLING_HEADER: _told(room.session.params)}
        if asked.ignored:
            headers[IGNORED_HEADER] = ", ".join(asked.ignored)
        stream = None
        with room.clock.waiting(), pending.waited_for():
            done = await _wait(pending.task, self._keep_alive_s if asked.stream else None)
            if not done:
                stream = web.StreamResponse(headers=headers | {"Content-Type": _EVENTS, "Cache-Control": "no-cache"})
                await stream.prepare(request)
                while not done:
                    await stream.write(b": the model writes\n\n")
                    done = await _wait(pending.task, self._keep_alive_s)
        try:
            answer = room.result_of(pending.task)
        except Refused as error:
            if stream is None:
                raise
            await stream.write(door.event(door.refusal(error)))
            return stream
        data = door.events(answer) if asked.stream else msgspec.json.encode(door.answer(answer))
        if request.transport is None or request.transport.is_closing():  # what is written now is lost without an error
            raise ConnectionResetError("the client has hung up")
        if stream is None:
            stream = web.Response(body=data, content_type=_EVENTS if asked.stream else _JSON, headers=headers)
            await stream.prepare(request)
        else:
            await stream.write(data)
        await stream.write_eof()
        answer.node.delivered = True
        return stream

    async def _count_tokens(self, request: web.Request, door: Door) -> web.StreamResponse:
        room = self._room(request)
        asked = anthropic.read(await _read(request, room.session.max_context))
        return _json({"input_tokens": room.count_tokens(asked)})

    async def _call_tool(self, request: web.Request, door: Door) -> web.StreamResponse:
        room = self._room(request)
        call = decoded(_calls, await _read(request, room.session.max_context))
        with room.clock.waiting():
            result = await room.call_tool(request.match_info["tool"], call.arguments)
        if result.failure is not None:
            raise Refused(f"The tool failed: {result.failure}", 503, "tool_unavailable")
        return _json({"output": result.output, "error": result.error})

    async def _models(self, request: web.Request, door: Door) -> web.StreamResponse:
        model = {"id": self.model, "object": "model", "created": 0, "owned_by": "verl-retool"}
        model |= {"type": "model", "display_name": self.model, "created_at": "1970-01-01T00:00:00Z"}  # Anthropic's
        return _json({"object": "list", "data": [model], "has_more": False})

    async def _unknown(self, request: web.Request, door: Door) -> web.StreamResponse:
        raise Refused(f"{request.method} {request.path[:80]} is not served here, but {_ROUTES} are.", 404)

    def _room(self, request: web.Request) -> Room:
        room = self._rooms.get(_name(request))
        if room is None:
            raise ended()
        return room


def _name(request: web.Request) -> str:
    """Return the name of a request's session: of its path, or its API key."""
    if name := request.match_info.get("session"):
        return name
    key = request.headers.get("Authorization", "").removeprefix("Bearer ").strip()
    return key if key else request.headers.get("x-api-key", "").strip()


async def _read(request: web.Request, max_context: int) -> bytes:
    """Return the body, within a limit: parsing and encoding a larger one would hold up all sessions, in vain.

    Raises:
        Refused: it is larger than a prompt of `max_context` tokens can be, or it is packed.
    """
    encoding = request.headers.get("Content-Encoding", "identity")
    if encoding.lower() != "identity":
        raise Refused(f"Expected a body without Content-Encoding, got {encoding[:40]!r}.")
    limit, body = _FREE_BYTES + _BYTES_PER_TOKEN * max_context, bytearray()
    async for chunk in request.content.iter_any():
        body += chunk
        if len(body) > limit:
            what = f"The body has over {limit} bytes, more than a prompt of {max_context} tokens can have."
            raise Refused(what, code=TOO_LONG)
    return bytes(body)


def _json(data: Any, headers: Mapping[str, str] | None = None, *, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(data), status=status, content_type=_JSON, headers=headers)


async def _wait(task: asyncio.Task, timeout_s: float | None) -> bool:
    return bool((await asyncio.wait([task], timeout=timeout_s))[0])


def _told(params: Mapping[str, Any]) -> str:
    """Return sampling parameters as JSON, less those that are no plain values but the engine's."""
    return json.dumps({name: value for name, value in params.items() if isinstance(value, int | float | str)})
