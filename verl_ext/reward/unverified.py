"""Keeps responses that no verifier could judge, so that they can be graded again after the run.

`python -m verl_ext.reward.score --input FOLDER --output graded.jsonl` reads these files.
"""

import json
import os
import socket
from pathlib import Path
from typing import Any


class UnverifiedLog:
    """Appends rows to `FOLDER/unverified-HOST-PID.jsonl`: one file per process, so that any number may write.

    A row is one `write` to a file opened for appending: a process that is killed leaves whole lines behind.
    """

    def __init__(self, folder: str | os.PathLike[str]):
        self._folder = Path(folder)

    def append(self, row: dict[str, Any]) -> None:
        """
        Raises:
            OSError: the folder cannot be made or written.
        """
        # Asked for each time, as a forked process must not write into its parent's file.
        path = self._folder / f"unverified-{socket.gethostname()}-{os.getpid()}.jsonl"
        self._folder.mkdir(parents=True, exist_ok=True)
        line = json.dumps(row, ensure_ascii=False, default=str) + "\n"
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(descriptor, line.encode(errors="replace"))
        finally:
            os.close(descriptor)
