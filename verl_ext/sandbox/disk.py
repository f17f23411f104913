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

MAX_THREADS = 128  # isolation.MAX_TASKS, where RLIMIT_NPROC would count processes that are not the program's
CHECK_S = 0.01  # at least; a count that takes long is followed by a longer pause
PAUSE = 10  # times what a count took
MAPS_S = 0.1  # between two looks at what is mapped, which costs most
MAX_DEPTH = 256  # folders in folders
MAX_PART = 2000  # characters of a path that one open() gets; the kernel takes 4,095
TOO_DEEP = -1  # no inode has it
BLOCK = 512  # bytes, of st_blocks on every file system

libc = ctypes.CDLL(None)


class DiskWatch:
    """Counts the files of one folder and of the processes that write there.

    Args:
        folder: of the program; nothing else can be written to.
        uid: of the program, user and group; as whom its files are counted.
    """

    def __init__(self, folder: str, uid: int) -> None:
        self.folder, self.uid = os.path.realpath(folder), uid
        self.next_check = self._next_maps = 0.0  # by time.monotonic()

    def excess(self, pids: Iterable[int]) -> str:
        """Which limit the program is beyond, in words for the model; "" when it is within all."""
        started = time.monotonic()
        try:
            with acting_as(self.uid):
                return self._excess(pids)
        finally:
            now = time.monotonic()
            self.next_check = now + max(CHECK_S, PAUSE * (now - started))

    def _excess(self, pids: Iterable[int]) -> str:
        pids = list(pids)
        num_bytes = 0
        seen: set[int] = set()  # inodes
        for inode, size in self._files(pids):
            if inode == TOO_DEEP:
                return f"disk limit: it has more than {MAX_DEPTH} folders in each other"
            if inode in seen:
                continue
            seen.add(inode)
            num_bytes += size
            if num_bytes > HOME_BYTES:
                return f"disk limit: its files take more than {HOME_BYTES >> 20} MiB"
            if len(seen) > HOME_INODES:
                return f"disk limit: it has more than {HOME_INODES} files and folders"
        if any(len(_list(f"/proc/{pid}/task")) > MAX_THREADS for pid in pids):
            return f"thread limit: a process has more than {MAX_THREADS}"
        return ""

    def _files(self, pids: list[int]) -> Iterator[tuple[int, int]]:
        """(inode, bytes) of all below the folder, and of what is open or mapped and has no name any more."""
        for status in self._below():
            yield (status.st_ino, status.st_blocks * BLOCK) if status else (TOO_DEEP, 0)
        for pid in pids:
            for path in _list(f"/proc/{pid}/fd"):
                try:
                    status = os.stat(path)
                except OSError:  # closed meanwhile
                    continue
                if stat.S_ISREG(status.st_mode) and not status.st_nlink:
                    yield status.st_ino, status.st_blocks * BLOCK
        if time.monotonic() < self._next_maps:
            return
        self._next_maps = time.monotonic() + MAPS_S
        folder = os.fsencode(self.folder)
        for pid in pids:
            try:
                with open(f"/proc/{pid}/maps", "rb") as file:  # a name may hold any byte; only a line end is escaped
                    lines = [line.split() for line in file if folder in line and line.endswith(b" (deleted)\n")]
            except OSError:  # it has ended
                continue
            for addresses, _, offset, _, inode, *_ in lines:
                start, end = (int(address, 16) for address in addresses.split(b"-"))
                yield int(inode), int(offset, 16) + end - start

    def _below(self) -> Iterator[os.stat_result | None]:
        """None for what is below MAX_DEPTH folders."""
        pending = [""]
        while pending:
            path = pending.pop()
            if path.count("/") >= MAX_DEPTH:
                yield None
            try:
                fd = self._open(path)
            except OSError:  # removed meanwhile
                continue
            try:
                with os.scandir(fd) as entries:
                    for entry in entries:
                        try:
                            yield entry.stat(follow_symlinks=False)
                            if entry.is_dir(follow_symlinks=False):
                                pending.append(f"{path}/{entry.name}" if path else entry.name)
                        except OSError:
                            continue
            finally:
                os.close(fd)

    def _open(self, path: str) -> int:
        """A folder below `self.folder`, at any depth; one that its owner has locked is opened and locked again."""
        fd = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        parts, part = path.split("/") if path else [], ""
        for position, name in enumerate(parts):
            part = f"{part}/{name}" if part else name
            if len(part) < MAX_PART and position < len(parts) - 1:
                continue
            try:
                below = _open_folder(part, fd)
            finally:
                os.close(fd)
            fd, part = below, ""
        return fd


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


def _open_folder(path: str, parent: int) -> int:
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return os.open(path, flags, dir_fd=parent)
    except PermissionError:
        mode = stat.S_IMODE(os.stat(path, dir_fd=parent, follow_symlinks=False).st_mode)
        os.chmod(path, mode | stat.S_IRWXU, dir_fd=parent)
        try:
            return os.open(path, flags, dir_fd=parent)
        finally:
            os.chmod(path, mode, dir_fd=parent)


def _list(folder: str) -> list[str]:
    try:
        return [f"{folder}/{name}" for name in os.listdir(folder)]
    except OSError:  # its process has ended
        return []


def tree_of(pid: int) -> list[int]:
    """A process and all below it."""
    pids = [pid]
    for parent in pids:
        try:
            for task in _list(f"/proc/{parent}/task"):
                with open(f"{task}/children") as file:
                    pids += [int(child) for child in file.read().split()]
        except OSError:  # it has ended
            continue
    return pids
