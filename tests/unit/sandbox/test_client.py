"""The client against a real server, and against a fake one for infrastructure failures."""

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

import aiohttp
import pytest
from aiohttp import web

from verl_ext.sandbox import RunResult, SandboxClient, SandboxNotReady, running_server
from verl_ext.sandbox.client import SERVER_NAME


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with running_server(workers=2) as url:
        yield url


def answer(answer_status: str = "Success", **result: object) -> web.Response:
    run_result = {"status": "Finished", "execution_time": 0.5, "return_code": 0, "stdout": "out", "stderr": "err"}
    body = {"status": answer_status, "message": "why", "run_result": run_result | result, "queue_time": 0.25}
    return web.json_response(body)


async def hang() -> web.Response:
    await asyncio.sleep(60)
    raise AssertionError("not reached")


class FakeServer:
    """Answers request after request with what `script` says, the last entry again and again; keeps their bodies."""

    def __init__(self) -> None:
        self.script: list[Callable[[], web.Response | Awaitable[web.Response]]] = [answer]
        self.bodies: list[dict] = []

    async def handle(self, request: web.Request) -> web.Response:
        self.bodies.append(await request.json())
        step = self.script[min(len(self.bodies), len(self.script)) - 1]()
        return step if isinstance(step, web.Response) else await step

    async def start(self) -> None:
        app = web.Application()
        app.router.add_post("/run_code", self.handle)
        self.runner = web.AppRunner(app, shutdown_timeout=0.01, handler_cancellation=True)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self.runner.addresses[0][1]}"


@pytest.fixture
async def start() -> AsyncIterator[Callable[..., Awaitable[FakeServer]]]:
    servers = []

    async def start_one(*script: Callable) -> FakeServer:
        servers.append(FakeServer())
        servers[-1].script = list(script)
        await servers[-1].start()
        return servers[-1]

    yield start_one
    for server in servers:
        await server.runner.cleanup()


async def call(*urls: str, code: str = "print(1)", timeout_s: float = 5, **settings: object) -> RunResult:
    client = SandboxClient(urls, **({"backoff_s": 0.01} | settings))
    try:
        return await client.run(code, timeout_s=timeout_s)
    finally:
        await client.aclose()


@pytest.fixture
async def client_of() -> AsyncIterator[Callable[..., SandboxClient]]:
    """Makes clients for calls that need the same one; closes them."""
    clients = []

    def make(urls: list[str], **settings: object) -> SandboxClient:
        clients.append(SandboxClient(urls, **({"backoff_s": 0.01} | settings)))
        return clients[-1]

    yield make
    for client in clients:
        await client.aclose()


def in_session(call: int, status: str = "Success") -> web.Response:
    """Answer of our server to the call of that number of a session."""
    body = json.loads(answer(status).text) | {"session": {"call": call, "alive": True}}
    return web.json_response(body, headers={"Server": SERVER_NAME})


@pytest.fixture
def down() -> Iterator[list[str]]:
    """Three URLs that refuse connections. Their ports are bound, so that no other server gets one meanwhile."""
    with socket.socket() as first, socket.socket() as second, socket.socket() as third:
        for bound in (first, second, third):
            bound.bind(("127.0.0.1", 0))
        yield [f"http://127.0.0.1:{bound.getsockname()[1]}" for bound in (first, second, third)]


# --- with a real server


@pytest.mark.parametrize(
    ("code", "status", "return_code", "stdout", "stderr_end"),
    [
        ("print('é' * 3)", "ok", 0, "ééé\n", ""),
        ("", "ok", 0, "", ""),
        ("print(1); 1/0", "code_error", 1, "1\n", "ZeroDivisionError: division by zero\n"),
        ("import sys; sys.exit(7)", "code_error", 7, "", ""),
        ("import os; os.kill(os.getpid(), 9)", "code_error", -9, "", ""),
        ("print(1, flush=True)\nwhile True: pass", "timeout", None, "1\n", ""),
        ("\ud800", "code_error", 1, "", ""),
    ],
)
async def test_outcome_of_a_program(url, code, status, return_code, stdout, stderr_end):
    result = await call(url, code=code, timeout_s=0.5)
    assert (result.status, result.return_code, result.stdout) == (status, return_code, stdout)
    assert result.stderr.endswith(stderr_end)
    assert (result.attempts, result.message) == (1, "")
    assert 0 < result.run_s < 2
    assert result.queue_s < 2


async def test_stdin_and_memory_limit_reach_the_program(url):
    client = SandboxClient([url])
    result = await client.run("x = bytearray(200 << 20); print(input())", stdin="hello", memory_limit_mb=512)
    assert result.stdout == "hello\n"
    result = await client.run("x = bytearray(200 << 20); print(input())", stdin="hello", memory_limit_mb=128)
    assert (result.status, result.stderr.splitlines()[-1]) == ("code_error", "MemoryError")
    await client.aclose()


