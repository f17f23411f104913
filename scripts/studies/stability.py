"""Summarise the runs of the stability map: a table, and a heat map for each of four figures."""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from scripts.studies.cell import Cell
from scripts.studies.drawing import write_heat_map
from verl_ext.evaluation.estimators import half_width
from verl_ext.runs import jsonl

Condition = tuple[int, bool]  # staleness, bf16


class Summary(NamedTuple):
    """The runs of an objective in a condition.

    Attributes:
        seeds: number of runs.
        accuracy: mean on held-out problems after training.
        half_width: half of its 95% interval by Student's t over seeds; None with one seed.
        collapsed: share of the runs that end below where they began.
        masked: sum of the shares of clipped and of dropped tokens; mean over steps and runs.
        cosine: between the gradient and that of fresh rollouts, mean over steps and runs; None if none was measured.
    """

    seeds: int
    accuracy: float
    half_width: float | None
    collapsed: float
    masked: float
    cosine: float | None


def read_runs(path: Path) -> dict[Cell, dict]:
    """Return each run of a file, one per line as `in_short` makes it; none if there is no file.

    Raises:
        ValueError: a line is not a run, or the runs differ in their number of steps.
    """
    found: dict[Cell, dict] = {}
    if path.exists():
        expected = "a run of the map (delete the line to repeat the run)"
        found = dict(jsonl.read(path, lambda row: (Cell(**row["cell"]), {"steps": row["steps"]} | row), expected))
    steps = sorted({result["steps"] for result in found.values()})
    if len(steps) > 1:
        raise ValueError(f"{path} has runs of {steps} steps, which cannot be compared. Delete all but one kind.")
    return found


def in_short(result: dict, steps: int = 10) -> dict:
    """Return a run of cell.py with the means of each `steps` steps as its rows, in three digits."""
    rows = []
    for start in range(0, len(result["rows"]), steps):
        group = result["rows"][start : start + steps]
        values = {name: [row[name] for row in group if row.get(name) is not None] for row in group for name in row}
        rows.append({name: float(f"{fmean(own):.3g}") for name, own in values.items() if own})
    return result | {"rows": rows}


def summarize(results: Sequence[dict]) -> Summary:
    """Return figures of runs that differ only in their seed; there must be at least one."""
    after = [result["after"] for result in results]
    rows = [row for result in results for row in result["rows"]]
    cosines = [row["cosine"] for row in rows if row.get("cosine") is not None]
    return Summary(
        seeds=len(after),
        accuracy=fmean(after),
        half_width=half_width(after),
        collapsed=fmean(result["after"] < result["before"] for result in results),
        masked=fmean(row["clipped_low"] + row["clipped_high"] + row["dropped"] for row in rows),
        cosine=fmean(cosines) if cosines else None,
    )


def summaries(
    objectives: Sequence[str], conditions: Sequence[Condition], found: dict[Cell, dict]
) -> dict[tuple[str, Condition], Summary]:
    """Return summaries of the objectives and conditions that have a run."""
    result = {}
    for name in objectives:
        for staleness, bf16 in conditions:
            runs = [
                run
                for cell, run in found.items()
                if (cell.objective, cell.staleness, cell.bf16) == (name, staleness, bf16)
            ]
            if runs:
                result[name, (staleness, bf16)] = summarize(runs)
    return result


def table(objectives: Sequence[str], conditions: Sequence[Condition], found: dict[Cell, dict], wanted: int) -> str:
    """Return a line for each objective and condition that has a run, and how many of `wanted` runs are there."""
    lines = [
        f"{'objective':<16}{'condition':<20}{'seeds':>6}{'accuracy':>15}{'collapsed':>11}{'masked':>9}{'cosine':>8}"
    ]
    for (name, condition), each in summaries(objectives, conditions, found).items():
        cosine = "-" if each.cosine is None else f"{each.cosine:.2f}"
        lines.append(
            f"{name:<16}{_condition(condition):<20}{each.seeds:>6}{_accuracy(each):>15}{each.collapsed:>11.2f}"
            f"{each.masked:>9.4f}{cosine:>8}"
        )
    there = sum(each.seeds for each in summaries(objectives, conditions, found).values())
    lines.append(f"{there} of {wanted} runs are done.")
    return "\n".join(lines)


def write_maps(
    objectives: Sequence[str], conditions: Sequence[Condition], found: dict[Cell, dict], out: Path
) -> list[Path]:
    """Write a heat map for each figure into `out`, and return the files."""
    figures = {
        "accuracy": ("Accuracy on held-out problems, with 95% intervals over seeds", (0.3, 1.0)),
        "collapsed": ("Share of runs that end below their start", (0.0, 1.0)),
        "masked": ("Share of tokens clipped or dropped", (0.0, 0.2)),
        "cosine": ("Cosine between the gradient and that of fresh rollouts", (0.0, 1.0)),
    }
    summed, paths = summaries(objectives, conditions, found), []
    for figure, (title, scale) in figures.items():
        cells = {}
        for (name, condition), each in summed.items():
            value = getattr(each, figure)
            if value is not None:
                text = (
                    _accuracy(each)
                    if figure == "accuracy"
                    else f"{value:.3f}"
                    if figure == "masked"
                    else f"{value:.2f}"
                )
                cells[name, _condition(condition)] = (value, text)
        paths.append(out / f"stability_{figure}.svg")
        write_heat_map(title, objectives, [_condition(each) for each in conditions], cells, scale=scale, out=paths[-1])
    return paths


def _condition(condition: Condition) -> str:
    return f"{condition[0]} stale{', bf16' if condition[1] else ''}"


def _accuracy(each: Summary) -> str:
    return f"{each.accuracy:.2f}" + ("" if each.half_width is None else f" ± {each.half_width:.2f}")
