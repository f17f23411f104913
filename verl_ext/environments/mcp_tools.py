"""The environment `mcp`: the tools of a server that speaks the Model Context Protocol. Needs the extra `mcp`.

    retool.environment: {name: mcp, command: [uvx, mcp-server-time]}                # one process for each episode
    retool.environment: {name: mcp, url: "http://127.0.0.1:9000/mcp", tools: [look_up]}

Whose error a failed call is: what a tool reports as its error, and arguments that the server refuses, are the model's.
If the server does not answer in time, ends or breaks, it is the infrastructure's failure; except that only the calls of
an episode can break a process of the episode's own, so that this counts as the model's error, too.
"""

import asyncio
import functools
import json
import os
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from verl_ext.environments.base import Environment, Opening
from verl_ext.environments.mcp_connection import Connection, Server, Unreachable
from verl_ext.environments.tool_errors import ToolUnavailable
from verl_ext.episode import CallResult
from verl_ext.protocols.base import Call, format_output

MAX_CHARS = 1_000_000  # of an answer
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")  # as OpenAI's form of a schema wants it
_ARGUMENTS = (-32602, -32601)  # JSON-RPC's invalid parameters and unknown method: the call is at fault
_PROTOCOL = range(-32768, -31999)  # reserved by JSON-RPC; other codes are an application's own


