"""The client: sessions, echo, token, rate limit."""

import asyncio
import time
from collections.abc import Iterator

import aiohttp
import pytest
from aiohttp import web

from tests.unit.sandbox.fake_server import answer, hang, in_session
from verl_ext.sandbox import running_server
from verl_ext.sandbox.leases import Session, Sessions
from verl_ext.sandbox.limits import SERVER_NAME


@pytest.fixture(scope="module")
def session_url() -> Iterator[str]:
    with running_server(workers=2, options=("--max-sessions", "2", "--preload", "")) as url:
        yield url


async def test_session_keeps_its_server_and_its_state(url, session_url, client_of):
    client = client_of([session_url])
    assert (await client.run("x = 20", session_id="s")).status == "ok"
    result = await client.run("x += 1\nx * 2", session_id="s", echo_last_expression=True)
    assert (result.stdout, result.session_ended) == ("42\n", False)
    await client.end_session("s")
    assert (await client.run("print('x' in globals())", session_id="s")).stdout == "False\n"
    await client.end_session("s")


async def test_calls_of_a_session_all_go_to_one_server(start, client_of):
    calls = iter(range(1, 100))
    servers = [await start(lambda: in_session(next(calls))) for _ in range(3)]
    client = client_of([server.url for server in servers])
    for _ in range(6):
        assert (await client.run("pass", session_id="s")).status == "ok"
    assert sorted(len(server.bodies) for server in servers) == [0, 0, 6]


async def test_end_by_the_program_itself_is_told_and_a_new_session_begins(session_url, client_of):
    client = client_of([session_url])
    await client.run("x = 1", session_id="s")
    result = await client.run("import os; os._exit(3)", session_id="s")
    assert (result.status, result.return_code, result.session_ended) == ("code_error", 3, True)
    assert (await client.run("print('x' in globals())", session_id="s")).stdout == "False\n"
    await client.end_session("s")


async def test_lost_session_is_a_sandbox_failure_and_not_an_empty_one(session_url, client_of):
    client = client_of([session_url])
    await client.run("x = 1", session_id="s")
    async with aiohttp.ClientSession() as http, http.delete(f"{session_url}/v1/sessions/s") as response:
        assert response.status == 200  # as a restart of the server, or its idle limit, would
    result = await client.run("print('x' in globals())", session_id="s")
    assert (result.status, result.attempts) == ("sandbox_failure", 1)
    assert "lost the session: its call 2 was call 1 there" in result.message


async def test_call_of_a_session_that_may_have_run_is_not_sent_again(start, client_of):
    server = await start(lambda: in_session(1, status="SandboxError"))
    result = await client_of([server.url]).run("pass", session_id="s")
    assert (result.status, len(server.bodies)) == ("sandbox_failure", 1)


async def test_call_of_a_session_that_did_not_run_is_sent_again(start, client_of):
    server = await start(lambda: web.Response(status=503), lambda: web.Response(status=504), lambda: in_session(1))
    assert (await client_of([server.url]).run("pass", session_id="s")).status == "ok"
    assert len(server.bodies) == 3


async def test_one_session_too_many_waits_until_another_ends(start, client_of):
    """Also for a client that no server has answered yet: a full server is well."""
    full = [lambda: web.Response(status=503, headers={"Server": SERVER_NAME})] * 6
    server = await start(*full, lambda: in_session(1))
    result = await client_of([server.url], max_attempts=2).run("pass", session_id="s")
    assert (result.status, result.attempts) == ("ok", 7)


async def test_one_session_too_many_is_a_failure_when_its_time_is_over(session_url, client_of):
    client = client_of([session_url], queue_timeout_s=1.5)
    for name in ("a", "b"):
        assert (await client.run("pass", session_id=name)).status == "ok"
    result = await client.run("pass", timeout_s=0.1, session_id="c")
    assert result.status == "sandbox_failure" and "2 sessions already" in result.message
    waiting = asyncio.create_task(client_of([session_url]).run("print(1)", session_id="d"))
    await client.end_session("a")
    assert (await waiting).stdout == "1\n"
    await client.end_session("b")


async def test_session_waits_for_its_next_call_for_as_long_as_its_client_lives(client_of):
    with running_server(workers=1, options=("--session-idle-s", "0.6", "--preload", "")) as url:
        client, gone = client_of([url]), client_of([url])
        assert (await client.run("x = 1", session_id="s")).status == "ok"
        assert (await gone.run("x = 1", session_id="t")).status == "ok"
        await gone.aclose()
        async with aiohttp.ClientSession() as http:
            while "sandbox_sessions 2.0" in await (await http.get(f"{url}/metrics")).text():  # until the other ended
                await asyncio.sleep(0.05)
        await asyncio.sleep(0.6)
        assert (await client.run("print(x)", session_id="s")).stdout == "1\n"
        assert "lost the session" in (await gone.run("print(x)", session_id="t")).message
        before = asyncio.all_tasks()
        await client.end_session("s")
        assert len(before - asyncio.all_tasks()) == 1, "nothing renews what has ended"


