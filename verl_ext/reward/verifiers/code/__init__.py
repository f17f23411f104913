"""Code: run the response's program against test cases in the sandbox, never in this process.

Tests and expected values never share a process with the program: expected standard output is compared here, and tests
run in a separate sandbox program, to which the solution's program gives plain data (dialogue.py). prepare.py compiles a
test, and refuses one that needs more. solution.py, tests.py and values.py run in the sandbox, sent there as source.

A ground truth is a mapping, its JSON, or a string that is neither, which is one test in Python:

- `{"tests": ["assert add(1, 2) == 3", ...]}`: Python that calls what the program defines, each test separately.
  Functions `test_...` run too.
- `{"inputs": ["1 2\\n", ...], "outputs": ["3\\n", ...]}`: standard input, and what the program must print for it.
"""

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from verl_ext.outcome import UNVERIFIED_VERDICT
from verl_ext.protocols.thinking import after_thinking
from verl_ext.reward.score import Score
from verl_ext.reward.verifiers.code.dialogue import Dialogue
from verl_ext.reward.verifiers.code.prepare import CannotJudge, compile_test
from verl_ext.sandbox.client import RunResult, SandboxClient
from verl_ext.sandbox.limits import CONTROL_PROGRAM

# A fence of any language at the start of a line, since its end must not be taken for a beginning; of Python or of none
# also within a line. A Python fence within a block begins a new block: the first was never closed.
_FENCE = re.compile(
    r"(?:^[ \t]*```(?P<language>[^\n`]*)|```(?P<python>(?i:python3?|py)\b[^\n`]*|[ \t]*))\n"
    r"(?P<body>(?:(?!```(?i:python3?|py)\b).)*?)```(?!(?i:python3?|py)\b)",
    re.DOTALL | re.MULTILINE,
)
_LANGUAGES = {"", "python", "py", "python3"}


@dataclass(frozen=True)
class Case:
    """One test: Python to run after the program, or a standard input and the output that it must give."""

    test: str | None = None
    stdin: str = ""
    stdout: str = ""


