"""The worker's view of a program's processes: it messages, stops, counts and kills them."""

import contextlib
import errno
import fcntl
import os
import select
import signal
import socket
import termios
import time
from typing import NamedTuple

from .disk import tree_of
from .program import CHUNK, RETURN_CODE, TOKEN_BYTES

STOP_S = 1.0  # for a session's program to stop after a call; otherwise it is killed
KILL_S = 1.0  # for killed processes to be gone; after that they are stuck in the kernel, and left to die by themselves
SEND_FDS_S = 3.0  # to send a file descriptor while the user's other processes have too many in flight
CPUCLOCK_SCHED = 2  # linux/posix-timers.h: the clock of all threads of a process


class Program(NamedTuple):
    """The worker's view of the program that it forked."""

    pid: int
    pidfd: int
    pipes: tuple[int, int]  # stdout, stderr
    control: socket.socket | None  # of a session
    token: bytearray  # begins each message of a session's program; empty until the program has sent it

    def call(self, body: int) -> None:
        """Have a session's program continue with the next request; whoever waits for it sees if it is dead.

        Raises:
            OSError: too many file descriptors of others are in flight.
        """
        assert self.control  # of a session
        self.signal(signal.SIGCONT)
        deadline = time.monotonic() + SEND_FDS_S
        while True:
            try:
                socket.send_fds(self.control, [b"\0"], [body])
                return
            except OSError as exc:
                if exc.errno != errno.ETOOMANYREFS:
                    return
                if any(fcntl.ioctl(self.control, termios.TIOCOUTQ, bytes(4))):
                    # The program reported calls as done that it has not received: they are in flight by its own doing.
                    self.signal(signal.SIGKILL)
                    return
                if time.monotonic() > deadline:
                    raise
            time.sleep(0.01)

    def receive(self) -> bytes | None:
        try:
            return self.control.recv(CHUNK) if self.control else None
        except OSError:  # closed with a message unread
            return None

    def return_code(self, message: bytes | None) -> int | None:
        """Return the message's return code; None if program.py did not send it, and the program cannot be trusted."""
        if not message or not self.token or not message.startswith(self.token):
            return None
        code = message[TOKEN_BYTES:]
        return RETURN_CODE.unpack(code)[0] if len(code) == RETURN_CODE.size else None

    def stop(self) -> bool:
        """Stop all processes until the next call; return False if the program did not stop or has ended, in any way."""
        self.signal(signal.SIGSTOP)
        deadline = time.monotonic() + STOP_S
        try:
            while not os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOHANG):  # a write that has begun completes first
                if time.monotonic() > deadline:
                    return False
                time.sleep(0.0001)
        except ChildProcessError:  # it has ended, and a dead process cannot be waited for to stop
            return False
        return True

    def pids(self) -> list[int]:
        """Return the program's process first, then all others that it has started; some may have ended.

        A worker has no other children, and becomes the parent of what the program's children leave behind.
        """
        if os.getpid() == 1:
            pids = [int(name) for name in os.listdir("/proc") if name.isdecimal() and name != "1"]
        else:
            pids = tree_of(os.getpid())[1:]
        return [self.pid, *(pid for pid in pids if pid != self.pid)]

    def cpu_s(self, *, with_others: bool = True) -> float:
        """Return the CPU time of its processes, as far as they can be seen; without others, that of the first."""
        total = 0.0
        for pid in self.pids() if with_others else [self.pid]:
            with contextlib.suppress(OSError):  # it has ended
                total += time.clock_gettime(~pid << 3 | CPUCLOCK_SCHED)
        return total

    def signal(self, number: int) -> None:
        """Signal all of the program's processes; without a process namespace, only those still in its process group."""
        with contextlib.suppress(ProcessLookupError):
            if os.getpid() == 1:
                os.kill(-1, number)
            else:
                os.killpg(self.pid, number)

    def close(self) -> None:
        for fd in (self.pidfd, *self.pipes):
            os.close(fd)
        if self.control:
            self.control.close()


def kill_all(program: Program) -> tuple[int | None, bool]:
    """Kill the program's session and every process that descends from it.

    Returns:
        (the program's wait status, None if it is not gone within KILL_S; whether all are gone).
    """
    deadline = time.monotonic() + KILL_S
    if os.getpid() == 1:  # in a process namespace all others are the program's; kill them at once, so that none forks
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
    else:
        for kill in (os.killpg, os.kill):  # the group does not exist yet if the time was over before setsid()
            with contextlib.suppress(ProcessLookupError):
                kill(program.pid, signal.SIGKILL)
    poller = select.poll()
    poller.register(program.pidfd, select.POLLIN)
    poller.poll(KILL_S * 1000)
    while True:
        reaped, status = os.waitpid(program.pid, os.WNOHANG)
        if reaped:
            break
        if time.monotonic() > deadline:
            return None, False
        time.sleep(0.001)
    while True:  # a process that left the session is our child, or becomes it when its parent is killed
        try:
            reaped, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return status, True
        if reaped:
            continue
        if time.monotonic() > deadline:
            return status, False
        if os.getpid() != 1:
            with open(f"/proc/self/task/{os.getpid()}/children") as file:
                for child in file.read().split():
                    os.kill(int(child), signal.SIGKILL)
        time.sleep(0.0002)
