"""Results of long runs, kept one by one: a line each in a JSON-lines file.

A script runs what is not there. So a comparison that takes many hours can be made in parts, and on several machines,
which need to have nothing in common but this file.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl_ext.records import durable, jsonl


class Published:
    """The results in a file.

    Attributes:
        rows: name of a run -> its result.
    Raises:
        ValueError: a line of the file is no result.
    """

    def __init__(self, path: Path):
        self._path = path
        expected = "an object with `run`, the name of the run: delete the line, and the run is made again"
        lines = jsonl.read(path, lambda row: (str(row["run"]), row), expected) if path.exists() else ()
        self.rows: dict[str, dict[str, Any]] = dict(lines)

    def add(self, run: str, result: Mapping[str, Any]) -> None:
        """Write a result to the disk."""
        durable.make_folder(self._path.parent)
        jsonl.cut_half_line(self._path)
        self.rows[run] = {"run": run, **result}
        durable.append_line(self._path, jsonl.dumps(self.rows[run]))
