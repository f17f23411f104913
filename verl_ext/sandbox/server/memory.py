"""Count the memory of a program's processes that RLIMIT_AS does not bound; their worker does so while they run.

RLIMIT_AS bounds the pages of one process. It does not bound its page tables, which take twice as much if the pages lie
far apart, nor the sum over several processes, nor what waits in their sockets and pipes. Memory that could not be
counted at all is denied to programs (seccomp.py).
"""

import contextlib
import os
import re
import stat
import time
from collections.abc import Iterable

from .disk import acting_as, after_count, threads_of
from .wire import numbers_in

STATUS = re.compile(rb".*?\nVmRSS:\s+(\d+) kB\n.*?\nVmPTE:\s+(\d+) kB\n", re.S)
ROLLUP = re.compile(rb".*?\nPss:\s+(\d+) kB\n", re.S)
CHECK_S = 0.05  # minimum between two counts; one takes 0.5 ms
# Their capacity, including the kernel's overhead: Linux's net.core.wmem_default, and 16 pages.
SOCKET_BYTES, PIPE_BYTES = 256 << 10, 64 << 10


class MemoryWatch:
    """Counts the memory of one program, at most every CHECK_S; see `memory_excess` for the arguments."""

    def __init__(self, limit: int, *, uid: int, several: bool) -> None:
        self.limit, self.uid, self.several = limit, uid, several
        self.next_check = time.monotonic() + CHECK_S

    def excess(self, pids: Iterable[int]) -> str:
        started = time.monotonic()
        try:
            return memory_excess(pids, self.limit, uid=self.uid, several=self.several)
        finally:
            self.next_check = max(started + CHECK_S, after_count(started))


def memory_excess(pids: Iterable[int], limit: int, *, uid: int, several: bool) -> str:
    """Say for the model that processes have more than `limit` bytes; "" if they do not.

    Args:
        uid: of the processes.
        several: there may be several. What they share then counts once, and their sockets and pipes count as full.
    """
    buffers: dict[int, int] = {}
    pages: dict[str, int] = {}  # by thread, one for each process
    total = 0
    with acting_as(uid):
        for pid in pids:
            for thread in threads_of(pid):
                resident, tables = _sizes(f"{thread}/status", STATUS) or (0, 0)
                pages[thread] = resident
                total += resident + tables
                if tables:  # all threads have the same memory and files; one that has ended has none
                    buffers |= _buffers_of(thread) if several else {}
                    break
        total += sum(buffers.values())
        if several and total > limit:  # only then, because finding out what is shared takes fifty times longer
            for thread, size in pages.items():
                part = _sizes(f"{thread}/smaps_rollup", ROLLUP)
                total += part[0] - size if part else 0  # none: its executable cannot be read
    if total <= limit:
        return ""
    return f"memory limit: it has more than {limit >> 20} MiB, with page tables and preloaded packages"


def _sizes(path: str, lines: re.Pattern[bytes]) -> list[int]:
    """Return in bytes the sizes that a file in /proc gives in kB; [] if its process has ended or may not be read."""
    with contextlib.suppress(OSError):
        return [int(number) << 10 for number in numbers_in(path, lines)]
    return []


def _buffers_of(thread: str) -> dict[int, int]:
    """Return the most bytes that each socket and pipe can hold, by inode."""
    found = {}
    with contextlib.suppress(OSError):  # it has ended, or closes files meanwhile
        for name in os.listdir(f"{thread}/fd"):
            status = os.stat(f"{thread}/fd/{name}")
            if stat.S_ISSOCK(status.st_mode):
                found[status.st_ino] = SOCKET_BYTES
            elif stat.S_ISFIFO(status.st_mode):
                found[status.st_ino] = PIPE_BYTES
    return found