async def test_a_session_with_a_shorter_lease_than_the_first_is_renewed_in_time():
    renewed = asyncio.Queue()

    async def renew(server: int, session_ids: list[str]) -> None:
        renewed.put_nowait((server, session_ids))

    sessions = Sessions(renew)
    sessions["long"] = Session(server=0)
    sessions.renew_within(1000)
    await asyncio.sleep(0)  # its renewal waits for 250 s
    sessions["short"] = Session(server=1)
    sessions.renew_within(0.2)
    async with asyncio.timeout(5):
        assert [await renewed.get() for _ in range(4)] == [(0, ["long"]), (1, ["short"])] * 2
    sessions.stop()


async def test_a_lost_program_is_told_apart_from_a_lost_server(start, client_of, down):
    lost = {"status": "SandboxError", "message": "", "lost": True}
    server = await start(lambda: web.json_response(lost, headers={"Server": SERVER_NAME}))
    assert (await client_of([server.url]).run("pass", session_id="s")).program_lost
    assert not (await client_of(down[:1]).run("pass", session_id="s")).program_lost


async def test_server_is_told_that_a_call_may_come_after_the_end(start, client_of):
    calls = iter(range(1, 100))
    server = await start(lambda: in_session(next(calls)), hang, hang, lambda: web.Response(status=500))
    client = client_of([server.url])
    await client.run("pass", session_id="s")
    await client.end_session("s")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(client.run("pass", session_id="s"), 0.1)
    await client.end_session("s")
    running = asyncio.create_task(client.run("pass", session_id="s"))
    while len(server.bodies) < 3:
        await asyncio.sleep(0.01)
    await client.end_session("s")
    running.cancel()
    assert (await client.run("pass", session_id="s")).status == "sandbox_failure"
    assert server.ends == ["", "given_up", "given_up", "given_up"]


async def test_new_session_goes_to_another_server_than_one_that_is_down(start, client_of, down):
    number = 1
    server = await start(lambda: in_session(number))
    attempts, session = 1, 0
    while attempts == 1:  # the first attempt goes to either by chance
        client, session = client_of([down[0], server.url]), session + 1
        result = await client.run("pass", session_id=str(session))
        assert result.status == "ok"
        attempts = result.attempts
    assert attempts == 2
    number = 2
    result = await client.run("pass", session_id=str(session))
    assert (result.status, result.attempts) == ("ok", 1)


async def test_calls_of_one_session_may_be_made_at_once(start, client_of):
    async def first() -> web.Response:
        await asyncio.sleep(0.2)
        return in_session(1)

    server = await start(first, lambda: in_session(2))  # as a long answer, of which the end comes after the next answer
    client = client_of([server.url])
    results = await asyncio.gather(*(client.run("pass", session_id="s") for _ in range(2)))
    assert [result.status for result in results] == ["ok", "ok"]


async def test_call_that_waited_for_one_that_ended_the_session_does_not_begin_another(start, client_of):
    server = await start(lambda: in_session(1, status="SandboxError"), lambda: in_session(1))
    client = client_of([server.url])
    results = await asyncio.gather(*(client.run("pass", session_id="s") for _ in range(2)))
    assert [result.status for result in results] == ["sandbox_failure", "sandbox_failure"]
    assert (results[1].message, len(server.bodies)) == ("an earlier call ended the session", 1)


async def test_session_on_a_server_that_hangs_fails_by_its_deadline(client_of):
    async def never_answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(4096):
            pass
        writer.close()  # from Python 3.12 on the server's end waits for it

    async with await asyncio.start_server(never_answer, "127.0.0.1", 0) as server:
        client = client_of([f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"], queue_timeout_s=0.3)
        started = time.monotonic()
        assert (await client.run("pass", timeout_s=0.2, session_id="s")).status == "sandbox_failure"
        assert time.monotonic() - started < 4


@pytest.mark.parametrize("argument", [{"session_id": "s"}, {"echo_last_expression": True}])
async def test_server_that_is_not_ours_cannot_do_what_only_ours_can(start, client_of, argument):
    server = await start(answer)
    with pytest.raises(ValueError, match="only verl-retool-sandbox"):
        await client_of([server.url]).run("pass", **argument)
    assert (await client_of([server.url]).run("pass")).status == "ok"


async def test_token_is_sent(tmp_path, client_of, monkeypatch):
    (tmp_path / "token").write_text("s3cret")
    with running_server(workers=1, options=("--preload", "", "--token-file", str(tmp_path / "token"))) as url:
        with pytest.raises(ValueError, match="HTTP 401.*Authorization: Bearer"):
            await client_of([url]).run("print(1)")
        monkeypatch.setenv("SANDBOX_TOKEN", "s3cret")
        assert (await client_of([url]).run("print(1)")).stdout == "1\n"


async def test_every_attempt_waits_for_the_rate_limit(start, client_of):
    server = await start(lambda: web.Response(status=500), answer)
    acquired = []

    async def acquire() -> None:
        acquired.append(len(server.bodies))

    assert (await client_of([server.url], acquire=acquire).run("pass")).status == "ok"
    assert acquired == [0, 1]


async def test_rate_limit_that_lets_nothing_through_is_a_sandbox_failure(start, client_of):
    server = await start(answer)

    async def acquire() -> None:
        await asyncio.sleep(60)

    client = client_of([server.url], acquire=acquire, queue_timeout_s=0.1)
    result = await client.run("pass", timeout_s=0.1)
    assert (result.status, server.bodies) == ("sandbox_failure", [])
    assert "rate limit" in result.message