class Mcp(Environment):
    """An episode with the tools of one server.

    Args:
        command: program and arguments of a server that speaks over its standard input and output.
        url: of a server that speaks streamable HTTP, in place of `command`.
        env: environment variables of the process, besides a few such as PATH and HOME.
        cwd: its folder.
        headers: of HTTP requests, such as {Authorization: "Bearer ${oc.env:TOKEN}"}.
        tools: names of the tools that episodes have; None: all.
        shared: one session (and process) for all episodes of a worker process, in place of one for each episode.
        start_s: seconds until a server must have listed its tools.
        call_s: seconds that a call may take.
    Raises:
        ValueError: a setting cannot be used.
    """

    call_s: float

    def __init__(
        self,
        config: Any = None,
        *,
        command: Sequence[str] = (),
        url: str = "",
        env: Mapping[str, Any] | None = None,
        cwd: str | None = None,
        headers: Mapping[str, str] | None = None,
        tools: Sequence[str] | None = None,
        shared: bool = False,
        start_s: float = 30.0,
        call_s: float = 60.0,
    ):
        super().__init__(config)
        if isinstance(command, str) or bool(command) == bool(url):
            raise ValueError("mcp: expected either `command`, a list such as [python, server.py], or `url`.")
        if url and not url.startswith(("http://", "https://")):
            raise ValueError(f"mcp: url is {url!r}; expected one such as http://127.0.0.1:9000/mcp.")
        if not (start_s > 0 and call_s > 0):
            raise ValueError(f"mcp: start_s is {start_s} and call_s is {call_s}; expected numbers above 0.")
        words = tuple(map(str, command))
        if words and not shutil.which(words[0] if "/" not in words[0] else str(Path(cwd or ".", words[0]).absolute())):
            raise ValueError(f"mcp: there is no program {words[0]!r} here. Install it, or correct `command`.")
        texts = [tuple((str(name), str(value)) for name, value in (each or {}).items()) for each in (env, headers)]
        self._server = Server(words, url, texts[0], cwd, texts[1], start_s, "" if url else _log(config))
        self._wanted, self._shared, self.call_s = None if tools is None else tuple(tools), shared, call_s
        self._connection: Connection | None = None

    @classmethod
    def schemas(cls, config: Any = None, **settings: Any) -> dict[str, dict]:
        """Return the schemas of the tools, for which it connects to the server once in a process.

        Raises:
            ValueError: it cannot be reached, or has no such tools, or the extra `mcp` is not installed.
        """
        environment = cls(config, **settings)
        return _schemas(_tools_of(environment._server), environment._wanted, environment._server)

    async def open(self, task: Mapping[str, Any]) -> Opening:
        """Begin a session, or join the shared one.

        Raises:
            ToolUnavailable: the server cannot be started or reached.
            ValueError: it no longer has a tool of `tools`.
        """
        self._connection = _joined(self._server) if self._shared else Connection(self._server)
        self._connection.users += 1
        try:
            tools = await self._connection.tools()
        except Unreachable as error:
            raise ToolUnavailable(f"mcp: {_told(self._server, error)}") from error
        return Opening(list(task["raw_prompt"]), _schemas(tools, self._wanted, self._server))

    async def call(self, call: Call) -> CallResult:
        """Make one call; see the module for whose error a failure is."""
        import mcp

        assert self._connection is not None  # since `open`
        started, is_own = time.perf_counter(), not self._shared and not self._server.url
        try:
            result = await self._connection.call(call.tool, call.arguments, self.call_s)
        except Unreachable as error:
            if not is_own:
                return CallResult("", failure=f"{call.tool}: {_told(self._server, error)}")
            said, kind = f"{error.kind}: {error}", error.kind
        except mcp.MCPError as error:
            if not is_own and error.code in _PROTOCOL and error.code not in _ARGUMENTS:
                return CallResult("", failure=f"{call.tool}: {_told(self._server, error)}")
            said, kind = f"ToolError: {error.message}", "ToolError"
        else:
            kind = "ToolError" if result.is_error else None
            said = "ToolError: " * result.is_error + _text(result)
        return CallResult(format_output(said[:MAX_CHARS], ""), error=kind, run_s=time.perf_counter() - started)

    async def close(self) -> None:
        """End the session; a shared one if no other episode has it."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.users -= 1
            if not connection.users:
                await connection.aclose()


_SHARED: dict[tuple[asyncio.AbstractEventLoop, Server], Connection] = {}  # the newest of each server


def _joined(server: Server) -> Connection:
    key = (asyncio.get_running_loop(), server)
    if key not in _SHARED or _SHARED[key].is_lost:
        _SHARED[key] = Connection(server)
    return _SHARED[key]


def _schemas(tools: Sequence[Any], wanted: Sequence[str] | None, server: Server) -> dict[str, dict]:
    """Return the schemas of the server's tools in OpenAI's form: of those that are wanted."""
    found = {tool.name: tool for tool in tools}
    if missing := sorted(set(wanted or ()) - found.keys()):
        raise ValueError(f"mcp: {server} has no tool {missing[0]!r}; it has {', '.join(sorted(found)) or 'none'}.")
    names = list(found) if wanted is None else list(wanted)
    if bad := [name for name in names if not _NAME.fullmatch(name)]:
        raise ValueError(
            f"mcp: {server} has a tool {bad[0]!r}, which no model can call by name. Choose others by `tools`."
        )
    return {
        name: {
            "type": "function",
            "function": {
                "name": name,
                "description": found[name].description or "",
                "parameters": found[name].input_schema or {"type": "object", "properties": {}},
            },
        }
        for name in names
    }


@functools.cache
def _tools_of(server: Server) -> list[Any]:
    """Return the tools of a server, by a connection of its own in another thread: this one may have an event loop."""
    told: list[Any] = []

    async def ask() -> list[Any]:
        connection = Connection(server)
        try:
            return await connection.tools()
        finally:
            await connection.aclose()

    def run() -> None:
        try:
            told.append(asyncio.run(ask()))
        except (Unreachable, ImportError) as error:
            told.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if not told:
        raise RuntimeError(f"mcp: {server} could not be asked for its tools; see the error above.")
    if isinstance(told[0], ImportError):
        raise ValueError(f"mcp: {told[0]}. Install the extra: pip install 'verl-retool[mcp]'.") from told[0]
    if isinstance(told[0], Unreachable):
        raise ValueError(f"mcp: {_told(server, told[0])}. Start it, or correct the settings.") from told[0]
    return told[0]


def _told(server: Server, error: Exception) -> str:
    return f"{server}: {error}" + (f" (its messages: {server.log})" if server.log else "")


def _log(config: Any) -> str:
    """Return the file for the standard error of the servers of this process: in the run's folder, if it has one."""
    folder = OmegaConf.select(config, "trainer.default_local_dir") if OmegaConf.is_config(config) else None
    folder = folder or Path(tempfile.gettempdir(), f"verl-retool-{os.getuid()}")
    return str(Path(folder, "mcp", f"{os.getpid()}.log").absolute())


def _text(result: Any) -> str:
    """Return an answer as text; what is none is named."""
    parts = []
    for block in result.content:
        if block.type == "text":
            parts.append(block.text)
        elif block.type == "resource" and hasattr(block.resource, "text"):
            parts.append(block.resource.text)
        else:
            parts.append(f"[{block.type}, not shown]")
    if not parts and result.structured_content is not None:
        parts.append(json.dumps(result.structured_content, ensure_ascii=False))
    return "\n".join(parts)
