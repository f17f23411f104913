"""The tokens of a conversation by the chat template: of a whole prompt, and of what stands between two turns.

What a message says is text, and nothing else: a special token's text in it is encoded in pieces (SegmentEncoder). In
the output of a tool, this holds for every added token, as in the built-in loop.
"""

from __future__ import annotations  # transformers, which takes 1.3 s, is imported by who made the tokenizer

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from verl_ext.gateway.messages import Message, Refused, meaning
from verl_ext.protocols.base import SegmentEncoder, after_blanks, checked_kwargs, decoded, render
from verl_ext.protocols.hermes import HermesProtocol

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_CALLS = 64  # of a turn; one with more is told as text, whatever the model repeats
_MARK, _MARK_END = "\ue000", "\ue001"  # around the number of a token's text while the template renders
_MARKS = re.compile(f"{_MARK}(\\d+){_MARK_END}")


@dataclass(frozen=True)
class Frame:
    """What a conversation's rendering is before a turn. The text itself, as long as the conversation, is not kept."""

    length: int  # characters, without `tail`
    digest: bytes
    tail: str  # as long as a generation prompt


class Template:
    """The chat template of a policy.

    A rendering is a list of texts for `SegmentEncoder`: the texts of special tokens that messages have are at its odd
    places.

    Args:
        tokenizer: the policy's.
        template_kwargs: `data.apply_chat_template_kwargs`.
    Raises:
        ValueError: the template has no generation prompt, or the tokenizer cannot encode a special token as text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template_kwargs: Mapping[str, Any] | None = None):
        self.tokenizer = tokenizer
        self._kwargs = checked_kwargs(tokenizer, template_kwargs)
        self._encoder = SegmentEncoder(tokenizer)
        self.parser = HermesProtocol(tokenizer, self._kwargs, max_parallel_calls=MAX_CALLS)
        self._end_ids = {*tokenizer.all_special_ids}
        self.special_ids = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        added = [token for token in tokenizer.added_tokens_decoder.values() if token.content.strip()]
        # An author's prompt, or an answer that comes back, names tags such as <tool_call> as the model writes them.
        self._special = _one_of(token.content for token in added if token.special)
        self._added = _one_of(token.content for token in added)
        bare, prompt = (
            "".join(self.rendered([{"role": "user", "content": "?"}], None, prompt=p)) for p in (False, True)
        )
        self._prompt_length = len(prompt) - len(bare) if prompt.startswith(bare) else 0  # of a generation prompt

    def rendered(self, messages: Sequence[Message], tools: Any, *, prompt: bool = True) -> list[str]:
        """Return the rendering of messages, which are `normal`.

        Args:
            prompt: with the generation prompt.
        Raises:
            Refused: the template refuses the messages.
        """
        texts: list[str] = []
        marked = [
            self._marked(each, self._added if each["role"] == "tool" else self._special, texts) for each in messages
        ]
        tools = tools and self._marked(tools, self._special, texts)
        try:
            text = render(self.tokenizer, marked, self._kwargs, tools=tools, add_generation_prompt=prompt)
        except ValueError as error:
            raise Refused(str(error)) from error
        text = _encodable(text)
        parts = _MARKS.split(text) if texts else [text]
        parts[1::2] = [texts[int(number)] for number in parts[1::2]]
        return parts

    def opened(self, parts: Sequence[str], text: str) -> list[str]:
        """Return a rendering whose last turn, the model's, begins with this text."""
        first, *more = self._special.split(_encodable(text))
        return [*parts[:-1], parts[-1] + first, *more]

    def _marked(self, value: Any, pattern: re.Pattern[str], texts: list[str]) -> Any:
        """Return a value of JSON with each match of the pattern, which is added to `texts`, as a mark."""
        if isinstance(value, str):
            return pattern.sub(lambda match: _mark(match[0], texts), value) if pattern.search(value) else value
        if isinstance(value, Mapping):
            return {name: self._marked(each, pattern, texts) for name, each in value.items()}
        return [self._marked(each, pattern, texts) for each in value] if isinstance(value, list) else value

    def encode(self, parts: Sequence[str]) -> list[int]:
        """Return the tokens of a rendering."""
        return self._encoder.encode(parts)

    def decode(self, ids: Sequence[int]) -> str:
        return decoded(self.tokenizer, ids)

    def split_end(self, ids: Sequence[int], *, is_full: bool) -> tuple[str, str]:
        """Return the text of a turn's end token, "" if it has none, and the text before it.

        Args:
            is_full: the turn has as many tokens as the servers were asked for. If it has fewer, a special token at its
                end has ended it: not every end token of generation_config.json has a name in the tokenizer.
        """
        if ids[-1] in self._end_ids or (not is_full and ids[-1] in self.special_ids):
            return self.decode(ids[-1:]), self.decode(ids[:-1])
        return "", self.decode(ids)

    def frame(self, parts: Sequence[str]) -> Frame:
        """Return what `delta` needs to know of the rendering before a turn."""
        text = "".join(parts)
        length = len(text) - self._prompt_length
        return Frame(length, _digest(text[:length]), text[length:])

    def delta(self, parts: Sequence[str], frame: Frame, turn: str, end: str) -> list[int] | None:
        """Return the tokens between a turn's last token and the next turn.

        The template decides how it shows the turn, and what was before it. If that is not what the model read and
        wrote, tokens after the turn would continue another conversation. White space, the form of JSON and an empty
        `<think></think>` within the turn do not count, because the model's own tokens stay.

        Args:
            parts: the rendering of a conversation that contains the turn.
            frame: of the rendering that the turn was written after.
            turn: the turn's text, as the client was told.
            end: the text of the end token that the model wrote, "" if the turn was cut or stopped.
        Returns:
            None if the template shows the turn, or what was before it, in another way.
        """
        text = "".join(parts)
        if _digest(text[: frame.length]) != frame.digest:
            return None
        ends = [each for each in dict.fromkeys((end, str(self.tokenizer.eos_token or ""))) if each]
        position = self._end_of_turn(text, frame, turn, ends)
        if position is None:
            return None
        end_length = next(len(each) for each in ends if text.startswith(each, position))
        return self.encode(_after(parts, position + (end_length if end else 0)))

    def _end_of_turn(self, text: str, frame: Frame, turn: str, ends: Sequence[str]) -> int | None:
        """Return where one of the end tokens ends the turn."""
        written = frame.tail + turn
        if text.startswith(written, frame.length):  # as it was written, whatever it says
            position = after_blanks(text, frame.length + len(written))
            if text.startswith(tuple(ends), position):
                return position
        for end in ends:
            position = frame.length
            for _ in range(written.count(end) + 1):  # the turn may have the end token's text
                position = text.find(end, position)
                if position < 0:
                    break
                shown = text[frame.length : position]
                same = len(frame.tail) if shown.startswith(frame.tail) else 0
                if meaning(shown[same:], self.parser) == meaning(written[same:], self.parser):
                    return position
                position += len(end)
        return None


def _one_of(texts: Any) -> re.Pattern[str]:
    longest_first = sorted({*texts}, key=len, reverse=True)
    return re.compile("(" + "|".join(map(re.escape, [*longest_first, _MARK])) + ")")


def _mark(text: str, texts: list[str]) -> str:
    texts.append(text)
    return f"{_MARK}{len(texts) - 1}{_MARK_END}"


def _encodable(text: str) -> str:
    """Return `text` with lone surrogates spelt out; JSON may have them."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def _after(parts: Sequence[str], position: int) -> list[str]:
    """Return what follows the first `position` characters of a rendering, as a rendering."""
    for i, part in enumerate(parts):
        if position <= len(part):
            return [""] * (i % 2) + [part[position:], *parts[i + 1 :]]
        position -= len(part)
    return [""]
