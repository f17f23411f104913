"""From a conversation to the segments of a rollout: what the model wrote, and what stood between its turns.

Three forms are understood: `{role, content}` with the role `interpreter` and code between `<code>` tags; the published
ReTool-SFT, with tool calls as objects and the interpreter as role `tool`; and its original form, with the interpreter's
answers in the assistant's text. Each form can be turned into either protocol.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from verl.tools.schemas import OpenAIFunctionToolSchema

from verl_ext.protocols.base import CODE_SCHEMA, CODE_TOOL, Call, MalformedCall, ToolProtocol, format_output
from verl_ext.protocols.code import CODE_START, CODE_STOP, CodeProtocol, extract_code

PROMPT_ROLES = ("system", "user")
TOOL_ROLES = ("interpreter", "tool")

# ReTool-SFT was made by a format string that nobody formatted: its prompts ask for \boxed{{...}}.
_DOUBLED = re.compile(r"\\boxed\{\{([^{}]*)\}\}")
_INLINE_OUTPUT = re.compile(r"\s*<interpreter>(.*?)</interpreter>\s*", re.DOTALL)


@dataclass
class _Turn:
    """One turn of the model, with the tools' answers to it."""

    content: str
    calls: list[Call] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    text: str | None = None  # content and call as they stand in the trace, where its code is between tags


class Segment(NamedTuple):
    """A stretch of a conversation that is encoded by itself."""

    parts: list[str]  # for `SegmentEncoder`
    own: bool  # written by the model, and trained on


def split_trace(
    messages: Any, tools: Any, protocol: ToolProtocol, eos: str
) -> tuple[list[dict], list | None, list[Segment]]:
    """Split a conversation into prompt and response.

    Args:
        messages: system and user messages, then the assistant's, each with calls followed by the tools' answers; the
            last one without calls.
        tools: schemas in OpenAI's form, as a list or as JSON text; None for the interpreter alone.
        eos: text of the token that ends a turn; "" where there is no tokenizer.
    Returns:
        The prompt's messages; the tools that go into its template; and the response.
    Raises:
        ValueError: it is no such conversation, or has a call that the agent loop would refuse; says why.
    """
    messages, schemas = _plain(messages), _schemas(tools)
    length = next((i for i, m in enumerate(messages) if m.get("role") not in PROMPT_ROLES), len(messages))
    if length == 0:
        raise ValueError(f"expected a {' or '.join(PROMPT_ROLES)} message first")
    prompt = [{"role": m["role"], "content": _DOUBLED.sub(r"\\boxed{\1}", _text(m))} for m in messages[:length]]
    turns = list(_turns(messages[length:]))
    last = turns[-1]
    if last.calls or last.outputs:
        raise ValueError("the last message must be the assistant's answer, without a call")
    last.content = _DOUBLED.sub(r"\\boxed{\1}", last.content)
    segments: list[Segment] = []
    for turn in turns[:-1]:
        segments += _segments(turn, schemas, protocol, eos)
    if protocol.stop is not None and protocol.stop in last.content:
        raise ValueError(f"the answer has {protocol.stop}, where a rollout would have run code")
    if protocol.parse(last.content, schemas, ended=True):
        raise ValueError(f"the answer has what the agent loop would take for a call: {last.content[-200:]!r}")
    return prompt, protocol.schemas(schemas), [*segments, _own(last.content, eos), Segment([eos], True)]


def _segments(turn: _Turn, schemas: dict, protocol: ToolProtocol, eos: str) -> list[Segment]:
    keep = turn.text is not None and isinstance(protocol, CodeProtocol)
    text = turn.text if keep else protocol.write(turn.content, turn.calls)
    ended = protocol.call_ends_turn
    parsed = protocol.parse(text, schemas, ended=ended)
    refused = [call for call in parsed if isinstance(call, MalformedCall)]
    if refused or len(parsed) != len(turn.calls):
        raise ValueError(f"the agent loop would refuse the call {text[-200:]!r}: {'; '.join(map(str, refused))}")
    if protocol.stop is not None and text.index(protocol.stop) + len(protocol.stop) < len(text):
        raise ValueError(f"text after the first {protocol.stop} of a turn, where a rollout would have stopped")
    outputs = [format_output(output, "") for output in turn.outputs]
    end = [Segment([eos], True)] * ended
    return [_own(text, eos), *end, Segment(protocol.reply(outputs, ended=ended), False)]


