"""The server's side of execution: a zygote process, its workers, and the queue for them.

Nothing here knows of HTTP; what runs the code is in `zygote.py`, and what goes over a worker's socket in
`connection.py` and `worker.py`.
"""

import asyncio
import itertools
import json
import logging
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from verl_ext.sandbox.client import CONTROL_OUTPUT, CONTROL_PROGRAM
from verl_ext.sandbox.server.connection import (
    LostProgramError,
    SandboxError,
    Worker,
    ZygoteEndedError,
    digest,
    send_fd,
    with_blobs,
)
from verl_ext.sandbox.server.orphans import kill_below, kill_orphans

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

ZYGOTE = Path(__file__).with_name("zygote.py")
STALL_S = 1.0  # as worker.STALL_S
ANSWER_GRACE_S = 3.5  # a worker that says nothing for this long after the program's time limit is lost
CONTROL = {"code": CONTROL_PROGRAM, "stdin": None, "run_timeout": 5.0, "memory_limit_MB": -1, "files": {}}
CONTROL |= {"fetch_files": [], "echo_last_expression": False}
CONTROL_S = 1.5  # for the control program beside a program that was lost
ZYGOTE_END_S = 0.3  # for the end of a zygote to be seen, which takes its workers with it
MAX_REMEMBERED = 1024  # programs that were lost once
START_GRACE_S = 60.0  # a zygote first imports packages: 2 s, but more on a cold disk; after that it forks in 10 ms
STOP_GRACE_S = 5.0
# Not scipy, with which the fork of every program costs more, also of one that does not use it (docs/guides/sandbox.md).
PRELOAD = ("numpy", "sympy")
# All that a program sees. One BLAS thread and two malloc arenas: both reserve address space per thread and per core,
# so that on a large machine `import numpy` alone would be over a limit of 1024 MB.
ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "LANG": "C.UTF-8",
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "2",
}


async def within(seconds: float, awaited: Coroutine[Any, Any, Result]) -> Result:
    """Its result. Time in which this process stood still (a frozen container, SIGSTOP) for STALL_S does not count.

    Raises:
        TimeoutError: it took longer, and was cancelled.
    """
    task, loop = asyncio.create_task(awaited), asyncio.get_running_loop()
    try:
        while True:
            wait_s = min(seconds, STALL_S)
            due = loop.time() + wait_s
            if (await asyncio.wait([task], timeout=wait_s))[0]:
                return task.result()
            if loop.time() < due + STALL_S:
                seconds -= wait_s
            if seconds <= 0:
                raise TimeoutError
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait([task])  # it lets go of the socket


class QueueTimeoutError(Exception):
    """No worker became free within the request's queue budget; nothing ran."""


