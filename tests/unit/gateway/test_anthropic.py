"""Anthropic's messages, by plain HTTP: the same turns as OpenAI's chat completions, told in another format."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest

from tests.unit.gateway.clients import Room, opened, until

CALL = 'so\n<tool_call>\n{"name":"calc","arguments":{"e":"1+1"}}\n</tool_call>'
TOOL = {
    "name": "calc",
    "description": "Calculate.",
    "input_schema": {"type": "object", "properties": {"e": {"type": "string"}}, "required": ["e"]},
}
OPENAI_TOOL = {
    "type": "function",
    "function": {"name": "calc", "description": "Calculate.", "parameters": TOOL["input_schema"]},
}


@pytest.fixture
async def post(qwen: Room) -> AsyncIterator[Callable]:
    """Post as Anthropic's client does: the address has no session, the key is a header."""
    url = qwen.endpoint.base_url.replace(f"/s/{qwen.endpoint.api_key}", "")
    async with httpx.AsyncClient() as client:

        async def send(path: str = "messages", **body: Any) -> httpx.Response:
            headers = {"x-api-key": qwen.endpoint.api_key, "anthropic-version": "2023-06-01"}
            return await client.post(f"{url}/{path}", json={"model": "m", "max_tokens": 100} | body, headers=headers)

        yield send


def told(answer: httpx.Response) -> dict[str, Any]:
    """Return the message of an answer, put together from its events if it is a stream."""
    assert answer.status_code == 200, answer.text
    if not answer.headers["content-type"].startswith("text/event-stream"):
        return answer.json()
    message: dict[str, Any] = {}
    for event in answer.text.strip().split("\n\n"):
        kind, data = (line.partition(": ")[2] for line in event.split("\n"))
        data = json.loads(data)
        assert data["type"] == kind
        if kind == "message_start":
            message = data["message"]
        elif kind == "content_block_start":
            assert data["index"] == len(message["content"])
            message["content"].append(data["content_block"] | {"json": ""})
        elif kind == "content_block_delta" and data["delta"]["type"] == "text_delta":
            message["content"][data["index"]]["text"] += data["delta"]["text"]
        elif kind == "content_block_delta":
            message["content"][data["index"]]["json"] += data["delta"]["partial_json"]
        elif kind == "content_block_stop":
            block = message["content"][data["index"]]
            if (text := block.pop("json")) and block["type"] == "tool_use":
                block["input"] = json.loads(text)
        elif kind == "message_delta":
            message |= data["delta"] | {"usage": data["usage"]}
    assert kind == "message_stop"
    return message


@pytest.mark.parametrize("stream", [False, True])
async def test_a_conversation_with_tools_gives_one_row(post: Callable, qwen: Room, stream: bool) -> None:
    qwen.script.say([CALL, "It is 2.", "Bye."])
    more = {"system": "Be short.", "tools": [TOOL], "stream": stream}
    messages: list[dict[str, Any]] = [{"role": "user", "content": "What is 1+1?"}]
    first = told(await post(messages=messages, **more))
    text, call = first["content"]
    assert (text, first["stop_reason"], first["role"]) == ({"type": "text", "text": "so"}, "tool_use", "assistant")
    assert (call["name"], call["input"]) == ("calc", {"e": "1+1"})
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": [{"type": "text", "text": "2"}]}
    messages += [{"role": "assistant", "content": first["content"]}, {"role": "user", "content": [result]}]
    second = told(await post(messages=messages, **more))
    assert (second["content"], second["stop_reason"]) == ([{"type": "text", "text": "It is 2."}], "end_turn")
    cached = [{"type": "text", "text": "Thanks.", "cache_control": {"type": "ephemeral"}}]
    messages += [{"role": "assistant", "content": "It is 2."}, {"role": "user", "content": cached}]
    last = told(await post(messages=messages, **more))
    (_, (prompt, ids, _)) = qwen.script.seen[1:]
    assert last["usage"] == {"input_tokens": len(prompt), "output_tokens": len(ids)}
    use, (row,) = await qwen.ended()
    assert (use.turns, use.extended) == (3, 2)
    decode = qwen.script.tokenizer.decode
    assert [decode(row.ids[a:b]) for a, b in row.model_spans] == [f"{t}<|im_end|>" for t in (CALL, "It is 2.", "Bye.")]


