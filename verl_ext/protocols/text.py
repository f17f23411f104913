"""The protocol without calls, of text RL (`+tool=none`): what the model writes is its answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from verl_ext.protocols.base import Call, ChatReply
from verl_ext.protocols.instructions import without_tool

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class TextProtocol:
    """See `ToolProtocol`. Whatever the model writes is text; a user may reply to it."""

    name = "text"
    stop: str | None = None
    call_ends_turn = True

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, template_kwargs: Mapping[str, Any] | None = None):
        self.user_reply = ChatReply(tokenizer, "user", template_kwargs).render

    def prompt(self, messages: Sequence[dict]) -> list[dict]:
        """Return the messages with the instructions for a tool replaced in the last one of the user."""
        changed = [dict(message) for message in messages]
        of_user = [each for each in changed if each.get("role") == "user" and isinstance(each.get("content"), str)]
        for message in of_user[-1:]:
            message["content"] = without_tool(message["content"])
        return changed

    def schemas(self, tools: Mapping[str, dict]) -> None:
        """Return None: a prompt shows no tool."""

    def call_end(self, text: str, *, thinking: bool = False) -> None:
        """Return None: only its end token ends a turn."""

    def parse(self, text: str, tools: Mapping[str, dict], *, ended: bool, thinking: bool = False) -> list:
        return []

    def reply(self, outputs: Sequence[str], *, ended: bool) -> list[str]:
        raise ValueError("the protocol text makes no calls, so nothing answers one")

    def write(self, content: str, calls: Sequence[Call]) -> str:
        if calls:
            raise ValueError(
                f"the protocol text makes no calls, but there is one of {calls[0].tool!r}; use traces without calls"
            )
        return content
