"""How an agent is started: a function of Python, a command, or an agent that comes from outside and takes the task.

A starter knows nothing of tokens or rewards. It gives an agent its task and its endpoint, waits, and says whether the
agent ended well. Whatever happens, nothing of the agent is left afterwards.
"""

import asyncio
import contextlib
import functools
import inspect
import json
import logging
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, BinaryIO, Protocol
from urllib.parse import urlsplit

from verl_ext.environments import threads
from verl_ext.environments.threads import in_thread
from verl_ext.episode import CallResult
from verl_ext.settings.objects import load_object

logger = logging.getLogger(__name__)
logger.setLevel(os.getenv("VERL_LOGGING_LEVEL", "WARN"))

GRACE_S = 5.0  # in which an agent that is cancelled must end
KEPT_OUTPUT = 4000  # characters of what a command printed, from its end
MAX_OUTPUT, CHECK_S = 64 << 20, 1.0  # bytes of it on the disk, and after how many seconds they are looked at again
ROUNDS = 20  # of looking for processes that a command left behind
_SCRIPT_FRAMES = 8  # of a traceback


# Becomes the command that follows, whose process group also has a process that kills it when the pipe $0 ends.
_WATCHED = '( { cat "/dev/fd/$0" > /dev/null; kill -KILL 0; } & ); exec "$@"'


class AgentCrashed(Exception):
    """The agent raised, or its command failed; the text says how, with the traceback or the end of the output."""


class Endpoint(Protocol):
    """Where an agent asks (gateway/server.py): `base_url` ends with /v1, `api_key` is a secret of the episode."""

    @property
    def base_url(self) -> str: ...
    @property
    def api_key(self) -> str: ...
    @property
    def model(self) -> str: ...

    async def call(self, name: str, arguments: dict[str, Any]) -> CallResult: ...


class Starter(Protocol):
    """One way to start agents; an object for all episodes of a worker."""

    def place(self) -> contextlib.AbstractAsyncContextManager[Callable[[dict, Endpoint], Awaitable[None]]]:
        """Return a context that waits until an agent can be started, which is not the agent's time. Its value plays
        one episode: it is given task and endpoint, and returns when the agent has ended well.

        It raises `AgentCrashed`. It may be cancelled.
        """
        ...


class AgentEndpoint:
    """What a coroutine function gets as `endpoint`."""

    def __init__(self, endpoint: Endpoint):
        self._endpoint = endpoint
        self.base_url, self.api_key, self.model = endpoint.base_url, endpoint.api_key, endpoint.model

    def openai(self) -> Any:
        """Return an `openai.AsyncOpenAI` for this endpoint. All share connections; a new client is slow."""
        shared = _async_client(asyncio.get_running_loop())
        return shared.with_options(base_url=self.base_url, api_key=self.api_key)

    async def call(self, name: str, arguments: Mapping[str, Any]) -> CallResult:
        """Call a tool of the episode's environment; `output` of the result is what it says."""
        return await self._endpoint.call(name, dict(arguments))


class ThreadEndpoint:
    """What a function gets as `endpoint` that is no coroutine function: the same, but its methods wait."""

    def __init__(self, endpoint: Endpoint, loop: asyncio.AbstractEventLoop):
        self._endpoint, self._loop = endpoint, loop
        self.base_url, self.api_key, self.model = endpoint.base_url, endpoint.api_key, endpoint.model

    def openai(self) -> Any:
        """Return an `openai.OpenAI` for this endpoint."""
        return _client().with_options(base_url=self.base_url, api_key=self.api_key)

    def call(self, name: str, arguments: Mapping[str, Any]) -> CallResult:
        """As `AgentEndpoint.call`."""
        return asyncio.run_coroutine_threadsafe(self._endpoint.call(name, dict(arguments)), self._loop).result()


@functools.lru_cache(maxsize=4)
def _async_client(loop: asyncio.AbstractEventLoop) -> Any:
    import openai

    http = openai.DefaultAsyncHttpxClient(trust_env=False)  # a proxy does not reach this process
    return openai.AsyncOpenAI(base_url="http://127.0.0.1", api_key="none", timeout=None, http_client=http)


@functools.lru_cache(maxsize=1)
def _client() -> Any:
    import openai

    http = openai.DefaultHttpxClient(trust_env=False)
    return openai.OpenAI(base_url="http://127.0.0.1", api_key="none", timeout=None, http_client=http)


