"""The server's worker processes, and the zygote that forks them; both are started on demand, and again when they die.

The code of these processes is in `zygote.py` and `worker.py`; a worker's socket is `connection.py`.
"""

import asyncio
import itertools
import json
import logging
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from verl_ext.sandbox.server.connection import SandboxError, Worker, send_fd
from verl_ext.sandbox.server.isolation import NUM_UIDS
from verl_ext.sandbox.server.orphans import kill_below, kill_orphans

logger = logging.getLogger(__name__)

ZYGOTE = Path(__file__).with_name("zygote.py")
ZYGOTE_END_S = 0.3  # for the end of a zygote, which takes its workers with it, to show
START_GRACE_S = 60.0  # a zygote first imports packages: 2 s, but more on a cold disk; after that it forks in 10 ms
STOP_GRACE_S = 5.0
END_SESSION_S = 5.0  # for a worker to kill a session's program and to remove its files
MAX_IDLE_FOR_SESSIONS = 64  # an idle one takes 2 MiB; starting one takes 12 CPU-ms
MAX_SESSIONS = 4000  # each has a worker, and each worker a user: fewer than NUM_UIDS, with room for the pool's workers
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


# Numbers of workers, which give programs their users (isolation.py). They start at random, because programs of another
# server on this machine must not share limits that count by user, such as RLIMIT_NPROC.
_numbers = itertools.count(secrets.randbelow(1 << 16))
_by_user: "weakref.WeakValueDictionary[int, Worker]" = weakref.WeakValueDictionary()


class Workers:
    """Gives out workers, each to one user at a time. See `pool.Pool` for the arguments.

    Args:
        max_idle: workers that wait for the next user.
        boxes: each worker is for one box, which ends with it.
    """

    def __init__(
        self,
        max_idle: int,
        max_output_bytes: int,
        *,
        isolation: str,
        allow_subprocess: bool = False,
        preload: Sequence[str] = (),
        boxes: bool = False,
    ) -> None:
        self.restarts = {"zygote": 0, "worker": 0}  # of those that died or were killed
        self.layers: list[str] = []  # as the newest worker reported
        self.off: dict[str, str] = {}
        self._max_idle = max_idle
        self._root: Path | None = None  # of the workers' folders; a zygote removes it, even if this process is killed
        self._options = {
            "max_output_bytes": max_output_bytes,
            "isolation": isolation,
            "allow_subprocess": allow_subprocess,
            "preload": list(preload),
            "boxes": boxes,
        }
        self._removals: set[asyncio.Task] = set()  # of what dead workers left behind
        # Those for sessions have no huge pages (worker.py), and are never given to a program without one.
        self._idle: list[Worker] = []
        self._idle_for_sessions: list[Worker] = []
        self._ending: dict[asyncio.Task, Worker] = {}
        self._zygote: subprocess.Popen | None = None
        self._control_socket: socket.socket | None = None

    async def take(self, *, for_session: bool = False) -> Worker:
        """Return a worker that nobody else uses; the caller closes it or gives it back. Raises SandboxError."""
        idle = self._idle_for_sessions if for_session else self._idle
        while idle:
            worker = idle.pop()
            # One that outlived its zygote is not used: that end would later excuse a program that kills its worker.
            if worker.is_alive() and worker.zygote.poll() is None:
                return worker
            logger.error("an idle sandbox worker or its zygote died; starting another")
            worker.close()
            self.restarts["worker"] += 1
        return await self._start()

    def give_back(self, worker: Worker) -> None:
        """Keep a worker, which waits for its next request, for the next user."""
        if len(self._idle) < self._max_idle:
            self._idle.append(worker)
        else:
            worker.close()

    def discard(self, worker: Worker) -> asyncio.Task:
        """Kill a worker that can take no request; the returned task removes its processes and files in its place."""
        self.restarts["worker"] += 1
        zygote = worker.zygote.pid if worker.zygote.poll() is None else None  # else the id may be another's
        left = (zygote, worker.kill(), worker.folder)
        removal = asyncio.create_task(asyncio.to_thread(_remove_what_is_left, *left))
        self._removals.add(removal)
        removal.add_done_callback(self._removals.discard)
        return removal

    def end_session(self, worker: Worker) -> asyncio.Task | None:
        """Begin to end the session of a worker, whose program may have ended already, and keep it for another one.

        Returns:
            the task after which it is kept; None if enough others are.
        """
        if len(self._idle_for_sessions) + len(self._ending) >= MAX_IDLE_FOR_SESSIONS:
            worker.close()
            return None
        task = asyncio.create_task(self._end_session(worker))
        self._ending[task] = worker
        task.add_done_callback(self._ending.pop)
        return task

    async def _end_session(self, worker: Worker) -> None:
        try:
            async with asyncio.timeout(END_SESSION_S):
                await worker.end_session()
            self._idle_for_sessions.append(worker)
        except (OSError, EOFError):  # TimeoutError is an OSError
            self.discard(worker)

    async def were_killed_from_outside(self, worker: Worker) -> bool:
        """Return whether a worker that has died did so with its zygote, which no program here can end.

        The filter allows no fork, and signals only within the program's own namespace or to the program itself. A box
        always has its own namespace.
        """
        has_ended = await _has_ended(worker.zygote)
        is_held = "seccomp" in self.layers and not self._options["allow_subprocess"]
        return has_ended and (is_held or self._options["boxes"])

    async def close(self) -> None:
        """Stop the zygote, which first waits for the end of every program, and remove all files."""
        ending = dict(self._ending)
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)
        for worker in (*ending.values(), *self._idle, *self._idle_for_sessions):
            worker.close()
        if self._control_socket:
            self._control_socket.close()
        if self._zygote:
            try:
                await asyncio.to_thread(self._zygote.wait, STOP_GRACE_S)
            except subprocess.TimeoutExpired:
                await _kill_zygote(self._zygote, f"it did not stop within {STOP_GRACE_S:g} s")
        if self._root:
            await asyncio.to_thread(shutil.rmtree, self._root, ignore_errors=True)

    async def _start(self) -> Worker:
        """Have the zygote fork a worker; starts a zygote if there is none. Raises SandboxError."""
        if self._zygote is None or self._zygote.poll() is not None:
            if self._zygote is not None:
                self.restarts["zygote"] += 1
                logger.error("the sandbox zygote died (exit code %d); starting another", self._zygote.returncode)
            self._start_zygote()
        # Landlock lets a program look at any path that it knows, so a folder's name must not be guessable.
        # A session can stay while thousands of others come and go, so the next number's user may be taken.
        number = next(_numbers)
        while number % NUM_UIDS in _by_user and len(_by_user) < NUM_UIDS:
            number = next(_numbers)
        name = f"{number}-{secrets.token_hex(16)}"
        assert self._root and self._zygote and self._control_socket  # since `_start_zygote`
        ours, theirs = socket.socketpair()
        worker = _by_user[number % NUM_UIDS] = Worker(ours, self._root / name, self._zygote)
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
        self._root = self._root or Path(tempfile.mkdtemp(prefix="verl-sandbox-"))
        self._control_socket, zygote_end = socket.socketpair(type=socket.SOCK_SEQPACKET)
        self._control_socket.setblocking(False)  # a zygote that hangs, so that the buffer is full, hangs no server
        with zygote_end:
            fd = zygote_end.fileno()
            self._zygote = subprocess.Popen(
                [sys.executable, "-I", str(ZYGOTE), str(fd), json.dumps(self._options | {"root": str(self._root)})],
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
