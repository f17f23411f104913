"""Find out what a user's run folder holds: an RL run, an SFT run, an evaluation, or the quickstart's folder.

Every command that takes a run asks here which of its files to read, so all commands accept the same folders. This looks
at file names and at the run's saved configuration; it reads no samples and changes nothing.
"""

import os
import re
from pathlib import Path
from typing import NamedTuple

import yaml

from verl_ext.runs import jsonl

STAGES = "stages.json"  # the quickstart's journal
FOLDER = "records"  # of the recorder
SETTINGS = "settings.json"  # of `retool evaluate`
PARTS = ("sft", "rl")  # kinds of training runs, and their folders in a quickstart
SIDES = ("eval/before", "eval/after")  # a quickstart's evaluations before and after RL
LOOKED_FOR = (
    "a training run (metrics-*.jsonl, hydra/config.yaml, global_step_<n> or records/), an evaluation (settings.json "
    "and records/), or the quickstart's folder above them (stages.json, sft/, rl/)"
)
_STEP = re.compile(r"global_step_(\d+)")
_NAME = re.compile(r"(step|val|light)_(\d{6,})\.parquet")


class NoRun(FileNotFoundError):
    """A folder is no run, or the run lacks files that a command needs; the message says what was looked for."""


class RunFolder(NamedTuple):
    path: Path
    kind: str  # quickstart | sft | rl | evaluation


class RecordFile(NamedTuple):
    """A file of records: those of one step's training, or of one validation or evaluation."""

    path: Path
    step: int
    validate: bool
    light: bool  # a light validation, which is not comparable with whole ones


def path_of(run: Path, kind: str, step: int, *, validate: bool = False, light: bool = False) -> Path:
    """Return the path of a file of records. `light`: of a light validation."""
    return run / FOLDER / kind / f"{'light' if light else 'val' if validate else 'step'}_{step:06d}.parquet"


def files_of(run: Path, kind: str = "trajectories") -> list[RecordFile]:
    """Return the files of a kind ("*": of all) by step, a step's validation after its training; [] if none exist."""
    found = filter(None, map(file_of, (run / FOLDER).glob(f"{kind}/*.parquet")))
    return sorted(found, key=lambda file: (file.step, file.validate, file.light))


def file_of(path: Path) -> RecordFile | None:
    """Return what the name of a file of records says; None for another name."""
    match = _NAME.fullmatch(path.name)
    return RecordFile(path, int(match[2]), match[1] != "step", match[1] == "light") if match else None


def find_run(path: Path) -> RunFolder:
    """Return the kind of run that a folder is.

    Raises:
        NoRun: the folder does not exist or is none of the four kinds; the message names any runs in it.
    """
    if not path.is_dir():
        raise NoRun(
            f"No run at {path}. Expected the folder of a run, as `bash scripts/quickstart.sh` and every launcher in "
            "recipe/retool create it."
        )
    if kind := _kind(path):
        return RunFolder(path, kind)
    there = sorted(child.name for child in path.iterdir())
    inside = [str(path / name) for name in there if (path / name).is_dir() and _kind(path / name)]
    advice = f" Runs in it: {', '.join(inside)}." if inside else ""
    listed = ", ".join(there[:8]) + (", ..." if len(there) > 8 else "") if there else "nothing"
    raise NoRun(f"No run at {path}: it holds {listed}. Expected {LOOKED_FOR}.{advice}")


def training_folder(path: Path, *kinds: str) -> Path:
    """Return the folder of a run: `path` itself, or if it is the quickstart's, the first of `kinds` in it.

    Args:
        kinds: "rl" or "sft", in order of preference, and "evaluation".
    Raises:
        NoRun: none of them exists.
    """
    run = find_run(path)
    if run.kind in kinds:
        return path
    if run.kind == "quickstart":
        for kind in kinds:
            if _training_kind(path / kind):
                return path / kind
    wanted = " or ".join(kind.upper() for kind in kinds if kind in PARTS)
    what = {"sft": "an SFT run", "rl": "an RL run", "evaluation": "an evaluation"}.get(run.kind, "a quickstart")
    raise NoRun(f"No {wanted} run at {path}, which is the folder of {what}. Expected {LOOKED_FOR}.")


