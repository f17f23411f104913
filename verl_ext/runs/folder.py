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
SAMPLES = "samples.jsonl"  # of `python -m verl_ext.evaluation`
PARTS = ("sft", "rl")  # kinds of training runs, and their folders in a quickstart
LOOKED_FOR = (
    "a training run (metrics-*.jsonl, hydra/config.yaml or global_step_<n>), an evaluation (samples.jsonl, or "
    "<step>.jsonl of trainer.validation_data_dir), or the quickstart's folder above them (stages.json, sft/, rl/)"
)
_STEP = re.compile(r"global_step_(\d+)")
_NAME = re.compile(r"(step|val)_(\d{6,})\.parquet")


class NoRun(FileNotFoundError):
    """A folder is no run, or the run lacks files that a command needs; the message says what was looked for."""


class RunFolder(NamedTuple):
    path: Path
    kind: str  # quickstart | sft | rl | evaluation


class RecordFile(NamedTuple):
    """A record file of one step."""

    path: Path
    step: int
    validate: bool


def path_of(run: Path, kind: str, step: int, *, validate: bool = False) -> Path:
    return run / FOLDER / kind / f"{'val' if validate else 'step'}_{step:06d}.parquet"


def files_of(run: Path, kind: str = "trajectories") -> list[RecordFile]:
    """Return the files of a kind ("*": of all) by step, a step's validation after its training; [] if none exist."""
    named = [(path, _NAME.fullmatch(path.name)) for path in (run / FOLDER).glob(f"{kind}/*.parquet")]
    found = [RecordFile(path, int(match[2]), match[1] == "val") for path, match in named if match]
    return sorted(found, key=lambda file: (file.step, file.validate))


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
    """Return the folder of a training run: `path` itself, or if it is the quickstart's, the first of `kinds` in it.

    Args:
        kinds: "rl" or "sft", in order of preference.
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
    wanted = " or ".join(kind.upper() for kind in kinds)
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


def sample_files(folder: Path) -> list[Path]:
    """Return the files of judged samples, one per evaluation, in order; [] if there are none.

    An evaluation has its own samples, a folder of dumps has the dumps, and a training run its validations, or else the
    evaluations of its checkpoints; their settings differ from a validation's, so the two are not mixed. The
    quickstart's folder has the evaluations before and after RL, or else the files of its RL run, or of its SFT run.
    """
    if (folder / SAMPLES).is_file():
        return [folder / SAMPLES]
    if dumps := step_dumps(folder):
        return dumps
    if sides := [dumps[-1] for side in ("before", "after") if (dumps := step_dumps(folder / "eval" / side))]:
        return sides
    for run in (folder, folder / "rl", folder / "sft"):
        if found := validations_of(run) or evaluations_of(run):
            return found
    return []


def step_dumps(folder: Path) -> list[Path]:
    """Return verl's dumps `<step>.jsonl` in a folder, by step."""
    dumps = [path for path in folder.glob("*.jsonl") if path.stem.isdecimal()]
    return sorted(dumps, key=lambda path: int(path.stem))


def dumps_of(run: Path, key: str, default: str) -> list[Path]:
    """Return the dumps that a training run wrote, by step; empty if it wrote none.

    Args:
        key: of `trainer` in its configuration: `validation_data_dir` or `rollout_data_dir`.
        default: name of the folder if the configuration does not name it.
    """
    named = (_config(run).get("trainer") or {}).get(key)
    # First below the run's own folder: the configuration of a copied run names its original place.
    candidates = [run / Path(named or default).name, run / default]
    candidates += [Path(named)] if named and "${" not in named else []
    return next((dumps for folder in candidates if (dumps := step_dumps(folder))), [])


def validations_of(run: Path) -> list[Path]:
    """Return the files of a training run's validations, by step: its records, else verl's dumps.

    The dumps are also used if some validations are light: records do not tell these from whole ones, whose dumps have a
    separate folder. And they are used if the recorder, which keeps a limited number of steps and bytes, has removed the
    first validations and the dumps continue to the last one.
    """
    recorded = [file for file in files_of(run) if file.validate]
    dumps = dumps_of(run, "validation_data_dir", "validation")
    has_light = ((_config(run).get("retool") or {}).get("light_validation") or {}).get("enable")
    if not recorded or not dumps or has_light:
        return dumps or [file.path for file in recorded]
    first, last = int(dumps[0].stem), int(dumps[-1].stem)
    return dumps if first < recorded[0].step and recorded[-1].step <= last else [file.path for file in recorded]


def rollouts_of(run: Path) -> list[Path]:
    """Return verl's dumps of the rollouts that a run trained on, by step."""
    return dumps_of(run, "rollout_data_dir", "rollouts")


def old_log_of(folder: Path) -> list[Path]:
    """Return the JSON-lines logs of runs without records, rotated ones included, oldest first."""
    files = [path for path in folder.glob("*.jsonl*") if path.suffix == ".jsonl" or path.suffix[1:].isdecimal()]
    return sorted(files, key=lambda path: path.stat().st_mtime)


def evaluations_of(run: Path) -> list[Path]:
    """Return the `samples.jsonl` of each evaluation of a training run's checkpoints, by step."""
    found = [path for path in run.glob(f"evaluation/global_step_*/{SAMPLES}") if step_of(path.parent) is not None]
    return sorted(found, key=lambda path: step_of(path.parent))


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
    evaluated = any(step_dumps(path / "eval" / side) for side in ("before", "after"))
    if (path / STAGES).is_file() or evaluated or any(_training_kind(path / name) for name in PARTS):
        return "quickstart"
    return _training_kind(path) or ("evaluation" if (path / SAMPLES).is_file() or step_dumps(path) else None)


def _training_kind(path: Path) -> str | None:
    """Decide by the saved configuration, else by a checkpoint's layout, else by the logs; None: no training run."""
    metrics = sorted(path.glob("metrics*.jsonl"))
    checkpoints = [folder for folder in path.glob("global_step_*") if step_of(folder) is not None]
    config = _config(path)
    if not (config or metrics or checkpoints):
        dumps = any(step_dumps(path / name) for name in ("rollouts", "validation"))
        return "rl" if dumps or files_of(path) or any(path.glob("trajectories/*.jsonl")) else None
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
