"""The folder of a request: made, read after the program, and removed, whatever the program left in it."""

import errno
import os
import stat

SCRIPT = "main.py"  # the submitted program; relative, so that tracebacks do not vary with the folder
NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
MAX_FETCH_BYTES = 64 << 20  # all of `fetch_files` together


def write_file(path: str, content: bytes) -> None:
    """Write a new file; with fewer steps, and so fewer pages touched, than open()."""
    fd = os.open(path, NEW_FILE, 0o600)
    while content:
        content = content[os.write(fd, content) :]
    os.close(fd)


def open_unlinked(path: str, content: bytes) -> int:
    """A file that holds `content`, open for reading from its start, and has no name any more."""
    write_file(path, content)
    fd = os.open(path, os.O_RDONLY)
    os.unlink(path)
    return fd


def open_files(folder: str, paths: list[str]) -> tuple[dict[str, int], dict[str, str]]:
    """Open regular files below `folder`, no symbolic link on the way: ({path: fd}, {path: why it was left out})."""
    opened, left_out, budget = {}, {}, MAX_FETCH_BYTES
    for path in dict.fromkeys(paths):
        try:
            fd = open_inside(folder, path)
        except OSError as exc:
            left_out[path] = os.strerror(exc.errno)
            continue
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            left_out[path] = "not a regular file"
        elif status.st_size > budget:
            left_out[path] = f"over the limit of {MAX_FETCH_BYTES} bytes for all fetched files"
        else:
            budget -= status.st_size
            opened[path] = fd
            continue
        os.close(fd)
    return opened, left_out


def open_inside(folder: str, path: str) -> int:
    """Open a file below `folder` for reading; raises OSError (ELOOP, ENOTDIR) for a link or what is below one."""
    *parents, name = [part for part in path.split("/") if part not in ("", ".")]
    directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for parent in parents:
            below = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=directory)
            os.close(directory)
            directory = below
        # O_NONBLOCK: opening a FIFO must not wait for a writer
        return os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=directory)
    finally:
        os.close(directory)


def remove_folder(folder: str) -> None:
    """Remove a request's folder; quick when it holds nothing but the program."""
    try:
        os.unlink(f"{folder}/{SCRIPT}")
        os.rmdir(folder)
    except OSError:
        remove_tree(folder)


def remove_tree(path: str) -> None:
    """`rm -rf`, which takes any depth and is cheaper here than importing shutil; unlocks folders if it has to.

    Raises:
        OSError: something could not be removed.
    """
    quiet = [(os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0)]
    for command in (["rm", "-rf", path], ["chmod", "-R", "u+rwX", path], ["rm", "-rf", path]):
        os.waitpid(os.posix_spawnp(command[0], command, os.environ, file_actions=quiet), 0)
        if not os.path.lexists(path):
            return
    raise OSError(errno.ENOTEMPTY, "could not be removed", path)