async def test_many_calls_at_once_get_their_own_answers(url):
    client = SandboxClient([url], max_concurrency=16)
    results = await asyncio.gather(*(client.run(f"print({i})") for i in range(50)))
    assert [result.stdout for result in results] == [f"{i}\n" for i in range(50)]
    await client.aclose()


# --- infrastructure failures


@pytest.mark.parametrize(
    "failure",
    [
        lambda: web.Response(status=500, text="oops"),
        lambda: web.Response(status=503),
        lambda: web.Response(status=429),
        lambda: answer("SandboxError"),
        lambda: web.Response(text="{"),
        lambda: web.Response(text="[]"),
        lambda: web.Response(body=b"\xff"),
        lambda: web.json_response({"status": "Success"}),
        lambda: web.json_response({"status": "Odd", "run_result": {}}),
    ],
)
async def test_infrastructure_error_is_tried_again(start, failure):
    server = await start(failure, failure, answer)
    assert await call(server.url) == RunResult("ok", "out", "err", 0, pytest.approx(0.25, abs=0.2), 0.5, 3, "")
    assert len(server.bodies) == 3


async def test_after_the_last_attempt_it_is_a_sandbox_failure_that_says_why(start):
    server = await start(lambda: web.Response(status=500, text="oops"))
    result = await call(server.url, max_attempts=3)
    assert (result.status, result.stdout, result.stderr, result.return_code) == ("sandbox_failure", "", "", None)
    assert (result.attempts, len(server.bodies)) == (3, 4)  # and the control program
    assert result.message == f"sandbox failed after 3 attempt(s): {server.url}/run_code: HTTP 500: oops"


async def test_sandbox_error_passes_its_message_on(start):
    server = await start(lambda: answer("SandboxError"))
    assert (await call(server.url, max_attempts=1)).message.endswith("SandboxError: why")


async def test_refused_connection_is_a_sandbox_failure(down):
    result = await call(down[0])
    assert (result.status, result.attempts) == ("sandbox_failure", 4)
    assert "Connect call failed" in result.message


async def test_server_that_drops_the_connection_is_tried_again(start):
    async def drop() -> web.Response:
        raise ConnectionAbortedError

    server = await start(drop, answer)
    assert (await call(server.url)).status == "ok"


async def test_server_that_hangs_is_a_sandbox_failure_in_bounded_time(start):
    server = await start(hang)
    started = time.monotonic()
    result = await call(server.url, timeout_s=0.3, queue_timeout_s=0.5)
    assert 0.7 < time.monotonic() - started < 1.5
    assert result.status == "sandbox_failure"
    assert "did not answer within" in result.message


async def test_retry_after_is_respected(start):
    server = await start(lambda: web.Response(status=504, headers={"Retry-After": "1"}), answer)
    started = time.monotonic()
    assert (await call(server.url)).attempts == 2
    assert 1 <= time.monotonic() - started < 2


async def test_no_attempt_is_made_that_cannot_end_before_the_deadline(start):
    server = await start(lambda: web.Response(status=504, headers={"Retry-After": "5"}))
    started = time.monotonic()
    result = await call(server.url, timeout_s=1, queue_timeout_s=2)
    assert time.monotonic() - started < 1
    assert (result.status, result.attempts) == ("sandbox_failure", 1)
    assert "no time left" in result.message


# --- errors of the program's and ours are not tried again


async def test_timeout_of_the_program_is_not_tried_again(start):
    server = await start(lambda: answer("Failed", status="TimeLimitExceeded", return_code=None), answer)
    result = await call(server.url)
    assert (result.status, result.return_code, result.stdout, result.attempts) == ("timeout", None, "out", 1)
    assert len(server.bodies) == 1


async def test_failed_program_is_not_tried_again(start):
    server = await start(lambda: answer("Failed", return_code=1), answer)
    result = await call(server.url)
    assert (result.status, result.return_code, len(server.bodies)) == ("code_error", 1, 1)


@pytest.mark.parametrize("status", [404, 413, 422])
async def test_rejected_request_raises_at_once(start, status):
    server = await start(lambda: web.Response(status=status, text="no"))
    with pytest.raises(ValueError, match=f"HTTP {status}: no"):
        await call(server.url)
    assert len(server.bodies) == 1


@pytest.mark.parametrize("urls", [[], "http://127.0.0.1:1", ["127.0.0.1:1"], ["ftp://127.0.0.1"], ["http://"]])
def test_wrong_urls_raise(urls):
    with pytest.raises(ValueError, match="expected a list of URLs such as"):
        SandboxClient(urls)


# --- queueing


async def test_request_carries_the_limits_and_a_share_of_the_queueing_time(start):
    server = await start(lambda: web.Response(status=500), answer)
    client = SandboxClient([server.url], max_attempts=4, backoff_s=0.01, queue_timeout_s=60)
    await client.run("code", timeout_s=7, memory_limit_mb=99, stdin="in")
    shares = [body.pop("queue_timeout") for body in server.bodies]
    assert shares == [pytest.approx(60 / 4, abs=0.2), pytest.approx(60 / 3, abs=0.2)]
    expected = {"code": "code", "language": "python", "run_timeout": 7, "memory_limit_MB": 99, "stdin": "in"}
    assert server.bodies == [expected] * 2
    await client.aclose()


