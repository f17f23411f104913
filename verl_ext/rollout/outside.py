"""Agents that come from outside, perhaps from another machine, and take a task: the run's side of gateway/outside.py.

    GET  /task?wait=20     a task with its endpoint; 204 if there is none within so many seconds
    POST /s/NAME/end       the agent has ended: {"error": null}, or what went wrong

Both are routes of each worker's gateway. Each writes its address to a file in the folder `agents` of the run's folder.
"""

import asyncio
import atexit
import functools
import hmac
import json
import logging
import os
import socket
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

from verl_ext.rollout.starters import AgentCrashed, Endpoint
from verl_ext.settings import TOKEN, AgentSettings

logger = logging.getLogger(__name__)
logger.setLevel(os.getenv("VERL_LOGGING_LEVEL", "WARN"))

FOLDER = "agents"  # in the run's folder
WARN_S = 60.0  # without anyone who takes a task; then again each time
MAX_WAIT_S = 60.0  # of a request for a task


class NotTaken(Exception):
    """Whoever asked for a task had gone before it was handed out."""


@dataclass(eq=False)
class _Taker:
    """A request for a task."""

    answer: "asyncio.Future[dict]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    is_told: "asyncio.Future[None]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class OutsideStarter:
    """Hands tasks out.

    Args:
        settings: `max_processes` tasks are out at a time. With a `host` that other machines reach, the environment must
            have the token.
        run_folder: of the run.
    Raises:
        ValueError: it has none.
    """

    def __init__(self, settings: AgentSettings, run_folder: str | Path):
        self._token, self._folder = os.environ.get(TOKEN, ""), Path(run_folder) / FOLDER
        if problem := settings.token_problem(self._token):
            raise ValueError(problem)
        self._free = asyncio.Semaphore(settings.max_processes)
        self._takers: deque[_Taker] = deque()
        self._has_taker = asyncio.Event()
        self._waiting, self._quiet_since = 0, time.monotonic()
        self._out: dict[str, asyncio.Future[str | None]] = {}  # by the session's name: what went wrong
        self._file: Path | None = None

    def add_routes(self, app: web.Application) -> None:
        app.router.add_get("/task", self._hand_out)
        app.router.add_post("/s/{session}/end", self._end)

    def announce(self, url: str) -> None:
        """Write the address, for as long as this process lives."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for file in self._folder.glob(f"{socket.gethostname()}-*.json"):  # of workers that were killed
            if not Path("/proc", file.stem.rsplit("-", 2)[1]).exists():
                file.unlink(missing_ok=True)
        self._file = self._folder / f"{socket.gethostname()}-{os.getpid()}-{url.rpartition(':')[2]}.json"
        self._file.write_text(json.dumps({"url": url}))
        atexit.register(self.withdraw)
        where = f"{TOKEN} and " * bool(self._token) + f"verl_ext.gateway.outside.take({str(self._folder.parent)!r})"
        logger.warning("Agents can take tasks at %s, with %s.", url, where)

    def withdraw(self) -> None:
        """Remove the address."""
        if self._file is not None:
            self._file.unlink(missing_ok=True)
            atexit.unregister(self.withdraw)

    @asynccontextmanager
    async def place(self) -> AsyncIterator[Callable[[dict, Endpoint], Awaitable[None]]]:
        """Wait until somebody asks for a task; see `Starter`. What it yields also raises `NotTaken`."""
        async with self._free:
            taker = await self._next_taker()
            try:
                yield functools.partial(self._play, taker)
            finally:
                taker.answer.cancel()

    async def _next_taker(self) -> _Taker:
        self._waiting += 1
        try:
            while True:
                while self._takers:
                    if not (taker := self._takers.popleft()).answer.done():
                        self._quiet_since = time.monotonic()
                        return taker
                self._has_taker.clear()
                try:
                    async with asyncio.timeout(WARN_S):
                        await self._has_taker.wait()
                except TimeoutError:
                    self._warn()
        finally:
            self._waiting -= 1

    def _warn(self) -> None:
        if (quiet_s := time.monotonic() - self._quiet_since) >= WARN_S:
            self._quiet_since += WARN_S
            logger.warning(
                "No agent has asked for a task for %.0f s: %d tasks wait. Start agents that take them from the run's "
                "folder, %s.",
                *(quiet_s, self._waiting, self._folder.parent),
            )

    async def _play(self, taker: _Taker, task: dict, endpoint: Endpoint) -> None:
        ended = self._out[endpoint.api_key] = asyncio.get_running_loop().create_future()
        try:
            if taker.answer.done():
                raise NotTaken
            told = {"base_url": endpoint.base_url, "api_key": endpoint.api_key, "model": endpoint.model}
            taker.answer.set_result({"task": task, **told})
            await taker.is_told
            if error := await ended:
                raise AgentCrashed(error)
        finally:
            del self._out[endpoint.api_key]

    async def _hand_out(self, request: web.Request) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").removeprefix("Bearer ").strip()
        if self._token and not hmac.compare_digest(given.encode(), self._token.encode()):
            return web.json_response({"error": f"Expected the token of {TOKEN}: Authorization: Bearer ..."}, status=401)
        try:
            wait_s = min(max(float(request.query.get("wait", "20")), 0.0), MAX_WAIT_S)
        except ValueError:
            return web.json_response({"error": "Expected wait=SECONDS."}, status=400)
        taker = _Taker()
        self._takers.append(taker)
        self._has_taker.set()
        try:
            async with asyncio.timeout(wait_s):
                found = await asyncio.shield(taker.answer)
            response = web.json_response(found)
            await response.prepare(request)
            await response.write_eof()
            if request.transport is None or request.transport.is_closing():
                raise ConnectionResetError
            taker.is_told.set_result(None)
            return response
        except TimeoutError:
            taker.answer.cancel()
            return web.Response(status=204)
        except asyncio.CancelledError:
            if taker.answer.cancelled():  # its place is gone
                return web.Response(status=204)
            raise
        finally:
            taker.answer.cancel()
            if not taker.is_told.done():
                taker.is_told.set_exception(NotTaken())
                taker.is_told.exception()  # seen, also if nobody waits for it

    async def _end(self, request: web.Request) -> web.StreamResponse:
        try:
            said: Any = await request.json()
            error = said["error"]
            if not isinstance(error, str | None):
                raise TypeError
        except (ValueError, KeyError, TypeError):
            return web.json_response({"error": 'Expected {"error": null}, or a text in place of null.'}, status=400)
        ended = self._out.get(request.match_info["session"])
        if ended is None or ended.done():
            return web.json_response({"error": "There is no such session, or it has ended."}, status=410)
        ended.set_result(error)
        return web.json_response({})
