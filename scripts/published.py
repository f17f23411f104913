"""Keep the results of long runs, one line each, in a JSON-lines file.

A script runs only what is missing. A comparison that takes many hours can therefore be made in parts, and on several
machines that share nothing except this file. Each result records the settings it was made with, and so does the folder
of a run that has no result yet.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl_ext.runs import durable, jsonl
from verl_ext.runs.lock import LOCK

BEGUN = "comparison.json"  # in a run's folder: the settings that it began with


def begin(folder: Path, settings: Mapping[str, Any]) -> None:
    """Note the settings that a run begins with. `settings` holds plain JSON."""
    durable.make_folder(folder)
    durable.write_text(folder / BEGUN, json.dumps(settings))


def has_begun(folder: Path, settings: Mapping[str, Any], writes: str) -> bool:
    """Return whether a run was begun in a folder.

    Args:
        writes: a glob of files that every run writes there.
    Raises:
        ValueError: it began with other settings, or without `begin`.
    """
    advice = f"Delete it, or write elsewhere with --out.\n  now:   {dict(settings)}"
    if not (folder / BEGUN).is_file():
        if any(folder.glob(writes)):
            raise ValueError(f"{folder} was not started by this script. {advice}")
        return False
    if (there := json.loads((folder / BEGUN).read_text())) != settings:
        raise ValueError(f"{folder} was started with other settings. {advice}\n  there: {there}")
    return True


def empty(folder: Path) -> None:
    """Delete a folder's content except its lock. The caller holds it, as a killed script's run may still be there."""
    for path in set(folder.iterdir()) - {folder / LOCK}:
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink()


class Published:
    """The results in a file.

    Attributes:
        rows: name of a run -> its result.
    Raises:
        ValueError: a line of the file is not a result.
    """

    def __init__(self, path: Path):
        self._path = path
        expected = "an object with `run`, the name of the run (delete the line to repeat the run)"
        lines = jsonl.read(path, lambda row: (str(row["run"]), row), expected) if path.exists() else ()
        self.rows: dict[str, dict[str, Any]] = dict(lines)

    def has(self, run: str, settings: Mapping[str, Any]) -> bool:
        """Return whether there is a result of a run.

        Raises:
            ValueError: there is one, made with other settings.
        """
        if run not in self.rows:
            return False
        if (there := self.rows[run].get("settings")) != settings:
            raise ValueError(
                f"{self._path}: {run} was made with other settings.\n  there: {there}\n  now:   {dict(settings)}\n"
                "Name another file with --results, or delete the line to repeat the run."
            )
        return True

    def add(self, run: str, result: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
        """Write a result to the disk. `settings` holds plain JSON."""
        durable.make_folder(self._path.parent)
        jsonl.cut_half_line(self._path)
        self.rows[run] = {"run": run, "settings": dict(settings), **result}
        durable.append_line(self._path, jsonl.dumps(self.rows[run]))
