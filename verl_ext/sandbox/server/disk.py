"""What the files of a program take on the disk: its limit where mounts, and so a file system of its own, are refused.

A worker counts every CHECK_S, and kills a program that has more; what it can write in between comes on top.
"""

import contextlib
import ctypes
import os
import stat
import time
from collections.abc import Iterable, Iterator

from .namespaces import HOME_BYTES, HOME_INODES

MAX_FILE_BYTES = 64 << 20  # RLIMIT_FSIZE of a program; writing beyond it raises OSError(EFBIG)
MAX_THREADS = 128  # isolation.MAX_TASKS, where RLIMIT_NPROC would count processes that are not the program's
CHECK_S = 0.01  # at least; a count that takes long is followed by a longer pause, of at most MAX_PAUSE_S
PAUSE, MAX_PAUSE_S = 10, 0.1  # times what a count took
MAPS_S = 0.1  # between two looks at what is mapped, which costs most
MAX_DEPTH = 128  # folders in folders, all open at once
OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
BLOCK = 512  # bytes, of st_blocks on every file system
PF_EXITING, PF_FORKNOEXEC = 0x4, 0x40  # linux/sched.h: it ends, or has ended; it was forked, and executed nothing since

libc = ctypes.CDLL(None)


class Excess(Exception):
    """A program is beyond a limit; the message is for the model."""


def after_count(started: float) -> float:
    """When to count again, by time.monotonic(), after a count that began then."""
    now = time.monotonic()
    return now + min(max(CHECK_S, PAUSE * (now - started)), MAX_PAUSE_S)


class DiskWatch:
    """Counts the files of one folder and of the processes that write there.

    Args:
        folder: of the program; nothing else can be written to.
        uid: of the program, user and group.
    """

    def __init__(self, folder: str, uid: int) -> None:
        self.folder, self.uid = os.path.realpath(folder), uid
        self.next_check = self._next_maps = 0.0  # by time.monotonic()
        self._seen: set[int] = set()  # inodes, within a count
        self._num_bytes = 0

    def excess(self, pids: Iterable[int]) -> str:
        """Which limit the program is beyond, in words for the model; "" when it is within all.

        Args:
            pids: of its processes, the worker's own child first.
        """
        started = time.monotonic()
        try:
            return self._excess(pids)
        finally:
            self.next_check = after_count(started)

    def _excess(self, pids: Iterable[int]) -> str:
        pids = list(pids)
        try:
            self._count_below(os.open(self.folder, OPEN_FOLDER), 1)
            with acting_as(self.uid):
                unnamed = self._open(pids) + self._mapped(pids)
            for inode, num_bytes in unnamed:
                self._count(inode, num_bytes)
        except Excess as exc:
            return f"disk limit: {exc}"
        finally:  # the next program, a fork of this process, is to find nothing of this one
            self._seen, self._num_bytes = set(), 0
        if sum(len(threads_of(pid)) for pid in pids) > MAX_THREADS:
            return f"thread limit: it has more than {MAX_THREADS} threads"
        return ""

    def _count(self, inode: int, num_bytes: int) -> None:
        """Count a file, folder or link once, by whatever name it is seen. Raises Excess."""
        if inode in self._seen:
            return
        self._seen.add(inode)
        self._num_bytes += num_bytes
        if self._num_bytes > HOME_BYTES:
            raise Excess(f"its files take more than {HOME_BYTES >> 20} MiB")
        if len(self._seen) > HOME_INODES:
            raise Excess(f"it has more than {HOME_INODES} files and folders")

    def _count_below(self, fd: int, depth: int) -> None:
        """Count what is below an open folder, which is closed. Raises Excess.

        Each folder is opened by its name in the folder above it, since a program may meanwhile put a symbolic link in
        the place of a folder. What a program removes meanwhile does not count.
        """
        folders = []
        try:
            with os.scandir(fd) as entries:
                for entry in entries:
                    try:
                        status = entry.stat(follow_symlinks=False)
                    except OSError:
                        continue
                    self._count(status.st_ino, status.st_blocks * BLOCK)
                    if stat.S_ISDIR(status.st_mode):
                        folders.append(entry)
            if folders and depth >= MAX_DEPTH:
                raise Excess(f"it has more than {MAX_DEPTH} folders in each other")
            for entry in folders:
                try:
                    below = _open_folder(entry, fd)
                except OSError:
                    continue
                self._count_below(below, depth + 1)
        finally:
            os.close(fd)

    def _open(self, pids: list[int]) -> list[tuple[int, int]]:
        found = []
        for pid in pids:
            paths = [path for thread in threads_of(pid) for path in _list_open(thread, may_be_new=pid == pids[0])]
            for path in paths:
                try:
                    status = os.stat(path)
                except OSError:  # closed meanwhile
                    continue
                if stat.S_ISREG(status.st_mode) and not status.st_nlink:
                    found.append((status.st_ino, status.st_blocks * BLOCK))
        return found

    def _mapped(self, pids: list[int]) -> list[tuple[int, int]]:
        if time.monotonic() < self._next_maps:
            return []
        self._next_maps = time.monotonic() + MAPS_S
        found, folder = [], os.fsencode(self.folder)
        for pid in pids:
            for thread in threads_of(pid):
                with contextlib.suppress(OSError), open(f"{thread}/maps", "rb") as file:  # OSError: it has ended
                    lines = file.readlines()  # a name may hold any byte; only a line end is escaped
                    deleted = [line.split() for line in lines if folder in line and line.endswith(b" (deleted)\n")]
                    # One that is open, too, has been counted. Of others, nobody sees more than the part that is mapped.
                    found += [(int(inode), MAX_FILE_BYTES) for _, _, _, _, inode, *_ in deleted]
                    if lines:
                        break  # all threads of a process have the same memory
        return found


