"""What the two tool protocols share: calls, malformed calls, what a tool says, and the chat template's turns.

A protocol (code.py, hermes.py) says what a call looks like in the model's text, and how it is answered. The agent loop
(RL, evaluation) and the data set (SFT) use the same protocol, so that they cannot drift apart.
"""

from __future__ import annotations  # transformers, which takes 1.3 s, is imported where it is used

import os
import re
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from datetime import date
from functools import lru_cache
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol, cast

from jinja2 import TemplateError

from verl_ext.protocols.thinking import without_thinking

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CODE_TOOL = "code_interpreter"
CODE_SCHEMA = {  # as in the published run, verl-recipe@48ea0a7 retool/sandbox_fusion_tool_config.yaml
    "type": "function",
    "function": {
        "name": CODE_TOOL,
        "description": "A tool for executing code.",
        "parameters": {
            "type": "object",
            "properties": {"code": {"type": "string", "description": "The code to execute."}},
            "required": ["code"],
        },
    },
}
MALFORMED_KINDS = (
    "bad_json",  # not JSON, or not of the form {"name": ..., "arguments": {...}}
    "unknown_tool",
    "missing_argument",  # or an argument whose type or value is not what the schema says
    "unclosed_tag",
    "unopened_tag",
    "empty_code",
    "two_blocks",  # more calls in a turn than are run
    "other_protocol",  # the tags of the protocol that is not in use
)

TEMPLATE_DAY = date(2024, 7, 26)  # the day that a chat template's strftime_now gives; Llama 3's own without a clock
TEMPLATE_ERRORS = (TemplateError, TypeError, ValueError, LookupError, AttributeError)  # templates raise them
_USER, _MODEL, _REPLY = "(text of the user)", "(text of the model)", "(text of reply {})"
ERROR_TOKENS = 128  # an error may have so many, however few an output may have: it says what was wrong and what to do
_CHARS_PER_TOKEN = 16  # that are tokenised per token that is kept of a long text; with longer tokens, fewer are kept
_FENCE = re.compile(r"\A\s*```[a-zA-Z0-9_+-]*\n(.*?)\n?```\s*\Z", re.DOTALL)
_INK = re.compile(r"\S")


class MalformedCall(ValueError):
    """The model's text has a call that cannot be run; the message is written for the model."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"FormatError: {message}")
        self.kind = kind  # one of MALFORMED_KINDS


@dataclass(frozen=True)
class Call:
    """A call that can be run."""

    tool: str
    arguments: dict[str, Any]
    start: int  # where it begins in the turn's text
    repaired: bool = False  # its JSON was not valid, and `retool.repair_json` made it so
    end: int = field(default=0, compare=False)  # where its closing tag ends; 0 in the code protocol


class ToolProtocol(Protocol):
    """One way to write calls. `tools` always maps the names of a sample's tools to their schemas in OpenAI's form."""

    name: str  # in `retool.protocol`
    stop: str | None  # the engine stops a turn after this text; None: at end tokens only
    call_ends_turn: bool  # a turn with a call closes with the end token, and the tool answers in a separate turn

    def prompt(self, messages: Sequence[dict]) -> list[dict]:
        """Return the messages of a prompt as the model should read them."""
        ...

    def schemas(self, tools: Mapping[str, dict]) -> list[dict] | None:
        """Return what the chat template gets as `tools`."""

    def call_end(self, text: str, *, thinking: bool = False) -> int | None:
        """Return where the `stop` that ends this turn ends; None if no stop in its text does.

        Args:
            thinking: the turn begins within thinking (`thinking.opens_thinking`).
        """

    def parse(
        self, text: str, tools: Mapping[str, dict], *, ended: bool, thinking: bool = False
    ) -> list[Call | MalformedCall]:
        """Return the calls of one model turn, in order; none if it is an answer or cut off. Neither thinking nor the
        mention of a tag is a call.

        Args:
            text: the turn, up to `call_end` if it has one.
            ended: its last token is an end token.
            thinking: as in `call_end`.
        """
        ...

    def reply(self, outputs: Sequence[str], *, ended: bool) -> list[str]:
        """Return all text between a turn with calls and the model's next turn, for `SegmentEncoder`.

        Args:
            outputs: one text per item of `parse`.
        Returns:
            The outputs at odd places, and the text that frames them at even ones.
        """
        ...

    def user_reply(self, texts: Sequence[str]) -> list[str]:
        """Return all text between a turn without a call, after its end token, and the model's next turn, if users say
        `texts` there; in the form of `reply`."""
        ...

    def write(self, content: str, calls: Sequence[Call]) -> str:
        """Return the text that a model would write to say `content` and to make `calls`, without the end token."""
        ...


def end_token(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the text of the token that ends a turn; raise ValueError if there is none."""
    if isinstance(token := tokenizer.eos_token, str):
        return token
    raise ValueError("The tokenizer has no end token (`eos_token`), so no turn can end. Use a chat model's tokenizer.")


