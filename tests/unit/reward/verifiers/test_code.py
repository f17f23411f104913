"""Programs run in a real sandbox server, except if the sandbox is meant to fail."""

import asyncio
import json
import socket
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from verl_ext.reward.verifiers.code import Case, CodeVerifier, extract_program, read_cases
from verl_ext.sandbox import running_server

REPO = Path(__file__).resolve().parents[4]
ADD = "def add(a, b):\n    return a + b"
THREE_TESTS = {"tests": ["assert add(1, 2) == 3", "assert add(0, 0) == 0", "assert add(2, 2) == 5"]}


@pytest.fixture(scope="module")
def url():
    with running_server(workers=2) as url:
        yield url


def verify(url, program, ground_truth, **settings):
    async def run():
        verifier = CodeVerifier({}, urls=[url], **{"timeout_s": 5.0} | settings)
        try:
            return await verifier.verify(f"So:\n```python\n{program}\n```", ground_truth, {})
        finally:
            await verifier.aclose()

    return asyncio.run(run())


def test_acc_is_the_share_of_tests_passed(url):
    score = verify(url, ADD, THREE_TESTS)
    assert (score.acc, score.verdict, score.method) == (pytest.approx(2 / 3), "partial", "tests: 2/3")


def test_all_or_nothing(url):
    assert verify(url, ADD, THREE_TESTS, all_or_nothing=True).acc == 0.0
    assert verify(url, ADD, {"tests": THREE_TESTS["tests"][:2]}, all_or_nothing=True).acc == 1.0


def test_standard_input_and_output(url):
    cases = json.dumps({"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7"]})
    assert verify(url, "a, b = map(int, input().split())\nprint(a + b, '')", cases).acc == 1.0
    assert verify(url, "print(3)", cases).acc == 0.5


@pytest.mark.parametrize(
    "program",
    [
        "import sys; sys.exit(0)",
        "import os; os._exit(0)",
        "raise SystemExit",
        "def add(a, b): return 'no'",
        "def add(a, b): raise SystemExit(0)",
        "print('\\n' * 3)",
        "import sys; print(sys.stdin.read())",
        "while True: pass",
        "syntax error",
    ],
)
def test_program_that_avoids_the_tests_is_wrong(url, program):
    limit = {"timeout_s": 2.0} if "while" in program else {}
    assert verify(url, program, "assert add(1, 2) == 3", **limit).verdict == "wrong"


def test_failing_sandbox_leaves_the_verdict_open():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        score = verify(url, ADD, THREE_TESTS, max_attempts=1, backoff_s=0.01)
    assert (score.acc, score.verdict) == (None, "unknown")
    assert "3 of 3 tests" in score.method


PYTEST_STYLE = "import math\n\ndef test_add(unit=1):\n    assert math.isclose(add(1, 2), 3)"


def test_functions_that_pytest_would_collect_are_run(url):
    assert verify(url, ADD, PYTEST_STYLE).verdict == "correct"
    assert verify(url, "def add(a, b):\n    return 0", PYTEST_STYLE).verdict == "wrong"


@pytest.mark.parametrize(
    "program",
    [
        ADD + "\nif __name__ == '__main__':\n    print(add(*map(int, input().split())))",
        "from dataclasses import dataclass\n@dataclass\nclass Pair:\n    a: 'int'\n    b: 'int'\n"
        "def add(a, b):\n    pair = Pair(a, b)\n    return pair.a + pair.b",
        "import pickle\nclass Sum:\n    def __init__(self, value):\n        self.value = value\n"
        "def add(a, b):\n    return pickle.loads(pickle.dumps(Sum(a + b))).value",
    ],
    ids=["reads its input if run as a script", "dataclass", "pickle"],
)
def test_program_is_a_module_whose_functions_are_called(url, program):
    assert verify(url, program, "assert add(1, 2) == 3").verdict == "correct"


def test_test_that_is_no_python_is_an_error_of_the_data(url):
    with pytest.raises(ValueError, match="is no Python"):
        verify(url, ADD, "assert add(1, 2) ==")


