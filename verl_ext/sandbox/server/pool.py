"""The server's side of execution: a zygote process, its workers, and the queue for them.

Nothing here knows of HTTP. The code runs in `zygote.py`; `connection.py` and `worker.py` are the two ends of a worker's
socket.
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
    WorkerFailedError,
    digest,
    send_fd,
)
from verl_ext.sandbox.server.orphans import kill_below, kill_orphans
from verl_ext.sandbox.server.wire import STALL_S

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

ZYGOTE = Path(__file__).with_name("zygote.py")
WORKER_GRACE_S = 3.5  # a worker that says nothing for this long after the program's time limit is lost
CONTROL = {"code": CONTROL_PROGRAM, "stdin": None, "run_timeout": 5.0, "memory_limit_MB": -1, "files": {}}
CONTROL |= {"fetch_files": [], "echo_last_expression": False}
CONTROL_S = 1.5  # for the control program that runs after a program was lost
ZYGOTE_END_S = 0.3  # for the end of a zygote, which takes its workers with it, to show
# So many losses of a program in a row are its own doing. Without isolation another program can kill its worker, so it
# takes more, each in another attempt of the client (`max_attempts`), after a pause.
LOSSES_TO_BLAME, LOSSES_WITHOUT_ISOLATION = 2, 4
MAX_REMEMBERED = 1024  # programs that were lost
START_GRACE_S = 60.0  # a zygote first imports packages: 2 s, but more on a cold disk; after that it forks in 10 ms
STOP_GRACE_S = 5.0
# Not scipy: with it every fork costs more, even for a program that does not use it (docs/guides/sandbox.md).
PRELOAD = ("numpy", "sympy")
# All that a program sees. One BLAS thread and two malloc arenas, because both reserve address space per thread and per
# core: on a large machine, a mere `import numpy` would exceed a limit of 1024 MB.
ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "LANG": "C.UTF-8",
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "2",
}


async def within(seconds: float, awaited: Coroutine[Any, Any, Result]) -> Result:
    """Return the awaited result. Time in which this process stood still for STALL_S (SIGSTOP, a frozen container) does
    not count.

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
    """A request that ran nothing, because no worker became free within its queue budget."""


