"""Run what `as-agent` asks for (as_agent.py): programs of the agent, out of reach of the tests that run them.

A process that makes the system call landlock_create_ruleset() with flags that no kernel knows has to wait, and the
kernel reports it to the box's worker (seccomp_unotify(2)). The worker takes from it the command, the folder, the
environment, the limits and the three standard streams, and runs the command below a child of its own: process 1 of a
process namespace, in a mount namespace without the tests' files, and under narrower rules of landlock. The caller gets
a socket on which the exit code arrives; when it closes it, as by its death, or writes to it, the run is killed.
"""

import contextlib
import ctypes
import errno
import fcntl
import os
import resource
import select
import signal
import socket
import struct
from typing import Any, NamedTuple, NoReturn

from . import landlock, namespaces, seccomp
from .box_isolation import BoxIsolation
from .isolation import drop_capabilities, set_no_new_privs
from .program import CHUNK

# linux/seccomp.h
SECCOMP, SET_MODE_FILTER, NEW_LISTENER, USER_NOTIF = 317, 1, 8, 0x7FC00000
RECEIVE, SEND, ADD_FD = 0xC0502100, 0xC0182101, 0x40182103  # ioctl()
NOTIFICATION = struct.Struct("=QIIiIQ6Q")  # struct seccomp_notif: id, pid, flags, and struct seccomp_data
ANSWER = struct.Struct("=QqiI")  # struct seccomp_notif_resp: id, value, error, flags
ADDED = struct.Struct("=QIIII")  # struct seccomp_notif_addfd: id, flags, source, target, flags of the target
ADD_FD_AND_SEND = 2
CLONE, PIDFD_GETFD = {"x86_64": 56, "aarch64": 220}[os.uname().machine], 438  # system calls
MAX_RUNS = 32  # at once
MAX_TEXT_BYTES = 1 << 20  # of a command and of an environment
INHERITED_LIMITS = ("CPU", "FSIZE", "DATA", "STACK", "NOFILE", "AS", "NPROC")

libc = ctypes.CDLL(None, use_errno=True)
syscall = ctypes.PyDLL(None, use_errno=True).syscall  # also as fork(), without the hooks of Python


class Run(NamedTuple):
    pid: int
    pidfd: int
    end: int  # of a socket, for the exit code


class Command(NamedTuple):
    """What the caller was asked to run, and with what."""

    words: list[bytes]
    environment: dict[bytes, bytes]
    folder: bytes
    streams: list[int]
    limits: dict[int, tuple[int, int]]


class AgentRuns:
    """The runs of one box. This process must not make the call itself.

    Raises:
        OSError: the kernel cannot report calls (Linux before 5.14).
    """

    def __init__(self, layers: BoxIsolation) -> None:
        self.layers = layers
        self.runs: dict[int, Run] = {}  # by each of its descriptors
        ask = [
            (seccomp.LOAD, 0, 0, seccomp.OFFSET_NUMBER),
            (seccomp.JUMP_EQUAL, 0, 3, seccomp.CREATE_RULESET),
            (seccomp.LOAD, 0, 0, seccomp.OFFSET_ARGUMENTS + 8 * 2),
            (seccomp.JUMP_EQUAL, 0, 1, seccomp.OF_AS_AGENT),
            (seccomp.RETURN, 0, 0, USER_NOTIF),
            (seccomp.RETURN, 0, 0, seccomp.ALLOW),
        ]
        program = seccomp.prepare(b"".join(seccomp.INSTRUCTION.pack(*instruction) for instruction in ask))
        self.listener = libc.syscall(SECCOMP, SET_MODE_FILTER, NEW_LISTENER, ctypes.byref(program))
        if self.listener < 0:
            raise OSError(ctypes.get_errno(), "seccomp(SECCOMP_FILTER_FLAG_NEW_LISTENER)")

    def register(self, poller: select.poll, streams: dict[int, Any]) -> None:
        """Have a worker's loop call `read_from` when a program asks, a run has ended or nobody waits for it."""
        self.poller, self.streams = poller, streams
        for fd in (self.listener, *self.runs):
            self._register(fd)

    def _register(self, fd: int) -> None:
        self.poller.register(fd, select.POLLIN)
        self.streams[fd] = self

    def read_from(self, fd: int) -> int:
        """Do what is due for one of the descriptors; return 0 if nothing more will be."""
        if fd == self.listener:
            return self._answer()
        run = self.runs[fd]
        if fd == run.end:  # the caller is gone, or asks for it
            os.kill(run.pid, signal.SIGKILL)
            return 0
        code = os.waitstatus_to_exitcode(os.waitpid(run.pid, 0)[1])
        with contextlib.suppress(OSError):
            os.write(run.end, bytes([code if code >= 0 else 128 - code]))
        self._forget(run)
        return 1  # it is closed, and so not polled any more

    def pids(self) -> set[int]:
        """Return the processes that `read_from` reaps."""
        return {run.pid for run in self.runs.values()}

    def forget_all(self) -> None:
        """All processes are dead, and reaped."""
        for run in set(self.runs.values()):
            self._forget(run)

    def _forget(self, run: Run) -> None:
        for fd in (run.pidfd, run.end):
            with contextlib.suppress(KeyError):
                self.poller.unregister(fd)
            self.streams.pop(fd, None)
            del self.runs[fd]
            os.close(fd)

    def _answer(self) -> int:
        """Answer one call; return 0 if there can be no other one."""
        notification = bytearray(NOTIFICATION.size)
        try:
            fcntl.ioctl(self.listener, RECEIVE, notification)
        except OSError as exc:  # the caller was killed meanwhile
            return 1 if exc.errno in (errno.ENOENT, errno.EINTR) else 0
        number, caller, *_ = NOTIFICATION.unpack(notification)
        theirs = -1
        try:
            theirs = self._start(caller)
            fcntl.ioctl(self.listener, ADD_FD, ADDED.pack(number, ADD_FD_AND_SEND, theirs, 0, os.O_CLOEXEC))
        except OSError as exc:
            with contextlib.suppress(OSError):  # the caller is gone
                fcntl.ioctl(self.listener, SEND, ANSWER.pack(number, 0, -(exc.errno or errno.EIO), 0))
        finally:
            if theirs >= 0:
                os.close(theirs)  # now only the caller has it: if it did not get it, the run ends
        return 1

    def _start(self, caller: int) -> int:
        """Start a run; return the caller's end of its socket. Raises OSError."""
        if len(self.pids()) >= MAX_RUNS:
            raise OSError(errno.EAGAIN, "too many runs")
        command = command_of(caller)
        ours, theirs = (end.detach() for end in socket.socketpair())
        pid = syscall(CLONE, namespaces.CLONE_NEWPID | signal.SIGCHLD, 0, 0, 0, 0)
        if pid == 0:
            be_first_process(self, command)
        failure = ctypes.get_errno()
        for fd in command.streams:
            os.close(fd)
        if pid < 0:
            os.close(ours)
            os.close(theirs)
            raise OSError(failure, "clone")
        run = Run(pid, os.pidfd_open(pid), ours)
        self.runs |= {run.pidfd: run, run.end: run}
        self._register(run.pidfd)
        self._register(run.end)
        return theirs


