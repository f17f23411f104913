"""Whether the client blames the program or the sandbox for a program that every attempt lost."""

import json

import pytest
from aiohttp import web

from tests.unit.sandbox.fake_server import answer, call, hang, in_session
from verl_ext.sandbox.client import CONTROL_PROGRAM


async def drop() -> web.Response:
    raise ConnectionAbortedError


LOSSES = [lambda: answer("SandboxError"), lambda: web.Response(status=500), drop, lambda: web.Response(text="{")]


def control() -> web.Response:
    return answer(stdout="42\n")


@pytest.mark.parametrize("loss", LOSSES, ids=["SandboxError", "500", "dropped", "no JSON"])
async def test_program_that_a_sound_server_lost_every_time_is_to_blame(start, loss):
    server = await start(loss, loss, control, loss, control)
    result = await call(server.url, max_attempts=2)
    assert (result.status, result.return_code, result.stdout, result.message) == ("code_error", -9, "", "")
    assert result.stderr == "Killed: 3 attempts to run this program lost it, and the sandbox is well"
    control_, program = CONTROL_PROGRAM, "print(1)"
    assert [body["code"] for body in server.bodies] == [program, program, control_, program, control_]


@pytest.mark.parametrize("loss", LOSSES, ids=["SandboxError", "500", "dropped", "no JSON"])
async def test_a_program_that_runs_once_the_sandbox_is_well_is_not_to_blame(start, loss):
    """The server was unwell, and recovered before the control program."""
    server = await start(loss, loss, control, lambda: answer(stdout="1\n"))
    result = await call(server.url, max_attempts=2)
    assert (result.status, result.stdout, result.attempts) == ("ok", "1\n", 3)


@pytest.mark.parametrize(
    ("last", "attempts", "requests"),
    [(LOSSES[0], 2, 3), (answer, 2, 3), (lambda: web.Response(status=400), 2, 3), (control, 1, 1)],
    ids=["control lost", "control answered wrongly", "control refused", "lost once"],
)
async def test_else_the_sandbox_failed(start, last, attempts, requests):
    server = await start(*[LOSSES[0]] * attempts, last)
    assert (await call(server.url, max_attempts=attempts)).status == "sandbox_failure"
    assert len(server.bodies) == requests


async def test_refused_requests_are_no_losses(start):
    server = await start(LOSSES[0], lambda: web.Response(status=503), control)
    assert (await call(server.url, max_attempts=2)).status == "sandbox_failure"
    assert len(server.bodies) == 2


def blameless() -> web.Response:
    return web.json_response(json.loads(answer("SandboxError").text) | {"blameless": True})


async def test_what_no_program_can_have_done_is_no_loss(start):
    server = await start(LOSSES[0], blameless, LOSSES[0], control)
    assert (await call(server.url, max_attempts=3)).status == "sandbox_failure"
    assert len(server.bodies) == 3


async def test_what_no_program_can_have_done_is_not_the_loss_that_decides(start):
    server = await start(LOSSES[0], LOSSES[0], control, blameless, control)
    assert (await call(server.url, max_attempts=2)).status == "sandbox_failure"


async def test_another_server_that_is_down_saves_no_program(start, down):
    server = await start(*[LOSSES[0]] * 3, control, LOSSES[0], control)
    for _ in range(5):  # by chance the one that is down might be asked first, or last
        server.bodies.clear()
        result = await call(server.url, down[0], max_attempts=4)
        assert (result.status, result.return_code) == ("code_error", -9)
        assert len([body for body in server.bodies if body["code"] != CONTROL_PROGRAM]) == 4  # 3 of 4, and one more


async def test_a_program_is_to_blame_on_servers_that_lost_it_once_each(start):
    servers = [await start(LOSSES[0], control, LOSSES[0], control) for _ in range(2)]
    result = await call(*(server.url for server in servers), max_attempts=2)
    assert (result.status, result.return_code) == ("code_error", -9)


async def test_a_server_that_refused_it_since_has_lost_no_program(start):
    """As with a server that is killed and comes back."""
    refuses = lambda: web.Response(status=503)  # noqa: E731
    server = await start(LOSSES[2], LOSSES[2], refuses, refuses, control)
    assert (await call(server.url, max_attempts=4)).status == "sandbox_failure"


async def test_a_program_that_is_lost_until_no_time_is_left_is_to_blame(start):
    server = await start(LOSSES[0], LOSSES[0], control)
    result = await call(server.url, timeout_s=1, queue_timeout_s=0.5, backoff_s=0.25, max_attempts=9)
    assert (result.status, result.return_code, result.attempts) == ("code_error", -9, 2)


async def test_call_of_a_session_that_was_lost_is_a_failure_of_the_sandbox(start, client_of):
    server = await start(lambda: in_session(1, status="SandboxError"), control)
    result = await client_of([server.url]).run("pass", session_id="s")
    assert (result.status, len(server.bodies)) == ("sandbox_failure", 1)


async def test_answer_comes_by_the_deadline_also_when_the_control_hangs(start):
    server = await start(hang)
    result = await call(server.url, timeout_s=0.1, queue_timeout_s=0.5, max_attempts=2)
    assert result.status == "sandbox_failure"
