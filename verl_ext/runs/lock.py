"""Allow one writer per folder of a quickstart, an evaluation, or a training run."""

import contextlib
import errno
import fcntl
import logging
import os
import socket
import time
from pathlib import Path
from typing import TextIO

from verl_ext.runs import durable

logger = logging.getLogger(__name__)

LOCK = ".lock"
TRAINING_LOCK = ".training"  # in a run's own folder, which may also be that of a quickstart
WAIT_S = 20.0  # for the processes of a killed run, which Ray ends a moment later

_held: dict[Path, TextIO] = {}  # folders that this process holds


class Taken(ValueError):
    """Another training run writes into the folder."""


def own_training_folder(out: Path) -> None:
    """Lock a run's folder until this process ends, however it ends; processes that it forks do not hold the lock.

    Two runs would delete and mix each other's checkpoints. A disk without locks only causes a warning.

    Raises:
        Taken: another process holds it, on this machine, or on another one if the file system locks across machines.
    """
    if out in _held:
        return
    try:
        durable.make_folder(out)
        file = open(out / TRAINING_LOCK, "a+")  # noqa: SIM115  it is open as long as the process lives
        _wait_for(file, out)
    except OSError as error:
        logger.warning("%s cannot be locked (%s). Make sure that no other run writes there.", out, error)
        return
    _held[out] = file
    with contextlib.suppress(OSError):  # a full disk; the lock is there
        file.truncate(0)
        file.write(f"process {os.getpid()} of {socket.gethostname()}\n")
        file.flush()


def check_training_folder(out: Path) -> None:
    """Raise `Taken` if another run holds the folder, before a run that would only find out minutes later."""
    with contextlib.suppress(OSError), open(out / TRAINING_LOCK, "r+") as file:
        _wait_for(file, out)


def _wait_for(file: TextIO, out: Path) -> None:
    deadline = time.monotonic() + WAIT_S
    while not _try_to_lock(file):
        if time.monotonic() > deadline:
            file.seek(0)
            raise Taken(
                f"Another training run writes into {out} ({file.read().strip()}). Wait for it, stop it, or give this "
                "run a separate folder: trainer.default_local_dir (OUTPUT_DIR). If that machine is dead, delete "
                f"{out / TRAINING_LOCK}."
            )
        time.sleep(0.5)


def _try_to_lock(file: TextIO) -> bool:
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EAGAIN):
            raise
        return False
    return True


def lock_folder(out: Path) -> TextIO:
    """Return the folder's lock, held as long as the file is open; the file may exist when nobody holds the lock.

    Raises:
        SystemExit: another process writes into the folder.
    """
    return _locked(out / LOCK, out)


def lock_file(path: Path) -> TextIO:
    """Return a file that is open for appending, locked as long as it is open.

    Raises:
        SystemExit: another process holds its lock.
    """
    return _locked(path, path)


def _locked(path: Path, what: Path) -> TextIO:
    file = open(path, "a")  # noqa: SIM115  the caller holds it
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise SystemExit(f"Another run writes into {what}. Wait for it, or write elsewhere with --out.") from None
    return file
