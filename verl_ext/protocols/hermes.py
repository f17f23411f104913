"""The hermes protocol: JSON calls between `<tool_call>` tags, several in a turn; tools answer in a separate turn.

verl's own parser (experimental/agent_loop/tool_parser.py, 0.9.1) drops a call that it cannot read, and the rollout
ends. With this one the model reads what was wrong.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from verl_ext.protocols.base import Call, ChatReply, MalformedCall, strip_fence
from verl_ext.protocols.call_json import loads, short, what_is_wrong
from verl_ext.protocols.thinking import TAG, THINK_START, THINK_STOP, end_of_thinking, without_thinking

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CALL_START, CALL_STOP = "<tool_call>", "</tool_call>"
MAX_SURPLUS = 64  # calls of a turn beyond those that are run, which are answered and counted; a model may repeat a tag

_TAG = re.compile(
    TAG + r"|<tool_call>(?P<json>\s*(?:[\[{]|```))"  # also in quotes: a mere mention has no JSON
    r"|(?<![`\"'])<tool_call>(?P<line>[ \t]*\n)?"
)
_UNOPENED = re.compile(r"(?:\A|[\])}]\s*|\n[ \t]*|[^\s`\"'])</tool_call>")  # a mention in prose follows a blank
_STRING_OR_TAG = re.compile(r'"(?:[^"\\]|\\.)*+(?:"|\Z)|</?tool_call>', re.DOTALL)
_INVALID_ESCAPE = re.compile(r'(\\["\\/bfnrt]|\\u[0-9a-fA-F]{4})|\\')


class HermesProtocol:
    """See `ToolProtocol`.

    Args:
        max_parallel_calls: calls of one turn that are run; further ones are answered as `two_blocks`.
        repair_json: accept raw line breaks and invalid escapes in JSON strings.
    """

    name = "hermes"
    stop: str | None = None
    call_ends_turn = True

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | None,
        template_kwargs: Mapping[str, Any] | None = None,
        *,
        max_parallel_calls: int = 1,
        repair_json: bool = False,
    ):
        self._tool_turns = ChatReply(tokenizer, "tool", template_kwargs)
        self.user_reply = ChatReply(tokenizer, "user", template_kwargs).render
        self._max_parallel_calls = max_parallel_calls
        self._repair_json = repair_json

    def prompt(self, messages: Sequence[dict]) -> list[dict]:
        return [*messages]

    def schemas(self, tools: Mapping[str, dict]) -> list[dict] | None:
        return list(tools.values()) or None

    def call_end(self, text: str, *, thinking: bool = False) -> None:
        """Return None: only its end token ends a turn."""

    def parse(
        self, text: str, tools: Mapping[str, dict], *, ended: bool, thinking: bool = False
    ) -> list[Call | MalformedCall]:
        if not ended:
            return []
        found: list[Call | MalformedCall] = []
        mentions: list[Call | MalformedCall] = []  # tags without JSON: prose about a call, if there is another call
        limit, position, last_box = self._max_parallel_calls, 0, text.rfind("\\boxed{")
        if thinking:
            position = end_of_thinking(text)
        while len(found) + len(mentions) < limit + MAX_SURPLUS and (tag := _TAG.search(text, position)):
            position = tag.end()
            if tag[0] == THINK_START:
                position = end_of_thinking(text, position)
            elif tag[0] == THINK_STOP:  # the prompt opened it: all before it was thinking
                found, mentions = [], []
            else:
                item, position = self._read(text, tag, tools, last_box)
                if item is not None:
                    (found if tag["json"] is not None else mentions).append(item)
        if not found and not mentions:
            return self._without_call(without_thinking(text, thinking))
        found = found or mentions
        return found[:limit] + [
            MalformedCall("two_blocks", f"more calls in one turn than the {limit} that are run; this one was not run")
            for _ in found[limit:]
        ]

    def _read(
        self, text: str, tag: re.Match[str], tools: Mapping[str, dict], last_box: int
    ) -> tuple[Call | MalformedCall | None, int]:
        """Return the call that a `<tool_call>` opens, None if prose only mentions the tag, and where to read on."""
        start, body_start = tag.start(), tag.start() + len(CALL_START)
        is_json = tag["json"] is not None
        following = text.find(CALL_START, body_start)
        stop = text.find(CALL_STOP, body_start, following if following >= 0 and not is_json else len(text))
        is_answer = last_box >= start  # the turn boxes an answer after the tag, if this is not a call
        if stop < 0:
            is_told = is_json or (tag["line"] is not None and following < 0)
            is_told = is_told and not (following < 0 and is_answer)
            return _unclosed() if is_told else None, len(text) if following < 0 else following
        for end in dict.fromkeys((_end_of_json(text, body_start) if is_json else None, stop)):
            if end is None:
                continue
            try:
                call = self._call(text[body_start:end], start, tools)
                return replace(call, end=end + len(CALL_STOP)), end + len(CALL_STOP)
            except MalformedCall as error:
                refused = error
                if error.kind != "bad_json":  # it is JSON, up to this end
                    return refused, end + len(CALL_STOP)
        if 0 <= following < stop:  # opened again before it is closed
            return _unclosed(), following
        return refused if is_json or not is_answer else None, stop + len(CALL_STOP)

    def reply(self, outputs: Sequence[str], *, ended: bool) -> list[str]:
        return self._tool_turns.render(outputs)

    def write(self, content: str, calls: Sequence[Call]) -> str:
        bodies = [json.dumps({"name": call.tool, "arguments": call.arguments}, ensure_ascii=False) for call in calls]
        return "\n".join([content] * bool(content) + [f"{CALL_START}\n{body}\n{CALL_STOP}" for body in bodies])

    def _without_call(self, text: str) -> list[Call | MalformedCall]:
        if "\\boxed{" in text:
            return []
        if _UNOPENED.search(text):
            return [MalformedCall("unopened_tag", f"{CALL_STOP} without {CALL_START}")]
        code_start = text.find("<code>")  # a regular expression would take quadratic time if a model repeats a tag
        if 0 <= code_start < text.rfind("</code>"):
            return [MalformedCall("other_protocol", f"write calls as JSON between {CALL_START} and {CALL_STOP}")]
        return []

    def _call(self, body: str, start: int, tools: Mapping[str, dict]) -> Call:
        form = 'expected {"name": <tool>, "arguments": {...}}'
        repaired = False
        try:
            call = loads(body)
        except ValueError as error:
            call, repaired = self._repair(body), True
            if call is None:
                raise MalformedCall(
                    "bad_json",
                    f'the call is not valid JSON: {error}. Inside a string write a line break as \\n, a quote as \\" '
                    "and a backslash as \\\\",
                ) from None
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            raise MalformedCall("bad_json", f"{form}, got {short(call)}")
        name, arguments = call["name"], call.get("arguments")
        if name not in tools:
            raise MalformedCall("unknown_tool", f"unknown tool {short(name)}; the tools are {', '.join(sorted(tools))}")
        if not isinstance(arguments, dict):
            raise MalformedCall("missing_argument", f"{form}, got arguments {short(arguments)}")
        parameters = tools[name]["function"].get("parameters") or {}
        if wrong := what_is_wrong(arguments, parameters, name):
            raise MalformedCall(*wrong)
        if isinstance(arguments.get("code"), str):
            arguments = {**arguments, "code": strip_fence(arguments["code"])}
            if not arguments["code"].strip():
                raise MalformedCall("empty_code", f"{name} got no code")
        return Call(name, arguments, start, repaired)

    def _repair(self, body: str) -> Any:
        """Return the JSON of `body`, with raw control characters and invalid escapes taken literally, or None."""
        if not self._repair_json:
            return None
        try:
            return loads(_INVALID_ESCAPE.sub(lambda match: match.group(1) or r"\\", body), strict=False)
        except ValueError:
            return None


def _end_of_json(text: str, start: int) -> int | None:
    """Return where the first `</tool_call>` outside of JSON strings begins; None if a call opens first or none ends."""
    for token in _STRING_OR_TAG.finditer(text, start):
        if token[0] in (CALL_START, CALL_STOP):
            return token.start() if token[0] == CALL_STOP else None
    return None


def _unclosed() -> MalformedCall:
    return MalformedCall("unclosed_tag", f"{CALL_START} without {CALL_STOP}; nothing was run")
