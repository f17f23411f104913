"""Classify what code is for, by rules over its syntax tree, and what it does for a response: position of the first
call, errors that a later call repairs. ReTool's analysis asks the same question (arXiv:2504.11536); the rules are ours.

    python -m scripts.studies.purposes outputs/quickstart    # a table over the steps of training

A program has the first purpose that fits, read from the top:

    other tool     a JSON object: the arguments of a tool that is not an interpreter
    not Python     it cannot be parsed
    no computation no operator (except a number's sign), comparison, loop, or call except `print`: talk to itself
    checking       an `assert`, a printed comparison (`print(a == b)`), or a name with check, verif, valid or correct
    simulation     `random`: an answer by drawing
    algebra        sympy, or a call of solve, simplify, factor, expand, diff, integrate, Eq or symbols
    enumeration    a loop or comprehension with a condition, or itertools: candidates are tried
    iteration      another loop or comprehension, or a function that calls itself: sums, recurrences
    numerics       numpy, scipy or mpmath
    calculation    the rest: arithmetic
"""

import ast
import json
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from statistics import fmean
from typing import Any

from scripts.studies.shared import command_line, markdown
from verl_ext.records import store
from verl_ext.runs.folder import training_folder

PURPOSES = ("other tool", "not Python", "no computation", "checking", "simulation", "algebra", "enumeration",
            "iteration", "numerics", "calculation")  # fmt: skip
_ALGEBRA = {"solve", "simplify", "factor", "expand", "diff", "integrate", "Eq", "symbols"}
_LOOPS = (ast.For, ast.While, ast.comprehension)


def _is_json_object(code: str) -> bool:
    """Return whether a call is of a tool that is not an interpreter: its code is the arguments."""
    try:
        return isinstance(json.loads(code), dict)
    except (ValueError, RecursionError):
        return False


@lru_cache(maxsize=20_000)
def purpose(code: str) -> str:
    """Return one of PURPOSES."""
    if _is_json_object(code):
        return "other tool"
    try:
        nodes = list(ast.walk(ast.parse(code)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return "not Python"

    def of(*kinds: type[ast.AST], among: Sequence[ast.AST] = nodes) -> list[Any]:
        return [node for node in among if isinstance(node, kinds)]

    imports = [alias.name for node in of(ast.Import) for alias in node.names]
    imports += [node.module or "" for node in of(ast.ImportFrom)]
    packages = {part for name in imports for part in name.split(".")}
    called = {id(call): getattr(call.func, "id", getattr(call.func, "attr", "")) for call in of(ast.Call)}
    operators = of(ast.BinOp, ast.AugAssign, ast.BoolOp, ast.Compare)
    operators += [node for node in of(ast.UnaryOp) if not isinstance(node.operand, ast.Constant)]
    names = {node.id for node in of(ast.Name)} | {node.name for node in of(ast.FunctionDef)} | set(called.values())
    printed = [part for call in of(ast.Call) if called[id(call)] == "print" for part in call.args]
    inside = [child for loop in of(ast.For, ast.While) for child in ast.walk(loop)]
    recurs = any(
        called[id(call)] == function.name
        for function in of(ast.FunctionDef)
        for call in of(ast.Call, among=list(ast.walk(function)))
    )
    fits = {
        "no computation": not operators and not of(*_LOOPS) and set(called.values()) <= {"print"},
        "checking": of(ast.Assert)
        or of(ast.Compare, among=printed)
        or any(re.search("check|verif|valid|correct", name, re.IGNORECASE) for name in names),
        "simulation": "random" in packages | names | {node.attr for node in of(ast.Attribute)},
        "algebra": "sympy" in packages or _ALGEBRA & set(called.values()),
        "enumeration": "itertools" in packages
        or of(ast.If, among=inside)
        or any(node.ifs for node in of(ast.comprehension)),
        "iteration": of(*_LOOPS) or recurs,
        "numerics": packages & {"numpy", "scipy", "mpmath"},
    }
    return next((name for name, found in fits.items() if found), "calculation")


def _first_call(tool_use: str | None) -> float | None:
    """Return `first_call_token` of a row's `tool_use`; None if that is of another form, as from another agent loop."""
    try:
        start = json.loads(tool_use or "{}").get("first_call_token")
    except (ValueError, AttributeError, RecursionError):
        return None
    return start if isinstance(start, int | float) and 0 <= start < 2**31 else None


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return figures of judged responses; those without a base for a share are left out.

    `right/PURPOSE` and `wrong/PURPOSE` are shares of their calls that have code (a malformed one has none);
    `first call` is the mean share of a response before its first call that ran; `repaired` is the share of the
    responses with an error in their code in which a call of a later turn ran well.
    """
    found: dict[str, float] = {}
    for name, right in (("right", True), ("wrong", False)):
        side = [row for row in rows if (row["acc"] == 1) == right]
        calls = [purpose(call["code"]) for row in side for call in row["calls"] or [] if call["code"]]
        found |= {f"{name}/{kind}": Counter(calls)[kind] / len(calls) for kind in PURPOSES if calls}
    first, repaired = [], []
    for row in rows:
        start = _first_call(row["tool_use"])
        first += [start / row["response_tokens"]] if start is not None and row["response_tokens"] else []
        calls = [call for call in row["calls"] or [] if call["code"] and call["turn"] is not None]
        if errors := [call["turn"] for call in calls if call["fault"] == "model"]:
            repaired.append(any(call["status"] == "ok" and call["turn"] > errors[0] for call in calls))
    return found | {name: fmean(each) for name, each in (("first call", first), ("repaired", repaired)) if each}


def over_training(run: Path, width: int) -> dict[range, dict[str, float]]:
    """Return the `summary` of the judged training responses of each `width` steps.

    Raises:
        ValueError: the run has no records of such responses.
    """
    spans = defaultdict(list)
    columns = ["step", "validate", "acc", "response_tokens", "tool_use", "calls"]
    for row in store.rows(run, columns=columns):
        if not row["validate"] and row["acc"] is not None:
            spans[(row["step"] - 1) // width].append(row)
    if not spans:
        raise ValueError(f"{run} has no judged responses of training steps (see retool.recorder).")
    return {range(at * width + 1, (at + 1) * width + 1): summary(rows) for at, rows in sorted(spans.items())}


def main(argv: Sequence[str] | None = None) -> None:
    parser = command_line(__spec__, __doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of an RL run, or the quickstart's above it")
    parser.add_argument("--width", type=int, default=10, metavar="N", help="steps in a column (default: %(default)s)")
    args = parser.parse_args(argv)
    try:
        found = over_training(training_folder(args.run, "rl"), args.width)
    except (OSError, ValueError) as error:
        sys.exit(f"purposes: {error}")
    names = dict.fromkeys(name for each in found.values() for name in each)
    rows = [[name, *(f"{each[name]:.1%}" if name in each else "-" for each in found.values())] for name in names]
    print(markdown(["", *(f"{span[0]}-{span[-1]}" for span in found)], rows))


if __name__ == "__main__":
    main()
