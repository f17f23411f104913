"""When the client blames the program, and when the sandbox, for a program that every attempt lost."""

import pytest
from aiohttp import web

from tests.unit.sandbox.test_client import answer, call, client_of, hang, in_session, start  # noqa: F401
from verl_ext.sandbox.client import SERVER_NAME


async def with_ping(server, status: int = 200, name: str = SERVER_NAME):  # noqa: ANN001
    """Restart a fake server with a route that tells its health."""

    async def ping(_: web.Request) -> web.Response:
        server.pings += 1
        return web.json_response({}, status=status, headers={"Server": name})

    server.pings = 0
    await server.runner.cleanup()
    app = web.Application()
    app.router.add_post("/run_code", server.handle)
    app.router.add_get("/v1/ping", ping)
    server.runner = web.AppRunner(app, shutdown_timeout=0.01, handler_cancellation=True)
    await server.runner.setup()
    await web.TCPSite(server.runner, "127.0.0.1", 0).start()
    server.url = f"http://127.0.0.1:{server.runner.addresses[0][1]}"
    return server


async def drop() -> web.Response:
    raise ConnectionAbortedError


LOSSES = [lambda: answer("SandboxError"), lambda: web.Response(status=500), drop, lambda: web.Response(text="{")]


@pytest.mark.parametrize("loss", LOSSES, ids=["SandboxError", "500", "dropped", "no JSON"])
async def test_program_that_a_sound_server_lost_every_time_is_to_blame(start, loss):  # noqa: F811
    server = await with_ping(await start(loss))
    result = await call(server.url, max_attempts=2)
    assert (result.status, result.return_code, result.stdout, result.message) == ("code_error", -9, "", "")
    assert result.stderr == "Killed: 2 attempts to run this program lost it, and the sandbox is well"
    assert (len(server.bodies), server.pings) == (2, 1)


@pytest.mark.parametrize(
    ("status", "name", "attempts"),
    [(503, SERVER_NAME, 2), (200, "SandboxFusion", 2), (200, SERVER_NAME, 1)],
    ids=["not sound", "not ours", "lost once"],
)
async def test_else_the_sandbox_failed(start, status, name, attempts):  # noqa: F811
    server = await with_ping(await start(LOSSES[0]), status, name)
    assert (await call(server.url, max_attempts=attempts)).status == "sandbox_failure"


async def test_refused_requests_are_no_losses(start):  # noqa: F811
    server = await with_ping(await start(LOSSES[0], lambda: web.Response(status=503)))
    assert (await call(server.url, max_attempts=2)).status == "sandbox_failure"
    assert server.pings == 0


async def test_call_of_a_session_that_was_lost_is_a_failure_of_the_sandbox(start, client_of):  # noqa: F811
    server = await with_ping(await start(lambda: in_session(1, status="SandboxError")))
    result = await client_of([server.url]).run("pass", session_id="s")
    assert (result.status, server.pings) == ("sandbox_failure", 0)


async def test_answer_comes_by_the_deadline_also_when_the_control_hangs(start):  # noqa: F811
    server = await start(hang)
    result = await call(server.url, timeout_s=0.1, queue_timeout_s=0.5, max_attempts=2)
    assert result.status == "sandbox_failure"
