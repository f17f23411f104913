"""Files and folders that are still there, and the same, after a power loss.

A write, a rename or a new file is in memory only until `fsync`: of the file for its bytes, of the folder for its names.
What is here waits for the disk; what a checkpoint needs and in which order, checkpoints/folder.py knows.
"""

import contextlib
import errno
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path

logger = logging.getLogger(__name__)
logger.setLevel(os.getenv("VERL_LOGGING_LEVEL", "INFO"))

# What a file system answers that has no fsync for this kind of file, as FUSE and network ones do for folders.
_UNSUPPORTED = {errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EBADF, errno.EISDIR}
_UNREADABLE = {errno.EACCES, errno.EPERM}  # a folder above the run's that may be passed, but not opened

_warned: set[str] = set()  # kinds, once per process


def sync(path: Path) -> None:
    """Wait until a file's bytes, whoever on this machine wrote them, or the names in a folder are on the disk.

    Raises:
        OSError: they cannot be written, for instance EIO or ENOSPC. A file system without fsync is warned of once.
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
        if kind not in _warned:
            _warned.add(kind)
            logger.warning(
                "fsync of %s failed (%s): the file system does not promise that %s outlive a power loss, which a kill "
                "alone does not touch. A checkpoint's checksums are compared at a resume. If the power may fail, set "
                "trainer.default_local_dir to another disk.",
                *(path, os.strerror(error.errno), kind),
            )


def sync_tree(folder: Path, is_own: Callable[[str], bool] = lambda name: True) -> None:
    """Wait for all below a folder: files whose names are this process's own, folders, the folder itself."""
    for parent, _, names in os.walk(folder, topdown=False):
        for name in filter(is_own, names):
            with contextlib.suppress(FileNotFoundError):  # another rank's temporary file, gone by now
                sync(Path(parent, name))
        sync(Path(parent))


def make_folder(path: Path) -> None:
    """As `mkdir -p`; the names that are new are on the disk."""
    if not path.is_dir():
        make_folder(path.parent)
        path.mkdir(exist_ok=True)
        sync(path.parent)


def write_text(path: Path, text: str) -> None:
    """Write a file so that there is the old one or the new one, whatever happens when, and then the new one.

    Raises:
        OSError: as on a full disk. The old file stays, and nothing is left of the new one.
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
    """Add a line to a file, which is made if it is not there. A power loss cuts at most this line short.

    Raises:
        OSError: as on a full disk. The part of the line that was written is taken back, where the disk lets us.
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
    """The errors of `write` and `fsync` name no file: "No space left on device" alone does not say on which."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
