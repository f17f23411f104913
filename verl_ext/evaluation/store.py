"""The folder of an evaluation: its settings, and its samples as records.

A file of records is written whole or not at all, so each sample is first a file of the kind `waiting`, on the disk when
the sample has ended. Once many wait, and at the end, they are put into the one file of trajectories, in which the last
attempt at a sample counts.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl_ext.episode import EpisodeKey
from verl_ext.records import store
from verl_ext.runs import durable
from verl_ext.runs.folder import FOLDER, SETTINGS, files_of, path_of

# Samples that wait before they are put into the file, which is then written anew: at least, and as a share of all.
WAITING, WAITING_SHARE = 64, 0.125


class OtherSettings(ValueError):
    """The folder holds samples that were made with other settings."""


class Store:
    """Keeps rows of records, and has those that an earlier start has left.

    Args:
        folder: created if missing.
        settings: what the samples depend on; plain JSON.
        about: what the samples do not depend on, such as addresses and versions, for a reader.
        step: of the model's checkpoint; 0 for a model without a run. What is there keeps its step.
    Attributes:
        path: the file of trajectories.
        rows: the last row of each sample.
    Raises:
        OtherSettings: the folder has samples of other settings; the message names what differs.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any], about: Mapping[str, Any], step: int = 0):
        kept = next(iter(files_of(folder)), None)
        self._step, self._waiting = kept.step if kept else step, folder / FOLDER / "waiting"
        self.path = kept.path if kept else path_of(folder, "trajectories", step, validate=True)
        path = folder / SETTINGS
        if (folder / FOLDER).is_dir():
            if not path.exists():
                raise OtherSettings(
                    f"{folder} has {FOLDER}/, but no {SETTINGS} that says how they were made. Delete it."
                )
            there, now = (flatten(each) for each in (json.loads(path.read_text())["settings"], settings))
            changed = [key for key in there | now if there.get(key) != now.get(key)]
            if changed:
                lines = "".join(f"  {key}: there {there.get(key)!r}, now {now.get(key)!r}\n" for key in changed)
                raise OtherSettings(
                    f"{folder} holds samples made with other settings:\n{lines}"
                    "Use the same settings to continue, another folder (--out) to start over, or delete this one."
                )
        folder.mkdir(parents=True, exist_ok=True)
        durable.write_text(path, json.dumps({"settings": settings, **about}, indent=1) + "\n")
        store.remove_half_written(folder)
        there = [self.path] * self.path.exists() + self._parts()
        self.rows = {key_of(row): row for part in there for row in store.read(part).to_pylist()}
        self.join()

    def add(self, row: Mapping[str, Any]) -> None:
        row = dict(row) | {"step": self._step}
        store.write(self._waiting / f"{self._number:06d}.parquet", "waiting", [row])
        self._number += 1
        self.rows[key_of(row)] = row
        if self._number >= max(WAITING, WAITING_SHARE * len(self.rows)):
            self.join()

    def join(self) -> None:
        """Put the samples that wait into the file of trajectories."""
        if parts := self._parts():
            store.write(self.path, "trajectories", self.rows.values())
        for part in parts:
            part.unlink()
        self._number = 0

    def _parts(self) -> list[Path]:
        return sorted(self._waiting.glob("*.parquet"))


def key_of(row: Mapping[str, Any]) -> EpisodeKey:
    """Return the name of the sample in a row of records."""
    return EpisodeKey(row["uid"], row["session"])


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return dotted key -> value; a list is a value."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        inner = isinstance(value, Mapping) and value
        flat |= flatten(value, f"{prefix}{name}.") if inner else {f"{prefix}{name}": value}
    return flat
