"""What code is for, by rules over its syntax tree, and what it does for a response: position of the first call, errors
that a later call repairs. The question is the one of ReTool's analysis (arXiv:2504.11536); the rules are ours.

A program has the first purpose that fits, read from the top:

    other tool     a JSON object: the arguments of a tool that is no interpreter
    not Python     it cannot be parsed
    no computation no operator, comparison or loop, and no call but `print`: the model talks to itself
    checking       an `assert`, a printed comparison (`print(a == b)`), or a name with check, verif, valid or correct
    simulation     `random`: an answer by drawing
    algebra        sympy, or a call of solve, simplify, factor, expand, diff, integrate, Eq or symbols
    enumeration    a loop or comprehension with a condition, or itertools: candidates are tried
    iteration      another loop or comprehension, or a function that calls itself: sums, recurrences
    numerics       numpy, scipy or mpmath
    calculation    the rest: arithmetic
"""

import ast
import re
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from statistics import fmean
from typing import Any

from verl_ext.plots.charts import Chart
from verl_ext.records.run_record import Metrics
from verl_ext.view import curves, text
from verl_ext.view.data import Run, State, state_of, step_of

PURPOSES = ("other tool", "not Python", "no computation", "checking", "simulation", "algebra", "enumeration",
            "iteration", "numerics", "calculation")  # fmt: skip
SAMPLE = 64  # responses of a file, chosen by a hash of their names: a share to within 0.06 (one standard error)
_ALGEBRA = {"solve", "simplify", "factor", "expand", "diff", "integrate", "Eq", "symbols"}
_LOOPS = (ast.For, ast.While, ast.comprehension)


@lru_cache(maxsize=20_000)
def purpose(code: str) -> str:
    """One of PURPOSES."""
    if text.is_json_object(code):
        return "other tool"
    try:
        nodes = list(ast.walk(ast.parse(code)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return "not Python"

    def of(*kinds: type[ast.AST], among: Sequence[ast.AST] = nodes) -> list[Any]:
        return [node for node in among if isinstance(node, kinds)]

    imports = [alias.name for node in of(ast.Import) for alias in node.names]
    imports += [node.module or "" for node in of(ast.ImportFrom)]
    packages = {name.partition(".")[0] for name in imports}
    called = {id(call): getattr(call.func, "id", getattr(call.func, "attr", "")) for call in of(ast.Call)}
    names = {node.id for node in of(ast.Name)} | {node.name for node in of(ast.FunctionDef)} | set(called.values())
    printed = [part for call in of(ast.Call) if called[id(call)] == "print" for part in call.args]
    inside = [child for loop in of(ast.For, ast.While) for child in ast.walk(loop)]
    recurs = any(
        called[id(call)] == function.name
        for function in of(ast.FunctionDef)
        for call in of(ast.Call, among=list(ast.walk(function)))
    )
    fits = {
        "no computation": not of(ast.BinOp, ast.Compare, *_LOOPS) and set(called.values()) <= {"print"},
        "checking": of(ast.Assert)
        or of(ast.Compare, among=printed)
        or any(re.search("check|verif|valid|correct", name, re.IGNORECASE) for name in names),
        "simulation": "random" in packages | names,
        "algebra": "sympy" in packages or _ALGEBRA & set(called.values()),
        "enumeration": "itertools" in packages
        or of(ast.If, among=inside)
        or any(node.ifs for node in of(ast.comprehension)),
        "iteration": of(*_LOOPS) or recurs,
        "numerics": packages & {"numpy", "scipy", "mpmath"},
    }
    return next((name for name, found in fits.items() if found), "calculation")


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Of judged responses: `right/PURPOSE` and `wrong/PURPOSE`, shares of their calls that have code, as a malformed
    one has none; `first call`, the mean share of a response that stands before its first call's output; `repaired`,
    the share of the responses with an error of their code in which a later call ran well. Left out is what there is
    nothing to take a share of."""
    found: dict[str, float] = {}
    for name, right in (("right", True), ("wrong", False)):
        side = [row for row in rows if (row["acc"] == 1) == right]
        calls = [purpose(call["code"]) for row in side for call in row["calls"] or [] if call["code"]]
        found |= {f"{name}/{kind}": Counter(calls)[kind] / len(calls) for kind in PURPOSES if calls}
    first, repaired = [], []
    for row in rows:
        starts = [turn["start"] for turn in row["turns"] or [] if turn["role"] != "model"]
        first += [starts[0] / row["response_tokens"]] if starts and row["response_tokens"] else []
        faults = [call["fault"] for call in row["calls"] or []]
        if "model" in faults:
            later = (row["calls"] or [])[faults.index("model") :]
            repaired.append(any(call["status"] == "ok" for call in later))
    return found | {name: fmean(each) for name, each in (("first call", first), ("repaired", repaired)) if each}


def over_training(run: Run) -> Metrics:
    """`summary` of SAMPLE judged responses of each step of training."""
    files = {key: path for key, path in run.files().items() if key.startswith("step")}
    return Metrics({step_of(key): _of_file(run, key, state_of(path)) for key, path in files.items()}, set())


@lru_cache(maxsize=20_000)
def _of_file(run: Run, key: str, _: State | None) -> dict[str, float]:
    """Once for each state of a file."""
    sql = (
        "SELECT acc, response_tokens, list_transform(turns, lambda t: {'role': t.role, 'start': t.start}) AS turns,"
        " list_transform(calls, lambda c: {'code': c.code, 'status': c.status, 'fault': c.fault}) AS calls"
        f" FROM records WHERE acc IS NOT NULL ORDER BY hash(uid, session) LIMIT {SAMPLE}"
    )
    return summary(run.ask(sql, keys=[key]))


def charts(runs: Sequence[Run]) -> dict[str, list[Chart]]:
    """As `curves.charts`: shares of purposes by verdict for each run, then what calls do for a response."""
    shown = [(run.name, run.number, over_training(run)) for run in runs]
    sides = [(f"{side}/.+", f"in {side} responses", "share of calls") for side in ("right", "wrong")]
    found = [curves.charts([each], {f"What the code is for: {each[0]}": sides}) for each in shown]
    does = (
        ("first call", "position of the first call", "share of the response"),
        ("repaired", "errors repaired by a later call", "share of the responses with one"),
    )
    by_run = {title: group for each in found for title, group in each.items()}
    return by_run | curves.charts(shown, {"What it does": does})
