"""Tests that need an object of the program itself do not judge programs; all others do."""

import ast
import asyncio

import pytest

from verl_ext.reward.verifiers.code import CodeVerifier, refused_tests
from verl_ext.reward.verifiers.code.refusals import why_refused
from verl_ext.sandbox import running_server

FETCH = "import asyncio\nasync def fetch(x):\n    await asyncio.sleep(0)\n    return x + 1"
NUMBERS = "async def numbers(n):\n    for i in range(n):\n        yield i"
MEAN = """
def mean():
    seen, x = [], None
    while True:
        x = yield sum(seen) / len(seen) if seen else None
        seen.append(x)
"""
LOCK = "class Lock:\n    async def __aenter__(self): return 5\n    async def __aexit__(self, *e): return None"
# name: (a right program, a test that would call it wrong, words of the reason)
REFUSED = {
    "asyncio.run": (FETCH, "import asyncio\nassert asyncio.run(fetch(1)) == 2", "runs 'fetch(1)' as a coroutine"),
    "asyncio by another name": (FETCH, "import asyncio as aio\nassert aio.run(fetch(1)) == 2", "runs 'fetch(1)'"),
    "run": (FETCH, "from asyncio import run\nassert run(fetch(1)) == 2", "runs 'fetch(1)'"),
    "a variable": (FETCH, "import asyncio\nc = fetch(1)\nassert asyncio.run(c) == 2", "runs 'c'"),
    "in a function": (
        FETCH,
        "import asyncio\ndef check(f):\n    assert asyncio.run(f(1)) == 2\ncheck(fetch)",
        "'f(1)'",
    ),
    "Runner": (FETCH, "import asyncio\nwith asyncio.Runner() as r:\n    assert r.run(fetch(1)) == 2", "'fetch(1)'"),
    "create_task": (
        FETCH,
        "import asyncio\nasync def main():\n    task = asyncio.create_task(fetch(1))\n    assert await task == 2\n"
        "asyncio.run(main())",
        "runs 'fetch(1)'",
    ),
    "TaskGroup": (
        FETCH,
        "import asyncio\nasync def main():\n    async with asyncio.TaskGroup() as group:\n"
        "        task = group.create_task(fetch(1))\n    assert task.result() == 2\nasyncio.run(main())",
        "runs 'fetch(1)'",
    ),
    "wait": (
        FETCH,
        "import asyncio\nasync def main():\n    done, _ = await asyncio.wait([asyncio.create_task(fetch(1))])\n"
        "    assert done.pop().result() == 2\nasyncio.run(main())",
        "runs ",
    ),
    "async for": (
        NUMBERS,
        "import asyncio\nasync def main():\n    async for i in numbers(1):\n        assert i == 0\nasyncio.run(main())",
        "runs 'numbers(1)'",
    ),
    "async comprehension": (
        NUMBERS,
        "import asyncio\nasync def main():\n    assert [i async for i in numbers(2)] == [0, 1]\nasyncio.run(main())",
        "runs 'numbers(2)'",
    ),
    "anext": (
        NUMBERS,
        "import asyncio\nasync def main():\n    assert await anext(numbers(2)) == 0\nasyncio.run(main())",
        "runs 'numbers(2)'",
    ),
    "async with": (
        LOCK,
        "import asyncio\nasync def main():\n    async with Lock() as x:\n        assert x == 5\nasyncio.run(main())",
        "runs 'Lock()'",
    ),
    "send": (MEAN, "g = mean()\nnext(g)\nassert g.send(10) == 10.0", "uses 'send' of a generator"),
    "send in a function": (MEAN, "def check(f):\n    g = f()\n    next(g)\n    g.send(1)\ncheck(mean)", "uses 'send'"),
    "send by name": (MEAN, "g = mean()\nnext(g)\nassert getattr(g, 'send')(10) == 10.0", "uses 'send'"),
    "send kept": (MEAN, "g = mean()\nnext(g)\nsend = g.send\nassert send(10) == 10.0", "uses 'send'"),
    "throw": (
        "def f():\n    try:\n        yield 1\n    except ValueError:\n        yield 2",
        "g = f()\nnext(g)\nassert g.throw(ValueError) == 2",
        "uses 'throw'",
    ),
    "a generator that listens": (
        "def f(g):\n    next(g)\n    return g.send(3)",
        "def echo():\n    x = yield\n    yield x\nassert f(echo()) == 3",
        "takes what is sent to it",
    ),
    "an iterator that goes on": (
        "def f(it):\n    return next(it)",
        "it = iter([1, 2])\nassert f(it) == 1\nassert next(it) == 2",
        "passes the iterator 'it'",
    ),
    "a generator that goes on": (
        "def f(it):\n    return next(it)",
        "it = (i for i in range(3))\nassert f(it) == 0\nassert list(it) == [1, 2]",
        "passes the iterator 'it'",
    ),
    "a question": (FETCH, "import inspect\nassert inspect.iscoroutinefunction(fetch)", "uses 'iscoroutinefunction'"),
    "another question": (MEAN, "import types\nassert isinstance(mean(), types.GeneratorType)", "uses 'GeneratorType'"),
    "a file": ("def f(x):\n    return len(x.read())", "import io\nassert f(io.StringIO('abc')) == 3", "'StringIO'"),
    "an iterator class": (
        "def f(x):\n    return x.n",
        "class It:\n    n = 3\n    def __iter__(self): return self\n    def __next__(self): raise StopIteration\n"
        "assert f(It()) == 3",
        "passes an object of 'It'",
    ),
}
KEPT = {
    "await": (FETCH, "import asyncio\nasync def main():\n    assert await fetch(1) == 2\nasyncio.run(main())"),
    "gather": (
        FETCH,
        "import asyncio\nasync def main():\n    assert await asyncio.gather(fetch(1), fetch(2)) == [2, 3]\n"
        "asyncio.run(main())",
    ),
    "own task": (
        FETCH,
        "import asyncio\nasync def one():\n    return await fetch(1)\nasync def main():\n"
        "    task = asyncio.create_task(one())\n    async with asyncio.timeout(5):\n        assert await task == 2\n"
        "asyncio.run(main())",
    ),
    "own coroutine in a variable": (
        FETCH,
        "import asyncio\nasync def main():\n    assert await fetch(1) == 2\nc = main()\nasyncio.run(c)",
    ),
    "unittest": (
        FETCH,
        "import unittest\nclass T(unittest.IsolatedAsyncioTestCase):\n    async def test(self):\n"
        "        self.assertEqual(await fetch(1), 2)",
    ),
    "next": ("def f():\n    yield 1\n    yield 2", "g = f()\nassert next(g) == 1 and list(g) == [2]"),
    "a method send": (
        "class Bus:\n    def __init__(self): self.sent = []\n    def send(self, x): self.sent.append(x)",
        "bus = Bus()\nbus.send(1)\nassert bus.sent == [1]",
    ),
    "a method send in unittest": (
        "class Bus:\n    def send(self, x): return x",
        "import unittest\nclass T(unittest.TestCase):\n    def setUp(self):\n        self.bus = Bus()\n"
        "    def test(self):\n        self.assertEqual(self.bus.send(1), 1)",
    ),
    "an iterator": (
        "def f(it):\n    return sum(it)",
        "assert f(iter([1, 2])) == 3\nit = map(int, '12')\nassert f(it) == 3",
    ),
    "a function run": ("def run(x):\n    return x", "assert run(abs(-1)) == 1"),
    "a method run": ("class Job:\n    def run(self, x): return x", "job = Job()\nassert job.run(abs(-1)) == 1"),
    "a type": ("def f():\n    return 1", "from typing import Generator\nx: Generator = None\nassert f() == 1"),
    "a fixture": (
        "def f(x):\n    return x",
        "def numbers():\n    yield 1\n    yield 2\nassert [f(i) for i in numbers()] == [1, 2]",
    ),
}