def test_calls_of_a_test_are_remembered(url):
    """One run of the test without a solution, then for each program one of the solution and one of the test."""
    programs = []

    async def forward(request: web.Request) -> web.Response:
        programs.append(await request.json())
        async with aiohttp.ClientSession() as http, http.post(f"{url}/run_code", json=programs[-1]) as answer:
            return web.json_response(await answer.json())

    async def run():
        app = web.Application(client_max_size=1 << 20)
        app.add_routes([web.post("/run_code", forward)])
        server = TestServer(app)
        await server.start_server()
        verifier = CodeVerifier({}, urls=[str(server.make_url("")).rstrip("/")], timeout_s=5.0)
        test = "for n in range(20):\n    assert add(add(n, 1), 2) == n + 3"
        scores = [await verifier.verify(f"```python\n{ADD}\n```", test, {}) for _ in range(2)]
        await verifier.aclose()
        await server.close()
        return [score.verdict for score in scores]

    assert asyncio.run(run()) == ["correct", "correct"]
    assert len(programs) == 5


def test_references_are_right_and_mutants_wrong(url, load_script):
    from scripts.studies import check_reward as script

    rows = [json.loads(line) for line in (REPO / "tests/data/code_tasks.jsonl").read_text().splitlines()]
    assert len(rows) == 11
    assert asyncio.run(script.grade_code(rows, url)) == ([], [])


@pytest.mark.parametrize(
    ("response", "program"),
    [
        ("```python\na = 1\n```", "a = 1\n"),
        ("```\na = 1\n```", "a = 1\n"),
        ("```python\na = 1\n```\nor\n```py\na = 2\n```", "a = 2\n"),
        ("<think>```python\na = 1\n```</think>", None),
        ("```python\nprint('</think>')\n```", "print('</think>')\n"),
        ("```python\na = 1", None),
        ("a = 1", None),
        ("```python\n\n```", None),
        ("```text\n1 2\n```\nSolution:\n```python\na = 1\n```", "a = 1\n"),
        ("```python\na = 1\n```\nIt prints\n```text\n1\n```", "a = 1\n"),
        ("Put it in ``` fences:\n```python\na = 1\n```", "a = 1\n"),
        ("```text\n1 2\n```python\na = 1\n```", "a = 1\n"),
        ("It is ```py\na = 1```", "a = 1"),
        ("1. ```\na = 1\n```\nIt works, see ```x```.", "a = 1\n"),
        ("```python\na = 1\n```\n```\n```", "a = 1\n"),
        ("```Python title\na = 1\n```\nSo ```a``` is 1.", "a = 1\n"),
    ],
)
def test_last_fence_is_the_program(response, program):
    assert extract_program(response) == program


def test_ground_truths_of_each_form():
    import numpy as np

    assert read_cases("assert f() == 1") == [Case(test="assert f() == 1")]
    assert read_cases({"tests": np.array(["a", "b"], dtype=object)}) == [Case(test="a"), Case(test="b")]
    assert read_cases('{"inputs": ["1"], "outputs": ["2"]}') == [Case(stdin="1", stdout="2")]


@pytest.mark.parametrize(
    "broken",
    [
        "{}",
        " ",
        "[]",
        '{"tests": []}',
        '{"inputs": ["1"], "outputs": []}',
        {"tests": [""]},
        {"fn_name": "f", "inputs": [[1]], "outputs": [[2]]},  # of calls, which would be taken for texts
    ],
)
def test_ground_truth_without_tests_is_an_error_of_the_data(broken):
    with pytest.raises(ValueError, match="has no test cases"):
        read_cases(broken)


def test_servers_are_those_of_the_run_unless_named():
    CodeVerifier({"retool": {"sandbox": {"urls": ["http://127.0.0.1:1"]}}})
    with pytest.raises(ValueError, match=r"set retool.sandbox.urls"):
        CodeVerifier({})
