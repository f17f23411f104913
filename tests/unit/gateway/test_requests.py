"""What the gateway refuses, and bad input: a 400 that says what was seen, never a 500, and no harm to others."""

import asyncio
import json
import random
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import openai
import pytest

from tests.unit.gateway.clients import Room, opened, until
from tests.unit.gateway.conftest import TOOLS
from verl_ext.episode import CallResult
from verl_ext.gateway import rooms
from verl_ext.gateway.asked import Asked
from verl_ext.gateway.session import Sampled, Session
from verl_ext.gateway.template import Template

QUESTION = [{"role": "user", "content": "What is 1+1?"}]
DEEP = '{"messages": [{"role": "user", "content": "1", "x": ' + "[" * 20_000 + "]" * 20_000 + "}]}"
DEEP_ARGUMENTS = '{"a": ' * 900 + "1" + "}" * 900


@pytest.fixture
async def post(plain: Room) -> AsyncIterator[Callable]:
    async with httpx.AsyncClient() as client:

        async def send(body: Any, path: str = "chat/completions", **headers: str) -> tuple[int, dict[str, Any]]:
            raw = {"content": body} if isinstance(body, str | bytes) else {"json": body}
            headers = {name.replace("_", "-"): value for name, value in headers.items()}
            answer = await client.post(f"{plain.endpoint.base_url}/{path}", headers=headers, **raw)
            return answer.status_code, answer.json()

        yield send


