"""Boxes: what terminal tasks act in. A box has its own files and processes, and each command in it is a new bash.

The worker of a box (box.py) serves nothing else, and the box ends with it. As with sessions, only the id gives access,
whoever opened it renews its lease, and a command takes one of the pool's slots while it runs. After `seal`, which kills
all processes and then reads files, a box can only be ended.
"""

import asyncio
import signal
from dataclasses import dataclass
from typing import Any

from verl_ext.sandbox.limits import ARCHIVE_S, WORKER_GRACE_S
from verl_ext.sandbox.server import box_isolation
from verl_ext.sandbox.server.connection import SandboxError, Worker, WorkerFailedError, with_blobs
from verl_ext.sandbox.server.pool import Pool, within
from verl_ext.sandbox.server.sessions import Session, Sessions
from verl_ext.sandbox.server.workers import Workers


class BoxRefusedError(Exception):
    """What was asked for may not be; the message says why. Nothing was done."""


class LostBoxError(Exception):
    """The box was lost with its worker, while a control program ran well: by what its own processes did.

    `timed_out`: the worker did not answer at the time limit.
    """

    def __init__(self, message: str, timed_out: bool) -> None:
        super().__init__(message)
        self.timed_out = timed_out


@dataclass
class Box(Session):
    is_sealed: bool = False


class Boxes(Sessions):
    """The boxes of a server. See Sessions for what ends one, and for what its methods raise.

    Args:
        pool: gives slots, and runs the control program.
        workers: for boxes only.
    """

    entry, noun, option = Box, "boxes", "--max-boxes"

    def __init__(self, pool: Pool, workers: Workers, *, max_boxes: int, idle_s: float) -> None:
        super().__init__(pool, max_sessions=max_boxes, idle_s=idle_s)
        self.workers = workers

    def refusal(self) -> str:
        """Return why no box can be opened; "" if one can be."""
        if not self.max_sessions:
            return "this server allows no boxes: start it without --max-boxes 0"
        if missing := [layer for layer in box_isolation.NEEDED if layer not in self.pool.workers.layers]:
            return f"a box needs layers of isolation that are off on this server: {', '.join(missing)}"
        return box_isolation.obstacle()

    async def open(self, box_id: str, request: dict[str, Any], *, queue_timeout_s: float) -> None:
        """Open a box with the files of an archive.

        Args:
            request: the fields of `request.OpenBoxRequest`.
        Raises:
            BoxRefusedError, SessionLimitError, SessionEndedError, QueueTimeoutError, SandboxError.
        """
        if why := self.refusal():
            raise BoxRefusedError(why)
        async with self._turn(box_id, queue_timeout_s) as (box, _):
            if box.worker:
                raise BoxRefusedError("a box with this id is open: choose another id")
            box.worker = await self.workers.take()
            wanted = {name: request[name] for name in ("memory_limit_MB", "disk_limit_MB", "workdir")}
            wanted |= {"do": "open", "has_archive": bool(request["archive"])}
            try:
                answer, _ = await self._ask(box, wanted, ARCHIVE_S, request["archive"])
            except LostBoxError as exc:  # nothing of its own has run yet
                raise SandboxError(str(exc)) from exc
            if "refused" in answer:
                self._close(box, box.worker)
                raise BoxRefusedError(f"archive: {answer['refused']}")

    async def run(
        self, box_id: str, request: dict[str, Any], *, queue_timeout_s: float
    ) -> tuple[dict[str, Any], float]:
        """Run a command (`request.RunBoxRequest`); return what `Sessions.run` does.

        A command that is lost with its box counts as killed, or as stopped at its time limit if it did not end there.
        """
        async with self._turn(box_id, queue_timeout_s, begin=False) as (box, queue_time):
            if box.is_sealed:
                raise BoxRefusedError("this box is sealed: nothing runs in it any more")
            wanted = {"do": "run", **{name: request[name] for name in ("command", "stdin", "run_timeout")}}
            try:
                header, blobs = await self._ask(box, wanted, request["run_timeout"])
            except LostBoxError as exc:
                header, blobs = _lost(exc, request["run_timeout"]), bytearray()
            if header.pop("spent") and box.worker:
                self._discard(box, box.worker)
            result = with_blobs(header | {"files": {}, "not_fetched": {}}, blobs)
            return result | {"alive": box.worker is not None}, queue_time

    async def seal(
        self, box_id: str, request: dict[str, Any], *, queue_timeout_s: float
    ) -> tuple[dict[str, Any], bytearray]:
        """Kill all processes of a box, then read its files (`request.SealBoxRequest`).

        Returns:
            ({dropped, strays, lost: why, if the box was lost, else ""}; a tar.gz, empty if lost).
        """
        async with self._turn(box_id, queue_timeout_s, begin=False) as (box, _):
            if box.is_sealed:
                raise BoxRefusedError("this box is sealed already")
            box.is_sealed = True
            wanted = {"do": "seal", **{name: request[name] for name in ("paths", "max_bytes")}}
            try:
                answer, archive = await self._ask(box, wanted, ARCHIVE_S)
            except LostBoxError as exc:
                return {"dropped": {}, "strays": [], "lost": str(exc)}, bytearray()
            return answer | {"lost": ""}, archive

    async def _ask(
        self, box: Box, request: dict[str, Any], time_s: float, archive: bytes = b""
    ) -> tuple[dict[str, Any], bytearray]:
        """Send a request to the box's worker; whatever goes wrong ends the box.

        Raises:
            LostBoxError, SandboxError: see there.
        """
        worker = box.worker
        assert worker is not None  # as each turn of a box begins with one
        try:
            return await within(time_s + WORKER_GRACE_S, worker.ask(request, archive))
        except TimeoutError as exc:
            self._discard(box, worker)
            raise await self._blame("its worker did not answer at the time limit", timed_out=True) from exc
        except WorkerFailedError as exc:
            self._close(box, worker)
            if exc.by_program:
                raise await self._blame(str(exc)) from exc
            raise SandboxError(str(exc)) from exc
        except Exception as exc:  # its socket closed
            await self._discard(box, worker)
            message = f"its worker died ({exc or type(exc).__name__})"
            if await self.workers.were_killed_from_outside(worker):
                raise SandboxError(message) from exc
            raise await self._blame(message) from exc
        except BaseException:  # the client hung up: nobody knows how far this got
            self._close(box, worker)
            raise

    async def _blame(self, message: str, *, timed_out: bool = False) -> Exception:
        """Return the error for a box that was lost: its own doing, unless nothing else works either."""
        if why := await self.pool.control():
            return SandboxError(f"a box was lost: {message}; a control program failed, too: {why}")
        return LostBoxError(message, timed_out)

    def _discard(self, box: Box, worker: Worker) -> asyncio.Task:
        box.worker = None
        return self.workers.discard(worker)

    def _close(self, box: Box, worker: Worker) -> None:
        box.worker = None
        worker.close()

    def _end_worker(self, worker: Worker) -> None:
        worker.close()  # its namespaces end with it, and with them all processes and files of the box


def _lost(exc: LostBoxError, run_timeout: float) -> dict[str, Any]:
    return {
        "status": "TimeLimitExceeded" if exc.timed_out else "Finished",
        "return_code": None if exc.timed_out else -signal.SIGKILL,
        "execution_time": run_timeout if exc.timed_out else 0.0,
        "stdout": [0, 0],
        "stderr": [0, 0],
        "spent": False,
    }