class Pool:
    """Runs requests in the workers of one zygote; both are started on demand, and again when they have died.

    Args:
        workers: programs that run at once; further requests wait in order of arrival.
        max_output_bytes: kept of stdout and of stderr, each; more is read, counted and cut.
        isolation: "auto" (all layers that work, at least one strong one), "full" (all) or "none" (resource limits).
        allow_subprocess: programs may start other programs.
        preload: packages to import before any program, if they are installed.
    """

    def __init__(
        self,
        workers: int,
        max_output_bytes: int,
        *,
        isolation: str = "auto",
        allow_subprocess: bool = False,
        preload: Sequence[str] = PRELOAD,
    ) -> None:
        self._slots = asyncio.Semaphore(workers)
        self._max_idle = workers
        self.waiting = self.running = 0  # requests
        self.restarts = {"zygote": 0, "worker": 0}  # of those that died or were killed
        self._root = Path(tempfile.mkdtemp(prefix="verl-sandbox-"))  # of the workers' folders
        self._options = {
            "root": str(self._root),
            "max_output_bytes": max_output_bytes,
            "isolation": isolation,
            "allow_subprocess": allow_subprocess,
            "preload": list(preload),
        }
        self.layers: list[str] = []  # as the newest worker told
        self.off: dict[str, str] = {}
        self._lost: dict[bytes, None] = {}  # programs that were lost once, by hash, oldest first
        self._removals: set[asyncio.Task] = set()  # of what dead workers left
        # Of workers. Programs get their users by them (isolation.py), and what counts by user, as RLIMIT_NPROC does, is
        # not to be shared with programs of another server on this machine.
        self._numbers = itertools.count(secrets.randbelow(1 << 16))
        self._idle: list[Worker] = []
        self._zygote: subprocess.Popen | None = None
        self._control_socket: socket.socket | None = None

    async def run(self, request: dict[str, Any], *, queue_timeout_s: float) -> tuple[dict[str, Any], float]:
        """Wait for a free slot, then `execute`; gives its result and the seconds waited. Raises as `slot` and it do."""
        async with self.slot(queue_timeout_s) as queue_time:
            return await self.execute(request, spare_s=queue_timeout_s - queue_time), queue_time

    @asynccontextmanager
    async def slot(self, queue_timeout_s: float) -> AsyncIterator[float]:
        """Wait for the right to execute, in order of arrival; gives the seconds waited. Raises QueueTimeoutError."""
        arrived = time.monotonic()
        self.waiting += 1
        try:
            async with asyncio.timeout(queue_timeout_s):
                await self._slots.acquire()
        except TimeoutError:
            raise QueueTimeoutError(f"no worker became free within {queue_timeout_s:g} s") from None
        finally:
            self.waiting -= 1
        self.running += 1
        try:
            yield time.monotonic() - arrived
        finally:
            self.running -= 1
            self._slots.release()

    async def execute(self, request: dict[str, Any], *, spare_s: float = 0.0) -> dict[str, Any]:
        """Run a request at once, past the queue.

        A program whose worker died or failed is run again. When the second worker does, too, while a control program
        runs well, the program is to blame: it counts as killed (return code -9).

        Args:
            request: the fields of `api.RunCodeRequest`, with `files` as {path: bytes}.
            spare_s: what the answer may take beyond run_timeout. A program that was lost later than this is not run
                again here; it is remembered, so that the client's next attempt counts as the second.
        Returns:
            status ("Finished" or "TimeLimitExceeded"), return_code, execution_time (s), stdout, stderr,
            files {path: memoryview}, not_fetched {path: why}, alive (of a session: it goes on).
        Raises:
            SandboxError: the zygote or the worker died or did not answer, or the program could not be set up.
            ZygoteEndedError: see there; not where a program could have done it.
        """
        started = time.monotonic()
        try:
            return await self._ended(request)
        except LostProgramError as first:
            failure = first
        if self._options["isolation"] == "none":  # any program may kill what it likes: a loss says nothing about one
            raise failure
        program = digest(request)
        if program not in self._lost:
            self._lost[program] = None
            if len(self._lost) > MAX_REMEMBERED:
                self._lost.pop(next(iter(self._lost)))
            if time.monotonic() - started > spare_s:
                raise failure
            try:
                return await self._ended(request)
            except LostProgramError as second:
                failure = second
        if why := await self._control():
            raise SandboxError(f"{failure}; a control program failed, too: {why}") from failure
        stderr = "Killed: the process that ran this program died with it, twice\n"
        return _blamed(request, "Finished", -signal.SIGKILL, stderr, time.monotonic() - started)

    async def _ended(self, request: dict[str, Any]) -> dict[str, Any]:
        """What a program gave that was not lost: whatever killed its worker before, the program did not."""
        result = await self._execute(request)
        if self._lost:
            self._lost.pop(digest(request), None)
        return result

    async def _execute(self, request: dict[str, Any]) -> dict[str, Any]:
        worker = await self.take_worker()
        healthy = False
        try:
            result = await self.call(worker, request | {"session": False})
            healthy = not result.pop("spent")
        finally:  # also when the client hangs up and this is cancelled
            if healthy and len(self._idle) < self._max_idle:
                self._idle.append(worker)
            else:
                worker.close()
        return result

    async def _control(self) -> str | None:
        """Run the control program past the queue; None when it ran as it should, else what it did instead."""
        try:
            async with asyncio.timeout(CONTROL_S):
                return wrong_with_control(await self._execute(CONTROL))
        except (SandboxError, TimeoutError) as exc:
            return str(exc) or f"it did not end within {CONTROL_S:g} s"

    async def take_worker(self) -> Worker:
        """A worker that nobody else uses; the caller closes it. Raises SandboxError."""
        while self._idle:
            worker = self._idle.pop()
            # One that outlived its zygote is not used: that end would later excuse a program which kills its worker.
            if worker.is_alive() and worker.zygote.poll() is None:
                return worker
            logger.error("an idle sandbox worker or its zygote died; starting another")
            worker.close()
            self.restarts["worker"] += 1
        return await self._start_worker()

    async def call(self, worker: Worker, request: dict[str, Any]) -> dict[str, Any]:
        """`execute` in a given worker; with `session`, its program stays for the next call if the result is `alive`.

        `spent` says that the worker can take no further request. A program that ran, and whose worker does not answer
        after the time limit, while a control program runs well, was stopped at that limit as far as anyone can tell.
        """
        try:
            header, blobs = await within(request["run_timeout"] + ANSWER_GRACE_S, worker.call(request))
        except (OSError, EOFError) as exc:  # TimeoutError is an OSError
            removal = self._discard(worker)
            if isinstance(exc, TimeoutError):  # what hangs may be the disk: the removal is not awaited
                failure = SandboxError("the worker that ran the program did not answer")
                if not worker.started:
                    raise failure from exc
                if why := await self._control():
                    raise SandboxError(f"{failure}; a control program failed, too: {why}") from exc
                stderr = "Killed: it did not end at its time limit\n"
                return _blamed(request, "TimeLimitExceeded", None, stderr, request["run_timeout"]) | {"spent": True}
            await removal
            message = f"the worker that ran the program died ({exc})"
            if await _has_ended(worker.zygote):
                raise self._zygote_ended(message) from exc
            raise (LostProgramError if worker.started else SandboxError)(message) from exc
        if "error" in header:
            raise (LostProgramError if worker.started and header["lost"] else SandboxError)(header["error"])
        if header["spent"]:
            self._discard(worker)
        return with_blobs(header, blobs)

    def _discard(self, worker: Worker) -> asyncio.Task:
        """Kill a worker that can take no request; the task removes the processes and files that it no longer can."""
        self.restarts["worker"] += 1
        zygote = worker.zygote.pid if worker.zygote.poll() is None else None  # else the id may be another's
        left = (zygote, worker.kill(), worker.folder)
        removal = asyncio.create_task(asyncio.to_thread(_remove_what_is_left, *left))
        self._removals.add(removal)
        removal.add_done_callback(self._removals.discard)
        return removal

    def _zygote_ended(self, message: str) -> SandboxError:
        """The error for a worker that went with its zygote: a ZygoteEndedError where no program can do that.

        The filter allows no fork, and no signal but to what is in the program's own namespace or is the program itself.
        Without it the client counts this failure as every other, so that no program can excuse itself by it.
        """
        is_safe = "seccomp" in self.layers and not self._options["allow_subprocess"]
        return (ZygoteEndedError if is_safe else SandboxError)(message)

    async def close(self) -> None:
        """Stop the zygote, which first waits for the end of every program, and remove all files."""
        for worker in self._idle:
            worker.close()
        if self._control_socket:
            self._control_socket.close()
        if self._zygote:
            try:
                await asyncio.to_thread(self._zygote.wait, STOP_GRACE_S)
            except subprocess.TimeoutExpired:
                await _kill_zygote(self._zygote, f"it did not stop within {STOP_GRACE_S:g} s")
        await asyncio.to_thread(shutil.rmtree, self._root, ignore_errors=True)

    async def _start_worker(self) -> Worker:
        """Have the zygote fork a worker; starts a zygote if there is none. Raises SandboxError."""
        if self._zygote is None or self._zygote.poll() is not None:
            if self._zygote is not None:
                self.restarts["zygote"] += 1
                logger.error("the sandbox zygote died (exit code %d); starting another", self._zygote.returncode)
            self._start_zygote()
        # Landlock lets a program look at any path that it knows, so that it must not guess another one's folder.
        name = f"{next(self._numbers)}-{secrets.token_hex(16)}"
        ours, theirs = socket.socketpair()
        worker = Worker(ours, self._root / name, self._zygote)
        try:
            with theirs:
                async with asyncio.timeout(START_GRACE_S):
                    await send_fd(self._control_socket, name.encode(), theirs.fileno())
            async with asyncio.timeout(START_GRACE_S):
                await worker.start()
            self.layers, self.off = worker.layers, worker.off
        except BaseException as exc:
            worker.close()
            message = f"the zygote did not start a worker ({exc!r})"
            if isinstance(exc, TimeoutError):
                await _kill_zygote(worker.zygote, f"it forked no worker within {START_GRACE_S:g} s")
                raise SandboxError(message) from exc
            if isinstance(exc, OSError | EOFError):
                raise (self._zygote_ended if await _has_ended(worker.zygote) else SandboxError)(message) from exc
            raise
        return worker

    def _start_zygote(self) -> None:
        if self._control_socket:
            self._control_socket.close()
        self._control_socket, zygote_end = socket.socketpair(type=socket.SOCK_SEQPACKET)
        self._control_socket.setblocking(False)  # a zygote that hangs, so that the buffer is full, hangs no server
        with zygote_end:
            fd = zygote_end.fileno()
            self._zygote = subprocess.Popen(
                [sys.executable, "-I", str(ZYGOTE), str(fd), json.dumps(self._options)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(fd,),
                env=ENVIRONMENT,
                cwd="/",
                start_new_session=True,  # Ctrl-C goes to the server, which stops it in order
            )


async def _has_ended(zygote: subprocess.Popen) -> bool:
    """Whether what killed a worker killed its zygote, too, which is no program's doing; an end takes a while."""
    await asyncio.sleep(ZYGOTE_END_S)
    return zygote.poll() is not None


async def _kill_zygote(zygote: subprocess.Popen, why: str) -> None:
    """Kill it and its workers. Not in the event loop: what is stuck in the kernel takes seconds, or never ends."""

    def kill() -> None:
        kill_below(zygote.pid)
        zygote.kill()
        with suppress(subprocess.TimeoutExpired):
            zygote.wait(STOP_GRACE_S)

    if zygote.poll() is None:  # else another request has killed it, and its id may be another's
        logger.error("killing the sandbox zygote: %s", why)
        await asyncio.to_thread(kill)


def _remove_what_is_left(zygote: int | None, worker: int, folder: Path) -> None:
    """Processes and files of a worker that was killed; see `kill_orphans`. Closes `worker`."""
    try:
        kill_orphans(zygote, worker)
    finally:
        os.close(worker)
    shutil.rmtree(folder, ignore_errors=True)


def wrong_with_control(result: dict[str, Any]) -> str | None:
    """What the control program did instead of what it should; None for nothing."""
    return None if result["stdout"] == CONTROL_OUTPUT else f"{CONTROL_PROGRAM} gave {result}"


def _blamed(
    request: dict[str, Any], status: str, return_code: int | None, stderr: str, execution_time: float
) -> dict[str, Any]:
    """The result of a program of which nothing is left but that it was lost by its own doing."""
    return {
        "status": status,
        "return_code": return_code,
        "execution_time": execution_time,
        "stdout": "",
        "stderr": stderr,
        "alive": False,
        "files": {},
        "not_fetched": dict.fromkeys(request["fetch_files"], "the program was lost"),
    }
