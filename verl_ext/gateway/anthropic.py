"""Anthropic's messages: the body of a request read, an answer written, at once or as server-sent events.

A request becomes what chat.py would read. Blocks other than text, tool_use and tool_result are refused.
"""

from collections.abc import Iterator
from typing import Any, Literal, cast

import msgspec

from verl_ext.gateway.asked import SAMPLING, Asked, checked_limit, checked_stops, decoded
from verl_ext.gateway.messages import Refused
from verl_ext.gateway.rooms import Answer

_ENDS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class _Text(msgspec.Struct, tag="text"):
    text: str


class _ToolUse(msgspec.Struct, tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


class _ToolResult(msgspec.Struct, tag="tool_result"):
    tool_use_id: str
    content: str | list[_Text] = ""


class _Message(msgspec.Struct):
    role: Literal["user", "assistant"]
    content: str | list[_Text | _ToolUse | _ToolResult]


class _Tool(msgspec.Struct):
    name: str
    input_schema: dict[str, Any]
    description: str = ""


class _Body(msgspec.Struct):
    messages: list[_Message]
    model: str | None = None
    max_tokens: int | None = None
    system: str | list[_Text] = ""
    tools: list[_Tool] | None = None
    tool_choice: dict[str, Any] = {}
    stop_sequences: list[str] | None = None
    stream: bool | None = None


_whole = msgspec.defstruct("Body", [(name, Any, None) for name in SAMPLING], bases=(_Body,))
_decoder = msgspec.json.Decoder(cast(type[_Body], _whole))


def read(body: bytes) -> Asked:
    """Return what a request asks. Raises Refused if it cannot be read, or asks for what cannot be exact."""
    call = decoded(_decoder, body)
    choice = call.tool_choice.get("type", "auto")
    if choice not in ("auto", "none"):
        raise Refused(f"tool_choice: expected auto or none, got {choice!r:.80}: a forced call is not the model's.")
    messages = [{"role": "system", "content": _text(call.system)}] if call.system else []
    for message in call.messages:
        messages += _messages(message)
    functions = [{"name": t.name, "description": t.description, "parameters": t.input_schema} for t in call.tools or ()]
    return Asked(
        messages,
        [{"type": "function", "function": function} for function in functions] or None,
        may_call=choice == "auto",
        stops=checked_stops(call.stop_sequences),
        max_tokens=checked_limit("max_tokens", call.max_tokens),
        stream=bool(call.stream),
        is_open=bool(call.messages) and call.messages[-1].role == "assistant",
        model=call.model,
        ignored=[name for name in SAMPLING if getattr(call, name) is not None],
    )


def _messages(message: _Message) -> Iterator[dict[str, Any]]:
    """Yield a message in OpenAI's form: results of tools are messages, before the text beside them."""
    calls = []
    for block in message.content:
        if isinstance(block, _ToolUse):
            function = {"name": block.name, "arguments": block.input}
            calls.append({"id": block.id, "type": "function", "function": function})
        elif isinstance(block, _ToolResult):
            yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": _text(block.content)}
    text = _text(message.content)
    if text or calls or all(isinstance(block, _Text) for block in message.content):
        yield {"role": message.role, "content": text, "tool_calls": calls}


def _text(content: str | list[Any]) -> str:
    return content if isinstance(content, str) else "".join(block.text for block in content if isinstance(block, _Text))


def answer(made: Answer) -> dict[str, Any]:
    """Return a whole answer."""
    return _head(made) | {"content": [*_blocks(made)], "usage": _usage(made)} | _end(made)


def events(made: Answer) -> bytes:
    """Return the whole answer as a stream: its start, each block, the reason of the end, and the usage."""
    begun = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": _usage(made) | {"output_tokens": 0}}
    found = [{"type": "message_start", "message": _head(made) | begun}]
    for i, block in enumerate(_blocks(made)):
        if block["type"] == "text":
            empty, delta = {"text": ""}, {"type": "text_delta", "text": block["text"]}
        else:
            text = msgspec.json.encode(block["input"]).decode()
            empty, delta = {"input": {}}, {"type": "input_json_delta", "partial_json": text}
        found.append({"type": "content_block_start", "index": i, "content_block": block | empty})
        found.append({"type": "content_block_delta", "index": i, "delta": delta})
        found.append({"type": "content_block_stop", "index": i})
    found.append({"type": "message_delta", "delta": _end(made), "usage": _usage(made)})
    return b"".join(map(event, [*found, {"type": "message_stop"}]))


def refusal(error: Refused) -> dict[str, Any]:
    """Return the body of an error. The format has no code, so the sentence begins with it."""
    kind = "invalid_request_error" if error.status < 500 else "api_error"
    return {"type": "error", "error": {"type": kind, "message": f"{error.code}: " * bool(error.code) + str(error)}}


def event(data: dict[str, Any]) -> bytes:
    """Return an event of a stream."""
    return b"event: %b\ndata: %b\n\n" % (data["type"].encode(), msgspec.json.encode(data))


def _head(made: Answer) -> dict[str, Any]:
    return {"id": f"msg_{made.id}", "type": "message", "role": "assistant", "model": made.model}


def _usage(made: Answer) -> dict[str, int]:
    return {"input_tokens": made.prompt_tokens, "output_tokens": len(made.node.ids)}


def _end(made: Answer) -> dict[str, str | None]:
    return {"stop_reason": "stop_sequence" if made.stop else _ENDS[made.node.finish], "stop_sequence": made.stop}


def _blocks(made: Answer) -> Iterator[dict[str, Any]]:
    if content := made.node.message["content"]:
        yield {"type": "text", "text": content}
    for call in made.node.message.get("tool_calls", ()):
        arguments = msgspec.json.decode(call["function"]["arguments"])
        yield {"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": arguments}
