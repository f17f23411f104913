"""What a folder that a user names as a run holds: an RL run, an SFT run, an evaluation, or the quickstart's folder.

Every command that takes a run asks here, so that all of them take the same folders. Looks at names of files, and at the
run's saved configuration; reads no metrics and no samples, and changes nothing.
"""

import json
from pathlib import Path
from typing import NamedTuple

import yaml

STAGES = "stages.json"  # the quickstart's journal
SAMPLES = "samples.jsonl"  # of `python -m verl_ext.evaluate`
PARTS = ("sft", "rl")  # kinds of training runs, and their folders in the quickstart's
LOOKED_FOR = (
    "a training run (metrics-*.jsonl, hydra/config.yaml or global_step_<n>), an evaluation (samples.jsonl, or "
    "<step>.jsonl of trainer.validation_data_dir), or the quickstart's folder above them (stages.json, sft/, rl/)"
)


class NoRun(FileNotFoundError):
    """A folder is no run, or the run lacks what a command needs; the message says what was looked for."""


class RunFolder(NamedTuple):
    path: Path
    kind: str  # quickstart | sft | rl | evaluation


def find_run(path: Path) -> RunFolder:
    """What a folder is.

    Raises:
        NoRun: there is no such folder, or it is none of the four; names the runs that are in it, if any.
    """
    if not path.is_dir():
        raise NoRun(
            f"No run at {path}. Expected its folder; `bash scripts/quickstart.sh` makes one, and so does "
            "every launcher in recipe/retool."
        )
    if kind := _kind(path):
        return RunFolder(path, kind)
    there = sorted(child.name for child in path.iterdir())
    inside = [str(path / name) for name in there if (path / name).is_dir() and _kind(path / name)]
    advice = f" Runs in it: {', '.join(inside)}." if inside else ""
    listed = ", ".join(there[:8]) + (", ..." if len(there) > 8 else "") if there else "nothing"
    raise NoRun(f"No run at {path}: it holds {listed}. Expected {LOOKED_FOR}.{advice}")


def training_folder(path: Path, *kinds: str) -> Path:
    """The folder of a training run: `path` itself, or, where it is the quickstart's, the first of `kinds` in it.

    Args:
        kinds: "rl" or "sft", in order of preference.
    Raises:
        NoRun: there is none of them.
    """
    run = find_run(path)
    if run.kind in kinds:
        return path
    if run.kind == "quickstart":
        for kind in kinds:
            if _training_kind(path / kind):
                return path / kind
    wanted = " or ".join(kind.upper() for kind in kinds)
    raise NoRun(f"No {wanted} run at {path}, which is the folder of {_article(run.kind)}. Expected {LOOKED_FOR}.")


def step_dumps(folder: Path) -> list[Path]:
    """verl's dumps `<step>.jsonl` in a folder, by step."""
    dumps = [path for path in folder.glob("*.jsonl") if path.stem.isdecimal()]
    return sorted(dumps, key=lambda path: int(path.stem))


def dumps_of(run: Path, key: str, default: str) -> list[Path]:
    """The dumps that a training run wrote, by step; empty where it wrote none.

    Args:
        key: of `trainer` in its configuration: `validation_data_dir` or `rollout_data_dir`.
        default: name of the folder where the configuration is not at hand.
    """
    named = str((_config(run).get("trainer") or {}).get(key) or default)
    # First below the run's own folder: a run that was copied still names the place where it was made.
    candidates = [run / Path(named).name, run / default]
    candidates += [Path(named)] if "${" not in named else []
    return next((dumps for folder in candidates if (dumps := step_dumps(folder))), [])


def evaluations_of(run: Path) -> list[Path]:
    """The `samples.jsonl` of the evaluations of a training run's checkpoints, by step."""
    found = [path for path in run.glob(f"evaluation/global_step_*/{SAMPLES}") if _step(path.parent) >= 0]
    return sorted(found, key=lambda path: _step(path.parent))


def short_names(paths: list[Path]) -> list[str]:
    """The last parts of the paths, as many as tell them apart: `rl` and `sft`, or `a/rl` and `b/rl`."""
    whole = [path.resolve() for path in paths]
    for length in range(1, max(len(path.parts) for path in whole) + 1):
        names = ["/".join(path.parts[-length:]) for path in whole]
        if len(set(names)) == len(names):
            return names
    raise ValueError(f"{paths[0]} is named more than once. Name every run once.")


def _kind(path: Path) -> str | None:
    evaluated = any(step_dumps(path / "eval" / side) for side in ("before", "after"))
    if (path / STAGES).is_file() or evaluated or any(_training_kind(path / name) for name in PARTS):
        return "quickstart"
    return _training_kind(path) or ("evaluation" if (path / SAMPLES).is_file() or step_dumps(path) else None)


def _training_kind(path: Path) -> str | None:
    """By the saved configuration, else by the layout of a checkpoint, else by what was logged; None: no such run."""
    metrics = sorted(path.glob("metrics*.jsonl"))
    checkpoints = [folder for folder in path.glob("global_step_*") if _step(folder) >= 0]
    config = _config(path)
    if not (config or metrics or checkpoints):
        dumps = any(step_dumps(path / name) for name in ("rollouts", "validation"))
        return "rl" if dumps or any(path.glob("trajectories/*.jsonl")) else None
    if config:
        return "rl" if "actor_rollout_ref" in config else "sft"
    if checkpoints:
        return "rl" if any((folder / "actor").is_dir() for folder in checkpoints) else "sft"
    return "sft" if any(_logs_sft(file) for file in metrics) else "rl"


def _logs_sft(metrics: Path) -> bool:
    with open(metrics, encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                return any(key in json.loads(line)["data"] for key in ("train/loss", "val/loss"))
            except (ValueError, TypeError, KeyError):
                return False
    return False


def _config(run: Path) -> dict:
    """The saved configuration, as it is written; {} where it is not there."""
    file = run / "hydra" / "config.yaml"
    if not file.is_file():
        return {}
    try:
        config = yaml.safe_load(file.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{file} cannot be read: {error}. Expected the YAML that Hydra wrote.") from error
    return config if isinstance(config, dict) else {}


def _step(folder: Path) -> int:
    """n of `global_step_<n>`; -1 for another name."""
    number = folder.name.removeprefix("global_step_")
    return int(number) if number.isdecimal() and folder.name.startswith("global_step_") else -1


def _article(kind: str) -> str:
    return {"sft": "an SFT run", "rl": "an RL run", "evaluation": "an evaluation"}.get(kind, "a quickstart")