class CodeVerifier:
    """`acc` is the share of test cases that pass, or with `all_or_nothing` 1 if all do and 0 otherwise.

    The program is the last fenced block of Python after the last `</think>`. A failure that it causes is the model's:
    an error, a time-out, a wrong or unreadable result, a lost worker for which the server blames it, or after a
    time-out a test that finds no worker, because the others held them. The verdict "unknown" is left for a sandbox that
    fails without such a verdict, and for a test that judges no program (`refused_tests`).
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        *,
        urls: Sequence[str] | None = None,
        all_or_nothing: bool = False,
        timeout_s: float = 10.0,
        memory_limit_mb: int = 1024,
        max_concurrency: int = 16,
        **client_settings: Any,
    ):
        """
        Args:
            urls: of sandbox servers; None takes those of the run, `retool.sandbox.urls`.
            timeout_s: for one run of a program or of a test.
            max_concurrency: test cases in flight from this process.
            client_settings: further arguments of `SandboxClient`.
        Raises:
            ValueError: there are no servers.
        """
        if urls is None:
            urls = ((config.get("retool") or {}).get("sandbox") or {}).get("urls")
        if not urls:
            raise ValueError("There is no sandbox to run code in: set retool.sandbox.urls, or this verifier's `urls`.")
        self._all_or_nothing = all_or_nothing
        self._limits = {"timeout_s": timeout_s, "memory_limit_mb": memory_limit_mb}
        self._client = SandboxClient(list(urls), max_concurrency=max_concurrency, **client_settings)
        self._turns = asyncio.Semaphore(max_concurrency)  # waiting for own tests is not waiting for the sandbox
        self._dialogue = Dialogue()

    async def verify(self, response_text: str, ground_truth: Any, sample: Mapping[str, Any]) -> Score:
        cases = read_cases(ground_truth)
        program = extract_program(response_text)
        if program is None:
            return Score(0.0, "", "no_answer", "no_code")
        seen: set[str] = set()
        run = partial(self._run, seen)
        results = await asyncio.gather(*(self._result(run, program, case) for case in cases))
        undecided = [
            result
            for result in results
            if isinstance(result, CannotJudge) and not (result.found_no_place and "timeout" in seen)
        ]
        if undecided:
            return Score(None, program, UNVERIFIED_VERDICT, f"{undecided[0]}: {len(undecided)} of {len(cases)} tests")
        count = sum(result is True for result in results)
        share = count / len(cases)
        acc = float(share == 1.0) if self._all_or_nothing else share
        return Score.graded(acc, program, f"tests: {count}/{len(cases)}")

    async def aclose(self) -> None:
        await self._client.aclose()

    async def _result(self, run: Callable[..., Awaitable[RunResult]], program: str, case: Case) -> bool | CannotJudge:
        """Return whether the program passes a test, or why that is open."""
        try:
            if case.test is not None:
                return await self._dialogue.passes(run, program, case.test)
            result = await run(program, case.stdin)
        except CannotJudge as error:
            return error
        return result.status == "ok" and _lines(result.stdout) == _lines(case.stdout)

    async def _run(self, seen: set[str], program: str, stdin: str = "") -> RunResult:
        """Run a program and add its status to `seen`.

        Raises:
            CannotJudge: the sandbox failed without the program's fault (see `RunResult`).
        """
        try:
            async with self._turns:
                if "sandbox_failure" in seen:  # the verdict is open already: a dead sandbox is not waited for again
                    raise CannotJudge("sandbox_failure")
                result = await self._client.run(program, stdin=stdin, **self._limits)
        except ValueError:  # refused, as too large, say. If every program is (a wrong URL), this raises.
            await self._client.run(CONTROL_PROGRAM, **self._limits)
            return RunResult("code_error", "", "", None, 0.0, 0.0, 1, "")
        if not result.found_no_place:
            seen.add(result.status)
        if result.status == "sandbox_failure":
            raise CannotJudge("sandbox_failure", found_no_place=result.found_no_place)
        return result


def extract_program(response_text: str) -> str | None:
    """Return the last complete fenced block of Python (or no language) after the last `</think>`; None without one."""
    fences = _FENCE.finditer(after_thinking(response_text, unfinished=True))
    blocks = [each["body"] for each in fences if each["body"] and _language(each) in _LANGUAGES]
    return blocks[-1] if blocks and blocks[-1].strip() else None


def _language(fence: re.Match[str]) -> str:
    return ((fence["language"] or fence["python"] or "").split() or [""])[0].lower()


def read_cases(ground_truth: Any) -> list[Case]:
    """Return the test cases of a ground truth; see the top of this file.

    Raises:
        ValueError: there is no test case, or inputs and outputs do not pair up.
    """
    data = ground_truth
    if isinstance(data, str):
        try:
            data = json.loads(data)
        except ValueError:
            data = {"tests": [data]}
    if isinstance(data, Mapping):
        # Lists come out of a parquet file as arrays, or as None.
        columns = (data.get(key) for key in ("tests", "inputs", "outputs"))
        tests, inputs, outputs = ([] if column is None else list(column) for column in columns)
        if tests and all(isinstance(test, str) and test.strip() for test in tests):
            return [Case(test=test) for test in tests]
        if inputs and outputs and len(inputs) == len(outputs) and not data.get("fn_name"):
            return [Case(stdin=str(stdin), stdout=str(out)) for stdin, out in zip(inputs, outputs, strict=True)]
    raise ValueError(
        f"The ground truth {str(ground_truth)[:200]!r} has no test cases: expected JSON with `tests`, or with `inputs` "
        "and as many `outputs`, or a Python test, which a row with `fn_name` needs as well. Check the data row."
    )


def refused_tests(ground_truth: Any) -> list[str]:
    """Return why tests of a ground truth can judge no program, a reason each; responses to such rows are "unknown".

    Raises:
        ValueError: as for `read_cases`, or a test is not Python.
    """
    reasons = []
    for case in read_cases(ground_truth):
        try:
            compile_test(case.test or "")
        except CannotJudge as error:
            reasons.append(str(error))
    return reasons


def _lines(output: str) -> list[str]:
    """Return what counts in printed output: its lines without trailing space, and without empty ones at the end."""
    return [line.rstrip() for line in output.rstrip().split("\n")]
