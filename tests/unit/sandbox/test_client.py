"""The client against a real server, and against a fake one for infrastructure failures."""

import asyncio
import json
import re
import time
from concurrent.futures import ThreadPoolExecutor

import aiohttp
import pytest
from aiohttp import web

from tests.unit.sandbox.fake_server import answer, call, hang
from tests.unit.sandbox.server_process import Server
from verl_ext.sandbox import RunResult, SandboxClient, SandboxNotReady, running_server

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
    result = await call(url, code=code, timeout_s=1.5 if "while" in code else 10)
    assert (result.status, result.return_code, result.stdout) == (status, return_code, stdout)
    assert result.stderr.endswith(stderr_end)
    assert (result.attempts, result.message) == (1, "")
    assert 0 < result.run_s < 5
    assert result.queue_s < 5


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
    assert (result.attempts, len(server.bodies)) == (3, 3)
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
    assert 0.7 < time.monotonic() - started < 5
    assert result.status == "sandbox_failure"
    assert "did not answer within" in result.message


async def test_retry_after_is_respected(start):
    server = await start(lambda: web.Response(status=504, headers={"Retry-After": "1"}), answer)
    started = time.monotonic()
    assert (await call(server.url)).attempts == 2
    assert 1 <= time.monotonic() - started < 5


async def test_no_attempt_is_made_that_cannot_end_before_the_deadline(start):
    server = await start(lambda: web.Response(status=504, headers={"Retry-After": "5"}))
    started = time.monotonic()
    result = await call(server.url, timeout_s=1, queue_timeout_s=2)
    assert time.monotonic() - started < 2.5
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


async def test_calls_in_flight_are_bounded(start, client_of):
    in_flight, most, full = 0, 0, asyncio.Event()

    async def wait_for_others() -> web.Response:
        nonlocal in_flight, most
        in_flight += 1
        most = max(most, in_flight)
        if in_flight == 3:
            full.set()
        await full.wait()
        in_flight -= 1
        return answer()

    server = await start(wait_for_others)
    client = client_of([server.url], max_concurrency=3)
    results = await asyncio.gather(*(client.run("1") for _ in range(9)))
    assert most == 3
    waited = sorted(result.queue_s - 0.25 for result in results)  # .25: the server's
    assert waited[2] < waited[3]  # the first three did not wait


async def test_waiting_for_a_free_slot_counts_towards_the_deadline(start):
    server = await start(hang)
    client = SandboxClient([server.url], max_concurrency=1, max_attempts=1, queue_timeout_s=0.3)
    first = asyncio.create_task(client.run("1", timeout_s=30))
    while not server.bodies:
        await asyncio.sleep(0.01)
    second = await client.run("1", timeout_s=5.0)  # a slot that comes later leaves too little of it
    assert (second.status, second.attempts) == ("sandbox_failure", 0)
    waited_s = float(re.search(r"no free slot of this client for ([\d.]+) s", second.message)[1])
    assert 0.3 <= waited_s < 4  # .3 and what a loaded machine adds
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    await client.aclose()


# --- several servers


async def test_calls_in_flight_are_shared_by_the_servers(start, client_of):
    servers = [await start(hang) for _ in range(2)]
    client = client_of([server.url for server in servers])
    calls = [asyncio.create_task(client.run("1")) for _ in range(6)]
    while sum(len(server.bodies) for server in servers) < 6:
        await asyncio.sleep(0.01)
    assert [len(server.bodies) for server in servers] == [3, 3]
    for blocked in calls:
        blocked.cancel()
    await asyncio.gather(*calls, return_exceptions=True)


async def test_second_attempt_goes_to_another_server(start, down):
    server = await start(answer)
    for _ in range(10):
        result = await call(*down, server.url, max_attempts=4)
        assert result.status == "ok"


async def test_a_dead_server_does_not_attract_the_calls(start, down):
    """Calls one after the other: by calls in flight only, each of the two would get half of the first attempts."""
    server = await start(answer)
    client = SandboxClient([down[0], server.url], backoff_s=1)
    results = [await client.run("1") for _ in range(30)]
    assert {result.status for result in results} == {"ok"}
    assert sum(result.attempts - 1 for result in results) <= 5
    await client.aclose()


async def test_a_server_that_hangs_does_not_hold_every_call_up(start, client_of, monkeypatch):
    """After one call it rests for as long as a program may run."""
    monkeypatch.setattr("verl_ext.sandbox.client.ANSWER_GRACE_S", 0.0)
    hung, server = await start(hang), await start(answer)
    client = client_of([hung.url, server.url], queue_timeout_s=4)
    while not hung.bodies:  # each call goes to either by chance
        result = await client.run("1", timeout_s=2)
    assert (result.status, result.attempts) == ("ok", 2)
    assert [(await client.run("1", timeout_s=2)).attempts for _ in range(5)] == [1] * 5


async def test_a_server_that_is_back_gets_calls_again(start):
    back = await start(lambda: web.Response(status=503), answer)
    other = await start(answer)
    client = SandboxClient([back.url, other.url], backoff_s=0.05)
    while len(back.bodies) < 5:
        assert (await client.run("1")).status == "ok"
    await client.aclose()


@pytest.mark.nightly
async def test_server_that_is_killed_under_load_costs_no_answer(client_of):
    """One of three real servers. Calls that it had, and calls that it then refuses, are made again elsewhere."""
    with ThreadPoolExecutor() as executor:
        servers = list(executor.map(lambda _: Server("--preload", "", workers=1), range(3)))
    client = client_of([server.url for server in servers])
    try:
        calls = [asyncio.create_task(client.run(f"import time; time.sleep(0.05); print({n})")) for n in range(60)]
        while sum(call.done() for call in calls) < 6:
            await asyncio.sleep(0.01)
        servers[0].process.kill()
        results = await asyncio.gather(*calls)
        later = [await client.run(f"print({n})") for n in range(5)]
    finally:
        for server in servers:
            server.stop()
    assert [(result.status, result.stdout) for result in results] == [("ok", f"{n}\n") for n in range(60)]
    assert {result.attempts for result in results} == {1, 2}
    assert [(result.stdout, result.attempts <= 2) for result in later] == [(f"{n}\n", True) for n in range(5)]


async def test_client_can_be_made_outside_a_loop_and_closed_unused():
    client = await asyncio.to_thread(SandboxClient, ["http://127.0.0.1:1/"])
    await client.aclose()


def test_server_that_cannot_start_is_reported(url, capfd):
    server = running_server(port=int(url.rsplit(":")[-1]))
    with pytest.raises(SandboxNotReady, match=r"exit code 1 .* before it was ready"), server:
        raise AssertionError("not reached")
    assert "is in use" in capfd.readouterr().err


async def test_fake_server_answers_as_the_real_one_does(url):
    program = {"code": "1", "language": "python"}
    async with aiohttp.ClientSession() as session, session.post(f"{url}/run_code", json=program) as response:
        real = await response.json()
    fake = json.loads(answer().body)
    assert set(fake) <= set(real)
    assert set(fake["run_result"]) == set(real["run_result"])
