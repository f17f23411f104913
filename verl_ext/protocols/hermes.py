"""The hermes protocol: JSON calls between `<tool_call>` tags, several in a turn; tools answer in a turn of their own.

verl's own parser (experimental/agent_loop/tool_parser.py, 0.9.1) drops a call that it cannot read, and the rollout
ends. Here the model is told what was wrong.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from verl_ext.protocols.base import CODE_TOOL, Call, ChatReply, MalformedCall, strip_fence
from verl_ext.protocols.call_json import loads, short, what_is_wrong

CALL_START, CALL_STOP = "<tool_call>", "</tool_call>"
MAX_SURPLUS = 64  # calls of a turn beyond those that are run, which are answered and counted; a model may repeat a tag

_INVALID_ESCAPE = re.compile(r'(\\["\\/bfnrt]|\\u[0-9a-fA-F]{4})|\\')


class HermesProtocol:
    """See `ToolProtocol`.

    Args:
        max_parallel_calls: calls of one turn that are run; further ones are answered as `two_blocks`.
        repair_json: accept raw line breaks and invalid escapes in JSON strings.
    """

    stop = None
    call_ends_turn = True

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        template_kwargs: Mapping[str, Any] | None = None,
        *,
        max_parallel_calls: int = 1,
        repair_json: bool = False,
    ):
        self._tool_turns = ChatReply(tokenizer, "tool", template_kwargs)
        self._max_parallel_calls = max_parallel_calls
        self._repair_json = repair_json

    def schemas(self, tools: Mapping[str, dict]) -> list[dict] | None:
        return list(tools.values()) or None

    def parse(self, text: str, tools: Mapping[str, dict], *, ended: bool) -> list[Call | MalformedCall]:
        if not ended:
            return []
        found: list[Call | MalformedCall] = []
        start, last_stop = text.find(CALL_START), text.rfind(CALL_STOP)
        if start < 0:
            return self._without_call(text)
        limit = self._max_parallel_calls
        while start >= 0 and len(found) < limit + MAX_SURPLUS:
            body_start = start + len(CALL_START)
            stop = text.find(CALL_STOP, body_start) if body_start <= last_stop else -1
            following = text.find(CALL_START, body_start)
            if stop < 0:
                if not (following < 0 and "\\boxed{" in text[start:]):  # a turn that boxes an answer is an answer
                    found.append(_unclosed())
            else:
                try:
                    found.append(self._call(text[body_start:stop], start, tools))
                except MalformedCall as error:
                    open_again = 0 <= following < stop and error.kind == "bad_json"
                    found.append(_unclosed() if open_again else error)
                    if open_again:
                        start = following
                        continue
                following = text.find(CALL_START, stop)
            start = following
        return found[:limit] + [
            MalformedCall("two_blocks", f"more calls in one turn than the {limit} that are run; this one was not run")
            for _ in found[limit:]
        ]

    def reply(self, outputs: Sequence[str], *, ended: bool) -> list[str]:
        return self._tool_turns.render(outputs)

    def write(self, content: str, calls: Sequence[Call]) -> str:
        bodies = [json.dumps({"name": call.tool, "arguments": call.arguments}, ensure_ascii=False) for call in calls]
        return "\n".join([content] * bool(content) + [f"{CALL_START}\n{body}\n{CALL_STOP}" for body in bodies])

    def _without_call(self, text: str) -> list[Call | MalformedCall]:
        if "\\boxed{" in text:
            return []
        if CALL_STOP in text:
            return [MalformedCall("unopened_tag", f"{CALL_STOP} without {CALL_START}")]
        code_start = text.find("<code>")  # a regular expression would take quadratic time where a model repeats a tag
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
            raise MalformedCall("unknown_tool", f"unknown tool {short(name)}; there is {', '.join(sorted(tools))}")
        if not isinstance(arguments, dict):
            raise MalformedCall("missing_argument", f"{form}, got arguments {short(arguments)}")
        parameters = tools[name]["function"].get("parameters") or {}
        if wrong := what_is_wrong(arguments, parameters, name):
            raise MalformedCall(*wrong)
        if name == CODE_TOOL:
            if not isinstance(arguments.get("code"), str):
                raise MalformedCall("missing_argument", f"{name} needs the argument 'code', a string")
            arguments = {**arguments, "code": strip_fence(arguments["code"])}
            if not arguments["code"].strip():
                raise MalformedCall("empty_code", f"{CODE_TOOL} got no code")
        return Call(name, arguments, start, repaired)

    def _repair(self, body: str) -> Any:
        """The JSON of `body` with raw control characters and invalid escapes in strings taken literally, or None."""
        if not self._repair_json or CALL_START in body:  # then an earlier call was left open
            return None
        try:
            return loads(_INVALID_ESCAPE.sub(lambda match: match.group(1) or r"\\", body), strict=False)
        except ValueError:
            return None


def _unclosed() -> MalformedCall:
    return MalformedCall("unclosed_tag", f"{CALL_START} without {CALL_STOP}; nothing was run")
