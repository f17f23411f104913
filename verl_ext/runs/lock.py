"""One writer per folder: of the quickstart, of an evaluation, and of a training run."""

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
TRAINING_LOCK = ".training"  # in a run's own folder, which may be that of a quickstart, too
WAIT_S = 20.0  # for the processes of a run that was killed, which Ray ends a moment later

_held: dict[Path, TextIO] = {}  # folders of this process


class Taken(ValueError):
    """Another training run writes into the folder."""


def own_training_folder(out: Path) -> None:
    """Keep a run's folder until this process ends, however it ends; processes that it forks do not keep it.

    Two runs would delete and mix each other's checkpoints. A disk that takes no lock is warned of.

    Raises:
        Taken: another process has it, on this machine or, where the file system has locks between machines, on another.
    """
    if out in _held:
        return
    try:
        durable.make_folder(out)
        file = open(out / TRAINING_LOCK, "a+")  # noqa: SIM115  it is open as long as the process lives
        _wait_for(file, out)
    except OSError as error:
        logger.warning("%s cannot be locked (%s): see that no other run writes there.", out, error)
        return
    _held[out] = file
    with contextlib.suppress(OSError):  # a full disk; the lock is there
        file.truncate(0)
        file.write(f"process {os.getpid()} of {socket.gethostname()}\n")
        file.flush()


def check_training_folder(out: Path) -> None:
    """Raise `Taken` where another run has the folder; before a run that would find out minutes later."""
    with contextlib.suppress(OSError), open(out / TRAINING_LOCK, "r+") as file:
        _wait_for(file, out)


def _wait_for(file: TextIO, out: Path) -> None:
    deadline = time.monotonic() + WAIT_S
    while not _try_to_lock(file):
        if time.monotonic() > deadline:
            file.seek(0)
            raise Taken(
                f"Another training run writes into {out} ({file.read().strip()}). Wait for it or stop it, or give this "
                "run a folder of its own: trainer.default_local_dir (OUTPUT_DIR). If that machine is dead, delete "
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
    """The folder's lock, held as long as the file is open; it may lie there when nobody holds it.

    Raises:
        SystemExit: another process writes there.
    """
    file = open(out / LOCK, "w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise SystemExit(f"Another run writes into {out}. Wait for it, or write elsewhere with --out.") from None
    return file