class FunctionStarter:
    """Runs `async def agent(task, endpoint)` in the worker's event loop, or `def agent(task, endpoint)` in a thread.

    A function in a thread cannot be stopped: after the end of its episode, its next request is refused.

    Args:
        max_threads: that play at a time.
    Raises:
        ValueError: the function cannot be loaded.
    """

    def __init__(self, where: str, max_threads: int):
        self._agent = load_agent(where)
        self._free = asyncio.Semaphore(max_threads)
        call = getattr(self._agent, "__call__", None)  # noqa: B004 (of an object whose class defines it)
        self._is_coroutine = inspect.iscoroutinefunction(self._agent) or inspect.iscoroutinefunction(call)

    @asynccontextmanager
    async def place(self) -> AsyncIterator[Callable[[dict, Endpoint], Awaitable[None]]]:
        async with contextlib.nullcontext() if self._is_coroutine else self._free:
            yield self._play

    async def _play(self, task: dict, endpoint: Endpoint) -> None:
        loop = asyncio.get_running_loop()
        if self._is_coroutine:
            running = asyncio.ensure_future(_without_exit(self._agent(task, AgentEndpoint(endpoint))))
        else:
            running = in_thread(functools.partial(self._agent, task, ThreadEndpoint(endpoint, loop)))
        running.add_done_callback(lambda done: done.cancelled() or done.exception())  # perhaps nobody waits any more
        try:
            await asyncio.wait([running])
        finally:
            if not running.done():
                running.cancel()
                if (await asyncio.wait([running], timeout=GRACE_S))[1]:
                    logger.warning("An agent does not let itself be cancelled, and works on after its episode.")
        if running.cancelled():
            raise AgentCrashed("it cancelled itself")
        if error := running.exception():
            raise AgentCrashed(_shown(error)) from error


async def _without_exit(agent: Awaitable[Any]) -> None:
    """Wait for an agent. `exit` ends the agent, not the event loop, and the worker with it."""
    try:
        await agent
    except (SystemExit, KeyboardInterrupt) as error:
        raise RuntimeError(f"it raised {error!r}") from error


def load_agent(where: str) -> Callable:
    """Return the function that `retool.agent.run` names. Raises ValueError if there is none."""
    try:
        agent = load_object(where)
    except Exception as error:  # whatever the file raises
        raise ValueError(
            f"retool.agent.run is {where!r}, which cannot be loaded: {type(error).__name__}: {error}. Expected "
            "FILE.py:NAME or package.module:NAME of a function agent(task, endpoint)."
        ) from error
    try:
        inspect.signature(agent).bind("task", "endpoint")
    except TypeError as error:
        raise ValueError(
            f"retool.agent.run is {where!r}, which is no function of two arguments, (task, endpoint): {error}."
        ) from error
    return agent


def _shown(error: BaseException) -> str:
    """Return the end of a traceback, without the lines that start an agent."""
    frames = traceback.extract_tb(error.__traceback__)
    while frames and frames[0].filename in (__file__, threads.__file__):
        frames.pop(0)
    return "".join([*traceback.format_list(frames[-_SCRIPT_FRAMES:]), *traceback.format_exception_only(error)]).strip()


class CommandStarter:
    """Runs a command for each episode, in a process group of its own and a fresh folder.

    It reads the task as JSON from standard input, and finds its endpoint in OPENAI_BASE_URL, OPENAI_API_KEY and
    OPENAI_MODEL (ANTHROPIC_BASE_URL, ANTHROPIC_API_KEY). Exit status 0: it ended well. At the end it is killed with all
    processes that it started.

    Args:
        command: parts that name a file here are made absolute, because the command runs elsewhere.
        max_processes: that run at a time.
    Raises:
        ValueError: there is no such command.
    """

    def __init__(self, command: Sequence[str], max_processes: int):
        self._command = found_command(command)
        self._free = asyncio.Semaphore(max_processes)

    @asynccontextmanager
    async def place(self) -> AsyncIterator[Callable[[dict, Endpoint], Awaitable[None]]]:
        async with self._free:
            yield self._play

    async def _play(self, task: dict, endpoint: Endpoint) -> None:
        process = _Process(self._command, task, endpoint)
        running = in_thread(process.run)
        try:
            while not (await asyncio.wait([running], timeout=CHECK_S))[0]:
                process.cut_output()
            status, output = running.result()
        finally:
            while not running.done():  # cancelled: the thread ends when nothing is left of the command
                process.kill()
                await asyncio.wait([running], timeout=0.1)
        if status:
            how = f"killed by signal {-status}" if status < 0 else f"exit status {status}"
            raise AgentCrashed(f"{how}: {output}" if output else how)


