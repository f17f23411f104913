"""The worker: forks a program per request, reads what it prints, holds its deadline, and cleans up after it.

See zygote.py for what forks the workers, and program.py for the fork that becomes the program.

The table lists what a worker and its program both hold, and the worker's system calls on it. Whatever such a call meets
is the program's doing, so it is not a failure of the sandbox. A call that you add belongs here, with a test in
test_shared_objects.py.

  stdout, stderr     poll, readv. Nothing there, because the program read it itself: poll again. An error: the stream
                     has ended. At the end, as many reads as a full pipe can take: who still holds it may keep writing.
  a call's memory    preadv, F_ADD_SEALS, before a program of a session gets it. It can then only be emptied, and then
  file               the names of files to fetch are gone: none is fetched.
  a session's        sendmsg, recv, poll. Full or shut: the call never gets there, and its time runs out. Closed, or a
  socket             message without the token: killed. Its own descriptors in flight: killed (others': our failure).
  its processes      kill, waitid, waitpid, poll of a pidfd, clocks. Gone: it has ended. Not stopped after its call:
                     killed. Not dead after SIGKILL: it is given up, and this worker with it.
  its folder and     openat, getdents, statx, fstat, sendfile. Gone, locked, a link, a pipe, too large: not fetched, and
  files              the answer says why. Cut while it is sent: zeros. The folder is gone: over the disk limit. It
                     cannot be removed: the worker ends after its answer.
"""

import contextlib
import ctypes
import errno
import fcntl
import gc
import json
import math
import os
import resource
import select
import signal
import socket
import sys
import time
from typing import Any, NamedTuple

from . import folders, preload
from .disk import MAX_FILE_BYTES, DiskWatch
from .isolation import limit
from .memory import MemoryWatch
from .output import Buffer
from .processes import Program, kill_all
from .program import CHUNK, TOKEN_BYTES, become_program, cpu_limit_s, make_main_module
from .wire import END_SESSION, FETCHED, LENGTH, REQUEST, RESULT, STALL_S, unshared

MAX_OPEN_FILES = 256
STOPPED_CPU_S = 0.05  # CPU time that a stopped program may use
WATCH_S, MAX_WATCH_S = 1.0, 32.0  # until it is checked; doubles, so that a thousand idle sessions use no CPU
DRAIN_READS = 256  # of a pipe with as many buffers as a pipe may have, each a packet
SCRATCH_BYTES = 8192  # for a file's name, and for what precedes and follows it
PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h

libc = ctypes.CDLL(None, use_errno=True)
# os.fork() also runs the hooks that modules register for forks (threading, logging, random). A worker has one thread
# and holds no lock, and `preload.renew` seeds the random states: the hooks would only touch, and copy, 60 more pages.
fork = ctypes.PyDLL(None, use_errno=True).fork


def adopt_orphans() -> None:
    """Become the parent of every descendant of this process whose own parent ends."""
    if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def start(connection: socket.socket, name: str, kind: "type[Worker]", layers: Any, *for_worker: int) -> None:
    """Be a worker of this kind until its socket closes; first send its process id and its layers, or {"error": why}."""
    try:
        pid = layers.enter_worker(name)
        worker = kind(connection, layers, *for_worker)
    except OSError as exc:
        send(connection, {"error": f"a worker could not be set up: {exc}"})
        return
    send(connection, {"pid": pid, "layers": layers.names(), "off": layers.off})
    try:
        worker.serve()
    finally:
        if worker.program:  # of a session
            kill_all(worker.program)
            layers.remove_folder()


def send(connection: socket.socket, message: dict[str, Any]) -> None:
    """Send LENGTH and JSON; raises OSError if the server is gone."""
    text = json.dumps(message).encode()
    connection.sendall(LENGTH.pack(len(text)) + text)


class SetUpError(Exception):
    """A failure before any of the submitted code ran."""


class Request(NamedTuple):
    """The part of a request that a worker reads. The program reads the rest from the memory file."""

    body: int  # the memory file
    num_bytes: int  # of the program's part
    run_timeout: float
    memory_limit_MB: int
    num_names: int  # of files to fetch
    session: bool


