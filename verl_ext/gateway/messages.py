"""Messages of a client: what the chat template gets of them, when two of them are one, and what a client is told.

Clients write messages anew with each request: they strip an answer, indent the JSON of a call, send null for "". Such
a message is still the turn that the model wrote.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate
from typing import Any
from uuid import uuid4

from verl_ext.protocols.base import Call
from verl_ext.protocols.call_json import is_plain, loads
from verl_ext.protocols.hermes import CALL_START, CALL_STOP, HermesProtocol
from verl_ext.protocols.thinking import THINK_STOP

Message = Mapping[str, Any]

TOO_LONG, TURN_LIMIT = "context_length_exceeded", "turn_limit"  # codes of refusals that end an episode

_ROLES = ("system", "user", "assistant", "tool")
_EMPTY_THOUGHTS = re.compile(r"<think>\s*</think>\s*")


class Refused(Exception):
    """A request that cannot be served; `sentence` is for the agent's author.

    Attributes:
        status: of HTTP: 400 for what the client asked, 410 for a session that has ended, 503 for failed servers.
        code: OpenAI's word for it, such as "context_length_exceeded", or None.
    """

    def __init__(self, sentence: str, status: int = 400, code: str | None = None):
        super().__init__(sentence)
        self.sentence, self.status, self.code = sentence, status, code


def normal(message: Any) -> dict[str, Any]:
    """Return what the chat template gets of a message: role, text, calls with parsed arguments, no empty field.

    Raises:
        Refused: the message is not in OpenAI's form, or has a part that is no text.
    """
    if not isinstance(message, Mapping) or message.get("role") not in (*_ROLES, "developer"):
        raise Refused(f"messages: expected objects with a role of {', '.join(_ROLES)}; got {message!r:.200}")
    role = "system" if message["role"] == "developer" else message["role"]
    found = {"role": role, "content": _text(message.get("content"))}
    if role == "tool":
        return found | {name: message[name] for name in ("tool_call_id", "name") if message.get(name)}
    if role == "assistant":
        if calls := message.get("tool_calls"):
            if not isinstance(calls, list):
                raise Refused(f"tool_calls: expected a list, got {calls!r:.200}")
            found["tool_calls"] = [*map(_call, calls)]
        reasoning = message.get("reasoning_content") or message.get("reasoning")
        if isinstance(reasoning, str) and THINK_STOP not in found["content"]:  # else it is said twice
            found["reasoning_content"] = reasoning
    return found


def _text(content: Any) -> str:
    if isinstance(content, list):
        for part in content:
            if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise Refused(f"the policy reads text only, but a message has the part {part!r:.200}")
        return "".join(part["text"] for part in content)
    if content is not None and not isinstance(content, str):
        raise Refused(f"content: expected a text, a list of text parts or null; got {content!r:.200}")
    return content or ""


def _call(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise Refused(f"tool_calls: expected objects with a function that has a name; got {call!r:.200}")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):  # of an author's own example: the template shows the text
            arguments = json.loads(arguments)
    found = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    return found | ({"id": call["id"]} if call.get("id") else {})


def chain(messages: Sequence[Message], start: str = "") -> list[str]:
    """Return digests of the first 0, 1, 2, ... messages, which are `normal`.

    Two messages count as one if their role, text and calls agree. The ids of calls, the order of keys in arguments,
    reasoning in a separate field, and white space around an assistant's text do not count.

    Args:
        start: digest of what comes before them.
    """
    return [*accumulate(messages, _link, initial=start)]


def _link(before: str, message: Message) -> str:
    calls = [[call["function"]["name"], call["function"]["arguments"]] for call in message.get("tool_calls", ())]
    content = message["content"].strip() if message["role"] == "assistant" else message["content"]
    text = json.dumps([before, message["role"], content, calls], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


class _AnyTool(dict):
    """Tools of any name and arguments: the agent itself answers a call that it cannot run."""

    def __contains__(self, name: object) -> bool:
        return True

    def __missing__(self, name: str) -> dict[str, Any]:
        return {"function": {}}


_ANY_TOOL = _AnyTool()


def calls_in(
    text: str, parser: HermesProtocol, *, thinking: bool = False
) -> tuple[str, list[tuple[str, dict[str, Any]]]]:
    """Return the text around the calls of a turn, and name and arguments of each call.

    Args:
        parser: that of a `Template`.
        thinking: the turn begins within thinking, in which nothing is a call.
    Returns:
        All of the text and no calls, if a call cannot be read, or there are too many.
    """
    if CALL_START not in text:
        return text, []
    found = parser.parse(text, _ANY_TOOL, ended=True, thinking=thinking)
    calls = [call for call in found if isinstance(call, Call) and is_plain(call.tool)]
    if not calls or len(calls) < len(found):
        return text, []
    around = [*_around(text, calls)]
    # From the text: the parser removes a fence around code, which the agent would get from other servers.
    bodies = [loads(text[call.start + len(CALL_START) : call.end - len(CALL_STOP)]) for call in calls]
    return "\n".join(filter(None, around)), [(body["name"], body["arguments"]) for body in bodies]


def _around(text: str, calls: Sequence[Call]) -> Iterator[str]:
    position = 0
    for call in calls:
        yield text[position : call.start].strip()
        position = call.end
    yield text[position:].strip()


def told(
    text: str, tools: Any, *, ended: bool, parser: HermesProtocol, thinking: bool = False
) -> tuple[str | None, list[dict[str, Any]]]:
    """Return the `content` and the `tool_calls` that a client is told of a turn. Thinking stays in `content`.

    Args:
        text: of the turn, without its end token and the client's stop string.
        tools: of the request; without any, nothing is a call.
        ended: the model ended the turn, or a stop string did; a turn that was cut has no calls.
    """
    content, calls = calls_in(text, parser, thinking=thinking) if tools and ended else (text, [])
    if not calls:
        return content, []
    functions = [{"name": name, "arguments": json.dumps(each, ensure_ascii=False)} for name, each in calls]
    return content or None, [
        {"id": f"call_{uuid4().hex[:24]}", "type": "function", "function": function} for function in functions
    ]


def meaning(text: str, parser: HermesProtocol) -> tuple[list[str], list[tuple[str, dict[str, Any]]]]:
    """Return a turn's words and calls, without what a template decides: white space, the form of JSON, an empty block
    of thoughts."""
    content, calls = calls_in(_EMPTY_THOUGHTS.sub(" ", text), parser)
    return content.split(), calls
