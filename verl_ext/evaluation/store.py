"""The folder of an evaluation: its settings, and every sample as it ended.

`samples.jsonl` has the keys of verl's validation dumps and more, one row per attempt; the last row of a `uid` counts.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl_ext.runs import durable, jsonl
from verl_ext.runs.folder import SAMPLES

SETTINGS = "settings.json"


class OtherSettings(ValueError):
    """The folder holds samples that were made with other settings."""


class Store:
    """Appends rows, and reads those that an earlier start has left.

    Args:
        folder: created if missing.
        settings: what the samples depend on; plain JSON.
        about: what the samples do not depend on, such as addresses and versions, for a reader.
    Raises:
        OtherSettings: the folder has samples of other settings; the message names what differs.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any], about: Mapping[str, Any]):
        self.folder, self.samples = folder, folder / SAMPLES
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / SETTINGS
        if self.samples.exists() and self.samples.stat().st_size:
            if not path.exists():
                raise OtherSettings(
                    f"{folder} has {SAMPLES}, but no {SETTINGS} that says how they were made. Delete it."
                )
            there, now = (flatten(each) for each in (json.loads(path.read_text())["settings"], settings))
            changed = [key for key in there | now if there.get(key) != now.get(key)]
            if changed:
                lines = "".join(f"  {key}: there {there.get(key)!r}, now {now.get(key)!r}\n" for key in changed)
                raise OtherSettings(
                    f"{folder} holds samples made with other settings:\n{lines}"
                    "Use the same settings to continue, another folder (--out) to start over, or delete this one."
                )
        durable.write_text(path, json.dumps({"settings": settings, **about}, indent=1) + "\n")
        jsonl.cut_half_line(self.samples)
        self._sink = open(self.samples, "a", encoding="utf-8")

    def rows(self) -> dict[str, dict[str, Any]]:
        """Return the last row of each `uid`."""
        return {row["uid"]: row for row in jsonl.read(self.samples)}

    def add(self, row: Mapping[str, Any]) -> None:
        self._sink.write(f"{jsonl.dumps(row)}\n")
        self._sink.flush()

    def close(self) -> None:
        self._sink.close()


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return dotted key -> value; a list is a value."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        inner = isinstance(value, Mapping) and value
        flat |= flatten(value, f"{prefix}{name}.") if inner else {f"{prefix}{name}": value}
    return flat
