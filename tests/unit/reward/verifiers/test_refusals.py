"""Tests that need more of a program than calls with plain data judge no program."""

import asyncio

import pytest

from verl_ext.reward.verifiers.code import CodeVerifier, refused_tests
from verl_ext.sandbox import running_server

# name: (test, words of the reason)
REFUSED = {
    "object": ("s = Stack()\ns.push(1)\nassert s.pop() == 1", "uses objects of the program: 'Stack()'"),
    "objects compared": ("assert Vector(1, 2) + Vector(3, 4) == Vector(4, 6)", "uses objects of the program"),
    "attribute of an object": ("assert solve(1).x == 2", "uses 'x' of what the program returned"),
    "attribute of an object in a variable": ("p = solve(1)\nassert p[0].x == 2", "uses 'x' of what"),
    "function that is returned": ("assert make(3)(4) == 7", "calls what the program returned"),
    "function that is returned, in a variable": ("add = make(3)\nassert add(4) == 7", "calls what the program"),
    "generator": ("g = mean()\nassert g.send(10) == 10.0", "uses 'send' of what the program returned"),
    "in place": ("a = [3, 1]\nsolve(a)\nassert a == [1, 3]", "without looking at the answer: 'solve(a)'"),
    "in place, returns None": ("a = [3, 1]\nassert solve(a) is None\nassert a == [1, 3]", "looks at 'a' after the"),
    "exception": ("try:\n    solve(-1)\nexcept ValueError:\n    pass", "where it may expect an error: 'solve(-1)'"),
    "raises": ("import pytest\nwith pytest.raises(ValueError):\n    solve(-1)", "where it may expect an error"),
    "unittest": (
        "import unittest\nclass T(unittest.TestCase):\n  def test(self): self.assertEqual(f(1), 1)",
        "a class",
    ),
    "constant": ("assert LIMIT == 3", "uses a name of the program other than to call it: 'LIMIT'"),
    "class as a value": ("assert isinstance(solve(1), Node)", "other than to call it: 'Node'"),
    "function as a value": ("assert list(map(solve, [1, 2])) == [2, 3]", "other than to call it: 'solve'"),
    "method as a value": ("assert list(map(Solution().solve, [1])) == [2]", "uses objects of the program"),
    "lambda": ("assert solve(lambda v: v * 2, [1]) == [2]", "gives the program what is no plain data"),
    "function of the test": ("def twice(x): return 2 * x\nassert solve(twice, [1]) == [2]", "what is no plain data"),
    "comprehension": ("assert all(solve(x) == y for x, y in [(1, 2)])", "elsewhere than in an assert"),
    "condition": ("if solve(1) == 2:\n    assert solve(2) == 3", "elsewhere than in an assert"),
    "loop over an answer": ("xs = solve(3)\nfor x in xs:\n    assert solve(x) == 1", "does what depends on an answer"),
    "answers collected": (
        "xs = []\nxs.append(solve(1))\nif 3 in xs:\n    assert solve(2) == 1",
        "depends on an answer",
    ),
    "answers collected and given": (
        "xs = []\nxs.append(f(1))\nassert g(xs) == 3",
        "gives the program what has collected",
    ),
    "answers collected and given by name": (
        "xs = []\nxs.append(f(1))\nassert g(values=xs) == 3",
        "gives the program what has collected",
    ),
    "coroutine": ("import asyncio\nassert asyncio.run(fetch(1)) == 2", "needs coroutines"),
    "printed": ("import io, sys\nsys.stdout = out = io.StringIO()\nx = solve(3)", "needs what the program prints"),
    "mock": ("from unittest.mock import patch\nassert solve(1) == 2", "needs coroutines, or what the program prints"),
    "fixture": ("def test_solve(tmp_path):\n    assert solve(tmp_path) == 1", "needs a fixture"),
}
# Found when the test first runs: what it gives to the program, and what it does without a program.
REFUSED_BY_A_RUN = {
    "an object of the test": ("class Node: pass\nassert size(Node()) == 1", "gives the program an object of 'Node'"),
    "a file": ("import io\nassert f(io.StringIO('abc')) == 3", "an object of 'StringIO'"),
    "an iterator": ("assert f(iter([1, 2])) == 3", "an object of 'list_iterator'"),
    "an answer that it calculates with": ("assert f(len(f(1))) == 2", "looks at an answer outside of an assert"),
    "an answer in a new variable": ("x = f(1)\ny = x[0]\nassert f(y) == 3", "gives the program an object of 'Answer'"),
    "an answer unpacked": ("a, b = f(1)\nassert a == b", "looks at an answer outside of an assert"),
    "random calls": ("import uuid\nassert f(str(uuid.uuid4())) == 1", "makes other calls each time"),
    "a missing import": ("import no_such_module\nassert f(1) == 3", "fails before it looks at an answer"),
    "an error": ("1 / 0\nassert f(1) == 3", "fails before it looks at an answer (ZeroDivisionError"),
    "no call": ("x = 1", "never calls the program"),
    "a check that is not called": ("def check(candidate):\n    assert candidate(1) == 3", "never calls the program"),
    "an end": ("import os\nos._exit(0)\nassert f(1) == 3", "ends before it has listed its calls"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_test_that_needs_more_than_plain_data_is_found_before_a_run(name):
    test, words = REFUSED[name]
    reasons = refused_tests({"tests": ["assert f() == 1", test]})
    assert len(reasons) == 1 and words in reasons[0], reasons


@pytest.fixture(scope="module")
def scores():
    """The score of a program, by each of the tests."""

    async def run(url):
        verifier = CodeVerifier({}, urls=[url], timeout_s=5.0, max_concurrency=2)
        tests = [test for test, _ in (REFUSED | REFUSED_BY_A_RUN).values()]
        calls = (verifier.verify("```python\ndef f(*args): return 3\n```", {"tests": [test]}, {}) for test in tests)
        try:
            return dict(zip(REFUSED | REFUSED_BY_A_RUN, await asyncio.gather(*calls), strict=True))
        finally:
            await verifier.aclose()

    with running_server(workers=2) as url:
        return asyncio.run(run(url))


@pytest.mark.parametrize("name", REFUSED | REFUSED_BY_A_RUN)
def test_refused_test_leaves_the_verdict_open(scores, name):
    assert (scores[name].acc, scores[name].verdict) == (None, "unknown")
    assert (REFUSED | REFUSED_BY_A_RUN)[name][1] in scores[name].method


def test_rows_without_tests_have_none_to_refuse():
    assert refused_tests({"inputs": ["1"], "outputs": ["g.send(1)"]}) == []
    with pytest.raises(ValueError, match="no test cases"):
        refused_tests({"tests": []})