def command_of(caller: int) -> Command:
    """Read from a process, which waits, what it was asked to run. Raises OSError."""
    words = _strings(f"/proc/{caller}/cmdline")
    script = next((i for i, word in enumerate(words) if word.endswith(b"/as_agent.py")), len(words))
    variables = [string.split(b"=", 1) for string in _strings(f"/proc/{caller}/environ") if b"=" in string]
    kinds = [getattr(resource, f"RLIMIT_{name}") for name in INHERITED_LIMITS]
    limits = {kind: resource.prlimit(caller, kind) for kind in kinds}
    folder = os.readlink(os.fsencode(f"/proc/{caller}/cwd"))
    pidfd = os.pidfd_open(caller)
    try:
        streams = [libc.syscall(PIDFD_GETFD, pidfd, fd, 0) for fd in range(3)]
    finally:
        os.close(pidfd)
    streams = [os.open(os.devnull, os.O_RDWR) if fd < 0 else fd for fd in streams]
    return Command(words[script + 1 :], dict(variables), folder, streams, limits)


def _strings(path: str) -> list[bytes]:
    with open(path, "rb") as file:
        text = file.read(MAX_TEXT_BYTES + 1)
    if len(text) > MAX_TEXT_BYTES:
        raise OSError(errno.E2BIG, os.strerror(errno.E2BIG))
    return text.split(b"\0")[:-1]


def be_first_process(runs: AgentRuns, command: Command) -> NoReturn:
    """Be process 1 of the run's namespace: start the command, and end with it, and all that it started with this."""
    code = 125
    try:
        if libc.setns(runs.layers.without_tests, namespaces.CLONE_NEWNS):
            raise OSError(ctypes.get_errno(), "setns")
        os.setsid()
        for number, fd in enumerate(command.streams):
            os.dup2(os.dup(fd), number)
        ruleset = os.dup(runs.layers.for_as_agent)
        set_no_new_privs()
        pid = os.fork()
        if pid == 0:
            be_program(runs, command, ruleset)
        os.closerange(0, CHUNK)
        drop_capabilities()
        while True:
            reaped, status = os.waitpid(-1, 0)
            if reaped == pid:
                code = os.waitstatus_to_exitcode(status)
                code = code if code >= 0 else 128 - code
                break
    finally:
        os._exit(code)


def be_program(runs: AgentRuns, command: Command, ruleset: int) -> NoReturn:
    code, said = 125, b"could not be confined"
    try:
        landlock.restrict_self(ruleset)
        for kind, limits in command.limits.items():
            resource.setrlimit(kind, limits)
        runs.layers.confine(is_readable=False)
        reset_signals()
        try:
            os.chdir(command.folder if command.folder.startswith(b"/app") else b"/app")
        except OSError:
            os.chdir("/app")
        code, said = 126, b"cannot be run"
        os.closerange(3, CHUNK)
        environment = command.environment | {b"HOME": b"/tmp", b"TMPDIR": b"/tmp"}
        os.execvpe(command.words[0], command.words, environment)
    except BaseException as exc:
        code = 127 if code == 126 and isinstance(exc, FileNotFoundError) else code
        name = command.words[0] if command.words else b"?"
        os.write(2, b"as-agent: %b %b: %b\n" % (name, said, str(exc).encode(errors="replace")))
    finally:
        os._exit(code)


def reset_signals() -> None:
    """Have the signals that Python ignores or handles do what a program expects."""
    for number in (signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
