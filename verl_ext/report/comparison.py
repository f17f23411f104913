"""Several runs side by side on one page: `comparison.html`, `comparison.json`. `python -m verl_ext.report` calls this.

The page has a line per run, one chart per metric with the curves of all runs, and the difference of each run's
evaluation from the first run's on the same problems. Each run's own report has the rest.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from verl_ext.evaluation import figures as evaluation
from verl_ext.pages.page import render
from verl_ext.pages.text import duration, percent, points
from verl_ext.report.contents import RunContents, read_run
from verl_ext.report.page import TEMPLATES, charts, evaluate_run, start_texts, summarize
from verl_ext.runs import durable
from verl_ext.runs.folder import short_names


class Compared(NamedTuple):
    """A run, its summary, and its difference from the first evaluated run on the problems that both have."""

    name: str
    run: RunContents
    summary: dict[str, Any]
    difference: dict[str, Any] | None  # group of problems -> figures minus those of the first; None for the first


def write_comparison(folders: Sequence[Path], out: Path) -> str:
    """Write comparison.html and comparison.json into `out`; return a table for the console.

    Raises:
        NoRun: a folder holds no run.
        ValueError: a file in a folder is malformed, or a run is named twice.
    """
    names, runs = short_names(list(folders)), [read_run(folder) for folder in folders]
    first, compared = next((run.after for run in runs if run.after), None), []
    for name, run in zip(names, runs, strict=True):
        is_other = run.after and run.after is not first
        difference = evaluation.to_json(evaluation.compare(first, run.after)) if is_other else None
        compared.append(Compared(name, run, summarize(run, evaluate_run(run)), difference))
    table = [header(), *map(row, compared)]
    out.mkdir(parents=True, exist_ok=True)
    content = {each.name: each.summary | {"difference_from_first": each.difference} for each in compared}
    durable.write_text(out / "comparison.json", json.dumps(content, indent=1, allow_nan=False) + "\n")
    html = render(
        TEMPLATES.get_template("comparison.html"),
        compared=compared,
        pairing=pairing(compared),
        table=table,
        groups=_group_table(compared),
        questions=charts([(each.name, each.run) for each in compared]),
    )
    durable.write_text(out / "comparison.html", html)
    lines = [evaluation.align(table), ""]
    lines += [f"{each.name}: {each.summary['verdict']}" for each in compared]
    return "\n".join([*lines, f"Comparison: {out / 'comparison.html'}"])


def header() -> list[str]:
    return ["run", "kind", "steps", "accuracy", "difference, points", "failed calls", "warm step", "starts"]


def row(each: Compared) -> list[str]:
    """Return a run's line of the table, with "-" for what it does not have."""
    summary = each.summary
    top, trained = summary["headline"], summary["sft" if each.run.kind == "sft" else "rl"]
    figures = (summary["evaluation"]["after"] or summary["evaluation"]["before"]).get(top["group"]) if top else None
    difference = (each.difference or {}).get(top["group"]) if top else None
    return [
        each.name,
        each.run.kind,
        str(trained["steps"] or "-"),
        percent(top["after"] or top["before"]) if top else "-",
        points(difference["metrics"]["acc/mean@k"]) if difference else "-",
        percent(figures["metrics"]["tool/error_rate"], interval=False) if figures else "-",
        duration(summary["rl"]["warm_step"]["median_s"]) if summary["rl"]["warm_step"] else "-",
        "; ".join(start_texts(trained["starts"])) or ("1" if trained["starts"] else "-"),
    ]


def pairing(compared: Sequence[Compared]) -> str:
    """Say what the differences are from and how they are paired; "" if fewer than two runs were evaluated."""
    first = next((each.name for each in compared if each.run.after), "")
    others = [each for each in compared if each.difference is not None]
    found = [figures for each in others for figures in each.difference.values()]
    units = sorted({"problem" if each["num_units"] == each["num_problems"] else "template" for each in found})
    how = f"Differences are from {first}, paired by {' or '.join(units)}, over the problems that both runs have."
    apart = [f"{each.name} has no judged problem in common with {first}." for each in others if not each.difference]
    return " ".join([how] * bool(units) + apart)


def _group_table(compared: Sequence[Compared]) -> list[list[str]]:
    """Return the accuracy of every data source, a column per run; [] if nothing was evaluated."""
    sides = [each.summary["evaluation"]["after"] or each.summary["evaluation"]["before"] for each in compared]
    sources = {group: figures["data_sources"] for side in sides for group, figures in side.items()}
    shown = [group for group, members in sources.items() if evaluation.is_shown(group, members)]
    if not shown:
        return []
    rows = [
        [group, *(percent(side[group]["metrics"]["acc/mean@k"]) if group in side else "-" for side in sides)]
        for group in shown
    ]
    return [["accuracy", *(each.name for each in compared)], *rows]
