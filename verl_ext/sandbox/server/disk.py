"""Count a program's files on disk: the limit if mounts, and so a separate file system, are refused.

A worker counts again CHECK_S to MAX_PAUSE_S after each count, and kills a program that has more than it may. What the
program writes in between comes on top.
"""

import contextlib
import ctypes
import io
import os
import re
import stat
import struct
import time
from collections.abc import Iterable, Iterator

from .folders import OPEN_FOLDER, openat
from .isolation import MAX_TASKS
from .namespaces import HOME_BYTES, HOME_INODES
from .wire import address_of, numbers_in, unshared

MAX_FILE_BYTES = 64 << 20  # RLIMIT_FSIZE of a program; writing beyond it raises OSError(EFBIG)
CHECK_S = 0.01  # minimum; a count that takes long is followed by a longer pause, of at most MAX_PAUSE_S
PAUSE, MAX_PAUSE_S = 10, 0.1  # the pause as a multiple of the time that a count took, and its maximum
MAPS_S = 0.1  # between two looks at what is mapped, which costs most
MAX_DEPTH = 128  # folders in folders, all open at once
BLOCK = 512  # bytes, of st_blocks on every file system
READ_BYTES = 1 << 15  # read at once from a folder or from the list of mappings: no line there is longer
GETDENTS64 = {"x86_64": 217, "aarch64": 61}[os.uname().machine]  # system call
DIRENT = struct.Struct("=QqHB")  # struct linux_dirent64: inode, offset, bytes, kind; then the name
STATUS = struct.Struct("=28xHxxQQQ")  # struct statx: mode, inode, size, blocks
STATUS_BYTES = 256
STATX_WANTED = 0x2 | 0x100 | 0x400  # STATX_MODE, STATX_INO, STATX_BLOCKS
AT_SYMLINK_NOFOLLOW = 0x100
FLAGS = re.compile(rb".*\) \S(?: \S+){5} (\d+)", re.S)  # "PID (NAME) STATE ... FLAGS ..."
DOTS = re.compile(rb"\.\.?\0")  # the folder itself, and the one above it
PF_EXITING, PF_FORKNOEXEC = 0x4, 0x40  # linux/sched.h: it ends or has ended; it was forked and has executed nothing

libc = ctypes.CDLL(None, use_errno=True)
statx = ctypes.PyDLL(None).statx  # PyDLL is cheaper: this process has one thread, and errno is not needed
statx.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint, ctypes.c_void_p]


class Excess(Exception):
    """A program is beyond a limit; the message is for the model."""


def after_count(started: float) -> float:
    """Return when to count again, by time.monotonic(), after a count that began at `started`."""
    now = time.monotonic()
    return now + min(max(CHECK_S, PAUSE * (now - started)), MAX_PAUSE_S)


