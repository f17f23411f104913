"""Where the engine stops within a turn of the model, and which of the tokens that it sent belong to the turn."""

from typing import Any, cast

from transformers import PreTrainedTokenizerBase

from verl_ext.protocols.base import ToolProtocol, decoded
from verl_ext.protocols.thinking import THINK_STOP, is_thinking, opens_thinking

MAX_MENTIONS = 32  # of stops, in one turn
_FRAME_TOKENS = 16  # before a turn, in which an opened `<think>` is found


def end_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the id of a chat model's end token, which transformers types as anything."""
    return cast(int, tokenizer.eos_token_id)


class Stops:
    """The stops of a protocol: its own ends a call, except within thinking, where the model continues to write.

    After a draft of a call within thinking, the next stop is the end of the thinking: a draft that repeats a tag does
    not cost a request for each. Nor does a turn that names tags again and again: after MAX_MENTIONS it stops at its
    end, where `length` still finds a call.
    """

    def __init__(self, protocol: ToolProtocol, tokenizer: PreTrainedTokenizerBase):
        self._protocol, self._tokenizer = protocol, tokenizer

    def params(self, stop: str | None) -> dict[str, Any]:
        """Return the sampling parameters that ask the engine to stop after this text.

        If the tag is one token, the engine itself stops there. At a string, vLLM's front end stops the engine, a few
        tokens later. The string is given as well: the model may also sample the tag in pieces.
        """
        if stop is None:
            return {}
        ids = self._tokenizer.encode(stop, add_special_tokens=False)
        by_token = {"stop_token_ids": ids if len(ids) == 1 else []}
        return by_token | {"stop": [stop], "include_stop_str_in_output": True}

    def begins_thinking(self, before: list[int]) -> bool:
        """Return whether the tokens before a turn, from prompt or reply, leave the model within its thinking."""
        return opens_thinking(decoded(self._tokenizer, before[-_FRAME_TOKENS:]))

    def length(self, ids: list[int], text: str, thinking: bool) -> int:
        """Return how many tokens hold the turn up to its call: all, unless the engine missed the stop and continued.

        The engine looks for stop strings within a request. The asynchronous client merges the requests of a turn that
        was aborted and resumed, so only this method sees a stop that was split between them. Tokens after the stop
        were sampled without the tool's answer, and are dropped. A last token may carry characters past the stop.
        """
        end = self._protocol.call_end(text, thinking=thinking)
        if end is None or end == len(text) or not self._has_call(ids[:-1], thinking):
            return len(ids)
        low, high = 1, len(ids) - 1  # smallest number of tokens with the call in their text
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self._has_call(ids[:middle], thinking) else (middle + 1, high)
        return low

    def _has_call(self, ids: list[int], thinking: bool) -> bool:
        return self._protocol.call_end(decoded(self._tokenizer, ids), thinking=thinking) is not None

    def next(self, text: str, sent: str, thinking: bool) -> str | None:
        """Return the next stop of a turn that continues because it stopped where no call ended; None if it is over.

        Args:
            text: the turn so far.
            sent: the part of it that the engine sent last.
            thinking: the turn began within thinking.
        """
        stop = self._protocol.stop
        if stop is None or not (stop in sent or THINK_STOP in sent) or self._protocol.call_end(text, thinking=thinking):
            return None
        if text.count(stop) + text.count(THINK_STOP) > MAX_MENTIONS:
            return decoded(self._tokenizer, [end_id(self._tokenizer)])
        return THINK_STOP if is_thinking(text, thinking) else stop
