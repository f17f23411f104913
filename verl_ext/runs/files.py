"""Recognize what is not a regular file: opening a FIFO, for instance, waits until somebody writes to it."""

import errno
import stat
from pathlib import Path

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def no_file(path: Path) -> str | None:
    """Return the kind of a path that is no regular file, such as "a FIFO"; None for a file.

    Raises:
        FileNotFoundError: the path does not exist.
        OSError: the path cannot be examined, for instance for lack of permission.
    """
    try:
        return _KINDS.get(stat.S_IFMT(path.stat().st_mode))
    except FileNotFoundError:
        if path.is_symlink():
            return "a link to a missing file"
        raise
    except OSError as error:
        if error.errno == errno.ELOOP:
            return "a circular link"
        raise