class Pool:
    """Runs requests in the workers of one zygote; both are started on demand, and again when they have died.

    Args:
        workers: programs that run at once; further requests wait in order of arrival.
        max_output_bytes: kept of stdout and of stderr each; more is read, counted and cut.
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
        self.layers: list[str] = []  # as the newest worker reported
        self.off: dict[str, str] = {}
        self._losses: dict[bytes, int] = {}  # in a row, of programs by hash, the newest last
        self._removals: set[asyncio.Task] = set()  # of what dead workers left behind
        # Numbers of workers, which give programs their users (isolation.py). They start at random, because programs of
        # another server on this machine must not share limits that count by user, such as RLIMIT_NPROC.
        self._numbers = itertools.count(secrets.randbelow(1 << 16))
        self._idle: list[Worker] = []
        self._zygote: subprocess.Popen | None = None
        self._control_socket: socket.socket | None = None

    async def run(self, request: dict[str, Any], *, queue_timeout_s: float) -> tuple[dict[str, Any], float]:
        """Wait for a free slot, then `execute`; return its result and the seconds waited. Raises what the two raise."""
        async with self.slot(queue_timeout_s) as queue_time:
            return await self.execute(request, spare_s=queue_timeout_s - queue_time), queue_time

    @asynccontextmanager
    async def slot(self, queue_timeout_s: float) -> AsyncIterator[float]:
        """Wait for the right to execute, in order of arrival; yield the seconds waited. Raises QueueTimeoutError."""
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

        A program whose worker died or failed is run again. If the next worker also dies or fails while a control
        program runs well, the program is to blame: it counts as killed (return code -9).

        Args:
            request: the fields of `api.RunCodeRequest`, with `files` as {path: bytes}.
            spare_s: what the answer may take beyond run_timeout. A program that was lost later than this is not run
                again here; it is remembered, so that the client's next attempt counts as the second.
        Returns:
            status ("Finished" or "TimeLimitExceeded"), return_code, execution_time (s), stdout, stderr,
            files {path: memoryview}, not_fetched {path: why}, alive (the session continues).
        Raises:
            SandboxError: the zygote or the worker died or did not answer, or the program could not be set up.
            LostProgramError: the program was lost, not yet often enough to be blamed.
        """
        started, is_isolated = time.monotonic(), self._options["isolation"] != "none"
        while True:
            try:
                result = await self._execute(request)
            except LostProgramError as exc:
                failure, losses = exc, self._count_loss(request)
            else:
                if self._losses:  # earlier ones were not its doing
                    self._losses.pop(digest(request), None)
                return result
            if losses >= (LOSSES_TO_BLAME if is_isolated else LOSSES_WITHOUT_ISOLATION):
                break
            if not is_isolated or time.monotonic() - started > spare_s:
                raise failure
        if why := await self._control():
            raise SandboxError(f"{failure}; a control program failed, too: {why}") from failure
        stderr = f"Killed: the process that ran this program died with it, {losses} times\n"
        return _blamed(request, "Finished", -signal.SIGKILL, stderr, time.monotonic() - started)

    def _count_loss(self, request: dict[str, Any]) -> int:
        """Remember a loss; return how many that makes in a row."""
        program = digest(request)
        losses = self._losses[program] = self._losses.pop(program, 0) + 1
        if len(self._losses) > MAX_REMEMBERED:
            self._losses.pop(next(iter(self._losses)))
        return losses

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
        """Run the control program past the queue; return None if it ran as it should, else what it did instead."""
        try:
            async with asyncio.timeout(CONTROL_S):
                return wrong_with_control(await self._execute(CONTROL))
        except (SandboxError, TimeoutError) as exc:
            return str(exc) or f"it did not end within {CONTROL_S:g} s"

    async def take_worker(self) -> Worker:
        """Return a worker that nobody else uses; the caller closes it. Raises SandboxError."""
        while self._idle:
            worker = self._idle.pop()
            # One that outlived its zygote is not used: that end would later excuse a program that kills its worker.
            if worker.is_alive() and worker.zygote.poll() is None:
                return worker
            logger.error("an idle sandbox worker or its zygote died; starting another")
            worker.close()
            self.restarts["worker"] += 1
        return await self._start_worker()

    async def call(self, worker: Worker, request: dict[str, Any]) -> dict[str, Any]:
        """Execute a request in a given worker; with `session`, its program stays for the next call if it is `alive`.

        `spent` says that the worker can take no further request. If a program ran and its worker does not answer after
        the time limit, while a control program runs well, the program counts as stopped at that limit.
        """
        try:
            result = await within(request["run_timeout"] + WORKER_GRACE_S, worker.call(request))
        except TimeoutError as exc:
            self._discard(worker)  # the disk may be hanging: this is not awaited
            failure = SandboxError("the worker that ran the program did not answer")
            if not worker.started:
                raise failure from exc
            if why := await self._control():
                raise SandboxError(f"{failure}; a control program failed, too: {why}") from exc
            stderr = "Killed: it did not end at its time limit\n"
            return _blamed(request, "TimeLimitExceeded", None, stderr, request["run_timeout"]) | {"spent": True}
        except WorkerFailedError as exc:
            raise self._loss(worker, str(exc), by_program=exc.lost) from exc
        except Exception as exc:  # its socket closed; or it sent what no worker sends, perhaps by the program's doing
            await self._discard(worker)
            by_program = not await _has_ended(worker.zygote) or not self._zygote_is_safe()
            message = f"the worker that ran the program died ({exc or type(exc).__name__})"
            raise self._loss(worker, message, by_program=by_program) from exc
        if result["spent"]:
            self._discard(worker)
        return result

    def _discard(self, worker: Worker) -> asyncio.Task:
        """Kill a worker that can take no request; the returned task removes its processes and files in its place."""
        self.restarts["worker"] += 1
        zygote = worker.zygote.pid if worker.zygote.poll() is None else None  # else the id may be another's
        left = (zygote, worker.kill(), worker.folder)
        removal = asyncio.create_task(asyncio.to_thread(_remove_what_is_left, *left))
        self._removals.add(removal)
        removal.add_done_callback(self._removals.discard)
        return removal

    def _loss(self, worker: Worker, message: str, *, by_program: bool) -> SandboxError:
        """Return the error for a worker that can give no answer: a LostProgramError if its program may be the cause."""
        return (LostProgramError if by_program and worker.started else SandboxError)(message)

    def _zygote_is_safe(self) -> bool:
        """Return whether no program can end the zygote, so that its end excuses the program that it takes with it.

        The filter allows no fork, and signals only within the program's own namespace or to the program itself.
        """
        return "seccomp" in self.layers and not self._options["allow_subprocess"]

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
        # Landlock lets a program look at any path that it knows, so a folder's name must not be guessable.
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
                await _has_ended(worker.zygote)  # so that the next request starts another
                raise SandboxError(message) from exc
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
    """Return whether the zygote ended together with its worker; wait first, because its end takes a while to show."""
    await asyncio.sleep(ZYGOTE_END_S)
    return zygote.poll() is not None


async def _kill_zygote(zygote: subprocess.Popen, why: str) -> None:
    """Kill a zygote and its workers, in a thread: a process stuck in the kernel takes seconds to end, or never does."""

    def kill() -> None:
        kill_below(zygote.pid)
        zygote.kill()
        with suppress(subprocess.TimeoutExpired):
            zygote.wait(STOP_GRACE_S)

    if zygote.poll() is None:  # else another request has killed it, and its id may be another's
        logger.error("killing the sandbox zygote: %s", why)
        await asyncio.to_thread(kill)


def _remove_what_is_left(zygote: int | None, worker: int, folder: Path) -> None:
    """Remove the processes and files of a worker that was killed; see `kill_orphans`. Closes `worker`."""
    try:
        kill_orphans(zygote, worker)
    finally:
        os.close(worker)
    shutil.rmtree(folder, ignore_errors=True)


def wrong_with_control(result: dict[str, Any]) -> str | None:
    """Return what the control program did wrong; None if it ran as it should."""
    return None if result["stdout"] == CONTROL_OUTPUT else f"{CONTROL_PROGRAM} gave {result}"


def _blamed(
    request: dict[str, Any], status: str, return_code: int | None, stderr: str, execution_time: float
) -> dict[str, Any]:
    """Return the result of a program that was lost by its own doing, and left nothing else."""
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
