"""The server's end of a worker's socket (wire.py). The other end is in `worker.py`."""

import asyncio
import codecs
import contextlib
import errno
import fcntl
import hashlib
import json
import marshal
import os
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any

from verl_ext.sandbox.server.folders import LEFT_OUT
from verl_ext.sandbox.server.wire import END_SESSION, FETCHED, LENGTH, RESULT, SEALED, pack_request

SEND_FDS_PAUSE_S = 0.02


class SandboxError(Exception):
    """The sandbox, not the code, failed: the same request may succeed when sent again."""


class LostProgramError(SandboxError):
    """A program was lost with its worker: a failure of the sandbox, unless the program does it each time."""


class WorkerFailedError(Exception):
    """A worker met an error and ends. `by_program`: a program that ran may be the cause."""

    def __init__(self, message: str, *, by_program: bool) -> None:
        super().__init__(message)
        self.by_program = by_program


class Worker:
    """The server's end of one worker process.

    Args:
        zygote: its parent; by the time that the worker dies, the pool may have another.
    """

    def __init__(self, connection: socket.socket, folder: Path, zygote: subprocess.Popen) -> None:
        self.connection, self.folder, self.zygote = connection, folder, zygote
        self.pid: int | None = None
        self._pidfd = -1  # a mere process id may be another's by the time that it is killed
        self.layers: list[str] = []  # what isolates its programs
        self.off: dict[str, str] = {}  # the layers that are off, and why
        self.started = False  # whether the last call's program started, and so may be to blame
        self._received = bytearray()
        connection.setblocking(False)

    async def start(self) -> None:
        """Wait until the worker is set up. Raises OSError, EOFError, or SandboxError with the worker's message."""
        hello = await self._receive_message()
        if "error" in hello:
            raise SandboxError(hello["error"])
        self.pid, self.layers, self.off = hello["pid"], hello["layers"], hello["off"]
        self._pidfd = os.pidfd_open(hello["pid"])

    async def call(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send a request; return the answer. Raises OSError, EOFError, or WorkerFailedError with the worker's message.

        An answer that is none raises anything.
        """
        self.started = False
        names = list(dict.fromkeys(request["fetch_files"]))
        body = os.memfd_create("request", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            with open(body, "wb", closefd=False) as file:
                file.writelines(pack_request(request, names))
            # No limit counts the file, and a session can keep it open or mapped: so it cannot grow, and ends up empty.
            fcntl.fcntl(body, fcntl.F_ADD_SEALS, SEALED)
            await send_fd(self.connection, b"\0", body)
            header = await self._receive_header(names)
            await self._receive_up_to(header["stdout"][0] + header["stderr"][0] + sum(header["files"].values()))
            received, self._received = self._received, bytearray()  # an idle worker holds no answer
            return with_blobs(header, received)
        finally:
            self.started = bool(fcntl.fcntl(body, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SEAL)
            with contextlib.suppress(PermissionError):  # without seccomp, a program can prevent it
                os.ftruncate(body, 0)
            os.close(body)

    async def ask(self, request: dict[str, Any], archive: bytes = b"") -> tuple[dict[str, Any], bytearray]:
        """Send a request to the worker of a box (box.py); return its answer, and the bytes that belong to it.

        Raises:
            OSError, EOFError, or WorkerFailedError with the worker's message.
        """
        body = os.memfd_create("request", os.MFD_CLOEXEC)
        try:
            with open(body, "wb", closefd=False) as file:
                text = json.dumps(request).encode()
                file.writelines((LENGTH.pack(len(text)), text, archive))
            os.lseek(body, 0, os.SEEK_SET)
            await send_fd(self.connection, b"\0", body)
            answer = await self._receive_message()
            if "error" in answer:
                raise WorkerFailedError(answer["error"], by_program=answer["lost"])
            await self._receive_up_to(answer.pop("bytes"))
            received, self._received = self._received, bytearray()
            return answer, received
        finally:
            os.close(body)

    async def end_session(self) -> None:
        """Return once the session's program and its files are gone, and the worker can take another's request.

        Raises:
            OSError, EOFError: they could not be removed, and the worker has ended.
        """
        self.connection.send(END_SESSION)
        await self._receive_up_to(len(END_SESSION))
        self._received.clear()

    async def _receive_header(self, names: list[str]) -> dict[str, Any]:
        """Receive the header of an answer about the files `names`; the bytes after it stay in `_received`."""
        await self._receive_up_to(LENGTH.size)
        if LENGTH.unpack_from(self._received)[0]:
            message = await self._receive_message()
            raise WorkerFailedError(message["error"], by_program=message["lost"])
        await self._receive_up_to(LENGTH.size + RESULT.size)
        result = RESULT.unpack_from(self._received, LENGTH.size)
        timed_out, return_code, execution_time, stdout, stdout_total, stderr, stderr_total, alive, spent = result
        del self._received[: LENGTH.size + RESULT.size]
        end = stdout + stderr + FETCHED.size * len(names)
        await self._receive_up_to(end)
        fetched = FETCHED.iter_unpack(self._received[stdout + stderr : end])
        sizes = dict(zip(names, (number for (number,) in fetched), strict=True))
        del self._received[stdout + stderr : end]
        return {
            "status": "TimeLimitExceeded" if timed_out else "Finished",
            "return_code": None if timed_out else return_code,
            "execution_time": execution_time,
            "stdout": [stdout, stdout_total],
            "stderr": [stderr, stderr_total],
            "alive": alive,
            "spent": spent,
            "files": {name: size for name, size in sizes.items() if size >= 0},
            "not_fetched": {
                name: LEFT_OUT.get(-size) or os.strerror(-size) for name, size in sizes.items() if size < 0
            },
        }

    async def _receive_message(self) -> dict[str, Any]:
        """Receive LENGTH and JSON of a message; what came after it stays in `_received`."""
        await self._receive_up_to(LENGTH.size)
        end = LENGTH.size + LENGTH.unpack_from(self._received)[0]
        await self._receive_up_to(end)
        message = json.loads(self._received[LENGTH.size : end])
        del self._received[:end]
        return message

    async def _receive_up_to(self, size: int) -> None:
        while len(self._received) < size:
            chunk = await asyncio.get_running_loop().sock_recv(self.connection, 1 << 18)
            if not chunk:
                raise EOFError("its socket closed")
            self._received += chunk

    def is_alive(self) -> bool:
        """Return whether the worker lives: an idle one sends nothing, so anything to read is the end of its socket."""
        try:
            self.connection.recv(1, socket.MSG_PEEK)
        except OSError as exc:
            return isinstance(exc, BlockingIOError)
        return False

    def close(self) -> None:
        """Close the socket: the worker then kills its program, if one is running, removes its folder and ends."""
        self.connection.close()
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1

    def kill(self) -> int:
        """Kill a worker that hangs or is already dead; its program dies with it, but not the program's forks.

        Returns:
            A pidfd of the worker, which the caller closes.
        """
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        return os.dup(self._pidfd)


def digest(request: dict[str, Any]) -> bytes:
    """Return a hash that identifies a program and its input."""
    return hashlib.sha256(marshal.dumps([request["code"], request["stdin"]])).digest()


async def send_fd(connection: socket.socket, message: bytes, fd: int) -> None:
    """Send a file descriptor; waits while the user's processes together have too many in flight (ETOOMANYREFS)."""
    while True:
        try:
            socket.send_fds(connection, [message], [fd])
            return
        except OSError as exc:
            if exc.errno != errno.ETOOMANYREFS:
                raise
        await asyncio.sleep(SEND_FDS_PAUSE_S)


def with_blobs(header: dict[str, Any], blobs: bytearray) -> dict[str, Any]:
    """Replace the byte counts of an answer's header by the bytes that they count."""
    rest = memoryview(blobs)  # not a copy: it may be the 64 MiB of folders.MAX_FETCH_BYTES
    replaced: dict[str, Any] = {"files": {}}
    for name in ("stdout", "stderr"):
        kept, total = header[name]
        replaced[name], rest = _decode(rest[:kept], total), rest[kept:]
    for path, size in header["files"].items():
        replaced["files"][path], rest = rest[:size], rest[size:]
    return header | replaced


def _decode(kept: memoryview, total: int) -> str:
    """Decode output, with invalid UTF-8 as U+FFFD and a last line that says how much was cut."""
    cut = total - len(kept)
    # final=False drops the first bytes of a character that the cut split.
    text = codecs.getincrementaldecoder("utf-8")("replace").decode(kept, final=not cut)
    return f"{text}\n[output cut: {cut} of {total} bytes]\n" if cut else text
