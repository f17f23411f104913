"""The literal `<code>` / `<interpreter>` protocol of ReTool (arXiv:2504.11536): all in one turn of the assistant."""

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from verl_ext.protocols.base import CODE_TOOL, Call, ChatReply, MalformedCall, strip_fence

CODE_START, CODE_STOP = "<code>", "</code>"


class CodeProtocol:
    """One call a turn, which ends at `</code>`; see `ToolProtocol`."""

    stop = CODE_STOP
    call_ends_turn = False

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template_kwargs: Mapping[str, Any] | None = None):
        self._user_turn = ChatReply(tokenizer, "user", template_kwargs)

    def schemas(self, tools: Mapping[str, dict]) -> None:
        """None: the prompt itself says how to write code."""

    def parse(self, text: str, tools: Mapping[str, dict], *, ended: bool) -> list[Call | MalformedCall]:
        if CODE_STOP not in text:
            start = text.rfind(CODE_START)
            if not ended or "\\boxed{" in text[max(start, 0) :]:
                return []
            if start >= 0:
                return [MalformedCall("unclosed_tag", "<code> without </code>; the code was not run")]
            if "<tool_call>" in text:
                return [MalformedCall("other_protocol", "write code as <code>...</code>, not as <tool_call>")]
            return []
        try:
            code, start = _last_block(text)
        except MalformedCall as error:
            return [error]
        if CODE_TOOL not in tools:
            return [MalformedCall("unknown_tool", "there is no interpreter here; answer without code")]
        return [Call(CODE_TOOL, {"code": code}, start)]

    def reply(self, outputs: Sequence[str], *, ended: bool) -> list[str]:
        """An `<interpreter>` block; after an end token, in a user's turn, as the assistant's is over."""
        (output,) = outputs
        before, after = "\n<interpreter>\n", "\n</interpreter>\n"
        if ended:
            turn_start, _, turn_end = self._user_turn.render([""])
            before, after = turn_start + before.lstrip(), after.rstrip() + turn_end
        return [before, output, after]

    def write(self, content: str, calls: Sequence[Call]) -> str:
        if not calls:
            return content
        if len(calls) > 1:
            raise ValueError(f"the <code> protocol has one call a turn, but there are {len(calls)}")
        if calls[0].tool != CODE_TOOL:
            raise ValueError(f"the <code> protocol calls {CODE_TOOL} only, but there is a call of {calls[0].tool!r}")
        block = f"{CODE_START}\n{calls[0].arguments['code']}\n{CODE_STOP}"
        return f"{content}\n{block}" if content else block


def extract_code(text: str) -> str:
    """The code of the call that `text` ends in, as the model wrote it, less one Markdown fence.

    Args:
        text: one model turn that contains `</code>`.
    Raises:
        MalformedCall: no `<code>` before `</code>`, or nothing between them.
    """
    return _last_block(text)[0]


def _last_block(text: str) -> tuple[str, int]:
    before_stop = text[: text.rindex(CODE_STOP)]
    start = before_stop.rfind(CODE_START)
    if start < 0:
        raise MalformedCall("unopened_tag", "</code> without <code>")
    code = strip_fence(before_stop[start + len(CODE_START) :])
    if not code.strip():
        raise MalformedCall("empty_code", "empty <code></code>")
    return code, start
