"""Read what a run left in its folder: metrics, samples, stage times, configs. Nothing is written.

An RL or SFT run has metrics*.jsonl, hydra/config.yaml, records of rollouts and validations, and `evaluation/`; the
quickstart's folder has both runs in `rl/` and `sft/`, next to the evaluations `eval/{before,after}` and `stages.json`;
an evaluation has its records. Each may be missing. runs/folder.py says which kind a folder is.
"""

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from verl_ext.evaluation.samples import COLUMNS, Sample, sample_of
from verl_ext.records import store
from verl_ext.report.rollouts import Row
from verl_ext.runs import parquet
from verl_ext.runs.folder import SIDES, STAGES, file_of, find_run, judged_files
from verl_ext.runs.metrics import Metrics, read_metrics, start_up

logger = logging.getLogger(__name__)


class RunContents(NamedTuple):
    """Everything found in a run's folder; a field is empty if its part is missing.

    `before` and `after` are the two sides of an evaluation, and `sides` their names: before and after RL in the
    quickstart's folder, the first and the last validation in others. Except in the quickstart's folder, a side without
    a counterpart is `after`.
    """

    folder: Path
    kind: str  # quickstart | sft | rl | evaluation
    sft: Metrics
    rl: Metrics
    before: list[Sample]
    after: list[Sample]
    sides: tuple[str, str]
    rows: tuple[list[Row], list[Row]]  # of the records, one for each sample before and after
    training_rollouts: list[Row]  # scored ones of the first and last step recorded
    start_up: dict[str, float] | None  # seconds of the phases before the first RL step, and of that step
    stages: list[dict[str, Any]]  # entries of stages.json: stage, status, wall_s, peak_gb, ...
    configs: dict[str, str]  # "SFT" | "RL" -> YAML text


def read_run(folder: Path) -> RunContents:
    """Read the folder of an SFT or RL run, of an evaluation, or of the quickstart.

    Raises:
        NoRun: the folder is none of these.
        ValueError: a file is malformed; the message names it and the line.
    """
    kind = find_run(folder).kind
    parts = {"quickstart": {"SFT": folder / "sft", "RL": folder / "rl"}, "sft": {"SFT": folder}, "rl": {"RL": folder}}
    sft, rl = (parts.get(kind, {}).get(name) for name in ("SFT", "RL"))
    files, sides = _evaluations(folder, kind)
    before, after = (store.read(file, COLUMNS).to_pylist() if file else [] for file in files)
    configs = {name: path / "hydra" / "config.yaml" for name, path in (("SFT", sft), ("RL", rl)) if path}
    return RunContents(
        folder=folder,
        kind=kind,
        sft=read_metrics(list(sft.glob("metrics*.jsonl")) if sft else []),
        rl=read_metrics(list(rl.glob("metrics*.jsonl")) if rl else []),
        before=list(map(sample_of, before)),
        after=list(map(sample_of, after)),
        sides=sides,
        rows=(before, after),
        training_rollouts=_training_rollouts(rl) if rl else [],
        start_up=start_up(rl) if rl else None,
        stages=_read_stages(folder / STAGES),
        configs={name: path.read_text(encoding="utf-8") for name, path in configs.items() if path.is_file()},
    )


def _evaluations(folder: Path, kind: str) -> tuple[tuple[Path | None, Path | None], tuple[str, str]]:
    """Return (files of samples before and after, names of the two sides)."""
    if kind == "quickstart":
        before, after = ((judged_files(folder / side) or [None])[-1] for side in SIDES)
        return (before, after), ("before RL", "after RL")
    files = judged_files(folder)
    steps = [found.step for file in files if (found := file_of(file))]
    names = ["in this evaluation" if kind == "evaluation" else f"step {step}" for step in steps]
    if len(files) < 2:
        return (None, files[0] if files else None), ("", names[0] if names else "")
    return (files[0], files[-1]), (names[0], names[-1])


def _training_rollouts(run: Path) -> list[Row]:
    """Return the scored training rollouts of the first and last recorded step."""
    files = [file for file in store.files_of(run) if not file.validate]
    found = [table for files in (files, files[::-1]) if (table := _first_readable(files)) is not None]
    if len(found) == 2 and found[0].equals(found[1]):  # the records have only one step
        del found[1]
    return [row for table in found for row in table.to_pylist() if row["score"] is not None]


def _first_readable(files: Sequence[store.RecordFile]) -> pa.Table | None:
    for file in files:
        try:
            return store.read(file.path, ("step", *COLUMNS))
        except (FileNotFoundError, parquet.Unreadable) as error:
            logger.warning("%s Another step's rollouts are shown.", error)
    return None


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