async def test_calls_in_flight_are_bounded(start):
    in_flight, most = 0, 0

    async def slow() -> web.Response:
        nonlocal in_flight, most
        in_flight += 1
        most = max(most, in_flight)
        await asyncio.sleep(0.05)
        in_flight -= 1
        return answer()

    server = await start(slow)
    client = SandboxClient([server.url], max_concurrency=3)
    results = await asyncio.gather(*(client.run("1") for _ in range(9)))
    assert most == 3
    assert max(result.queue_s for result in results) >= 0.25 + 0.1  # the server's, and two rounds of waiting here
    await client.aclose()


async def test_waiting_for_a_free_slot_counts_towards_the_deadline(start):
    server = await start(hang)
    client = SandboxClient([server.url], max_concurrency=1, max_attempts=1, queue_timeout_s=0.3)
    first = asyncio.create_task(client.run("1", timeout_s=0.5))
    await asyncio.sleep(0.05)
    second = await client.run("1", timeout_s=0.1)
    assert (second.status, second.attempts) == ("sandbox_failure", 0)
    assert "no free slot of this client for 0.4 s" in second.message
    assert (await first).status == "sandbox_failure"
    await client.aclose()


# --- several servers


async def test_call_goes_to_the_server_with_the_fewest_in_flight(start):
    busy, idle = await start(hang), await start(answer)
    client = SandboxClient([busy.url, idle.url])
    client._in_flight[1] = 1  # sends the first call to the other server, where it hangs
    blocked = asyncio.create_task(client.run("1"))
    await asyncio.sleep(0.05)
    client._in_flight[1] = 0
    for _ in range(5):
        assert (await client.run("1")).status == "ok"
    assert (len(busy.bodies), len(idle.bodies)) == (1, 5)
    blocked.cancel()
    await asyncio.gather(blocked, return_exceptions=True)
    assert client._in_flight == [0, 0]
    await client.aclose()


async def test_second_attempt_goes_to_another_server(start, down):
    server = await start(answer)
    for _ in range(10):
        result = await call(*down, server.url, max_attempts=4)
        assert result.status == "ok"


async def test_client_can_be_made_outside_a_loop_and_closed_unused():
    client = await asyncio.to_thread(SandboxClient, ["http://127.0.0.1:1/"])
    await client.aclose()


def test_server_that_cannot_start_is_reported(url, capfd):
    with pytest.raises(SandboxNotReady, match=r"exit code 1 .* before it was ready"):
        with running_server(port=int(url.rsplit(":")[-1])):
            raise AssertionError("not reached")
    assert "is in use" in capfd.readouterr().err


async def test_fake_server_answers_as_the_real_one_does(url):
    async with aiohttp.ClientSession() as session:
        async with session.post(f"{url}/run_code", json={"code": "1", "language": "python"}) as response:
            real = await response.json()
    fake = json.loads(answer().body)
    assert set(fake) <= set(real)
    assert set(fake["run_result"]) == set(real["run_result"])


# --- sessions, echo, token, rate limit


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


async def test_new_session_goes_to_another_server_than_one_that_is_down(start, client_of, down):
    calls = iter((1, 2))
    server = await start(lambda: in_session(next(calls)))
    client = client_of([down[0], server.url])
    client._in_flight[1] = 1  # so that the first attempt goes to the other
    for attempts in (2, 1):
        result = await client.run("pass", session_id="s")
        assert (result.status, result.attempts) == ("ok", attempts)


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
    async def never_answer(*_: object) -> None:
        await asyncio.sleep(60)

    async with await asyncio.start_server(never_answer, "127.0.0.1", 0) as server:
        client = client_of([f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"], queue_timeout_s=0.3)
        started = time.monotonic()
        assert (await client.run("pass", timeout_s=0.2, session_id="s")).status == "sandbox_failure"
        assert time.monotonic() - started < 1.5


@pytest.mark.parametrize("argument", [{"session_id": "s"}, {"echo_last_expression": True}])
async def test_server_that_is_not_ours_cannot_do_what_only_ours_can(start, client_of, argument):
    server = await start(answer)
    with pytest.raises(ValueError, match="only verl-retool-sandbox"):
        await client_of([server.url]).run("pass", **argument)
    assert (await client_of([server.url]).run("pass")).status == "ok"


async def test_token_is_sent(tmp_path, client_of, monkeypatch):
    (tmp_path / "token").write_text("s3cret")
    with running_server(workers=1, options=("--preload", "", "--token-file", str(tmp_path / "token"))) as url:
        assert (await client_of([url], token="s3cret").run("print(1)")).stdout == "1\n"
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
