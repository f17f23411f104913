"""Read what verl's file logger wrote about a run (`metrics-*.jsonl`), and the times in it and in the log."""

import re
import statistics
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from verl_ext.runs import jsonl

LARGEST = 1e300  # a larger value is left out, as NaN is, because a mean of several overflows
WARMUP_STEPS = 2  # first steps of every process: cold caches and compilation, left out of the warm step time
# verl's timers inside `timing_s/step`, in order (verl 0.9.1, trainer/ppo/v1/trainer_base.py:473)
STEP_PARTS = "gen reward old_log_prob ref values adv update_critic update_actor update_weights save_checkpoint".split()

START_UP_PHASES = {  # of an RL run -> the line, with the time of day, that Ray or verl (0.9.1) logs at its end
    "imports, configuration, Ray": "Started a local Ray instance",
    "data set": "Total training steps",
    "actor": "actor and ref model engine initialized",
    "vLLM": "ready to fit",
    "first weights to vLLM": "update_weights done",
}
TIME_OF_DAY = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}")


class Start(NamedTuple):
    """One start of a training run that reached a step."""

    resumed_from: int  # step of the checkpoint; 0 from scratch
    last: int  # step


class Metrics(NamedTuple):
    """What verl's file logger wrote: step -> {key: value}, and the steps too early in their process to time."""

    steps: dict[int, dict[str, float]]
    cold: set[int]
    starts: tuple[Start, ...] = ()  # in order

    def curve(self, key: str) -> tuple[list[int], list[float]]:
        """Return the steps that have the key, ascending, and its values."""
        steps = [step for step in sorted(self.steps) if key in self.steps[step]]
        return steps, [self.steps[step][key] for step in steps]


def metric_rows(path: Path) -> list[tuple[int, dict[str, Any]]]:
    """Return (step, metrics) of each line of a file of verl's logger.

    Raises:
        ValueError: a line has another form; the message names it.
    """

    def parse(row: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if not (isinstance(row.get("step"), int) and isinstance(row.get("data"), dict)):
            raise ValueError("`step` is not an integer, or `data` is not an object")
        return row["step"], row["data"]

    expected = """a line of verl's file logger, {"step": 1, "data": {"actor/entropy": 0.16, ...}}"""
    return list(jsonl.read(path, parse, expected))


def read_metrics(paths: Sequence[Path]) -> Metrics:
    """Merge the metric files of one run, `{"step": n, "data": {...}}` per line; a repeated step keeps its last value.

    Files are sorted by the launcher's start time in their names; files without it come first, by their first step,
    then by modification time. A start that resumes from a checkpoint drops what earlier ones logged for later steps.
    Values that are not finite numbers, or are beyond LARGEST, are left out.

    With algorithm.rollout_correction.bypass_mode, verl logs no `actor/entropy`. `actor/entropy_loss` replaces it, the
    same mean over tokens in the update (verl 0.9.1, workers/utils/losses.py:124; needs actor.calculate_entropy).

    Raises:
        ValueError: a line has another form; the message names it.
    """
    files = []
    for path in paths:
        if rows := metric_rows(path):
            launched = re.search(r"-(\d+)\.jsonl$", path.name)  # metrics-<seconds>.jsonl
            files.append((float(launched[1]) if launched else 0, rows[0][0], path.stat().st_mtime, path.name, rows))
    steps: dict[int, dict[str, float]] = {}
    cold: set[int] = set()
    starts: list[tuple[float, Start]] = []
    for launched, _, written, _, rows in sorted(files, key=lambda file: file[:4]):
        # Not validation, which a start may begin with
        trained = [step for step, data in rows if "timing_s/step" in data or "train/loss" in data]
        if trained:
            starts.append((launched or written, Start(trained[0] - 1, trained[-1])))
            steps = {step: values for step, values in steps.items() if step < trained[0]}
            cold = {step for step in cold if step < trained[0]}
        timed = []
        for step, data in rows:
            values = {k: float(v) for k, v in data.items() if isinstance(v, int | float) and abs(v) < LARGEST}
            if "actor/entropy_loss" in values:
                values.setdefault("actor/entropy", values["actor/entropy_loss"])
            steps.setdefault(step, {}).update(values)
            if "timing_s/step" in values:
                timed.append(step)
        cold.update(timed[:WARMUP_STEPS])
    return Metrics(steps, cold, tuple(start for _, start in sorted(starts)))


def step_times(rl: Metrics) -> tuple[list[int], dict[str, list[float]]]:
    """Return the seconds of each part of each RL step; `other` is the rest of `timing_s/step`.

    Parts below 1% of the whole are in `other`. Validation runs outside `timing_s/step` and is in no part.
    """
    steps, totals = rl.curve("timing_s/step")
    parts = {part: [rl.steps[step].get(f"timing_s/{part}", 0.0) for step in steps] for part in STEP_PARTS}
    parts = {part: values for part, values in parts.items() if sum(values) > 0.01 * sum(totals)}
    if steps:
        named = [sum(values[i] for values in parts.values()) for i in range(len(steps))]
        parts["other"] = [max(0.0, total - part) for total, part in zip(totals, named, strict=True)]
    return steps, parts


def warm_step(rl: Metrics) -> dict[str, Any] | None:
    """Return the median seconds of a step and of each part over the warm steps; None if there is no warm step.

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
    """Return the seconds of each phase of the latest start, from the launcher's start to the end of the first step.

    None if the run left no log or logged differently from verl 0.9.1. The launcher's start is known to the second.
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