def _own(text: str, eos: str) -> Segment:
    """What the model wrote of a turn, before its end token."""
    if eos and eos in text:
        raise ValueError(f"the end token {eos} within a turn, where a rollout would have ended: {text[-200:]!r}")
    return Segment([text], True)


def _turns(messages: list[dict]) -> Iterator[_Turn]:
    """The turns of the model; raises ValueError where roles do not alternate."""
    roles = [message.get("role") for message in messages]
    wrong = ValueError(f"expected roles assistant, {' or '.join(TOOL_ROLES)}, ..., assistant, but found {roles}")
    i = 0
    while i < max(len(messages), 1):
        if roles[i : i + 1] != ["assistant"]:
            raise wrong
        calls = [_call(call) for call in messages[i].get("tool_calls") or []]
        turns = [_Turn(_text(messages[i], optional=bool(calls)), calls)] if calls else list(_inline_turns(messages[i]))
        i += 1
        while i < len(messages) and roles[i] in TOOL_ROLES:
            turns[-1].outputs.append(_text(messages[i]))
            i += 1
        if turns[-1].outputs and not turns[-1].calls:
            turns[-1] = _with_call(turns[-1].content, turns[-1].outputs)
        if len(turns[-1].outputs) != len(turns[-1].calls):
            raise ValueError(f"{len(turns[-1].calls)} calls with {len(turns[-1].outputs)} answers; roles are {roles}")
        yield from turns
        if i < len(messages) and not turns[-1].calls:
            raise wrong


def _inline_turns(message: dict) -> Iterator[_Turn]:
    """The turns of one assistant message, in whose text the interpreter may have answered."""
    *parts, rest = _INLINE_OUTPUT.split(_text(message))
    for content, output in zip(parts[::2], parts[1::2], strict=True):
        yield _with_call(content, [output])
    yield _Turn(rest)


def _with_call(content: str, outputs: list[str]) -> _Turn:
    """A turn that ends in code between tags."""
    text = content.rstrip()
    if not text.endswith(CODE_STOP):
        raise ValueError(f"the interpreter answers a message that does not end in {CODE_STOP}: {content[-100:]!r}")
    code = extract_code(text).strip("\n")  # a protocol writes its own
    return _Turn(text[: text.rindex(CODE_START)].rstrip(), [Call(CODE_TOOL, {"code": code}, 0)], outputs, text)


def _call(call: Mapping[str, Any]) -> Call:
    function = call.get("function") or call
    name, arguments = function.get("name"), function.get("arguments")
    if isinstance(arguments, str):
        arguments = _json(arguments, f"arguments of {name!r}")
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise ValueError(f"expected a tool call with name and arguments, but found {function}")
    # A parquet column has every key in every row.
    return Call(name, {key: value for key, value in arguments.items() if value is not None}, 0)


def _schemas(tools: Any) -> dict[str, dict]:
    tools = _plain(_json(tools, "tools") if isinstance(tools, str) else tools)
    if not tools:
        return {CODE_TOOL: CODE_SCHEMA}
    try:  # as verl's tools give their schemas to a rollout's prompt: what else they say is left out
        functions = [tool if "function" in tool else {"type": "function", "function": tool} for tool in tools]
        schemas = [OpenAIFunctionToolSchema.model_validate(function) for function in functions]
    except (ValueError, TypeError) as error:
        raise ValueError(f"expected tools in OpenAI's form, but found {str(tools)[:200]} ({error})") from None
    return {schema.function.name: schema.model_dump(exclude_unset=True, exclude_none=True) for schema in schemas}


def _json(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the {what} are no JSON: {error}") from None


def _text(message: Mapping[str, Any], *, optional: bool = False) -> str:
    content = message.get("content")
    if content is None and optional:
        return ""
    if not isinstance(content, str):
        raise ValueError(f"expected text from the {message.get('role')}, but found {content!r}")
    return content


def _plain(value: Any) -> Any:
    """Lists for the arrays that parquet gives, at any depth, and no keys without value."""
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items() if item is not None}
    if hasattr(value, "tolist"):
        value = value.tolist()
    return [_plain(item) for item in value] if isinstance(value, list) else value