def found_command(command: Sequence[str]) -> list[str]:
    """Return a command with absolute paths. Raises ValueError if it does not exist."""
    if shutil.which(command[0]) is None:
        raise ValueError(
            f"retool.agent.run is {list(command)!r}, but there is no command {command[0]!r} on PATH or from "
            f"{Path.cwd()}. Install it, or give its whole path."
        )
    first, *rest = command
    whole = str(Path(first).absolute()) if os.sep in first else first  # else found on PATH again
    return [whole, *(str(Path(part).absolute()) if Path(part).is_file() else part for part in rest)]


class _Process:
    """A command while it runs. `run` belongs to a thread, `kill` to any."""

    def __init__(self, command: Sequence[str], task: dict, endpoint: Endpoint):
        self._command, self._task, self._secret = command, task, endpoint.api_key
        root = endpoint.base_url.removesuffix("/v1")  # Anthropic's clients add /v1
        direct = ",".join(
            filter(None, (os.environ.get("NO_PROXY", os.environ.get("no_proxy")), urlsplit(root).hostname))
        )
        self._env = os.environ | {
            "OPENAI_BASE_URL": endpoint.base_url,
            "OPENAI_API_KEY": endpoint.api_key,
            "OPENAI_MODEL": endpoint.model,
            "ANTHROPIC_BASE_URL": root,
            "ANTHROPIC_API_KEY": endpoint.api_key,
            **{"NO_PROXY": direct, "no_proxy": direct},
        }
        self._lock = threading.Lock()
        self._printed: BinaryIO  # set together with `_group`
        self._group: int | None = None  # while its leader is not reaped, so that the number is no other process's
        self._is_killed = False

    def run(self) -> tuple[int, str]:
        """Return exit status (negative: a signal) and the end of the output, when nothing of the command is left."""
        with (
            tempfile.TemporaryDirectory(prefix="agent-", ignore_cleanup_errors=True) as folder,
            tempfile.TemporaryFile() as given,
            tempfile.TemporaryFile() as printed,
        ):
            given.write(json.dumps(self._task, ensure_ascii=False).encode("utf-8", "backslashreplace"))
            given.seek(0)
            with self._lock:
                if self._is_killed:
                    return -signal.SIGKILL, ""
                process = subprocess.Popen(
                    ["sh", "-c", _WATCHED, str(_life_of_worker()), *self._command],
                    stdin=given,
                    stdout=printed,
                    stderr=subprocess.STDOUT,
                    cwd=folder,
                    env=self._env,
                    start_new_session=True,
                    pass_fds=[_life_of_worker()],
                )
                self._group, self._printed = process.pid, printed
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
            self.kill()
            _kill_all_with(self._secret)
            with self._lock:
                self._group = None
                status = process.wait()
            size = printed.seek(0, os.SEEK_END)
            printed.seek(max(0, size - KEPT_OUTPUT))
            return status, printed.read().decode("utf-8", "replace").strip()

    def cut_output(self) -> None:
        """Forget what the command printed, if it is too much: a model's program may print without end."""
        with self._lock:
            if self._group is not None and os.fstat(self._printed.fileno()).st_size > MAX_OUTPUT:
                self._printed.seek(0)  # also where the command writes on
                self._printed.truncate()

    def kill(self) -> None:
        """Kill the process group; `run` then returns."""
        with self._lock:
            self._is_killed = True
            if self._group is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._group, signal.SIGKILL)


def _kill_all_with(secret: str) -> None:
    """Kill what has left its group, but still has the endpoint's key in its environment."""
    for _ in range(ROUNDS):  # one may have started another meanwhile
        if not (left := [*_with_key(secret)]):
            return
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


@functools.cache
def _life_of_worker() -> int:
    """Return the end of a pipe that can be read to its end when this process has ended, also if it was killed."""
    reading, _ = os.pipe()  # nobody else has the other end
    return reading


def _with_key(secret: str) -> Iterator[int]:
    """Yield the living processes with this key in their environment."""
    key = f"OPENAI_API_KEY={secret}".encode()
    for entry in os.scandir("/proc"):
        if not entry.name.isdecimal():
            continue
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if key in Path(entry.path, "environ").read_bytes().split(b"\0"):
                yield int(entry.name)
