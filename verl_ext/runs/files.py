"""What stands where a file is expected. Whoever opens a FIFO waits until somebody writes to it."""

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
    """Return what a path is if it is no regular file, such as "a FIFO"; None for a file.

    Raises:
        FileNotFoundError: nothing is there.
        OSError: the path cannot be looked at, for instance without the permission.
    """
    try:
        return _KINDS.get(stat.S_IFMT(path.stat().st_mode))
    except FileNotFoundError:
        if path.is_symlink():
            return "a link to a file that is gone"
        raise
    except OSError as error:
        if error.errno == errno.ELOOP:
            return "a link that leads in a circle"
        raise
