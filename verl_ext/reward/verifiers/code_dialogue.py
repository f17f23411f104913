"""One test of a solution, in rounds: tests and expected values never share a process with the solution.

The test runs in a sandbox program of its own (code_tests.py), where the solution's names are proxies. It asks for
calls; the solution's program (code_solution.py) makes them, all from the beginning in each round, so that its state is
right, and gives the results as plain data (code_values.py); the test runs again with them. Most tests take one run of
the solution and one of the test: what a test asks first does not depend on the solution, and is remembered.
"""

import ast
import binascii
import builtins
import json
import marshal
import secrets
import sys
import zlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from verl_ext.reward.verifiers.code_collect import call_collected
from verl_ext.reward.verifiers.code_handles import BUILTIN_NAMES
from verl_ext.reward.verifiers.code_solution import LOADED, PAUSED
from verl_ext.sandbox.client import RunResult

SANDBOX_FAILURE = "sandbox_failure"
MAX_ROUNDS = 30
MAX_ANSWERS = 8 << 20  # characters of all answers of a test
MAX_FIRST_REQUESTS = 4096  # tests whose first requests are remembered

# Runs a program in the sandbox; None where the sandbox failed, which the program has not caused.
RunProgram = Callable[[str], Awaitable[RunResult | None]]


@dataclass(frozen=True)
class Prepared:
    """A test as the sandbox runs it; for the fields see `code_tests.run_test`."""

    source: str
    functions: list[tuple[int, str]]
    modules: list[str]
    classes: list[str]
    own_builtin: str


class Dialogue:
    """Runs tests against solutions.

    Args:
        run: see `RunProgram`.
        timeout_s: that `run` gives a program; a solution gets twice as much in all rounds of a test together.
    """

    def __init__(self, run: RunProgram, timeout_s: float):
        self._run = run
        self._timeout_s = timeout_s
        self._first: dict[str, dict[str, Any]] = {}

    async def passes(self, program: str, test: str) -> tuple[bool | None, str]:
        """Whether a solution passes a test, and why not; None where the sandbox failed, or the test is no test of it.

        Raises:
            ValueError: the test is no Python.
        """
        prepared = prepare(test)
        report = self._first.get(test)
        if report is None:
            report = await self._run_test(prepared, [], [])
            if report is None:
                return None, SANDBOX_FAILURE
            if reason := _why_no_test(report):
                return None, reason
            if len(self._first) >= MAX_FIRST_REQUESTS:
                self._first.clear()
            self._first[test] = report
        requests: list[Any] = []
        answers: list[str] = []
        seconds = 0.0
        for _ in range(MAX_ROUNDS):
            requests = requests[: report.get("from", 0)] + report.get("need", [])
            del answers[report.get("from", 0) :]
            result = await self._run(solution_program(program, requests, len(answers)))
            if result is None:
                return None, SANDBOX_FAILURE
            loaded, *lines = result.stdout.split("\n")
            if loaded != LOADED:
                return False, "the program does not load"
            lines = lines[:-1]  # what follows the last line's end
            paused = lines[-1:] == [PAUSED]
            answers += lines[: len(requests) - len(answers)][: -1 if paused else None]
            seconds += result.run_s
            if sum(map(len, answers)) > MAX_ANSWERS:
                return False, "too large results"
            report = await self._run_test(prepared, requests, answers, paused)
            if report is None:
                return None, SANDBOX_FAILURE
            if "need" not in report:
                return report["passed"], report["why"]
            if seconds > 2 * self._timeout_s:
                return False, "out of time"
        return False, f"no end after {MAX_ROUNDS} rounds"

    async def _run_test(
        self, prepared: Prepared, requests: list[Any], answers: list[str], paused: bool = False
    ) -> dict[str, Any] | None:
        """The report of one run of a test: `passed`, or `need` and `from`; None where the sandbox failed."""
        mark = secrets.token_hex(16)  # not known when the answers were given: no answer can hold a report
        played = list(zip(requests, answers, strict=False))
        if len(answers) < len(requests) and not paused:
            played.append((requests[len(answers)], None))
        result = await self._run(test_program(prepared, mark, played))
        if result is None:
            return None
        reports = [line for line in result.stdout.split("\n") if line.startswith(mark)]
        # Of several, the last is whole unless the test was stopped while it wrote it.
        for line in reversed(reports):
            try:
                return json.loads(line.removeprefix(mark))
            except (ValueError, RecursionError):
                continue
        return {"passed": False, "why": f"the test ended without a report: {result.status}"}


def _why_no_test(first: dict[str, Any]) -> str:
    """Why no program can pass a test, or fail it, by the report of its run without one; "" for any other test."""
    if "unpassable" in first:
        return first["unpassable"]
    if "need" in first:
        return ""
    if first["passed"]:
        return "a test passes and never asks the program for anything"
    return f"a test fails before it asks the program for anything ({first['why']})"  # it imports what is not there, say


def solution_program(program: str, requests: list[Any], known: int) -> str:
    """What the sandbox runs for a solution: its code, and the calls to make; answers from number `known` on are new."""
    requests_json = json.dumps(requests)
    return f"{_sources('code_values', 'code_solution')}\nserve({program!r}, json.loads({requests_json!r}), {known})\n"


