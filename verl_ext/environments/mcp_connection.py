"""A connection to an MCP server (Model Context Protocol): over stdio to a process that it starts, or over HTTP.

Each has a task of its own, because the client's task groups must end in the task that began them, and an environment
is opened and closed in different ones. A process runs in a group with a shell that leads it, its keeper. The group is
killed when the connection closes; if this process dies, the kernel tells the keeper, which kills it. The standard error
goes to a log file.
"""

import asyncio
import logging
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)
logger.setLevel(os.getenv("VERL_LOGGING_LEVEL", "WARN"))

EXIT_S = 0.5  # that a server has to end by itself once its input is closed
CLOSE_S = 5.0  # within which a connection is closed

_CLOSED, _LATE = -32000, -32001  # codes of errors that are the client's own
# Becomes the keeper, whose pid is the one in the file. 1: PR_SET_PDEATHSIG.
_SHIM = f"""
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, {int(signal.SIGTERM)})
with open(sys.argv[1] + ".part", "w") as file:
    file.write(str(os.getpid()))
os.rename(sys.argv[1] + ".part", sys.argv[1])
os.execv("/bin/sh", ["sh", "-c", sys.argv[2], os.path.dirname(sys.argv[1]), *sys.argv[3:]])
"""
# Runs the server with its own standard input and output, and ends with it. SIGTERM kills the group; $0 is the folder.
_KEEPER = """trap 'rm -r "$0"; kill -9 0' TERM; exec 3<&0; "$@" <&3 3<&- & exec <&- >&- 3<&-; wait $!"""
_ENDED = "the server has ended; its state is lost"


class Unreachable(Exception):
    """The server could not be started or reached, or has ended; the message says which."""

    kind = "ConnectionError"


class Late(Unreachable):
    """The server did not answer in time."""

    kind = "TimeoutError"


class BadAnswer(Unreachable):
    """The answer breaks the protocol, or the tool's own output schema."""

    kind = "AnswerError"


@dataclass(frozen=True)
class Server:
    """Where a server is: a `command` to start it, or a `url`.

    Attributes:
        env: further environment variables of the process, besides a few such as PATH and HOME.
        headers: of each HTTP request.
        start_s: seconds until it must have listed its tools.
        log: file that the standard error of the process is appended to.
    """

    command: tuple[str, ...] = ()
    url: str = ""
    env: tuple[tuple[str, str], ...] = ()
    cwd: str | None = None
    headers: tuple[tuple[str, str], ...] = ()
    start_s: float = 30.0
    log: str = os.devnull

    def __str__(self) -> str:
        return self.url or " ".join(self.command)


