"""Solutions that try to pass tests without solving them, and honest ones that must pass, in a real sandbox.

Both are in tests/data (code_forgeries.txt, code_honest.txt), where one more is a few lines of plain Python.
"""

import asyncio
import re
from pathlib import Path

import pytest

from verl_ext.reward.verifiers.code import CodeVerifier
from verl_ext.sandbox import running_server

DATA = Path(__file__).resolve().parents[3] / "data"
CHECK = "def check(candidate):\n    for x, y in [(3, 42), (4, 99)]:\n        assert candidate(x) == y\ncheck(solve)"


def read_cases(name):
    """name -> (solution, test) of a file of cases."""
    entries = re.split(r"^=== (.+)\n", (DATA / name).read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    cases = {}
    for case, entry in zip(entries[::2], entries[1::2], strict=True):
        solution, _, test = entry.partition("\n---\n")
        cases[case] = solution, test or CHECK
    return cases


FORGERIES = read_cases("code_forgeries.txt") | {"null byte": ("def solve(x): return 0\0", CHECK)}
HONEST = read_cases("code_honest.txt")


TIMEOUT_S = 3.0
ENDLESS = {"endless", "huge number", "recursion that crashes"}  # whatever time they get, they use it
ENDLESS_S = 1.0
assert ENDLESS.issubset(FORGERIES.keys() - HONEST.keys())
pytestmark = pytest.mark.timeout(180)  # the first test waits for all programs


@pytest.fixture(scope="module")
def scores():
    """The score of each solution, or what it raised: two at a time, because the server has two workers."""

    async def run(url):
        verifiers = [CodeVerifier({}, urls=[url], timeout_s=limit_s) for limit_s in (TIMEOUT_S, ENDLESS_S)]
        slots = asyncio.Semaphore(2)

        async def verify(name, code, test):
            async with slots:
                response = f"```python\n{code}\n```"
                return await verifiers[name in ENDLESS].verify(response, {"tests": [test]}, {})

        cases = {("forged", name): case for name, case in FORGERIES.items()}
        cases |= {("honest", name): case for name, case in HONEST.items()}
        try:
            calls = (verify(name, *case) for (_, name), case in cases.items())
            return dict(zip(cases, await asyncio.gather(*calls, return_exceptions=True), strict=True))
        finally:
            for verifier in verifiers:
                await verifier.aclose()

    with running_server(workers=2) as url:
        return asyncio.run(run(url))


@pytest.mark.parametrize("name", FORGERIES)
def test_forged_result_is_wrong(scores, name):
    score = scores["forged", name]
    assert (score.acc, score.verdict) == (0.0, "wrong"), score


@pytest.mark.parametrize("name", HONEST)
def test_honest_solution_is_right(scores, name):
    score = scores["honest", name]
    assert (score.acc, score.verdict) == (1.0, "correct"), score