class DiskWatch:
    """Counts the files of one folder and of the processes that write there.

    Names stay in memory that forks do not have (wire.py), and are opened and looked at by their addresses.

    Args:
        folder: of the program, which can write nowhere else.
        uid: of the program, user and group.
    """

    def __init__(self, folder: str, uid: int) -> None:
        self.folder, self.uid = os.path.realpath(folder), uid
        self.next_check = self._next_maps = 0.0  # by time.monotonic()
        self._seen: set[int] = set()  # inodes, within a count
        self._num_bytes = 0
        self._memory = unshared(MAX_DEPTH * READ_BYTES)  # a part for each folder on the way down
        self._status = unshared(STATUS_BYTES)
        self._address, self._status_address = address_of(self._memory), address_of(self._status)
        self._folder_bytes = os.fsencode(self.folder)
        self._deleted = re.compile(
            rb"^\S+ \S+ \S+ \S+ (\d+) +[^\n]*%b/[^\n]* \(deleted\)\n" % re.escape(self._folder_bytes), re.M
        )

    def reset(self) -> None:
        """Restart the clocks for a new program, which must find nothing of the one before it."""
        now = time.monotonic()
        self.next_check, self._next_maps = now + CHECK_S, now + MAPS_S

    def excess(self, pids: Iterable[int]) -> str:
        """Return which limit the program exceeds, in words for the model; "" if it exceeds none.

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
            try:
                folder = os.open(self.folder, OPEN_FOLDER)
            except OSError as exc:  # the program can move or lock it
                raise Excess(f"its folder is gone ({exc.strerror})") from exc
            self._count_below(folder, 1)
            with acting_as(self.uid):
                unnamed = self._open(pids) + self._mapped(pids)
            for inode, num_bytes in unnamed:
                self._count(inode, num_bytes)
        except Excess as exc:
            return f"disk limit: {exc}"
        finally:  # the next program, a fork of this process, must find nothing of this one
            self._seen, self._num_bytes = set(), 0
        # RLIMIT_NPROC is off if it would count processes that are not the program's.
        if sum(len(threads_of(pid)) for pid in pids) > MAX_TASKS:
            return f"thread limit: it has more than {MAX_TASKS} threads"
        return ""

    def _count(self, inode: int, num_bytes: int) -> None:
        """Count a file, folder or link once, whatever its names. Raises Excess."""
        if inode in self._seen:
            return
        self._seen.add(inode)
        self._num_bytes += num_bytes
        if self._num_bytes > HOME_BYTES:
            raise Excess(f"its files take more than {HOME_BYTES >> 20} MiB")
        if len(self._seen) > HOME_INODES:
            raise Excess(f"it has more than {HOME_INODES} files and folders")

    def _count_below(self, fd: int, depth: int) -> None:
        """Count what is below an open folder, and close it. Raises Excess.

        Each folder is opened by its name in the folder above it, because the program may meanwhile replace a folder
        by a symbolic link. What the program removes meanwhile does not count.
        """
        memory, address, status = self._memory, self._address, self._status_address
        start = (depth - 1) * READ_BYTES
        try:
            while (num_bytes := libc.syscall(GETDENTS64, fd, ctypes.c_void_p(address + start), READ_BYTES)) > 0:
                entry = start
                while entry < start + num_bytes:
                    name = entry + DIRENT.size
                    entry += DIRENT.unpack_from(memory, entry)[2]
                    if statx(fd, address + name, AT_SYMLINK_NOFOLLOW, STATX_WANTED, status):
                        continue
                    mode, inode, _, blocks = STATUS.unpack_from(self._status)
                    is_folder = stat.S_ISDIR(mode)
                    if is_folder and DOTS.match(memory, name):
                        continue
                    self._count(inode, blocks * BLOCK)
                    if not is_folder:
                        continue
                    if depth == MAX_DEPTH:
                        raise Excess(f"it has more than {MAX_DEPTH} folders in each other")
                    if (below := _open_folder(fd, address + name, mode)) >= 0:
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
        found: list[tuple[int, int]] = []
        for pid in pids:
            for thread in threads_of(pid):
                with contextlib.suppress(OSError), open(f"{thread}/maps", "rb", buffering=0) as file:  # it has ended
                    if self._find_deleted(file, found):
                        break  # all threads of a process have the same memory
        return found

    def _find_deleted(self, maps: io.FileIO, found: list[tuple[int, int]]) -> bool:
        """Add inode and maximum size of the folder's files without a name; return False if nothing is mapped at all.

        A file that is also open has been counted. Of the others, only the mapped part can be seen. A name may hold any
        byte except a line end.
        """
        memory, used, is_mapped = memoryview(self._memory), 0, False
        while count := maps.readinto(memory[used : used + READ_BYTES]):
            is_mapped, used = True, used + count
            end = self._memory.rfind(b"\n", 0, used) + 1
            if self._memory.find(self._folder_bytes, 0, end) >= 0:
                found += [(int(line[1]), MAX_FILE_BYTES) for line in self._deleted.finditer(self._memory, 0, end)]
            used -= end
            self._memory.move(0, end, used)  # a part of a line
        return is_mapped


@contextlib.contextmanager
def acting_as(uid: int) -> Iterator[None]:
    """Take the file access rights of a user and its group for a block.

    A process's own user may see what it has open, but root only with a capability that containers take away.
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


def _open_folder(parent: int, name: int, mode: int) -> int:
    """Open a folder; return -1 if that fails. A locked folder is unlocked, or nothing below it would count."""
    if ~mode & stat.S_IRWXU:
        fd = openat(parent, name, OPEN_FOLDER | os.O_PATH)
        if fd < 0:
            return fd
        try:
            os.chmod(f"/proc/self/fd/{fd}", stat.S_IRWXU)  # by name, it could have become a link to another folder
        except OSError:
            return -1
        finally:
            os.close(fd)
    return openat(parent, name, OPEN_FOLDER)


def _list(folder: str) -> list[str]:
    try:
        return [f"{folder}/{name}" for name in os.listdir(folder)]
    except OSError:  # its process has ended
        return []


def _list_open(thread: str, *, may_be_new: bool) -> list[str]:
    """Return what a thread has open. Raises Excess if that is hidden because the thread's executable cannot be read.

    Args:
        may_be_new: it may be the worker's own child, which shows nothing until it is confined (isolation.py).
    """
    try:
        return [f"{thread}/fd/{name}" for name in os.listdir(f"{thread}/fd")]
    except PermissionError:
        with contextlib.suppress(OSError):
            flags = int(numbers_in(f"{thread}/stat", FLAGS)[0])
            if not flags & (PF_EXITING | PF_FORKNOEXEC if may_be_new else PF_EXITING):
                raise Excess("a process whose executable cannot be read hides which files it has open") from None
    except OSError:  # it has ended
        pass
    return []


def threads_of(pid: int) -> list[str]:
    """Return the folders in /proc of a process's threads. The first thread may have ended, and then shows nothing."""
    return _list(f"/proc/{pid}/task")


def children_of(pid: int) -> list[int]:
    pids: list[int] = []
    with contextlib.suppress(OSError):  # it has ended
        for thread in threads_of(pid):
            with open(f"{thread}/children") as file:
                pids += [int(child) for child in file.read().split()]
    return pids


def tree_of(pid: int) -> list[int]:
    """Return a process and all its descendants."""
    pids = [pid]
    for parent in pids:
        pids += children_of(parent)
    return pids
