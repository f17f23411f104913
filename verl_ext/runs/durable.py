"""Write files and folders so that they survive a power loss unchanged.

A write, a rename or a new file is only in memory until `fsync`, of the file for its bytes and of the folder for its
names. The functions here wait for the disk; checkpoints/folder.py decides what a checkpoint needs, in which order.
"""

import contextlib
import errno
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path

logger = logging.getLogger(__name__)
logger.setLevel(os.getenv("VERL_LOGGING_LEVEL", "INFO"))

# Errors of a file system without fsync for this kind of file, as FUSE and network ones give for folders.
_UNSUPPORTED = {errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EBADF, errno.EISDIR}
_UNREADABLE = {errno.EACCES, errno.EPERM}  # a folder above the run's that may be traversed but not opened

warned: set[str] = set()  # kinds, once per process


def sync(path: Path) -> None:
    """Wait until a file's bytes, whoever on this machine wrote them, or the names in a folder are on the disk.

    Raises:
        OSError: they cannot be written, such as EIO or ENOSPC. A file system without fsync only causes one warning.
    """
    try:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        kind, tolerated = ("folders", _UNSUPPORTED | _UNREADABLE) if path.is_dir() else ("files", _UNSUPPORTED)
        if error.errno not in tolerated:
            raise
        if kind not in warned:
            warned.add(kind)
            logger.warning(
                "fsync of %s failed (%s): the file system does not guarantee that %s survive a power loss; a kill does "
                "no harm. A resume compares a checkpoint's checksums. If the power may fail, set "
                "trainer.default_local_dir to another disk.",
                *(path, os.strerror(error.errno), kind),
            )


def sync_tree(folder: Path, is_own: Callable[[str], bool] = lambda name: True) -> None:
    """Sync everything below a folder: files whose names are this process's own, folders, and the folder itself."""
    for parent, _, names in os.walk(folder, topdown=False):
        for name in filter(is_own, names):
            with contextlib.suppress(FileNotFoundError):  # another rank's temporary file, gone by now
                sync(Path(parent, name))
        sync(Path(parent))


def make_folder(path: Path) -> None:
    """Make a folder as `mkdir -p` does, and wait until the new names are on the disk."""
    if not path.is_dir():
        make_folder(path.parent)
        path.mkdir(exist_ok=True)
        sync(path.parent)


def write_text(path: Path, text: str) -> None:
    """Write a file atomically: at any time, the old or the new one exists; once this returns, the new one.

    Raises:
        OSError: such as on a full disk. The old file stays, and nothing is left of the new one.
    """
    part = path.with_name(f"{path.name}.part")
    with _errors_name(part):
        try:
            part.write_text(text, encoding="utf-8")
            sync(part)
        except OSError:
            part.unlink(missing_ok=True)
            raise
    os.replace(part, path)
    sync(path.parent)


def append_line(path: Path, line: str) -> None:
    """Append a line to a file, created if missing. A power loss cuts at most this line short.

    Raises:
        OSError: such as on a full disk. A partly written line is removed again if the disk allows it.
    """
    is_new = not path.exists()
    length = 0 if is_new else path.stat().st_size
    with _errors_name(path):
        try:
            with open(path, "a", encoding="utf-8") as file:
                file.write(f"{line}\n")
            sync(path)
            if is_new:
                sync(path.parent)
        except OSError:
            with contextlib.suppress(OSError):
                os.truncate(path, length)
            raise


@contextlib.contextmanager
def _errors_name(path: Path) -> Iterator[None]:
    """Add the path to the errors of `write` and `fsync`, which name no file, as in "No space left on device"."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