class Limits(NamedTuple):
    """Of one command in a box (box.py); a request has them as well."""

    run_timeout: float
    memory_limit_MB: int


class Result(NamedTuple):
    """How a program, or a call of a session, ended."""

    timed_out: bool
    return_code: int  # -N after signal N
    execution_time: float  # s
    alive: bool  # the session continues
    spent: bool  # a process is stuck in the kernel, which no signal reaches: this worker can take no other request


class End(NamedTuple):
    """Why a program is not waited for any longer; by default it has ended, or the server has."""

    timed_out: bool = False
    return_code: int | None = None  # of a finished call in a session that continues
    excess: str = ""  # of the program's memory or files, in words for the model


class Worker:
    """Serves requests from one socket (wire.py), one at a time, until it closes, something fails or it is spent."""

    def __init__(self, connection: socket.socket, layers: Any, max_output_bytes: int, address_space: int) -> None:
        self.connection, self.layers, self.folder = connection, layers, layers.folder
        self.address_space = address_space  # bytes that a program has before its first line
        self.buffers = [Buffer(max_output_bytes), Buffer(max_output_bytes)]  # stdout, stderr
        self.scratch = unshared(SCRATCH_BYTES)
        # Files are counted unless they are in a separate file system, which has limits.
        self.disk = None if "root" in layers.layers or not layers.layers else DiskWatch(self.folder, layers.uid)
        self.program: Program | None = None  # the running one, or one that waits between the calls of its session
        self.has_sessions = False  # the server gives it either sessions or programs that end with their call
        self.setup_r, self.setup_w = os.pipe()
        os.set_blocking(self.setup_r, False)
        # Everything below is for the programs, which inherit it.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # process 1 of a namespace ignores what it does not handle
        adopt_orphans()  # of programs, so that we can kill them
        limit(resource.RLIMIT_FSIZE, MAX_FILE_BYTES)
        limit(resource.RLIMIT_NOFILE, MAX_OPEN_FILES)
        limit(resource.RLIMIT_CORE, 0)
        layers.limit_programs()
        os.environ["HOME"] = os.environ["TMPDIR"] = self.folder
        sys.argv[:] = [folders.SCRIPT]
        gc.freeze()
        self.module = make_main_module(self.folder)  # after the freeze: its cycles are collected when the program ends

    def serve(self) -> None:
        """Answer requests until the socket closes; an error is also answered, and ends the worker."""
        if self.serve_one():
            if not self.has_sessions:  # there are many such workers, and each forks seldom
                preload.use_huge_pages()  # the first request split the zygote's huge pages; later ones split few
            while self.serve_one():
                pass

    def serve_one(self) -> bool:
        """Answer one request; return False if there can be no other. This frame's end drops all that it knew of it."""
        if self.program:
            self.watch(self.program)
        message, fds, _, _ = socket.recv_fds(self.connection, 1, 1)
        if message == END_SESSION:
            return self.end_session()
        if not fds:  # the server has closed its end, or is dead
            return False
        files, spent = [], False
        try:
            os.preadv(fds[0], [self.scratch], 0)
            request = Request(fds[0], *REQUEST.unpack_from(self.scratch))
            self.has_sessions = request.session
            if self.program is None:
                self.layers.make_folder()
            try:
                result = self.run(request)
                spent = result.spent
                if not spent:
                    names = REQUEST.size + request.num_bytes
                    files = folders.open_files(self.folder, request.body, request.num_names, names, self.scratch)
            finally:
                if self.program is None and not spent:
                    try:
                        self.layers.remove_folder()
                    except OSError:  # what the program left behind must not cost its answer
                        spent = True
        except Exception as exc:
            lost = not isinstance(exc, SetUpError)  # perhaps the program's doing
            send(self.connection, {"error": f"{type(exc).__name__}: {exc}", "lost": lost})
            return False
        self.send(result._replace(spent=spent), files or [(-1, -errno.EBUSY)] * request.num_names)
        os.close(request.body)
        return not spent

    def end_session(self) -> bool:
        """Kill the session's program and remove its files; False, or OSError: this worker can take no other request."""
        if program := self.program:
            self.program = None
            _, gone = kill_all(program)
            program.close()
            if not gone:
                return False
            self.layers.remove_folder()
        self.connection.sendall(END_SESSION)
        return True

    def watch(self, program: Program) -> None:
        """Wait for the next message; kill a program that runs meanwhile, as a SIGCONT from its own timers can cause."""
        poller = select.poll()
        poller.register(self.connection, select.POLLIN)
        used_s, wait_s = program.cpu_s(), WATCH_S
        while not poller.poll(wait_s * 1000):
            wait_s = min(2 * wait_s, MAX_WATCH_S)
            if program.cpu_s() - used_s > STOPPED_CPU_S:
                program.signal(signal.SIGKILL)  # the next call sees it

    def run(self, request: Request) -> Result:
        """Run the program until it exits, its time is over, or, in a session, its call is done; read what it prints.

        Afterwards, all that the program started is dead, or stopped if it is in a session.

        Raises:
            SetUpError: see there.
        """
        for buffer in self.buffers:
            buffer.reset()
        started = time.monotonic()
        if self.program is None:
            self.program = self.start_program(request)
            fcntl.fcntl(request.body, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL)
        else:
            fcntl.fcntl(request.body, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL)  # first: the program could also do it
            self.program.call(request.body)
        end = self.wait_for_end(self.program, request, started)
        return self.finish(self.program, request, end, time.monotonic() - started)

    def wait_for_end(self, program: Program, request: Request | Limits, started: float) -> End:
        """Read what the program prints until it need not be waited for any longer.

        Time in which this process stood still for STALL_S does not count.
        """
        poller, streams = self.poll(program)
        deadline = started + request.run_timeout
        watches = self.watches(request)
        asked, wake = started, math.inf
        while True:
            now = time.monotonic()
            if now > wake + STALL_S:  # the program may also have stood still: this wait does not count
                deadline += now - asked
            if now >= deadline:
                return End(timed_out=True)
            for watch in watches:
                if now >= watch.next_check and (excess := watch.excess(program.pids())):
                    return End(excess=excess)
            asked = time.monotonic()
            wake = min(deadline, asked + STALL_S, *(watch.next_check for watch in watches))
            wake = max(wake, asked)  # what was checked above took its time
            ready = [fd for fd, _ in poller.poll(math.ceil((wake - asked) * 1000))]
            for fd in ready:
                if fd in streams and streams[fd].read_from(fd) == 0:
                    poller.unregister(fd)
            if program.pidfd in ready or self.connection.fileno() in ready:
                return End()
            if program.control and program.control.fileno() in ready:
                message = program.receive()
                if not program.token and message and len(message) == TOKEN_BYTES:
                    program.token.extend(message)  # sent before the first line of the submitted code
                    continue
                return End(return_code=program.return_code(message))

    def watches(self, request: Request | Limits) -> list[MemoryWatch | DiskWatch]:
        """Return what looks for an excess while a program runs."""
        watches: list[MemoryWatch | DiskWatch] = []
        if request.memory_limit_MB > 0 and self.layers.layers:
            several = self.layers.allow_subprocess
            # RLIMIT_AS bounds the pages of one process; this bounds its page tables.
            memory = (request.memory_limit_MB << 20) + (0 if several else self.address_space)
            watches.append(MemoryWatch(memory, uid=self.layers.uid, several=several))
        if self.disk:
            watches.append(self.disk)
        return watches

    def poll(self, program: Program) -> tuple[select.poll, dict[int, Buffer]]:
        """Return a poll of all that ends the wait for a program, and of its streams; and their buffers."""
        poller = select.poll()
        poller.register(program.pidfd, select.POLLIN)
        poller.register(self.connection, 0)  # POLLHUP only: the server closed its end, nobody waits for the answer
        if program.control:
            poller.register(program.control, select.POLLIN)
        streams = dict(zip(program.pipes, self.buffers, strict=True))
        for fd in streams:
            poller.register(fd, select.POLLIN)
        return poller, streams

    def finish(self, program: Program, request: Request, end: End, execution_time: float) -> Result:
        """Stop a program whose session continues, and kill any other; read what is left in its pipes."""
        timed_out, return_code, excess = end
        alive = return_code is not None and program.stop()
        if self.disk and not excess and not timed_out:  # what it wrote since the last check
            excess = self.disk.excess(program.pids() if alive else ())
            alive = alive and not excess
        used_s, gone = 0.0, True
        if return_code is None or not alive:
            used_s = program.cpu_s(with_others=False)
            wait_status, gone = kill_all(program)
            return_code = -signal.SIGKILL if wait_status is None or excess else os.waitstatus_to_exitcode(wait_status)
        self.drain(program)
        if excess:
            self.buffers[1].append(f"\nKilled: {excess}\n".encode())
        if not alive:
            program.close()
            self.program = None
        self.raise_set_up_error()
        if not alive and not excess and not program.control:
            timed_out = timed_out or is_over_cpu_limit(return_code, used_s, request.run_timeout)
        return Result(timed_out, return_code, execution_time, alive, not gone)

    def drain(self, program: Program) -> None:
        """Read what the dead left in the pipes."""
        for fd, buffer in zip(program.pipes, self.buffers, strict=True):
            for _ in range(DRAIN_READS):  # a process that still has it open, as in a session, may keep writing
                if buffer.read_from(fd) <= 0:
                    break

    def raise_set_up_error(self) -> None:
        with contextlib.suppress(BlockingIOError):  # no complaint
            raise SetUpError(f"the program could not be set up: {os.read(self.setup_r, CHUNK).decode()}")

    def start_program(self, request: Request) -> Program:
        out_r, out_w = os.pipe()
        err_r, err_w = os.pipe()
        ours = theirs = None
        if request.session:
            ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
            ours.setblocking(False)  # a program that reads nothing must not hang its worker
        if self.disk:
            self.disk.reset()
        preload.renew()
        self.layers.restart_process_ids()
        pid = fork()
        if pid < 0:
            raise OSError(ctypes.get_errno(), "fork")
        if pid == 0:
            become_program(self, request, out_w, err_w, theirs)
        os.close(out_w)
        os.close(err_w)
        if theirs:
            theirs.close()
        for fd in (out_r, err_r):
            os.set_blocking(fd, False)
        return Program(pid, os.pidfd_open(pid), (out_r, err_r), ours, bytearray())

    def send(self, result: Result, files: list[tuple[int, int]]) -> None:
        """Send one answer and close the files; raises OSError if the server is gone, which ends the worker."""
        timed_out, return_code, execution_time, *rest = result
        counts = [count for buffer in self.buffers for count in (len(buffer.kept()), buffer.total)]
        LENGTH.pack_into(self.scratch, 0, 0)
        RESULT.pack_into(self.scratch, LENGTH.size, timed_out, return_code, execution_time, *counts, *rest)
        scratch = memoryview(self.scratch)
        parts = [scratch[: LENGTH.size + RESULT.size], *(buffer.kept() for buffer in self.buffers)]
        sent = self.connection.sendmsg(parts)
        for part in parts:  # what one call could not take
            self.connection.sendall(part[sent:])
            sent = max(sent - len(part), 0)
        for _, size in files:
            FETCHED.pack_into(self.scratch, 0, size)
            self.connection.sendall(scratch[: FETCHED.size])
        for fd, size in files:
            if fd >= 0:
                self.send_file(fd, size)

    def send_file(self, fd: int, size: int) -> None:
        with open(fd, "rb") as file:
            sent = self.connection.sendfile(file, count=size) if size else 0
            if sent < size:  # a process of the session was not stopped, and cut the file
                self.connection.sendall(bytes(size - sent))


def is_over_cpu_limit(return_code: int | None, used_s: float, run_timeout: float) -> bool:
    """Return whether several threads used up the CPU time before the wall clock ran out, and the kernel killed them.

    The time used decides, because a program can send itself these signals. The kernel counts clock ticks, so its count
    differs slightly from `used_s`.
    """
    return return_code in (-signal.SIGXCPU, -signal.SIGKILL) and used_s >= 0.9 * cpu_limit_s(run_timeout)
