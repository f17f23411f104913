"""Whose fault a lost program is: the server says so, and the client finds out only whether a server answers."""

import json

import pytest
from aiohttp import web

from tests.unit.sandbox.fake_server import answer, call, hang, in_session


async def drop() -> web.Response:
    raise ConnectionAbortedError


FAILURES = [lambda: answer("SandboxError"), lambda: web.Response(status=500), drop, lambda: web.Response(text="{")]


def lost() -> web.Response:
    return web.json_response(json.loads(answer("SandboxError").text) | {"lost": True})


def blamed() -> web.Response:
    return answer("Failed", return_code=-9, stdout="", stderr="Killed: twice\n")


async def test_verdict_of_the_server_is_the_result(start):
    server = await start(blamed)
    result = await call(server.url)
    assert (result.status, result.return_code, result.stderr) == ("code_error", -9, "Killed: twice\n")
    assert (result.attempts, result.message, len(server.bodies)) == (1, "", 1)


@pytest.mark.parametrize("failure", FAILURES, ids=["SandboxError", "500", "dropped", "no JSON"])
async def test_no_number_of_failures_without_a_verdict_is_the_programs(start, client_of, failure):
    """Though the sandbox ran another program before."""
    server = await start(answer, failure)
    client = client_of([server.url], max_attempts=2, queue_timeout_s=1)
    assert (await client.run("first")).status == "ok"
    result = await client.run("print(1)", timeout_s=0.1)
    assert (result.status, result.return_code, result.attempts > 2) == ("sandbox_failure", None, True)


@pytest.mark.parametrize("failure", FAILURES, ids=["SandboxError", "500", "dropped", "no JSON"])
async def test_program_runs_once_the_sandbox_is_well(start, client_of, failure):
    server = await start(answer, failure, failure, lambda: answer(stdout="1\n"))
    client = client_of([server.url], max_attempts=2)
    assert (await client.run("first")).status == "ok"
    result = await client.run("print(1)")
    assert (result.status, result.stdout, result.attempts) == ("ok", "1\n", 3)


async def test_server_that_lost_a_program_decides_when_it_is_asked_again(start):
    """It remembers the loss; another server would not."""
    servers = [await start() for _ in range(2)]
    for _ in range(10):  # by chance the next call goes to either
        for server in servers:
            server.bodies.clear()
            server.script = [lost, blamed]
        result = await call(*(server.url for server in servers))
        assert (result.status, result.return_code, result.attempts) == ("code_error", -9, 2)
        assert sorted(len(server.bodies) for server in servers) == [0, 2]


async def test_other_server_is_asked_where_the_one_that_lost_the_program_refuses_it(start):
    servers = [await start(lost, lambda: web.Response(status=503)) for _ in range(2)]
    assert (await call(*(server.url for server in servers), max_attempts=3)).status == "sandbox_failure"
    assert sorted(len(server.bodies) for server in servers) == [1, 2]


async def test_call_of_a_session_that_was_lost_is_a_failure_of_the_sandbox(start, client_of):
    server = await start(lambda: in_session(1, status="SandboxError"), answer)
    result = await client_of([server.url]).run("pass", session_id="s")
    assert (result.status, len(server.bodies)) == ("sandbox_failure", 1)


async def test_answer_comes_by_the_deadline_though_the_server_hangs(start):
    server = await start(hang)
    result = await call(server.url, timeout_s=0.1, queue_timeout_s=0.5, max_attempts=2)
    assert result.status == "sandbox_failure"
