"""The same problem over time and between runs, with the test of `retool evaluate` for what changed."""

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from verl_ext.evaluation import figures
from verl_ext.evaluation.samples import Sample, sample_of
from verl_ext.view.data import Run, is_validation, label

DRAWS = 2000  # bootstrap resamples: the end of an interval is known to about 0.03 of its width
_LIGHT = (  # what `sample_of` needs, without texts
    "uid, session, NULL AS prompt, ground_truth, problem, id, acc, domain, verdict, end_reason, score, model_tokens,"
    " list_transform(calls, lambda c: {'attempts': c.attempts, 'fault': c.fault, 'status': c.status}) AS calls,"
    " list_transform(turns, lambda t: {'role': t.role}) AS turns"
)


def sides(run: Run) -> list[str]:
    """Return the sides to compare: "first" and "last", each problem's draws in training, and the validations."""
    keys = list(run.files())
    training = ["first", "last"] if not all(map(is_validation, keys)) else []
    return training + [key for key in keys if is_validation(key)]


def named(side: str) -> str:
    """Return a page's name for a side."""
    return {"first": "First draw in training", "last": "Last draw in training"}.get(side) or label(side)


def samples(run: Run, side: str, *, again: bool = False) -> list[Sample]:
    """Return the judged and the failed samples of a side, as an evaluation has them; with `again`, only those of
    problems that were drawn in several steps, because the first draw of the others is also their last."""
    keys, only = [side], ""
    if end := {"first": "min", "last": "max"}.get(side):
        keys = [key for key in run.files() if key.startswith("step")]
        only = f" QUALIFY key = {end}(key) OVER of_problem"
        only += " AND min(key) OVER of_problem <> max(key) OVER of_problem" if again else ""
        only = f" WINDOW of_problem AS (PARTITION BY problem){only}"
    rows = run.ask(f"SELECT {_LIGHT} FROM records WHERE outcome IS DISTINCT FROM 'open'{only}", keys=keys)
    return [sample_of(row) for row in rows]


def compare(before: Sequence[Sample], after: Sequence[Sample]) -> dict[str, Any] | None:
    """Return `tables` of verl_ext/evaluation/figures.py, and the `problems` that changed most: name, id, before, after.

    Both cover the problems with judged samples on both sides, `common` of them; None if there is none.
    """
    pair = figures.paired(before, after)
    accs: dict[figures.Problem, tuple[list[float], list[float]]] = {}
    for side, rows in enumerate(pair):
        for row in rows:
            accs.setdefault(row.problem_key(), ([], []))[side].extend([] if row.acc is None else [row.acc])
    if not accs:
        return None
    one, other = (figures.evaluate(side, draws=DRAWS) for side in pair)
    difference = figures.compare(*pair, draws=DRAWS)
    moved = [(key[1], key[2], fmean(sides[0]), fmean(sides[1])) for key, sides in accs.items()]
    moved.sort(key=lambda row: (-abs(row[3] - row[2]), row[0]))
    return {"tables": figures.comparison_tables(one, other, difference), "problems": moved[:100], "common": len(accs)}


def prompts(runs: Sequence[Run], names: Sequence[str]) -> dict[str, str]:
    """Return problem -> its prompt in one of the runs."""
    sql = (
        "SELECT problem, any_value(prompt) AS prompt FROM records WHERE problem IN (SELECT unnest($names)) GROUP BY ALL"
    )
    found = [row for run in runs for row in run.ask(sql, {"names": list(names)})]
    return {row["problem"]: row["prompt"] for row in found if row["prompt"]}


def draws(runs: Sequence[Run], problem: str) -> list[dict[str, Any]]:
    """Return every group of a problem: run, key, uid, judged, acc, score, calls, tokens, id; by run, then time."""
    sql = (
        "SELECT split_part(key, '_', 2)::BIGINT AS moment, key, uid, count(acc) AS judged, avg(acc) AS acc,"
        " avg(score) AS score, avg(len(calls)) AS calls, avg(response_tokens) AS tokens, min(outcome) AS outcome,"
        " min(id) AS id FROM records WHERE problem = $problem GROUP BY ALL ORDER BY moment, key, uid"
    )
    return [{"run": run} | row for run in runs for row in run.ask(sql, {"problem": problem})]