@contextlib.contextmanager
def acting_as(uid: int) -> Iterator[None]:
    """With the rights of a user and its group where files are concerned.

    What a process has open may be seen by its own user, but by root only with a capability that containers take away.
    """
    if uid == os.geteuid():
        yield
        return
    gid = os.getegid()
    try:
        libc.setfsgid(uid)
        libc.setfsuid(uid)
        yield
    finally:
        libc.setfsuid(os.geteuid())
        libc.setfsgid(gid)


def _open_folder(entry: os.DirEntry, parent: int) -> int:
    """Open a folder, which is unlocked if its owner has locked it: else nothing below it could be counted."""
    if ~entry.stat(follow_symlinks=False).st_mode & stat.S_IRWXU:
        fd = os.open(entry.name, OPEN_FOLDER | os.O_PATH, dir_fd=parent)
        try:
            os.chmod(f"/proc/self/fd/{fd}", stat.S_IRWXU)  # by name, it could have become a link to another folder
        finally:
            os.close(fd)
    return os.open(entry.name, OPEN_FOLDER, dir_fd=parent)


def _list(folder: str) -> list[str]:
    try:
        return [f"{folder}/{name}" for name in os.listdir(folder)]
    except OSError:  # its process has ended
        return []


def _list_open(thread: str, *, may_be_new: bool) -> list[str]:
    """What a thread has open. Raises Excess for one that does not show it, because its executable cannot be read.

    Args:
        may_be_new: it may be the worker's own child, which shows nothing until it is confined (isolation.py).
    """
    try:
        return [f"{thread}/fd/{name}" for name in os.listdir(f"{thread}/fd")]
    except PermissionError:
        with contextlib.suppress(OSError), open(f"{thread}/stat", "rb") as file:
            flags = int(file.read().rpartition(b") ")[2].split()[6])  # "PID (NAME) STATE ... FLAGS ..."
            if not flags & (PF_EXITING | PF_FORKNOEXEC if may_be_new else PF_EXITING):
                raise Excess("a process whose executable cannot be read hides which files it has open") from None
    except OSError:  # it has ended
        pass
    return []


def threads_of(pid: int) -> list[str]:
    """Folders in /proc of the threads of a process. The first thread may have ended, and then shows nothing."""
    return _list(f"/proc/{pid}/task")


def children_of(pid: int) -> list[int]:
    pids: list[int] = []
    with contextlib.suppress(OSError):  # it has ended
        for thread in threads_of(pid):
            with open(f"{thread}/children") as file:
                pids += [int(child) for child in file.read().split()]
    return pids


def tree_of(pid: int) -> list[int]:
    """A process and all below it."""
    pids = [pid]
    for parent in pids:
        pids += children_of(parent)
    return pids
