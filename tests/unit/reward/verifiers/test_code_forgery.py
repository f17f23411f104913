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


@pytest.fixture(scope="module")
def url():
    with running_server(workers=2) as url:
        yield url


def verify(url, code, test):
    async def run():
        verifier = CodeVerifier({}, urls=[url], timeout_s=3.0)
        try:
            return await verifier.verify(f"```python\n{code}\n```", {"tests": [test]}, {})
        finally:
            await verifier.aclose()

    return asyncio.run(run())


@pytest.mark.parametrize("name", FORGERIES)
def test_forged_result_is_wrong(url, name):
    score = verify(url, *FORGERIES[name])
    assert (score.acc, score.verdict) == (0.0, "wrong"), score


@pytest.mark.parametrize("name", HONEST)
def test_honest_solution_is_right(url, name):
    score = verify(url, *HONEST[name])
    assert (score.acc, score.verdict) == (1.0, "correct"), score