def decoded(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
    """Return the text of tokens. Only for lists of lists does transformers return a list of texts."""
    return cast(str, tokenizer.decode(cast("list[int]", ids), skip_special_tokens=skip_special_tokens))


def with_fixed_day(tokenizer: PreTrainedTokenizerBase, template_kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return `data.apply_chat_template_kwargs`, with a fixed day for a template that asks for today's date.

    SFT, RL and evaluation run on different days, and a run may pass midnight: their prompts would differ.
    """
    asks = "strftime_now" in str(tokenizer.chat_template)
    return dict(template_kwargs or {}) | ({"strftime_now": TEMPLATE_DAY.strftime} if asks else {})


def render(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    template_kwargs: Mapping[str, Any] | None = None,
    *,
    tools: Sequence[dict] | None = None,
    add_generation_prompt: bool = True,
) -> str:
    """Return the text of a conversation by the chat template.

    Raises:
        ValueError: the template refuses the conversation, as some do without a user's turn or with two in a row.
    """
    apply: Callable[..., Any] = tokenizer.apply_chat_template  # which is annotated for messages of plain text only
    try:
        return apply(
            list(messages),
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            tokenize=False,
            **with_fixed_day(tokenizer, template_kwargs),
        )
    except TEMPLATE_ERRORS as error:
        roles = ", ".join(str(message.get("role")) for message in messages)
        raise ValueError(f"the chat template refuses messages of the roles {roles}: {error or repr(error)}") from error


def checked_kwargs(
    tokenizer: PreTrainedTokenizerBase, template_kwargs: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return `with_fixed_day`, if the template's generation prompt begins the assistant's turn as its conversations do.

    Raises:
        ValueError: it has none, or the template refuses a question with its answer.
    """
    question, answer = {"role": "user", "content": _USER}, {"role": "assistant", "content": _MODEL}
    bare = render(tokenizer, [question], template_kwargs, add_generation_prompt=False)
    whole = render(tokenizer, [question, answer], template_kwargs, add_generation_prompt=False)
    header = without_thinking(whole.partition(_USER)[2].partition(_MODEL)[0]).strip()
    begins = bare.partition(_USER)[2].strip()
    if render(tokenizer, [question], template_kwargs) == bare and header != begins and header.startswith(begins):
        raise ValueError(
            f"The chat template has no generation prompt: after a question it has {begins!r}, before an answer "
            f"{header!r}. A rollout would begin in nobody's turn. Use the template of a chat model."
        )
    return with_fixed_day(tokenizer, template_kwargs)


class ChatReply:
    """What the chat template puts between the end of the model's turn and the start of its next: turns of `role`.

    Taken from the template's own rendering, so that a rollout reads what the template would give.

    Raises:
        ValueError: the template does not close the assistant's turn with the tokenizer's end token, or there is no
            tokenizer: a protocol that only parses needs none.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase | None, role: str, template_kwargs: Mapping[str, Any] | None = None
    ):
        self._tokenizer, self._role, self._kwargs = tokenizer, role, dict(template_kwargs or {})
        self._frames: dict[int, list[str]] = {}  # number of replies -> text before, between and after them

    def render(self, texts: Sequence[str]) -> list[str]:
        """Return all from after the end token of the model's turn to its next turn: frame, text, frame, ..., frame."""
        if len(texts) not in self._frames:
            self._frames[len(texts)] = self._frame(len(texts))
        before, *after = self._frames[len(texts)]
        return [before, *chain.from_iterable(zip(texts, after, strict=True))]

    def _frame(self, count: int) -> list[str]:
        if (tokenizer := self._tokenizer) is None:
            raise ValueError("This protocol was made without a tokenizer, so it can only parse and write turns.")
        calls = [
            {"id": f"call{i}", "type": "function", "function": {"name": "tool", "arguments": {}}} for i in range(count)
        ]
        assistant: dict[str, Any] = {"role": "assistant", "content": _MODEL}
        if self._role == "tool":
            assistant["tool_calls"] = calls
        replies = [{"role": self._role, "content": _REPLY.format(i), "tool_call_id": f"call{i}"} for i in range(count)]
        text = render(tokenizer, [{"role": "user", "content": "?"}, assistant, *replies], self._kwargs)
        _, _, after = text.partition(_MODEL)
        _, end, after = after.partition(end_token(tokenizer))
        if not end:
            raise ValueError(
                f"The chat template does not end the assistant's turn with the tokenizer's end token "
                f"{tokenizer.eos_token!r}: {text!r}. Use a chat model's tokenizer."
            )
        frames = []
        for i in range(count):
            frame, found, after = after.partition(_REPLY.format(i))
            if not found:
                raise ValueError(f"The chat template drops messages with the role {self._role!r}: {text!r}.")
            frames.append(frame)
        return [*frames, after]


class SegmentEncoder:
    """Encodes what stands between two turns of the model, so that a tool's output is text and nothing more.

    A tool may print `<|im_end|>`, `</interpreter>` or another added token of the tokenizer (special or not, but not
    mere white space). In an output, its text is encoded in pieces, like any text. In the frame around the output, which
    the protocol or the chat template wrote, it is encoded as that token. So no output can end its turn or begin
    another.

    Some tags of a protocol are not added tokens, such as `</interpreter>` with Qwen2.5. Then a printed tag looks to the
    model like the real one, because outputs are not escaped. Only the model can be misled by it: the calls, the end and
    the answer of a rollout are read from the model's own tokens.

    Raises:
        ValueError: the tokenizer encodes the text of an added token as that token even in an output.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self._tokenizer = tokenizer
        self._plain_tokenizer, self._added = _plain_tokenizer(tokenizer)

    def encode_output(self, text: str) -> list[int]:
        """Return the tokens of a tool's text by itself."""
        return self._plain_tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)

    def encode(self, parts: Sequence[str]) -> list[int]:
        """Return the tokens of a segment: of `ToolProtocol.reply`, or `[text]` of the model or the prompt."""
        if not any(map(self._has_added_token, parts[1::2])):
            return self._tokenizer.encode("".join(parts), add_special_tokens=False)
        ids: list[int] = []
        for i, part in enumerate(parts):
            ids += self.encode_output(part) if i % 2 else self._tokenizer.encode(part, add_special_tokens=False)
        return ids

    def _has_added_token(self, text: str) -> bool:
        return any(token in text for token in self._added)


@lru_cache(maxsize=8)
def _plain_tokenizer(tokenizer: PreTrainedTokenizerBase) -> tuple[PreTrainedTokenizerBase, list[str]]:
    """Return a copy to encode text with, and the added tokens that it splits: those that are not mere white space.

    It is a copy because `split_special_tokens` is a state that all threads share, and does not split tokens that are
    not special. Copying takes 1 s with a vocabulary of 150,000.
    """
    from transformers import AddedToken

    added = {number: token for number, token in tokenizer.added_tokens_decoder.items() if token.content.strip()}
    copy = deepcopy(tokenizer)
    copy.add_tokens([AddedToken(token.content, special=True) for token in added.values()], special_tokens=True)
    for token in added.values():
        ids = copy.encode(token.content, add_special_tokens=False, split_special_tokens=True)
        if set(ids) & added.keys():
            raise ValueError(
                f"The tokenizer turns the text {token.content!r} into one special token even when it is told to split "
                "it, so a tool's output could forge a turn. Use a byte-level BPE tokenizer."
            )
    return copy, [token.content for token in added.values()]


def strip_fence(code: str) -> str:
    """Return the code as the model wrote it, without one Markdown fence around it."""
    fenced = _FENCE.match(code)
    return fenced.group(1) if fenced else code


def format_output(stdout: str, stderr: str, *, traceback: str = "full") -> str:
    """Return what a tool says: standard output, then standard error.

    Args:
        traceback: "full", or "last_line" for the exception only (short contexts).
    Raises:
        ValueError: unknown `traceback`.
    """
    if traceback not in ("full", "last_line"):
        raise ValueError(f"retool.traceback is {traceback!r}; expected 'full' or 'last_line'.")
    error = stderr.strip()
    if traceback == "last_line" and error:
        error = error.splitlines()[-1]
    return "\n".join(part for part in (stdout.strip(), error) if part) or "(no output)"


def after_blanks(text: str, start: int) -> int:
    """Return where the white space at a place of a text ends."""
    found = _INK.search(text, start)
    return found.start() if found else len(text)


def cut_output(tokenizer: PreTrainedTokenizerBase, text: str, limit: int, encode: Callable[[str], list[int]]) -> str:
    """Return `text` with at most `limit` tokens: its head, a note of how many characters are missing, its tail.

    The note comes on top of `limit`; a text that the cut would not shorten stays whole. A long text is first bounded by
    characters, so that the work does not grow with what a program prints. `encode` is the one for outputs
    (`SegmentEncoder.encode_output`).
    """
    if len(text.encode()) <= limit:  # no text has more tokens than bytes
        return text
    bound = _CHARS_PER_TOKEN * limit
    ids = encode(text[: bound + 1])
    if len(text) <= bound and len(ids) <= limit:
        return text
    tail_ids = ids if len(text) <= bound else encode(text[-bound - 1 :])
    # Cut at whole characters: a token may end within one.
    head = os.path.commonprefix([text, decoded(tokenizer, ids[: limit - limit // 2])])
    tail_text = decoded(tokenizer, tail_ids[len(tail_ids) - limit // 2 :])
    tail = os.path.commonprefix([text[: -len(tail_text) - 1 : -1], tail_text[::-1]])[::-1]
    cut = f"{head}\n[... {len(text) - len(head) - len(tail)} characters cut ...]\n{tail}"
    return cut if len(cut) < len(text) else text


def cut_reply(
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    error: str,
    *,
    limit: int,
    share: int,
    encode: Callable[[str], list[int]],
) -> str:
    """Return `cut_output` to `limit` tokens, except that an error may have `ERROR_TOKENS` if that is more.

    Args:
        error: the end of `text` that says what was wrong: all of a message that no program wrote, "" without an error.
        share: tokens of the response that there is room for; neither the text nor the error gets more.
    """
    limit, most = min(limit, share), min(max(limit, ERROR_TOKENS), share)
    shown = cut_output(tokenizer, text, limit, encode)
    if not error or shown.endswith(error):
        return shown
    shown_error = cut_output(tokenizer, error, most, encode)
    before = text.removesuffix(error).rstrip("\n")
    if not before:
        return shown_error
    return f"{cut_output(tokenizer, before, max(0, limit - len(encode(shown_error))), encode)}\n{shown_error}"
