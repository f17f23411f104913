"""One writer per folder: of the quickstart and of an evaluation."""

import fcntl
from pathlib import Path
from typing import TextIO

LOCK = ".lock"


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