def test_program(prepared: Prepared, mark: str, played: list[tuple[Any, str | None]]) -> str:
    """What the sandbox runs for a test: its code, and each call so far with its answer."""
    played_json = json.dumps(played)
    return (
        f"{_sources('code_values', 'code_handles', 'code_tests')}\nrun_test({prepared.source!r}, {mark!r}, "
        f"json.loads({played_json!r}), {prepared.functions!r}, {prepared.modules!r}, {prepared.classes!r}, "
        f"{prepared.own_builtin!r})\n"
    )


@cache
def _sources(*names: str) -> str:
    """Modules of this folder as one program, without the imports of each other; compiled, where the Python is ours."""
    folder = Path(__file__).parent
    lines = [line for name in names for line in (folder / f"{name}.py").read_text(encoding="utf-8").split("\n")]
    source = "\n".join(line for line in lines if not line.startswith("from verl_ext"))
    code = marshal.dumps(compile(source, f"{names[-1]}.py", "exec"))
    code, text = (binascii.b2a_base64(zlib.compress(data, 9)) for data in (code, source.encode()))
    return (
        "import binascii, marshal, sys, zlib\n"
        f"if sys.implementation.cache_tag == {sys.implementation.cache_tag!r}:\n"
        f"    exec(marshal.loads(zlib.decompress(binascii.a2b_base64({code!r}))))\n"
        f"else:\n    exec(zlib.decompress(binascii.a2b_base64({text!r})))\n"
    )


@lru_cache(maxsize=4096)
def prepare(test: str) -> Prepared:
    """A test such that its asserts may fail while it guesses; what may travel of it, found by its syntax.

    Raises:
        ValueError: it is no Python.
    """
    try:
        tree = ast.parse(test)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise ValueError(f"The test {test[:200]!r} is no Python ({error}). Check the data row.") from error
    source = ast.unparse(ast.fix_missing_locations(_TolerantAsserts().visit(call_collected(tree))))
    tree = ast.parse(source)
    nodes = list(ast.walk(tree))
    functions = [
        (node.lineno, ast.unparse(node))
        for node in nodes
        if isinstance(node, ast.Lambda | ast.FunctionDef)
        and not getattr(node, "decorator_list", [])
        and _is_closed(node)
    ]
    plain = [node.id for node in nodes if isinstance(node, ast.Name)]
    dotted = [node.value.id for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)]
    modules = sorted(
        name
        for name in set(dotted)
        if (name in sys.stdlib_module_names or name in ("np", "numpy")) and plain.count(name) == dotted.count(name)
    )
    return Prepared(source, functions, modules, _classes(nodes), _own_builtin(tree, set(plain) - set(modules)))


class _TolerantAsserts(ast.NodeTransformer):
    def visit_Assert(self, node: ast.Assert) -> ast.Try:
        """`assert x, text` as `try: assert x`, with `except: if not _guessing_(): raise`."""
        again = ast.If(
            ast.UnaryOp(ast.Not(), ast.Call(ast.Name("_guessing_", ast.Load()), [], [])), [ast.Raise(None, None)], []
        )
        return ast.Try([ast.Assert(node.test, None)], [ast.ExceptHandler(None, None, [again])], [], [])


def _is_closed(node: ast.AST) -> bool:
    """Whether a function needs no name but its own and builtins."""
    bound = _bound_names(node)
    return all(
        inner.id in bound or hasattr(builtins, inner.id) for inner in ast.walk(node) if isinstance(inner, ast.Name)
    )


def _bound_names(tree: ast.AST) -> set[str]:
    """Names that code defines somewhere: assigned, imported, of functions, classes and arguments."""
    bound = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            bound.add(node.id)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            bound.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            bound |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
    return bound


def _classes(nodes: list[ast.AST]) -> list[str]:
    """Names with a capital letter that the test uses as classes.

    What they make has an attribute that no number, string or container has, or is compared with what they make.
    """

    def makes(node: ast.AST) -> str:
        is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        return node.func.id if is_call and node.func.id.lstrip("_")[:1].isupper() else ""

    made = {  # variable -> class
        target.id: makes(node.value)
        for node in nodes
        if isinstance(node, ast.Assign) and makes(node.value)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    found = set()
    for node in nodes:
        if isinstance(node, ast.Attribute) and node.attr not in BUILTIN_NAMES:
            found.add(made.get(node.value.id, "") if isinstance(node.value, ast.Name) else makes(node.value))
        elif isinstance(node, ast.Compare):
            names = [{makes(inner) for inner in ast.walk(side)} for side in (node.left, node.comparators[-1])]
            found |= names[0] & names[1]
    return sorted(found - {""})


def _own_builtin(tree: ast.Module, names: set[str]) -> str:
    """The builtin whose name the solution has taken (`assert sum(10, 15) == 25`); "" where the test has other names.

    One name at most: others, such as abs, are what the test checks with.
    """
    bound = _bound_names(tree) | {"_guessing_"}
    if any(not hasattr(builtins, name) for name in names - bound):
        return ""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    for call in calls:  # check(sum)
        argument = call.args[0] if len(call.args) == 1 else None
        if call.func.id in bound and isinstance(argument, ast.Name) and argument.id not in bound:
            return argument.id
    for call in calls:
        if call.func.id not in bound and not any(isinstance(n, ast.Call) for arg in call.args for n in ast.walk(arg)):
            return call.func.id
    return ""
