"""A sandbox that goes away during use and comes back: calls wait for it, and meanwhile no program is blamed."""

import asyncio
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from tests.unit.sandbox.fake_server import FakeServer, answer, in_session
from verl_ext.sandbox import Box, BoxUnavailable


class Breaking(FakeServer):
    """A server that answers well, or as `broken` says while `is_broken`."""

    def __init__(self):
        super().__init__()
        self.is_broken, self.broken = False, lambda: web.Response(text="<html>502</html>")

    async def handle(self, request):
        self.bodies.append(body := await request.json())
        if self.is_broken:
            return self.broken()
        return answer(stdout=body["code"])


@pytest.fixture
async def breaking():
    server = Breaking()
    await server.start()
    yield server
    await server.runner.cleanup()


async def break_until_each_was_refused(server, programs: list[str], times: int) -> None:
    server.is_broken = True
    while min(Counter(body["code"] for body in server.bodies)[program] for program in programs) < times:
        await asyncio.sleep(0.01)
    server.is_broken = False


@pytest.mark.parametrize(
    "broken",
    [lambda: web.Response(text="{"), lambda: answer("SandboxError"), lambda: web.Response(status=503)],
    ids=["garbage", "SandboxError", "503"],
)
async def test_calls_wait_for_a_sandbox_that_is_unwell_and_none_is_blamed(breaking, client_of, broken):
    client = client_of([breaking.url], backoff_s=0.01, max_attempts=2)
    assert (await client.run("first")).status == "ok"
    breaking.broken = broken
    programs = [f"program {i}" for i in range(50)]
    healing = asyncio.create_task(break_until_each_was_refused(breaking, programs, times=3))
    await asyncio.sleep(0)
    results = await asyncio.gather(*(client.run(program, timeout_s=5) for program in programs))
    await healing
    assert [(result.status, result.stdout) for result in results] == [("ok", program) for program in programs]
    assert all(result.attempts > 3 for result in results)


@asynccontextmanager
async def restarted(server: FakeServer) -> AsyncIterator[None]:
    """Stop a server for the length of the block, while no other one gets its port."""
    port = server.runner.addresses[0][1]
    await server.runner.cleanup()
    with socket.socket() as kept:
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        kept.bind(("127.0.0.1", port))
        yield
        await server.start(port)


async def test_a_server_that_is_started_again_on_its_port_costs_no_call(breaking, client_of, caplog):
    client = client_of([breaking.url], backoff_s=0.01, max_attempts=2)
    assert (await client.run("first")).status == "ok"
    async with restarted(breaking):
        waiting = asyncio.create_task(client.run("second", timeout_s=5))
        while not caplog.records:
            await asyncio.sleep(0.01)
        assert not waiting.done()
    assert (await waiting).stdout == "second"
    (said,) = [record.getMessage() for record in caplog.records]  # however often it was asked
    assert "Calls try on" in said and "Connect call failed" in said


class Count:
    """An `acquire` of a client that counts its requests."""

    def __init__(self) -> None:
        self.requests = 0

    async def __call__(self) -> None:
        self.requests += 1


async def test_the_opening_of_a_box_waits_for_a_server_that_is_started_again(breaking, client_of):
    client = client_of([breaking.url], backoff_s=0.01, max_attempts=2, acquire=(count := Count()))
    await Box(client).open()
    async with restarted(breaking):
        opening = asyncio.create_task(Box(client).open())
        while count.requests < 5:
            assert not opening.done()
            await asyncio.sleep(0.01)
    await opening


async def test_the_opening_of_a_box_does_not_wait_for_one_that_never_answered(client_of, down):
    client = client_of(down[:1], backoff_s=0.01, max_attempts=3, queue_timeout_s=5, acquire=(count := Count()))
    with pytest.raises(BoxUnavailable, match=r"no box after 3 attempt\(s\): .*Connect call failed"):
        await Box(client).open()
    assert count.requests == 3


async def test_a_command_of_a_box_does_not_wait_for_a_server_whose_restart_has_ended_it(breaking, client_of):
    client = client_of([breaking.url], backoff_s=0.01, max_attempts=3, queue_timeout_s=60)
    box = Box(client)
    await box.open()
    await client.aclose()  # its connection: the next request finds no server
    async with restarted(breaking):
        result = await box.run("true", timeout_s=1)
        assert (result.status, result.attempts) == ("sandbox_failure", 3)


async def test_one_that_stays_away_is_a_failure_by_the_deadline(breaking, client_of):
    client = client_of([breaking.url], backoff_s=0.01, max_attempts=2, queue_timeout_s=0.5)
    await client.run("first")
    breaking.is_broken, began = True, time.monotonic()
    result = await client.run("second", timeout_s=0.1)
    assert result.status == "sandbox_failure" and "HTML" not in result.stderr
    assert 0.1 < time.monotonic() - began < 5  # more than two attempts take


async def test_one_that_never_answered_is_not_waited_for(client_of, down):
    began = time.monotonic()
    assert (await client_of(down[:1], backoff_s=0.01).run("first")).status == "sandbox_failure"
    assert time.monotonic() - began < 5


async def test_a_call_of_a_session_does_not_wait_as_its_state_is_gone(start, client_of):
    fake = await start(lambda: in_session(1), lambda: web.Response(status=503))
    client = client_of([fake.url], backoff_s=0.01, max_attempts=2)
    assert (await client.run("first", session_id="s")).status == "ok"
    began = time.monotonic()
    assert (await client.run("second", session_id="s")).status == "sandbox_failure"
    assert time.monotonic() - began < 5
