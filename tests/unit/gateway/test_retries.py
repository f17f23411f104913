"""Retries, time-outs, hang-ups, failed servers and the agent's clock, by the real `openai` client."""

import asyncio
import contextlib
import gc
import tracemalloc
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.unit.gateway.clients import Room, opened, until

QUESTION = [{"role": "user", "content": "What is 1+1?"}]
BODY = {"model": "m", "messages": QUESTION}


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client waits half a second before it tries again."""
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.01)


@contextlib.contextmanager
def held(room: Room) -> Iterator[None]:
    """No turn ends within the block."""
    room.script.gate.clear()
    try:
        yield
    finally:
        room.script.gate.set()


async def post(client: httpx.AsyncClient, room: Room, **headers: str) -> dict[str, Any]:
    headers = {name.replace("_", "-"): value for name, value in headers.items()}
    answer = await client.post(f"{room.endpoint.base_url}/chat/completions", json=BODY, headers=headers)
    return answer.json()


async def test_a_failure_of_the_servers_is_tried_again_and_forgotten(plain: Room) -> None:
    plain.script.failures = ["aborted"]
    await plain.talk("q", 2)
    assert plain.session.failed is None
    use, rows = await plain.ended()
    assert (use.requests, use.turns, use.joined, len(rows)) == (3, 2, 0, 1)


async def test_servers_that_stay_failed_are_told_as_503_and_noted(plain: Room) -> None:
    plain.script.failures = ["aborted"] * 9
    with pytest.raises(openai.InternalServerError, match="aborted") as failed:
        await plain.ask(QUESTION)
    assert (failed.value.status_code, plain.script.begun, plain.session.failed) == (503, 3, "aborted")
    assert plain.endpoint.room.error is None
    use, rows = await plain.ended()
    assert (use.turns, rows) == (0, [])


async def test_our_own_error_is_kept_and_not_tried_again(plain: Room) -> None:
    error = TypeError("a bug")
    plain.script.failures = [error]
    with pytest.raises(openai.InternalServerError, match="The gateway itself failed"):
        await plain.ask(QUESTION)
    assert (plain.script.begun, plain.endpoint.room.error) == (1, error)
    assert plain.session.failed is None, "no server failed"


async def test_a_retry_after_a_time_out_joins_the_request_that_runs(plain: Room) -> None:
    with held(plain):
        asking = asyncio.create_task(plain.ask(QUESTION, timeout=0.2))
        await until(lambda: plain.session.use.joined == 1)
    message, _ = await asking
    assert message["content"] == "fine"
    use, (row,) = await plain.ended()
    assert (use.requests, use.turns, use.repeats) == (use.joined + 1, 1, 0)
    assert sum(row.mask) == 3


async def test_a_retry_gets_the_stored_answer(plain: Room) -> None:
    async with httpx.AsyncClient() as client:
        first = await post(client, plain)
        again = await post(client, plain, x_stainless_retry_count="1")
    assert again == first, "its id, too"
    assert (plain.script.begun, plain.session.use.joined) == (1, 1)


async def test_a_failed_request_has_no_answer_to_repeat(plain: Room) -> None:
    plain.script.failures = ["aborted"]
    async with httpx.AsyncClient() as client:
        assert "error" in await post(client, plain)
        assert "choices" in await post(client, plain, x_stainless_retry_count="1")
    assert (plain.script.begun, plain.session.use.joined) == (2, 0)


async def test_an_equal_body_that_is_no_retry_is_a_new_sample(plain: Room) -> None:
    await plain.ask(QUESTION)
    await plain.ask(QUESTION)
    use, rows = await plain.ended()
    assert (use.turns, use.repeats, use.joined, len(rows)) == (2, 1, 0, 2)


async def test_an_idempotency_key_names_one_turn(plain: Room) -> None:
    async with httpx.AsyncClient() as client:
        with held(plain):
            asking = asyncio.gather(*(post(client, plain, Idempotency_Key="a") for _ in range(2)))
            await until(lambda: plain.session.use.joined == 1)
        first, second = await asking
        assert first == second == await post(client, plain, Idempotency_Key="a")
        assert await post(client, plain, Idempotency_Key="b") != first
        url = f"{plain.endpoint.base_url}/chat/completions"
        other = await client.post(url, json=BODY | {"max_tokens": 1}, headers={"Idempotency-Key": "a"})
    assert (other.status_code, other.json()["error"]["code"]) == (400, "idempotency_error")
    assert plain.script.begun == 2


async def test_two_equal_requests_that_are_both_retried_join_one_each(plain: Room) -> None:
    plain.script.say(["1", "2"])
    async with httpx.AsyncClient() as client:
        with held(plain):
            for count in (1, 2):
                with pytest.raises(httpx.ReadTimeout):
                    await client.post(f"{plain.endpoint.base_url}/chat/completions", json=BODY, timeout=0.2)
                await until(lambda count=count: plain.script.begun == count)
            again = [asyncio.create_task(post(client, plain, x_stainless_retry_count="1")) for _ in range(2)]
            await until(lambda: plain.session.use.joined == 2)
        told = [(await each)["choices"][0]["message"]["content"] for each in again]
    assert (sorted(told), plain.script.begun) == (["1", "2"], 2)


async def test_an_answer_that_nobody_waits_for_is_left_out(plain: Room) -> None:
    client = plain.client.with_options(max_retries=0)
    message, _ = await plain.ask(QUESTION)
    messages = [*QUESTION, message]
    with held(plain), pytest.raises(openai.APITimeoutError):
        await plain.ask([*messages, {"role": "user", "content": "b"}], client=client, timeout=0.2)
    await until(lambda: len(plain.session.nodes) == 2)
    await plain.ask([*messages, {"role": "user", "content": "c"}], client=client)
    use, (row,) = await plain.ended()
    assert (use.turns, use.undelivered, len(row.model_spans), sum(row.mask)) == (3, 1, 2, 6)


async def test_a_stream_that_is_dropped_is_not_delivered(plain: Room) -> None:
    with held(plain), contextlib.suppress(openai.APITimeoutError):
        await plain.ask(QUESTION, client=plain.client.with_options(max_retries=0), stream=True, timeout=0.2)
    await until(lambda: plain.session.nodes)
    use, rows = await plain.ended()
    assert (use.undelivered, rows) == (1, [])


async def test_keep_alives_carry_a_stream_over_the_clients_time_out(tokenizer: Any) -> None:
    async with opened(tokenizer, keep_alive_s=0.05) as room:
        with held(room):
            timeout = openai.Timeout(0.4)
            asking = asyncio.create_task(room.ask(QUESTION, stream=True, timeout=timeout))
            await until(lambda: room.script.begun)
            await asyncio.sleep(0.8)  # twice the client's time-out for reading
        assert (await asking)[0]["content"] == "fine"
        use, rows = await room.ended()
    assert (use.requests, use.turns, len(rows)) == (1, 1, 1)


async def test_an_error_within_a_stream_is_an_event(tokenizer: Any) -> None:
    async with opened(tokenizer, keep_alive_s=0.02) as room:
        room.script.failures = ["aborted"]
        with held(room):
            chunks = await room.client.chat.completions.create(model="m", messages=QUESTION, stream=True)
        with pytest.raises(openai.APIError, match="aborted"):
            [each async for each in chunks]
        assert (room.session.failed, room.session.nodes) == ("aborted", [])


async def test_an_error_before_the_stream_begins_has_its_status(plain: Room) -> None:
    plain.script.failures = ["aborted"]
    assert (await plain.ask(QUESTION, stream=True))[0]["content"] == "fine", "the client could try again"


async def test_the_agents_clock_stops_while_a_request_is_open(plain: Room) -> None:
    clock = plain.endpoint.room.clock
    before = clock.seconds()
    await until(lambda: clock.seconds() > before)
    with held(plain):
        asking = asyncio.gather(*(plain.ask(QUESTION) for _ in range(2)))
        await until(lambda: plain.script.begun == 2)
        stopped, over = clock.seconds(), asyncio.create_task(clock.reach(clock.seconds() + 0.05))
        await asyncio.sleep(0.1)
        assert clock.seconds() == stopped and not over.done()
    await asking
    await over
    assert clock.seconds() >= stopped + 0.05
    use, _ = await plain.ended()
    await asyncio.sleep(0.01)
    assert use.agent_s == clock.seconds() >= stopped + 0.05


async def test_the_agents_clock_runs_again_when_it_hangs_up(plain: Room) -> None:
    clock = plain.endpoint.room.clock
    with held(plain):
        with pytest.raises(openai.APITimeoutError):
            await plain.ask(QUESTION, client=plain.client.with_options(max_retries=0), timeout=0.2)
        stopped = clock.seconds()
        await until(lambda: clock.seconds() > stopped)


async def test_many_requests_at_once_are_all_served(plain: Room) -> None:
    await asyncio.gather(*(plain.ask([{"role": "user", "content": str(i)}]) for i in range(60)))
    use, rows = await plain.ended()
    assert (use.turns, len(rows)) == (60, 60)


async def test_bodies_are_not_kept(plain: Room) -> None:
    """A worker has hundreds of sessions, and a client may be refused as often as it likes."""

    async def ask(count: int) -> int:
        for number in range(count):
            long = [{"role": "user", "content": f"{number} " + "x" * 150_000}]
            with pytest.raises(openai.BadRequestError):
                await plain.client.chat.completions.create(model="policy", messages=long)
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        before = await ask(2)
        assert await ask(8) < before + 300_000
    finally:
        tracemalloc.stop()
