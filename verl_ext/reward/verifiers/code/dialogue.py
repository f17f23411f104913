"""One test of a solution, in two sandbox programs: tests and expected values never share a process with the solution.

The test (tests.py) lists its calls of the program, which do not depend on the answers and are remembered. The program
of the solution (solution.py) makes them and prints the answers. The test runs again to check them.
"""

import json
import secrets
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from verl_ext.reward.verifiers.code.prepare import CannotJudge, compile_test
from verl_ext.sandbox.client import RunResult

MAX_REMEMBERED = 4096  # tests whose calls are remembered

# Runs a program in the sandbox. Raises CannotJudge if the sandbox failed without the program's fault.
RunProgram = Callable[[str], Awaitable[RunResult]]


class Dialogue:
    """Runs tests against solutions."""

    def __init__(self) -> None:
        self._calls: dict[str, str] = {}  # of a test, packed

    async def passes(self, run: RunProgram, program: str, test: str) -> bool:
        """Return whether a solution passes a test.

        Args:
            run: runs the solution, and the test.
        Raises:
            ValueError: the test is not Python.
            CannotJudge: the sandbox failed, or the test judges no program.
        """
        source = compile_test(test)
        if test not in self._calls:
            report = await _run_test(run, source, None, None)
            if "calls" not in report:
                raise CannotJudge("the test ends before it has listed its calls of the program")
            if len(self._calls) >= MAX_REMEMBERED:
                self._calls.clear()
            self._calls[test] = report["calls"]
        calls = self._calls[test]
        result = await run(_program("solution", f"serve({program!r}, unpack({calls!r}))"))
        report = await _run_test(run, source, calls, result.stdout.split("\n"))
        return report.get("passed", False)


async def _run_test(run: RunProgram, source: str, calls: str | None, answers: list[str] | None) -> dict[str, Any]:
    """Return the report of one run of a test; {} without one."""
    mark = secrets.token_hex(16)  # not known when the answers were given: no answer can hold a report
    result = await run(_program("tests", f"run_test({source!r}, {mark!r}, {calls!r}, {answers!r})"))
    report: dict[str, Any] = {}
    for line in result.stdout.split("\n"):
        with suppress(ValueError):  # stopped while it was written
            report = json.loads(line.removeprefix(mark)) if line.startswith(mark) else report
    if "refused" in report:
        raise CannotJudge(report["refused"])
    return report


def _program(name: str, last_line: str) -> str:
    return f"{_source(name)}\n{last_line}\n"


@cache
def _source(name: str) -> str:
    """Join values.py and another module of this folder to one program, without imports of each other."""
    files = [Path(__file__).with_name(f"{each}.py").read_text(encoding="utf-8") for each in ("values", name)]
    return "\n".join(line for line in "\n".join(files).split("\n") if not line.startswith("from verl_ext"))