async def test_both_formats_continue_one_conversation(post: Callable, qwen: Room) -> None:
    qwen.script.say([CALL, "It is 2."])
    question = {"role": "user", "content": "What is 1+1?"}
    first = told(await post(messages=[question], tools=[TOOL]))
    function = {"name": "calc", "arguments": '{"e": "1+1"}'}
    calls = [{"id": "a", "type": "function", "function": function}]
    turn = {"role": "assistant", "content": "so", "tool_calls": calls}
    await qwen.ask([question, turn, {"role": "tool", "tool_call_id": "a", "content": "2"}], tools=[OPENAI_TOOL])
    use, rows = await qwen.ended()
    assert (first["stop_reason"], use.extended, len(rows)) == ("tool_use", 1, 1)


async def test_ends_of_a_turn(post: Callable, qwen: Room) -> None:
    qwen.script.say(["one, two", "a long answer of many words"])
    question = [{"role": "user", "content": "?"}]
    stopped = told(await post(messages=question, stop_sequences=["x", ", "]))
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", ", ")
    assert stopped["content"] == [{"type": "text", "text": "one"}]
    assert told(await post(messages=question, max_tokens=2))["stop_reason"] == "max_tokens"


async def test_the_models_turn_can_be_begun_for_it(post: Callable, qwen: Room) -> None:
    qwen.script.answer = lambda prompt: prompt[-5:]
    begun = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "It is"}]
    assert told(await post(messages=begun))["content"] == [{"type": "text", "text": "It is"}]


async def test_tokens_are_counted_and_not_recorded(post: Callable, qwen: Room) -> None:
    asked = {"messages": [{"role": "user", "content": "What is 1+1?"}], "tools": [TOOL], "system": "Be short."}
    counted = (await post("messages/count_tokens", **asked)).json()
    assert qwen.session.use.requests == 0
    assert counted == {"input_tokens": told(await post(**asked))["usage"]["input_tokens"]}
    await qwen.gateway.seal(qwen.endpoint)
    assert (await post("messages/count_tokens", **asked)).status_code == 410


async def test_tools_that_are_nested_too_deeply_to_be_counted_are_refused(post: Callable, qwen: Room) -> None:
    schema = json.loads('{"a": ' * 700 + "1" + "}" * 700)
    question, tools = [{"role": "user", "content": "?"}], [TOOL | {"input_schema": schema}]
    answer = await post("messages/count_tokens", messages=question, tools=tools)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
    assert "nested too deeply" in error["message"] and qwen.endpoint.room.error is None


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"tool_choice": {"type": "any"}}, "expected auto or none, got 'any'"),
        ({"tool_choice": {"type": "tool", "name": "calc"}}, "got 'tool'"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "Invalid value 'image'"),
        ({"messages": [{"role": "system", "content": "a"}]}, "Invalid enum value 'system'"),
        ({"messages": []}, "at least one"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "input_schema"),
        ({"max_tokens": 0}, "at least 1"),
        ({"messages": [{"role": "user", "content": "1" * 20_000}]}, "context_length_exceeded: "),
    ],
)
async def test_what_is_refused(post: Callable, qwen: Room, body: dict, says: str) -> None:
    answer = await post(**{"messages": [{"role": "user", "content": "?"}]} | body)
    error = answer.json()
    assert (answer.status_code, error["type"], error["error"]["type"]) == (400, "error", "invalid_request_error")
    assert says in error["error"]["message"] and not qwen.script.begun


async def test_a_failure_is_told_as_a_status_or_as_an_event(qwen_tokenizer: Any) -> None:
    async with opened(qwen_tokenizer, keep_alive_s=0.02) as room, httpx.AsyncClient() as client:
        room.script.failures = ["aborted"] * 2
        body = {"max_tokens": 9, "messages": [{"role": "user", "content": "?"}]}
        failed = await client.post(f"{room.endpoint.base_url}/messages", json=body)
        assert (failed.status_code, failed.json()["error"]["type"]) == (503, "api_error")
        assert failed.headers["x-should-retry"] == "true"
        room.script.gate.clear()
        asking = asyncio.create_task(
            client.post(f"{room.endpoint.base_url}/messages", json=body | {"stream": True}, timeout=20)
        )
        await until(lambda: room.script.begun == 2)
        await asyncio.sleep(0.1)  # the stream begins
        room.script.gate.set()
        told = await asking
        assert told.status_code == 200 and told.text.startswith(": ")
        assert 'event: error\ndata: {"type":"error"' in told.text