@pytest.fixture(scope="module")
def scores():
    """The score of each right program, by the verifier."""
    cases = {name: case[:2] for name, case in (REFUSED | KEPT).items()}

    async def run(url):
        verifier = CodeVerifier({}, urls=[url], timeout_s=5.0, max_concurrency=2)
        calls = (
            verifier.verify(f"```python\n{program}\n```", {"tests": [test]}, {}) for program, test in cases.values()
        )
        try:
            return dict(zip(cases, await asyncio.gather(*calls), strict=True))
        finally:
            await verifier.aclose()

    with running_server(workers=2) as url:
        return asyncio.run(run(url))


@pytest.mark.parametrize("name", REFUSED)
def test_right_program_is_not_called_wrong_by_a_test_that_needs_its_objects(scores, name):
    assert (scores[name].acc, scores[name].verdict) == (None, "unknown")
    assert REFUSED[name][2] in scores[name].method


@pytest.mark.parametrize("name", KEPT)
def test_other_tests_judge_as_they_did(scores, name):
    assert scores[name].verdict == "correct", scores[name]


@pytest.mark.parametrize("name", [name for name in REFUSED if name not in ("a file", "an iterator class")])
def test_such_a_row_is_found_before_a_run(name):
    reasons = refused_tests({"tests": ["assert f() == 1", REFUSED[name][1]]})
    assert len(reasons) == 1 and REFUSED[name][2] in reasons[0]
    assert why_refused(ast.parse(REFUSED[name][1])) == reasons[0]


def test_rows_without_tests_have_none_to_refuse():
    assert refused_tests({"inputs": ["1"], "outputs": ["g.send(1)"]}) == []
    with pytest.raises(ValueError, match="no test cases"):
        refused_tests({"tests": []})
