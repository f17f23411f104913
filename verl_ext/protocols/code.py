"""The literal `<code>` / `<interpreter>` protocol of ReTool (arXiv:2504.11536): all in one turn of the assistant."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from verl_ext.protocols.base import CODE_TOOL, Call, ChatReply, MalformedCall, strip_fence
from verl_ext.protocols.thinking import THINK_STOP, is_thinking, without_thinking

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CODE_START, CODE_STOP = "<code>", "</code>"
_QUOTES = ("`", '"', "'")
_OWN_LINE = re.compile(r"^[ \t]*(?P<tag><code>)[ \t]*$", re.MULTILINE)
_UNQUOTED, _ANY = re.compile(r"(?<![`\"'])(?P<tag><code>)"), re.compile("(?P<tag><code>)")
_ATTEMPT = re.compile(r"(?<![`\"'])<code>(?=\s*\n|[^\s`\"'.,;:!?)])")  # prose puts a blank or a comma after the tag
_OTHER_CALL = re.compile(r"<tool_call>\s*[\[{]")


class CodeProtocol:
    """One call per turn, which ends at `</code>`; see `ToolProtocol`."""

    name = "code"
    stop: str | None = CODE_STOP
    call_ends_turn = False

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, template_kwargs: Mapping[str, Any] | None = None):
        self.user_reply = ChatReply(tokenizer, "user", template_kwargs).render

    def prompt(self, messages: Sequence[dict]) -> list[dict]:
        return [*messages]

    def schemas(self, tools: Mapping[str, dict]) -> None:
        """Return None: the prompt itself says how to write code."""

    def call_end(self, text: str, *, thinking: bool = False) -> int | None:
        """Return the end of the `</code>` that ends the turn: the first that neither ends a draft within thinking, nor
        is only mentioned, in quotes or backticks. None if there is none: then the model continues.

        A `</code>` within a string of the program ends the program as well: the engine has stopped there, and the text
        does not show whether the model has forgotten a quote.
        """
        block = _first_block(text, thinking)
        return block and block[1]

    def parse(
        self, text: str, tools: Mapping[str, dict], *, ended: bool, thinking: bool = False
    ) -> list[Call | MalformedCall]:
        block = _first_block(text, thinking)
        if block is None:
            return self._without_call(without_thinking(text, thinking)) if ended else []
        start, stop = block
        try:
            code = _code_between(text, start, stop)
        except MalformedCall as error:
            return [error]
        if CODE_TOOL not in tools:
            return [MalformedCall("unknown_tool", "there is no interpreter here; answer without code")]
        return [Call(CODE_TOOL, {"code": code}, start)]

    def _without_call(self, spoken: str) -> list[Call | MalformedCall]:
        opened = list(_ATTEMPT.finditer(spoken))
        if "\\boxed{" in spoken[opened[-1].start() if opened else 0 :]:
            return []
        if opened:
            return [MalformedCall("unclosed_tag", "<code> without </code>; the code was not run")]
        if _OTHER_CALL.search(spoken):
            return [MalformedCall("other_protocol", "write code as <code>...</code>, not as <tool_call>")]
        return []

    def reply(self, outputs: Sequence[str], *, ended: bool) -> list[str]:
        """Return an `<interpreter>` block; after an end token, which ends the assistant's turn, in a user's turn."""
        (output,) = outputs
        before, after = "\n<interpreter>\n", "\n</interpreter>\n"
        if ended:
            turn_start, _, turn_end = self.user_reply([""])
            before, after = turn_start + before.lstrip(), after.rstrip() + turn_end
        return [before, output, after]

    def write(self, content: str, calls: Sequence[Call]) -> str:
        if not calls:
            return content
        if len(calls) > 1:
            raise ValueError(f"the <code> protocol has one call a turn, but there are {len(calls)}")
        if calls[0].tool != CODE_TOOL:
            raise ValueError(
                f"the <code> protocol calls {CODE_TOOL} only, but there is a call of {calls[0].tool!r}. Take the "
                "protocol hermes, as the quickstart's --tools FILE.py does."
            )
        block = f"{CODE_START}\n{calls[0].arguments['code']}\n{CODE_STOP}"
        return f"{content}\n{block}" if content else block


def split_call(text: str) -> tuple[str, str]:
    """Split a turn that ends in a call into the text before the call, and its code without one Markdown fence.

    Args:
        text: one model turn that contains `</code>`.
    Raises:
        MalformedCall: no `<code>` before `</code>`, or nothing between them.
    """
    stop = text.rindex(CODE_STOP)
    start = _opening(text, 0, stop)
    return text[: max(start, 0)], _code_between(text, start, stop + len(CODE_STOP))


def extract_code(text: str) -> str:
    """Return the code of the call that `text` ends in; see `split_call`."""
    return split_call(text)[1]


def _first_block(text: str, thinking: bool) -> tuple[int, int] | None:
    """Return [start, end) of the first block that is a call; the start is -1 if nothing opens it."""
    after = 0
    stop = text.find(CODE_STOP)
    while stop >= 0:
        start = _opening(text, after, stop)
        thinking = is_thinking(text, thinking, after, stop if start < 0 else start)
        before = text[stop - 1 : stop]
        is_mentioned = before in _QUOTES and (start < 0 or text[start - 1 : start] == before)
        if not thinking and not is_mentioned:
            return start, stop + len(CODE_STOP)
        after = stop + len(CODE_STOP)
        stop = text.find(CODE_STOP, after)
    return None


def _opening(text: str, low: int, high: int) -> int:
    """Return where the block that ends at `high` begins, or -1: the last `<code>` on a separate line, else the last
    one that is not in quotes, else the last.

    A program may have the tag in a string, and prose may mention it. A draft in finished thinking opens no block.
    """
    over = text.rfind(THINK_STOP, low, high)
    for start in (low if over < 0 else over, low):
        for pattern in (_OWN_LINE, _UNQUOTED, _ANY):
            if found := list(pattern.finditer(text, start, high)):
                return found[-1].start("tag")
    return -1


def _code_between(text: str, start: int, stop: int) -> str:
    if start < 0:
        raise MalformedCall("unopened_tag", "</code> without <code>")
    code = strip_fence(text[start + len(CODE_START) : stop - len(CODE_STOP)])
    if not code.strip():
        raise MalformedCall("empty_code", "empty <code></code>")
    return code
