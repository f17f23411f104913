"""Write the files of a request's folder, read them after the program, and remove whatever the program left."""

import ctypes
import errno
import mmap
import os
import stat

from .wire import NAME, address_of

SCRIPT = "main.py"  # the submitted program; relative, so that tracebacks do not vary with the folder
NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
STDIN = ".stdin"  # the program's standard input, for a moment
MAX_FETCH_BYTES = 64 << 20  # all of `fetch_files` together
# Why a file was left out, unless the kernel's own message says it.
LEFT_OUT = {
    errno.ENXIO: "not a regular file",
    errno.EBUSY: "a process of the program does not end",
    errno.EFBIG: f"over the limit of {MAX_FETCH_BYTES} bytes for all fetched files",
}
OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
OPEN_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # opening a FIFO must not wait for a writer

openat = ctypes.CDLL(None, use_errno=True).openat
openat.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int]  # the name is passed by its address


def write_file(path: str, content: bytes) -> None:
    """Write a new file, in fewer steps than open() takes, and so touching fewer pages."""
    fd = os.open(path, NEW_FILE, 0o600)
    while content:
        content = content[os.write(fd, content) :]
    os.close(fd)


def open_unlinked(path: str, content: bytes) -> int:
    """Return a file descriptor of a nameless file that holds `content`, open for reading from its start."""
    write_file(path, content)
    fd = os.open(path, os.O_RDONLY)
    os.unlink(path)
    return fd


def open_files(folder: str, body: int, count: int, offset: int, memory: mmap.mmap) -> list[tuple[int, int]]:
    """Open regular files below `folder`, following no symbolic link.

    Args:
        body: a request's memory file, which has the names (wire.py) from `offset` on.
        memory: for one name at a time, because no object of this process may hold one.
    Returns:
        for each name: the open file and its size, or -1 and -errno (see LEFT_OUT).
    """
    opened, budget = [], MAX_FETCH_BYTES
    for _ in range(count):
        size = os.preadv(body, [memory], offset)
        end = NAME.size + NAME.unpack_from(memory)[0]
        offset += end
        try:
            if size < end:  # a session's program has emptied it
                raise OSError(errno.ENODATA, "names of files")
            fd = open_inside(folder, memory, NAME.size, end)
        except OSError as exc:
            opened.append((-1, -(exc.errno or errno.EIO)))
            continue
        status = os.fstat(fd)
        if stat.S_ISREG(status.st_mode) and status.st_size <= budget:
            budget -= status.st_size
            opened.append((fd, status.st_size))
            continue
        opened.append((-1, -errno.EFBIG if stat.S_ISREG(status.st_mode) else -errno.ENXIO))
        os.close(fd)
    return opened


def open_inside(folder: str, memory: mmap.mmap, start: int, end: int) -> int:
    """Open a file below `folder` for reading, by the parts of its path in `memory`, a NUL after each.

    Raises:
        OSError: ELOOP, ENOTDIR: a link, or a path through one.
    """
    address = address_of(memory)
    directory = os.open(folder, OPEN_FOLDER)
    while True:
        after = memory.find(b"\0", start, end) + 1
        below = openat(directory, address + start, OPEN_FILE if after == end else OPEN_FOLDER)
        os.close(directory)
        if below < 0:
            raise OSError(ctypes.get_errno(), "openat")
        if after == end:
            return below
        directory, start = below, after


def remove_folder(folder: str) -> None:
    """Remove a request's folder; quick if it holds only the program."""
    try:
        os.unlink(f"{folder}/{SCRIPT}")
        os.rmdir(folder)
    except OSError:
        remove_tree(folder)


def remove_tree(path: str) -> None:
    """Call `rm -rf`, which takes any depth and is cheaper here than importing shutil; unlock folders if necessary.

    Raises:
        OSError: something could not be removed.
    """
    quiet = [(os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0)]
    for command in (["rm", "-rf", path], ["chmod", "-R", "u+rwX", path], ["rm", "-rf", path]):
        os.waitpid(os.posix_spawnp(command[0], command, os.environ, file_actions=quiet), 0)
        if not os.path.lexists(path):
            return
    raise OSError(errno.ENOTEMPTY, "could not be removed", path)