@pytest.mark.parametrize(
    ("parameter", "says"),
    [
        ({"n": 2}, "n=2 is not served: a request gets one answer"),
        ({"tool_choice": "required", "tools": TOOLS}, "tool_choice='required' is not served"),
        ({"tool_choice": {"type": "function", "function": {"name": "calc"}}, "tools": TOOLS}, "tool_choice="),
        ({"response_format": {"type": "json_object"}}, "response_format="),
        ({"logit_bias": {"5": 1}}, "logit_bias="),
        ({"logprobs": True, "top_logprobs": 3}, "top_logprobs=3"),
        ({"prediction": {"type": "content", "content": "x"}}, "prediction="),
        ({"audio": {"voice": "a", "format": "wav"}, "modalities": ["text", "audio"]}, "audio="),
        ({"extra_body": {"echo": True}}, "echo=True"),
        ({"extra_body": {"structured_outputs": {"regex": "a"}}}, "structured_outputs="),
        ({"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}, "chat_template_kwargs="),
        ({"max_tokens": 0}, "max_tokens of at least 1, got 0"),
        ({"max_completion_tokens": -1}, "max_completion_tokens of at least 1, got -1"),
        ({"stop": ["a"] * 17}, "at most 16 stop strings"),
        ({"stop": ""}, "none of them empty"),
        ({"extra_body": {"continue_final_message": True}}, "not the last"),
    ],
)
async def test_what_cannot_be_exact_is_refused_with_a_sentence(plain: Room, parameter: dict, says: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await plain.ask(QUESTION, **parameter)
    assert says in refused.value.body["message"]
    assert (plain.script.begun, plain.session.nodes) == (0, [])


async def test_images_are_refused(plain: Room) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    with pytest.raises(openai.BadRequestError, match="text only"):
        await plain.ask([{"role": "user", "content": [image]}])


async def test_defaults_of_clients_are_served(plain: Room) -> None:
    """What changes nothing may be sent, as some clients do."""
    more = {"logit_bias": {}, "top_logprobs": 0, "response_format": {"type": "text"}, "n": 1, "tools": [], "stop": []}
    parts = [{"type": "text", "text": "1"}, {"type": "text", "text": "2"}]
    await plain.ask([{"role": "developer", "content": "0"}, {"role": "user", "content": parts}], **more)
    assert plain.session.nodes[0].place.said == [("system", "0"), ("user", "12")]


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("", "cannot be read"),
        ("[", "cannot be read"),
        ("[]", "Expected `object`, got `array`"),
        ('"a"', "Expected `object`"),
        ("{}", "missing required field `messages`"),
        (b"\xff\xfe", "cannot be read"),
        ('{"messages": null}', "Expected `array`"),
        ('{"messages": []}', "at least one message"),
        ('{"messages": ["a"]}', "Expected `object`, got `str`"),
        ('{"messages": [{"role": "user", "content": NaN}]}', "cannot be read"),
        ('{"messages": [{"role": "user", "content": "\\ud800"}]}', "cannot be read"),
        ('{"messages": [{"content": "a"}]}', "role"),
        ('{"messages": [{"role": ["user"], "content": "a"}]}', "role"),
        ('{"messages": [{"role": "robot", "content": "a"}]}', "robot"),
        ('{"messages": [{"role": "user", "content": 5}]}', "content"),
        ('{"messages": [{"role": "user", "content": {"text": "a"}}]}', "content"),
        ('{"messages": [{"role": "user", "content": ["a"]}]}', "text only"),
        ('{"messages": [{"role": "assistant", "content": "a", "tool_calls": 5}]}', "tool_calls"),
        ('{"messages": [{"role": "assistant", "content": "a", "tool_calls": [5]}]}', "tool_calls"),
        ('{"messages": [{"role": "assistant", "content": "a", "tool_calls": {"a": 1}}]}', "tool_calls"),
        ('{"messages": [{"role": "user", "content": "a"}], "max_tokens": "5"}', "Expected `int | null`, got `str`"),
        ('{"messages": [{"role": "user", "content": "a"}], "stream": "yes"}', "Expected `bool | null`"),
        ('{"messages": [{"role": "user", "content": "a"}], "stop": [1]}', "Expected `str`, got `int`"),
        ('{"messages": [{"role": "user", "content": "a"}], "tools": "calc"}', "Expected `array | null`"),
        ('{"messages": [{"role": "user", "content": "a"}], "tools": [{"type": "function"}]}', "with a name"),
        ('{"messages": [{"role": "user", "content": "a"}], "stream_options": 5}', "Expected `object | null`"),
        (DEEP, "cannot be read"),
    ],
)
async def test_bad_bodies_are_told_what_was_expected(post: Callable, plain: Room, body: str, says: str) -> None:
    status, answer = await post(body)
    assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
    assert says in answer["error"]["message"]
    assert plain.endpoint.room.error is None and not plain.script.begun


async def test_deep_arguments_and_odd_fields_harm_nobody(post: Callable, plain: Room) -> None:
    function = {"name": "calc", "arguments": DEEP_ARGUMENTS}
    call = {"id": {"a": 1}, "type": "function", "function": function}
    turn = {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": {"a": 1}}
    tools = [{"type": "function", "function": {"name": "x", "parameters": json.loads(DEEP_ARGUMENTS)}}]
    for body in ({"messages": [*QUESTION, turn]}, {"messages": QUESTION, "tools": tools}):
        status, _ = await post(body)
        assert status in (200, 400)
    assert plain.endpoint.room.error is None


@pytest.mark.parametrize("depth", [100, 900, 3000])
async def test_what_the_model_writes_never_fails_the_gateway(qwen_tokenizer: Any, depth: int) -> None:
    nested = "[" * depth + "]" * depth
    async with opened(qwen_tokenizer, max_context=20_000) as room, httpx.AsyncClient() as client:
        room.script.say([f'<tool_call>\n{{"name": "calc", "arguments": {{"e": {nested}}}}}\n</tool_call>', "done"])
        url, messages = f"{room.endpoint.base_url}/chat/completions", list(QUESTION)
        for _ in range(2):
            answer = await client.post(url, json={"messages": messages, "tools": TOOLS})
            assert answer.status_code == 200
            messages += [answer.json()["choices"][0]["message"], {"role": "user", "content": "Go on."}]
        assert "tool_calls" not in messages[1], "nobody could read its call"
        assert room.endpoint.room.error is None


async def test_random_bodies_never_fail_the_gateway(post: Callable, plain: Room, qwen: Room) -> None:
    """Each value of a good body is exchanged for one of another type, at every depth."""
    random.seed(0)
    function = {"name": "calc", "arguments": '{"e": "1"}'}
    messages = [
        {"role": "system", "content": "0"},
        {"role": "user", "content": [{"type": "text", "text": "1"}]},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "a", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "a", "name": "calc", "content": "1"},
    ]
    good = {"messages": messages, "tools": TOOLS, "stop": ["a"], "max_tokens": 5, "stream_options": {}, "model": "m"}
    wrong = [None, True, 0, -1.5, "", "<|im_end|>\ue0000\ue001", [], ["a"], {}, {"a": [1]}, [None], 10**30]

    def places(value: Any, path: tuple = ()) -> Any:
        yield path
        for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
            yield from places(value[key], (*path, key))

    bodies = []
    for *path, last in filter(None, places(good)):
        for value in random.sample(wrong, 5):
            body = at = json.loads(json.dumps(good))
            for key in path:
                at = at[key]
            at[last] = value
            bodies.append(body)
    seen = set()
    async with httpx.AsyncClient() as client:
        for room in (plain, qwen):
            for body in bodies:
                url = f"{room.endpoint.base_url}/{random.choice(['chat/completions', 'messages'])}"
                seen.add((await client.post(url, json=body)).status_code)
    assert plain.endpoint.room.error is None and qwen.endpoint.room.error is None
    assert seen == {200, 400}


async def test_bad_requests_leave_a_conversation_as_it_was(post: Callable, plain: Room) -> None:
    message, _ = await plain.ask(QUESTION)
    messages = [*QUESTION, message, {"role": "user", "content": "Go on."}]
    assert (await post({"messages": [*messages, {"role": "robot"}]}))[0] == 400
    plain.script.failures = ["aborted"]
    assert (await post({"messages": messages}))[0] == 503
    await plain.ask(messages)
    use, rows = await plain.ended()
    assert (use.turns, use.extended, len(rows)) == (2, 1, 1)


async def test_a_prompt_without_room_for_an_answer_ends_an_episode(tokenizer: Any) -> None:
    async with opened(tokenizer, max_context=50) as room:
        await room.ask([{"role": "user", "content": "1" * 20}], max_tokens=10**6)
        ((_, params),) = room.script.requests
        assert params["max_tokens"] == 50 - len(room.session.nodes[0].place.prompt_ids)
        for long in ("1" * 60, "1" * 200_000):  # rendered, and too long to be read at all
            with pytest.raises(openai.BadRequestError) as refused:
                await room.ask([{"role": "user", "content": long}])
            assert (refused.value.code, room.session.last_refusal) == ("context_length_exceeded",) * 2
            room.session.last_refusal = None


async def test_a_text_that_cannot_fit_is_refused_before_all_of_it_is_encoded(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tokenizer, max_context=1000) as room:
        template, encoded = room.session.template, []
        encode = template.encode
        monkeypatch.setattr(template, "encode", lambda parts: encoded.append(len(parts[0])) or encode(parts))
        monkeypatch.setattr(template, "rendered", None)
        for content in ("1" * 100_000, [{"type": "text", "text": "1" * 100_000}]):
            with pytest.raises(openai.BadRequestError) as refused:
                await room.ask([{"role": "user", "content": content}])
            assert refused.value.code == "context_length_exceeded"
        assert sum(encoded) < 10_000 and room.endpoint.room.error is None


async def test_a_long_text_of_few_tokens_is_served(qwen_tokenizer: Any) -> None:
    async with opened(qwen_tokenizer, max_context=1000) as room:
        await room.ask([{"role": "user", "content": "<tool_call>" * 900}])  # 11 characters and one token each


async def test_a_body_beyond_any_prompt_is_not_read(post: Callable, plain: Room) -> None:
    status, answer = await post({"messages": QUESTION, "metadata": {"a": "1" * 300_000}})
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    assert "The body has over" in answer["error"]["message"] and not plain.script.begun


async def test_a_session_has_a_limit_of_turns_also_in_flight(tokenizer: Any) -> None:
    async with opened(tokenizer, max_turns=2) as room:
        room.script.gate.clear()
        asking = [asyncio.create_task(room.ask(QUESTION)) for _ in range(5)]
        await until(lambda: sum(each.done() for each in asking) == 3)  # the turns of the others run
        room.script.gate.set()
        answers = await asyncio.gather(*asking, return_exceptions=True)
        refused = [each for each in answers if isinstance(each, openai.BadRequestError)]
        assert [each.code for each in refused] == ["turn_limit"] * 3
        with pytest.raises(openai.BadRequestError):
            await room.ask(QUESTION)
        assert (room.script.begun, room.session.last_refusal) == (2, "turn_limit")


async def test_a_turn_that_has_just_ended_is_counted_once(templates: dict[str, Template]) -> None:
    session, gate, pending = Session(templates["tiny"], 1000), asyncio.Event(), []

    def begin(number: int) -> None:
        asked = Asked([{"role": "user", "content": str(number)}])
        pending.append(room.begin(asked, bytes([number]), key=None, is_retry=False))

    async def generate(request_id: str, prompt_ids: list[int], params: dict[str, Any]) -> Sampled:
        await gate.wait()
        if len(pending) == 2 and session.nodes:  # the first turn is stored, and its task has not been seen to end
            begin(2)
        return Sampled(ids=[templates["tiny"].tokenizer.eos_token_id])

    room = rooms.Room(session, generate, model="m", max_turns=3, call=None)
    for number in range(2):
        begin(number)
    await asyncio.sleep(0)
    gate.set()
    await until(lambda: len(session.nodes) == 3)


async def test_a_turn_that_failed_does_not_count(tokenizer: Any) -> None:
    async with opened(tokenizer, max_turns=1) as room:
        room.script.failures = ["aborted"]
        await room.ask(QUESTION)
        assert len(room.session.nodes) == 1


async def test_a_packed_body_and_an_unknown_address_are_refused(post: Callable, plain: Room) -> None:
    status, answer = await post(b"\x1f\x8b", Content_Encoding="gzip")
    assert (status, "Content-Encoding" in answer["error"]["message"]) == (400, True)
    status, answer = await post({"prompt": "a"}, "completions")
    assert (status, "/v1/chat/completions" in answer["error"]["message"]) == (404, True)


async def test_a_body_that_breaks_off_harms_nobody(plain: Room) -> None:
    host, port = plain.endpoint.base_url.split("/")[2].split(":")
    head = f"POST /s/{plain.endpoint.api_key}/v1/chat/completions HTTP/1.1\r\nHost: a\r\n"
    for length, *pieces in (
        ("Transfer-Encoding: chunked", "zz\r\n"),
        ("Transfer-Encoding: chunked", "1\r\n{\r\n", "zz\r\n"),
        ("Content-Length: 99", '{"mess'),
    ):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(f"{head}{length}\r\n\r\n".encode())
        for piece in pieces:
            await asyncio.sleep(0.05)  # the server reads what came before
            writer.write(piece.encode())
        writer.write_eof()
        await reader.read()
        writer.close()
    await plain.ask(QUESTION)
    assert plain.endpoint.room.error is None


async def test_tools_of_the_run_are_called(tokenizer: Any) -> None:
    calls = []

    async def call(name: str, arguments: dict[str, Any]) -> CallResult:
        calls.append((name, arguments))
        if arguments["e"] == "down":
            return CallResult("", failure="the sandbox is down")
        return CallResult("2") if arguments["e"] == "1+1" else CallResult("no number", error="bad")

    async with opened(tokenizer, call=call) as room, httpx.AsyncClient() as client:

        async def post(name: str, body: Any) -> httpx.Response:
            return await client.post(f"{room.endpoint.base_url}/tools/{name}", json=body)

        assert (await post("calc", {"arguments": {"e": "1+1"}})).json() == {"output": "2", "error": None}
        assert (await post("calc", {"arguments": {"e": "x"}})).json() == {"output": "no number", "error": "bad"}
        assert (await post("calc", {"arguments": {"e": "down"}})).status_code == 503
        assert (await room.endpoint.call("calc", {"e": "1+1"})).output == "2"
        assert len(calls) == 4
        for name, body, status in (
            ("calc", {"arguments": 5}, 400),
            ("calc", {}, 400),
        ):
            assert (await post(name, body)).status_code == status
        assert len(calls) == 4
        await room.gateway.seal(room.endpoint)
        assert (await post("calc", {"arguments": {"e": "1"}})).status_code == 410


async def test_a_tool_stops_the_agents_clock_and_ends_with_the_session(tokenizer: Any) -> None:
    begun = asyncio.Event()

    async def call(name: str, arguments: dict[str, Any]) -> CallResult:
        begun.set()
        await asyncio.Event().wait()

    async with opened(tokenizer, call=call) as room, httpx.AsyncClient() as client:
        url = f"{room.endpoint.base_url}/tools/calc"
        calling = asyncio.create_task(client.post(url, json={"arguments": {}}))
        await begun.wait()
        before = room.endpoint.room.clock.seconds()
        await asyncio.sleep(0.02)
        assert room.endpoint.room.clock.seconds() == before
        await room.gateway.seal(room.endpoint)
        assert (await calling).status_code == 410
