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
CHECK_S = 0.01  # at least; a count that takes long is followed by a longer pause, of at most MAX_PAUSE_S
PAUSE, MAX_PAUSE_S = 10, 0.1  # times what a count took
MAPS_S = 0.1  # between two looks at what is mapped, which costs most
MAX_DEPTH = 128  # folders in folders, all open at once
TOO_DEEP = -1  # no inode has it
OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
BLOCK = 512  # bytes, of st_blocks on every file system

libc = ctypes.CDLL(None)


class DiskWatch:
    """Counts the files of one folder and of the processes that write there.

    Args:
        folder: of the program; nothing else can be written to.
        uid: of the program, user and group.
    """

    def __init__(self, folder: str, uid: int) -> None:
        self.folder, self.uid = os.path.realpath(folder), uid
        self.next_check = self._next_maps = 0.0  # by time.monotonic()

    def excess(self, pids: Iterable[int]) -> str:
        """Which limit the program is beyond, in words for the model; "" when it is within all."""
        started = time.monotonic()
        try:
            return self._excess(pids)
        finally:
            now = time.monotonic()
            self.next_check = now + min(max(CHECK_S, PAUSE * (now - started)), MAX_PAUSE_S)

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
        with acting_as(self.uid):
            unnamed = self._open(pids) + self._mapped(pids)
        yield from unnamed

    def _open(self, pids: list[int]) -> list[tuple[int, int]]:
        found = []
        for pid in pids:
            for path in _list(f"/proc/{pid}/fd"):
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
            try:
                with open(f"/proc/{pid}/maps", "rb") as file:  # a name may hold any byte; only a line end is escaped
                    lines = [line.split() for line in file if folder in line and line.endswith(b" (deleted)\n")]
            except OSError:  # it has ended
                continue
            for addresses, _, offset, _, inode, *_ in lines:
                start, end = (int(address, 16) for address in addresses.split(b"-"))
                found.append((int(inode), int(offset, 16) + end - start))
        return found

    def _below(self) -> Iterator[os.stat_result | None]:
        """None for what is below MAX_DEPTH folders.

        One name after the other is opened, each in the folder above it, since a program may put a symbolic link in the
        place of a folder meanwhile.
        """
        stack: list[tuple[int, list[os.DirEntry]]] = []  # open folders, with those in them that are still to be opened
        try:
            stack.append((os.open(self.folder, OPEN_FOLDER), []))
            yield from _read_folder(*stack[-1])
            while stack:
                parent, folders = stack[-1]
                if not folders:
                    os.close(stack.pop()[0])
                    continue
                if len(stack) >= MAX_DEPTH:
                    yield None
                try:
                    stack.append((_open_folder(folders.pop(), parent), []))
                except OSError:  # removed meanwhile
                    continue
                yield from _read_folder(*stack[-1])
        finally:
            for fd, _ in stack:
                os.close(fd)


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


def _read_folder(fd: int, folders: list[os.DirEntry]) -> Iterator[os.stat_result]:
    """What is in an open folder; the folders among it are added to `folders`."""
    with os.scandir(fd) as entries:
        for entry in entries:
            try:
                yield entry.stat(follow_symlinks=False)
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry)
            except OSError:  # removed meanwhile
                continue


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
