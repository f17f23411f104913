"""The server's side of execution: a zygote process, its workers, and the queue for them.

Nothing here knows of HTTP; what runs the code is in `zygote.py`, and what goes over a worker's socket in `worker.py`.
"""

import asyncio
import base64
import codecs
import itertools
import json
import logging
import marshal
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

ZYGOTE = Path(__file__).with_name("zygote.py")
LENGTH = struct.Struct("<I")  # as worker.LENGTH
ANSWER_GRACE_S = 5.0  # a worker that says nothing for this long after the program's time limit is lost
START_GRACE_S = 60.0  # a zygote first imports packages: 2 s, but more on a cold disk; after that it forks in 10 ms
STOP_GRACE_S = 5.0
FOR_WORKER = ("run_timeout", "memory_limit_MB", "fetch_files", "session")  # the keys of a request
FOR_PROGRAM = ("code", "stdin", "files", "echo_last_expression")
PRELOAD = ("numpy", "sympy", "scipy")
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


class QueueTimeoutError(Exception):
    """No worker became free within the request's queue budget; nothing ran."""


class SandboxError(Exception):
    """The sandbox, not the code, failed: the same request may succeed when sent again."""


class Worker:
    """The server's end of one worker process."""

    def __init__(self, connection: socket.socket, folder: Path) -> None:
        self.connection, self.folder = connection, folder
        self.pid: int | None = None
        self._pidfd = -1  # a process id alone may be another's by the time that it is killed
        self.layers: list[str] = []  # what isolates its programs
        self.off: dict[str, str] = {}  # what does not, and why
        self._received = bytearray()
        connection.setblocking(False)

    async def start(self) -> None:
        """Wait until it is set up. Raises OSError, EOFError, or SandboxError with its own words."""
        hello, _ = await self._receive_header()
        if "error" in hello:
            raise SandboxError(hello["error"])
        self.pid, self.layers, self.off = hello["pid"], hello["layers"], hello["off"]
        self._pidfd = os.pidfd_open(self.pid)

    async def call(self, request: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
        """Send a request; returns the answer's header and the bytes after it. Raises OSError or EOFError."""
        header = marshal.dumps({key: request[key] for key in FOR_WORKER})
        body = os.memfd_create("request")  # not through the socket: the program is to read it, not the worker
        try:
            with open(body, "wb", closefd=False) as file:
                file.write(marshal.dumps({key: request[key] for key in FOR_PROGRAM}))
            socket.send_fds(self.connection, [LENGTH.pack(len(header))], [body])
        finally:
            os.close(body)
        await asyncio.get_running_loop().sock_sendall(self.connection, header)
        header, start = await self._receive_header()
        if "error" not in header:
            sizes = header["stdout"][0] + header["stderr"][0] + sum(header["files"].values())
            await self._receive_up_to(start + sizes)
        return header, bytes(self._received[start:])

    async def _receive_header(self) -> tuple[dict[str, Any], int]:
        """LENGTH and JSON of a new message; returns it with the number of bytes it took."""
        self._received.clear()
        await self._receive_up_to(LENGTH.size)
        start = LENGTH.size + LENGTH.unpack_from(self._received)[0]
        await self._receive_up_to(start)
        return json.loads(self._received[LENGTH.size : start]), start

    async def _receive_up_to(self, size: int) -> None:
        while len(self._received) < size:
            chunk = await asyncio.get_running_loop().sock_recv(self.connection, 1 << 18)
            if not chunk:
                raise EOFError("its socket closed")
            self._received += chunk

    def is_alive(self) -> bool:
        """An idle worker says nothing, so that anything to read is the end of its socket."""
        try:
            self.connection.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False

    def close(self) -> None:
        """The worker sees it, kills the program that may be running, removes its folder and ends."""
        self.connection.close()
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1

    async def destroy(self) -> None:
        """End a worker that hangs or is dead already, and remove what it can no longer remove."""
        try:
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)  # its program dies with it
        except ProcessLookupError:
            pass
        await asyncio.to_thread(shutil.rmtree, self.folder, ignore_errors=True)


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
        self._names = itertools.count()
        self._idle: list[Worker] = []
        self._zygote: subprocess.Popen | None = None
        self._control: socket.socket | None = None

    async def run(self, request: dict[str, Any], *, queue_timeout_s: float) -> tuple[dict[str, Any], float]:
        """Wait for a free slot, then execute.

        Returns:
            (what `execute` returns, seconds waited).
        Raises:
            QueueTimeoutError: there was no free slot within queue_timeout_s.
            SandboxError: see `execute`.
        """
        async with self.slot(queue_timeout_s) as queue_time:
            return await self.execute(request), queue_time

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

    async def execute(self, request: dict[str, Any]) -> dict[str, Any]:
        """Run a request at once, past the queue.

        Args:
            request: code, stdin (str or None), run_timeout (s), memory_limit_MB (<= 0: none),
                files {path: bytes}, fetch_files [path], echo_last_expression.
        Returns:
            status ("Finished" or "TimeLimitExceeded"), return_code, execution_time (s), stdout, stderr,
            files {path: base64}, not_fetched {path: why}.
        Raises:
            SandboxError: the zygote or the worker died or did not answer, or the program could not be set up.
        """
        worker = await self.take_worker()
        healthy = False
        try:
            result = await self.call(worker, request | {"session": False})
            healthy = True
        finally:  # also when the client hangs up and this is cancelled
            if healthy and len(self._idle) < self._max_idle:
                self._idle.append(worker)
            else:
                worker.close()
        return result

    async def take_worker(self) -> Worker:
        """A worker that nobody else uses; the caller closes it. Raises SandboxError."""
        return self._idle_worker() or await self._start_worker()

    async def call(self, worker: Worker, request: dict[str, Any]) -> dict[str, Any]:
        """`execute` in a given worker; with `session`, its program stays for the next call if the result is `alive`."""
        try:
            async with asyncio.timeout(request["run_timeout"] + ANSWER_GRACE_S):
                header, blobs = await worker.call(request)
        except (OSError, EOFError) as exc:  # TimeoutError is an OSError
            self.restarts["worker"] += 1
            await worker.destroy()
            why = "did not answer" if isinstance(exc, TimeoutError) else f"died ({exc})"
            raise SandboxError(f"the worker that ran the program {why}") from exc
        if "error" in header:
            raise SandboxError(header["error"])
        return _with_blobs(header, blobs)

    async def close(self) -> None:
        """Stop the zygote, which first waits until every program is dead, and remove all files."""
        for worker in self._idle:
            worker.close()
        if self._control:
            self._control.close()
        if self._zygote:
            try:
                await asyncio.to_thread(self._zygote.wait, STOP_GRACE_S)
            except subprocess.TimeoutExpired:
                self._kill_zygote(f"it did not stop within {STOP_GRACE_S:g} s")
        await asyncio.to_thread(shutil.rmtree, self._root, ignore_errors=True)

    def _idle_worker(self) -> Worker | None:
        while self._idle:
            worker = self._idle.pop()
            if worker.is_alive():
                return worker
            logger.error("an idle sandbox worker died; starting another when one is needed")
            worker.close()
            self.restarts["worker"] += 1
        return None

    async def _start_worker(self) -> Worker:
        """Have the zygote fork a worker; starts a zygote if there is none. Raises SandboxError."""
        if self._zygote is None or self._zygote.poll() is not None:
            if self._zygote is not None:
                self.restarts["zygote"] += 1
                logger.error("the sandbox zygote died (exit code %d); starting another", self._zygote.returncode)
            self._start_zygote()
        name = str(next(self._names))
        ours, theirs = socket.socketpair()
        worker = Worker(ours, self._root / name)
        try:
            with theirs:
                socket.send_fds(self._control, [name.encode()], [theirs.fileno()])
            async with asyncio.timeout(START_GRACE_S):
                await worker.start()
            self.layers, self.off = worker.layers, worker.off
        except BaseException as exc:
            worker.close()
            if isinstance(exc, TimeoutError):
                self._kill_zygote(f"it forked no worker within {START_GRACE_S:g} s")
            if isinstance(exc, OSError | EOFError):
                raise SandboxError(f"the zygote did not start a worker ({exc!r})") from exc
            raise
        return worker

    def _start_zygote(self) -> None:
        if self._control:
            self._control.close()
        self._control, zygote_end = socket.socketpair(type=socket.SOCK_SEQPACKET)
        self._control.setblocking(False)  # a full buffer means that the zygote hangs; it must not hang the server
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

    def _kill_zygote(self, why: str) -> None:
        logger.error("killing the sandbox zygote: %s", why)
        self._zygote.kill()
        self._zygote.wait()


def _with_blobs(header: dict[str, Any], blobs: bytes) -> dict[str, Any]:
    """Replace the byte counts of an answer's header by what they count."""
    result = header.copy()
    start = 0
    for stream in ("stdout", "stderr"):
        kept, total = header[stream]
        result[stream] = _decode(blobs[start : start + kept], total)
        start += kept
    result["files"] = {}
    for path, size in header["files"].items():
        result["files"][path] = base64.b64encode(blobs[start : start + size]).decode()
        start += size
    return result


def _decode(kept: bytes, total: int) -> str:
    """Output as text, invalid UTF-8 as U+FFFD, with a last line that says how much was cut."""
    cut = total - len(kept)
    # final=False drops the first bytes of a character that the cut split.
    text = codecs.getincrementaldecoder("utf-8")("replace").decode(kept, final=not cut)
    return f"{text}\n[output cut: {cut} of {total} bytes]\n" if cut else text