def metric_files(path: Path, *kinds: str) -> list[Path]:
    """Return the logger files of a training run or of the first of `kinds` in a quickstart; a file is returned itself.

    Raises:
        FileNotFoundError: no such file exists.
    """
    if path.is_file():
        return [path]
    for run in (path, *(path / kind for kind in kinds)):
        if files := sorted(run.glob("metrics*.jsonl")):
            return files
    what = "has no metrics*.jsonl" if path.is_dir() else "does not exist"
    raise FileNotFoundError(
        f"{path} {what}. Expected the folder of a run (OUTPUT_DIR of its launcher), the quickstart's folder above it, "
        "or its metrics-*.jsonl."
    )


def judged_files(folder: Path) -> list[Path]:
    """Return the files of judged responses, one per evaluation or whole validation, in order; [] if there are none.

    A training run has its validations, or else the evaluations of its checkpoints; their settings differ from a
    validation's, so the two are not mixed. The quickstart's folder has the evaluations before and after RL, or else the
    files of its RL run, or of its SFT run.
    """
    if sides := [files[-1] for side in SIDES if (files := _validations(folder / side))]:
        return sides
    for run in (folder, folder / "rl", folder / "sft"):
        evaluated = sorted(run.glob("evaluation/global_step_*"), key=lambda path: step_of(path) or 0)
        if found := _validations(run) or [file for path in evaluated for file in _validations(path)]:
            return found
    return []


def _validations(run: Path) -> list[Path]:
    return [file.path for file in files_of(run) if file.validate and not file.light]


def step_of(path: str | os.PathLike | None) -> int | None:
    """Return the step in the name of a checkpoint's folder, `global_step_<n>`; None for another name."""
    match = _STEP.fullmatch(Path(path or "").name)
    return int(match[1]) if match else None


def short_names(paths: list[Path]) -> list[str]:
    """Return the last parts of the paths, as many as tell them apart: `rl` and `sft`, or `a/rl` and `b/rl`."""
    whole = [path.resolve() for path in paths]
    for length in range(1, max(len(path.parts) for path in whole) + 1):
        names = ["/".join(path.parts[-length:]) for path in whole]
        if len(set(names)) == len(names):
            return names
    raise ValueError(f"{paths[0]} is given more than once. Name each run once.")


def _kind(path: Path) -> str | None:
    parts = any(_training_kind(path / name) for name in PARTS) or any(files_of(path / side) for side in SIDES)
    if (path / STAGES).is_file() or parts:
        return "quickstart"
    return "evaluation" if (path / SETTINGS).is_file() and (path / FOLDER).is_dir() else _training_kind(path)


def _training_kind(path: Path) -> str | None:
    """Decide by the saved configuration, else by a checkpoint's layout, else by the logs; None: no training run."""
    metrics = sorted(path.glob("metrics*.jsonl"))
    checkpoints = [folder for folder in path.glob("global_step_*") if step_of(folder) is not None]
    config = _config(path)
    if not (config or metrics or checkpoints):
        return "rl" if files_of(path) else None
    if config:
        return "rl" if "actor_rollout_ref" in config else "sft"
    if checkpoints:
        return "rl" if any((folder / "actor").is_dir() for folder in checkpoints) else "sft"
    return "sft" if any(_logs_sft(file) for file in metrics) else "rl"


def _logs_sft(metrics: Path) -> bool:
    keys = {"train/loss", "val/loss"}
    try:
        return next(jsonl.read(metrics, lambda row: not keys.isdisjoint(row["data"])), False)
    except (ValueError, OSError):  # the reader of the metrics reports the error
        return False


def _config(run: Path) -> dict:
    """Return the saved configuration as written; {} if there is none."""
    file = run / "hydra" / "config.yaml"
    if not file.is_file():
        return {}
    try:
        config = yaml.safe_load(file.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{file} cannot be read: {error}. Expected the YAML that Hydra wrote.") from error
    return config if isinstance(config, dict) else {}
