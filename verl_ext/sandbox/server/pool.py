"""The server's side of execution: the queue for the workers, and whose fault it is that a program was lost.

Nothing here knows of HTTP. `workers.py` has the processes.
"""

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from verl_ext.sandbox.limits import (
    CONTROL_OUTPUT,
    CONTROL_PROGRAM,
    CONTROL_S,
    LOSSES_TO_BLAME,
    LOSSES_WITHOUT_ISOLATION,
    WORKER_GRACE_S,
)
from verl_ext.sandbox.server.connection import LostProgramError, SandboxError, Worker, WorkerFailedError, digest
from verl_ext.sandbox.server.wire import STALL_S
from verl_ext.sandbox.server.workers import Workers

Result = TypeVar("Result")

CONTROL = {"code": CONTROL_PROGRAM, "stdin": None, "run_timeout": 5.0, "memory_limit_MB": -1, "files": {}}
CONTROL |= {"fetch_files": [], "echo_last_expression": False}
MAX_REMEMBERED = 1024  # programs that were lost
# Not scipy: with it every fork costs more, even for a program that does not use it (docs/guides/sandbox.md).
PRELOAD = ("numpy", "sympy")


class QueueTimeoutError(Exception):
    """A request that ran nothing, because no worker became free within its queue budget."""


class Pool:
    """Runs requests in workers.

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
        self.workers = Workers(
            workers, max_output_bytes, isolation=isolation, allow_subprocess=allow_subprocess, preload=preload
        )
        self.waiting = self.running = 0  # requests
        self._slots = asyncio.Semaphore(workers)
        self._allow_subprocess = allow_subprocess
        self._losses: dict[bytes, int] = {}  # in a row, of programs by hash, the newest last

    @property
    def _is_isolated(self) -> bool:
        """Return whether no program can kill the worker of another."""
        layers = self.workers.layers
        return bool({"namespaces", "uid"} & {*layers}) or ("seccomp" in layers and not self._allow_subprocess)

    async def close(self) -> None:
        """Stop all processes, and remove all files."""
        await self.workers.close()

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
            request: the fields of `request.RunCodeRequest`, with `files` as {path: bytes}.
            spare_s: what the answer may take beyond run_timeout. A program that was lost later than this is not run
                again here; it is remembered, so that the client's next attempt counts as the second.
        Returns:
            status ("Finished" or "TimeLimitExceeded"), return_code, execution_time (s), stdout, stderr,
            files {path: memoryview}, not_fetched {path: why}, alive (the session continues).
        Raises:
            SandboxError: the zygote or the worker died or did not answer, or the program could not be set up.
            LostProgramError: the program was lost, not yet often enough to be blamed.
        """
        started = time.monotonic()
        while True:
            try:
                result = await self._execute(request)
            except LostProgramError as exc:
                failure, losses = exc, self._count_loss(request)
            else:
                if self._losses:  # earlier ones were not its doing
                    self._losses.pop(digest(request), None)
                return result
            if losses >= (LOSSES_TO_BLAME if self._is_isolated else LOSSES_WITHOUT_ISOLATION):
                break
            if not self._is_isolated or time.monotonic() - started > spare_s:
                raise failure
        if why := await self.control():
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
        worker = await self.workers.take()
        healthy = False
        try:
            result = await self.call(worker, request | {"session": False})
            healthy = not result.pop("spent")
        finally:  # also when the client hangs up and this is cancelled
            self.workers.give_back(worker) if healthy else worker.close()
        return result

    async def control(self) -> str | None:
        """Run the control program past the queue; return None if it ran as it should, else what it did instead."""
        try:
            async with asyncio.timeout(CONTROL_S):
                return wrong_with_control(await self._execute(CONTROL))
        except (SandboxError, TimeoutError) as exc:
            return str(exc) or f"it did not end within {CONTROL_S:g} s"

    async def call(self, worker: Worker, request: dict[str, Any]) -> dict[str, Any]:
        """Execute a request in a given worker; with `session`, its program stays for the next call if it is `alive`.

        `spent` says that the worker can take no further request. If a program ran and its worker does not answer after
        the time limit, while a control program runs well, the program counts as stopped at that limit.

        Raises:
            LostProgramError: the worker can give no answer, and the program may be the cause.
            SandboxError: it can give none, and the program cannot be the cause.
        """
        try:
            result = await within(request["run_timeout"] + WORKER_GRACE_S, worker.call(request))
        except TimeoutError as exc:
            self.workers.discard(worker)  # the disk may be hanging: this is not awaited
            failure = SandboxError("the worker that ran the program did not answer")
            if not worker.started:
                raise failure from exc
            if why := await self.control():
                raise SandboxError(f"{failure}; a control program failed, too: {why}") from exc
            stderr = "Killed: it did not end at its time limit\n"
            return _blamed(request, "TimeLimitExceeded", None, stderr, request["run_timeout"]) | {"spent": True}
        except WorkerFailedError as exc:
            raise _loss(worker, str(exc), by_program=exc.by_program) from exc
        except Exception as exc:  # its socket closed; or it sent what no worker sends, perhaps by the program's doing
            await self.workers.discard(worker)
            from_outside = await self.workers.were_killed_from_outside(worker)
            message = f"the worker that ran the program died ({exc or type(exc).__name__})"
            raise _loss(worker, message, by_program=not from_outside) from exc
        if result["spent"]:
            self.workers.discard(worker)
        return result


def _loss(worker: Worker, message: str, *, by_program: bool) -> SandboxError:
    """Return the error for a worker that can give no answer. A program that has not started cannot be the cause."""
    return (LostProgramError if by_program and worker.started else SandboxError)(message)


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
