"""Several runs side by side on one page: `comparison.html`, `comparison.json`. `retool report` calls this.

The page has a line per run, and the difference of each run's evaluation from the first run's on the same problems; then
accuracy, tokens of a response and time, as the first figure of ReTool's paper, and one chart per metric with the curves
of all runs. Each run's own report has the rest.
"""

import json
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from verl_ext.evaluation import figures as evaluation
from verl_ext.pages.charts import Chart, Series
from verl_ext.pages.page import render
from verl_ext.pages.text import duration, percent, points
from verl_ext.report.contents import RunContents, read_run
from verl_ext.report.page import TEMPLATES, charts, evaluate_run, held_out, start_texts, summarize
from verl_ext.runs import durable
from verl_ext.runs.folder import short_names
from verl_ext.runs.metrics import Metrics


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
        difference = evaluation.to_json(evaluation.compare(first, run.after)) if first and is_other else None
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
        questions=figure(compared) | charts([(each.name, each.run) for each in compared]),
    )
    durable.write_text(out / "comparison.html", html)
    lines = [evaluation.align(table), ""]
    lines += [f"{each.name}: {each.summary['verdict']}" for each in compared]
    return "\n".join([*lines, f"Comparison: {out / 'comparison.html'}"])


def figure(compared: Sequence[Compared]) -> dict[str, list[Chart]]:
    """Return the charts of accuracy over steps, with the evaluations and their intervals, of tokens, and over time."""
    by_step, tokens, by_time, marks = [], [], [], []
    for each in compared:
        rl = each.run.rl
        steps, accs = rl.curve("train/acc")
        if steps:
            seconds = dict(zip(*training_seconds(rl), strict=True))
            timed = [(seconds[step], acc) for step, acc in zip(steps, accs, strict=True) if step in seconds]
            by_step.append(Series(each.name, steps, accs))
            by_time += [Series(each.name, [at for at, _ in timed], [acc for _, acc in timed])] if timed else []
        marks += held_out(each.summary, f"{each.name}, held out")
        steps, lengths = rl.curve("train/model_tokens")
        tokens += [Series(each.name, steps, lengths)] if steps else []
    drawn = [
        (
            "accuracy and evaluations",
            [*by_step, *marks],
            "share right; points: held out, with interval",
            "RL step",
            [0, 1],
        ),
        ("tokens of a response", tokens, "tokens that the model wrote", "RL step", [0]),
        ("accuracy over time", by_time, "share right", "seconds of RL steps", [0, 1]),
    ]
    found = [Chart(title, series, unit, x, include=include) for title, series, unit, x, include in drawn if series]
    return {"Accuracy, length and time": found} if found else {}


def training_seconds(rl: Metrics) -> tuple[list[int], list[float]]:
    """Return the RL steps and the seconds from the first one's begin to the end of each, without start-ups."""
    steps, seconds = rl.curve("timing_s/step")
    return steps, [*accumulate(seconds)]


def header() -> list[str]:
    of_run = ["run", "kind", "steps", "prompts", "before RL", "accuracy", "difference, points"]
    return [*of_run, "tokens", "failed calls", "RL", "warm step", "starts"]


def row(each: Compared) -> list[str]:
    """Return a run's line of the table, with "-" for what it does not have."""
    summary = each.summary
    top, trained = summary["headline"], summary["sft" if each.run.kind == "sft" else "rl"]
    figures = (summary["evaluation"]["after"] or summary["evaluation"]["before"]).get(top["group"]) if top else None
    difference = (each.difference or {}).get(top["group"]) if top else None
    _, seconds = training_seconds(each.run.rl)
    length = figures["metrics"]["model_tokens"] if figures else None
    return [
        each.name,
        each.run.kind,
        str(trained["steps"] or "-"),
        f"{sum(generated):.0f}" if (generated := each.run.rl.curve("filter_groups/generated")[1]) else "-",
        percent(top["before"]) if top and top["before"] and top["after"] else "-",
        percent(top["after"] or top["before"]) if top else "-",
        points(difference["metrics"]["acc/mean@k"]) if difference else "-",
        f"{length['value']:.0f}" if length else "-",
        percent(figures["metrics"]["tool/error_rate"], interval=False) if figures else "-",
        duration(seconds[-1]) if seconds else "-",
        duration(summary["rl"]["warm_step"]["median_s"]) if summary["rl"]["warm_step"] else "-",
        "; ".join(start_texts(trained["starts"])) or ("1" if trained["starts"] else "-"),
    ]


def pairing(compared: Sequence[Compared]) -> str:
    """Say what the differences are from and how they are paired; "" if fewer than two runs were evaluated."""
    first = next((each.name for each in compared if each.run.after), "")
    found = [figures for each in compared for figures in (each.difference or {}).values()]
    units = sorted({"problem" if each["num_units"] == each["num_problems"] else "template" for each in found})
    how = f"Differences are from {first}, paired by {' or '.join(units)}, over the problems that both runs have."
    apart = [f"{each.name} has no judged problem in common with {first}." for each in compared if each.difference == {}]
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