class Connection:
    """A session with a server.

    Attributes:
        users: episodes that share it.
    """

    def __init__(self, server: Server):
        self.server, self.users = server, 0
        self._task: asyncio.Task | None = None
        loop = asyncio.get_running_loop()
        self._ready, self._stop = loop.create_future(), loop.create_future()  # its tools; None when it is to end
        self._client: Any = None
        self._is_late = False

    @property
    def is_lost(self) -> bool:
        """Return whether it has ended, or is to end."""
        return self._stop.done() or (self._task is not None and self._task.done())

    async def tools(self) -> list[Any]:
        """Return the server's tools, as `mcp_types.Tool`; connects first.

        Raises:
            Unreachable: see there.
            ImportError: the extra `mcp` is not installed.
        """
        if self._task is None:
            self._task = asyncio.create_task(self._live())
        await asyncio.wait([self._ready, self._task], return_when="FIRST_COMPLETED")
        return await (asyncio.shield(self._ready) if self._ready.done() else self._task)

    async def call(self, tool: str, arguments: dict[str, Any], timeout_s: float) -> Any:
        """Return the `mcp_types.CallToolResult` of a call.

        Raises:
            mcp.MCPError: the server refused the call.
            Unreachable: see there.
        """
        import mcp

        if self.is_lost:
            raise Unreachable(_ENDED)
        try:
            async with asyncio.timeout(timeout_s + EXIT_S):
                return await self._client.call_tool(tool, arguments, read_timeout_seconds=timeout_s)
        except TimeoutError as error:
            raise Late(f"no answer within {timeout_s:g} s") from error
        except (RuntimeError, ValueError) as error:  # what the client raises of it: pydantic's are ValueErrors
            why = str(error).partition("\n")[0]
            raise BadAnswer(f"the server's answer cannot be used: {why:.300}") from error
        except mcp.MCPError as error:
            if error.code == _LATE:
                raise Late(f"no answer within {timeout_s:g} s") from error
            if error.code == _CLOSED:
                self._end()
                raise Unreachable(_ENDED) from error
            raise

    async def aclose(self) -> None:
        """End the session, and the process with its group. A second close does nothing."""
        self._end()
        if self._task is None:
            return
        if not self._ready.done() and self.server.url:  # a process is killed by `_watch`
            self._task.cancel()
        await asyncio.wait([self._task])
        if self._ready.done() and not self._ready.cancelled():
            self._ready.exception()  # was told to whoever waited

    def _end(self) -> None:
        if not self._stop.done():
            self._stop.set_result(None)

    async def _live(self) -> None:
        import mcp

        ready, loop = self._ready, asyncio.get_running_loop()
        start_s = self.server.start_s if self.server.url else None  # of a process: see `_watch`
        try:
            async with (
                asyncio.timeout(start_s) as limit,
                self._transport() as transport,
                mcp.Client(transport, cache=None) as client,
            ):
                self._client, tools, cursor = client, [], None
                while cursor is not None or not tools:
                    page = await client.list_tools(cursor=cursor)
                    tools += page.tools
                    if (cursor := page.next_cursor) is None:
                        break
                limit.reschedule(None)
                ready.set_result(tools)
                await self._stop
                limit.reschedule(loop.time() + CLOSE_S)
        except asyncio.CancelledError:
            if not ready.done():
                ready.cancel()
            raise
        except Exception as error:  # the client's groups raise whatever their tasks do
            cause = error
            while isinstance(cause, ExceptionGroup):
                cause = cause.exceptions[0]
            if ready.done():
                logger.warning("The connection to the MCP server %s ended: %r", self.server, cause)
            elif self._is_late or isinstance(cause, TimeoutError):
                ready.set_exception(Late(f"it did not list its tools within {self.server.start_s:g} s"))
            else:
                ready.set_exception(Unreachable(f"{type(cause).__name__}: {cause}"))

    async def _watch(self, pid: Path) -> None:
        """Kill a process that does not start, or end, in time. Cancelling its start instead could lose it."""
        await asyncio.wait([self._ready, self._stop], timeout=self.server.start_s, return_when="FIRST_COMPLETED")
        if self._ready.done():
            await asyncio.wait([self._stop])
            await asyncio.sleep(EXIT_S)
        self._is_late = not self._stop.done()
        while not pid.exists():
            await asyncio.sleep(0.01)
        _kill_group(pid)

    @asynccontextmanager
    async def _transport(self) -> AsyncIterator[Any]:
        from mcp.client.stdio import StdioServerParameters, stdio_client
        from mcp.client.streamable_http import streamable_http_client
        from mcp.shared._httpx_utils import create_mcp_http_client

        if self.server.url:
            async with create_mcp_http_client(headers=dict(self.server.headers)) as http:
                yield streamable_http_client(self.server.url, http_client=http)
            return
        Path(self.server.log).parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="retool-mcp-") as folder, open(self.server.log, "a") as log:
            pid = Path(folder, "pid")
            args = ["-IS", "-c", _SHIM, str(pid), _KEEPER, *self.server.command]
            watching = asyncio.create_task(self._watch(pid))
            try:
                server = {"command": sys.executable, "args": args, "env": dict(self.server.env), "cwd": self.server.cwd}
                yield stdio_client(StdioServerParameters(**server), errlog=log)
            finally:
                watching.cancel()
                _kill_group(pid)  # what it started and left behind


def _kill_group(pid: Path) -> None:
    with suppress(FileNotFoundError, ValueError, ProcessLookupError):  # not started yet, or gone
        os.killpg(int(pid.read_text()), signal.SIGKILL)
