"""The data and the SFT of another quickstart, from which a new RL run starts (`quickstart.sh --from FOLDER`).

They are copied, so that the new run's folder is whole and its report has all parts. The checkpoints of SFT are not
copied, because the merged model replaces them.
"""

import hashlib
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_ext.checkpoints.folder import SAVING, TRACKER
from verl_ext.quickstart.options import JOURNAL
from verl_ext.runs.lock import TRAINING_LOCK

STEPS = ("data", "sft", "merge_sft")  # steps of the pipeline that are taken
TAKEN = {  # what RL and the evaluations read -> what it is
    "data/rl_train.parquet": "training problems",
    "data/eval.parquet": "evaluation problems",
    "sft/merged/model.safetensors": "merged SFT model",
    "sft/merged/config.json": "its configuration",
    "sft/merged/tokenizer.json": "its tokenizer",
}
NOT_COPIED = ("global_step_*", SAVING, f"{SAVING}.*", TRACKER, TRAINING_LOCK)


class NoSource(ValueError):
    """There is nothing to start from; the message says what is missing and what makes it."""


@dataclass(frozen=True)
class Source:
    """A quickstart whose SFT is done and merged."""

    folder: Path
    settings: dict[str, dict[str, Any]]  # step -> the settings that it was made with
    digests: dict[str, str]  # file of TAKEN -> the first digits of its SHA-256

    def describe(self) -> str:
        """Return what is taken, one line for each."""
        made = self.settings["sft"]
        options = "".join(f", {name} {made[name]}" for name in ("data", "sft") if made[name])
        lines = [f"[from] {self.folder}: data and SFT of seed {made['seed']}{options}"]
        lines += [f"  {name} ({TAKEN[name]}), SHA-256 {digest}" for name, digest in self.digests.items()]
        return "\n".join(lines)

    def check_tools(self, digest: str | None) -> None:
        """Check that the run gets the tools that the SFT has taught, given as `Own.digests` has them.

        Raises:
            NoSource: it gets others, or none.
        """
        if digest != self.settings["sft"].get("own", {}).get("tools"):
            has = "other tools" if "tools" in self.settings["sft"].get("own", {}) else "no tools of a file"
            raise NoSource(f"--from {self.folder}: its SFT has taught {has}. Give the --tools that it was made with.")

    def copy_to(self, out: Path) -> None:
        """Copy data, initial model and SFT, without checkpoints.

        Raises:
            NoSource: a file changed in the meantime.
        """
        for name in ("data", "model", "sft"):
            if (self.folder / name).is_dir():
                ignore = shutil.ignore_patterns(*NOT_COPIED)
                shutil.copytree(self.folder / name, out / name, ignore=ignore, dirs_exist_ok=True)
        for name, digest in self.digests.items():
            if _digest(out / name) != digest:
                raise NoSource(f"{self.folder / name} changed while it was copied. Is a run still writing there?")


def find_source(folder: Path) -> Source:
    """Return the data and the SFT of a quickstart, checked.

    Raises:
        NoSource: a step was not run, or a file is missing.
    """
    again = f"`bash scripts/quickstart.sh --out {folder} --stage data --stage sft --stage merge` creates it"
    entries = {entry["stage"]: entry for entry in json.loads((folder / JOURNAL).read_text())}
    for step in STEPS:
        if entries.get(step, {}).get("status") != "done":
            raise NoSource(f"--from {folder}: its step {step} is not done, so there is no SFT to start from. {again}.")
    for name, what in TAKEN.items():
        if not (folder / name).is_file():
            raise NoSource(f"--from {folder}: {name} ({what}) is missing. {again} if you add --fresh.")
    settings = {step: entries[step]["settings"] for step in STEPS}
    return Source(folder, settings, {name: _digest(folder / name) for name in TAKEN})


def _digest(file: Path) -> str:
    with open(file, "rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()[:12]
