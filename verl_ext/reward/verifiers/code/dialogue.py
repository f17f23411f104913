"""One test of a solution, in rounds: tests and expected values never share a process with the solution.

The test runs in a separate sandbox program (tests.py), where the solution's names are proxies. It asks for calls; the
solution's program (solution.py) makes them, all from the beginning in each round, so that its state is right, and gives
the results as plain data (values.py); the test runs again with them. Most tests take one run of the solution and one of
the test, because a test's first requests do not depend on the solution and are remembered.
"""

import binascii
import json
import marshal
import secrets
import sys
import zlib
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from verl_ext.reward.verifiers.code.prepare import Prepared, prepare
from verl_ext.reward.verifiers.code.solution import LOADED, PAUSED
from verl_ext.sandbox.client import RunResult

SANDBOX_FAILURE = "sandbox_failure"
MAX_ROUNDS = 30
MAX_ANSWERS = 8 << 20  # characters of all answers of a test
MAX_FIRST_REQUESTS = 4096  # tests whose first requests are remembered

# Runs a program in the sandbox; None if the sandbox failed without the program's fault.
RunProgram = Callable[[str], Awaitable[RunResult | None]]


class Dialogue:
    """Runs tests against solutions.

    Args:
        run: see `RunProgram`.
        timeout_s: time that `run` gives a program; a solution gets twice as much over all rounds of a test.
    """

    def __init__(self, run: RunProgram, timeout_s: float):
        self._run = run
        self._timeout_s = timeout_s
        self._first: dict[str, dict[str, Any]] = {}

    async def passes(self, program: str, test: str) -> tuple[bool | None, str]:
        """Return whether a solution passes a test, and why not; None if the sandbox failed or the test cannot judge it.

        Raises:
            ValueError: the test is not Python.
        """
        prepared = prepare(test)
        if prepared.refusal:
            return None, prepared.refusal
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
                return False, "the results are too large"
            report = await self._run_test(prepared, requests, answers, paused)
            if report is None:
                return None, SANDBOX_FAILURE
            if "need" not in report:
                return report["passed"], report["why"]
            if seconds > 2 * self._timeout_s:
                return False, "out of time"
        return False, f"not finished after {MAX_ROUNDS} rounds"

    async def _run_test(
        self, prepared: Prepared, requests: list[Any], answers: list[str], paused: bool = False
    ) -> dict[str, Any] | None:
        """Return the report of one run of a test: `passed`, or `need` and `from`; None if the sandbox failed."""
        mark = secrets.token_hex(16)  # not known when the answers were given: no answer can hold a report
        played = list(zip(requests, answers, strict=False))
        if len(answers) < len(requests) and not paused:
            played.append((requests[len(answers)], None))
        result = await self._run(test_program(prepared, mark, played))
        if result is None:
            return None
        # The last of several reports is whole, unless the test was stopped while writing it.
        for line in reversed(result.stdout.split("\n")):
            with suppress(ValueError, RecursionError):
                if line.startswith(mark):
                    return json.loads(line.removeprefix(mark))
        return {"passed": False, "why": f"the test ended without a report: {result.status}"}


def _why_no_test(first: dict[str, Any]) -> str:
    """Return why no program can pass, or fail, a test, by the report of its run without one; "" for other tests."""
    if "unpassable" in first:
        return first["unpassable"]
    if "need" in first:
        return ""
    if first["passed"]:
        return "a test passes and never asks the program for anything"
    return f"a test fails before it asks the program for anything ({first['why']})"  # say, a missing import


def solution_program(program: str, requests: list[Any], known: int) -> str:
    """Return the sandbox program of a solution: its code and the calls to make; answers from `known` on are new."""
    requests_json = json.dumps(requests)
    return f"{_sources('values', 'solution')}\nserve({program!r}, json.loads({requests_json!r}), {known})\n"


def test_program(prepared: Prepared, mark: str, played: list[tuple[Any, str | None]]) -> str:
    """Return the sandbox program of a test: its code, and each call so far with its answer."""
    played_json = json.dumps(played)
    return (
        f"{_sources('values', 'handles', 'tests')}\nrun_test({prepared.source!r}, {mark!r}, "
        f"json.loads({played_json!r}), {prepared.functions!r}, {prepared.modules!r}, {prepared.classes!r}, "
        f"{prepared.own_builtin!r})\n"
    )


@cache
def _sources(*names: str) -> str:
    """Join modules of this folder to one program, without imports of each other; compiled if the Python is the same."""
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
