"""Measure how long an RL prompt is, as a rollout renders it: for the doctor, and for the start of a run."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from verl_ext.protocols.base import render
from verl_ext.protocols.by_name import make_protocol

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Messages = Sequence[dict[str, Any]]


def prompt_length(
    tokenizer: "PreTrainedTokenizerBase", schemas: list[dict] | None, template_kwargs: Mapping[str, Any], limit: int
) -> Callable[[Messages], int]:
    """Return a function that counts the tokens of a prompt, or returns 0 if its bytes show that it is within `limit`.

    Both raise ValueError if the chat template refuses the messages.

    Args:
        schemas: the tools' schemas, as the chat template gets them.
    """

    empty = render(tokenizer, [{"role": "user", "content": ""}], template_kwargs, tools=schemas)
    room = limit - len(empty.encode())  # bytes: no text has more tokens than bytes

    def length(messages: Messages) -> int:
        if len(messages) == 1 and messages[0]["role"] == "user" and len(messages[0]["content"].encode()) <= room:
            return 0
        text = render(tokenizer, messages, template_kwargs, tools=schemas)
        return len(tokenizer.encode(text, add_special_tokens=False))

    return length


class PromptLengths:
    """The length of a row's prompt, by the agent loop, the domain and the tools that the row names; see
    `prompt_length`.

    Args:
        loops: agent loop -> its tool protocol, "" for the domain's; verl's own loops, which show all tools of the
            run's files, are not among them or have None.
        default_loop: used for a row that names none.
        shown: `data_source` -> protocol and tools, name -> schema, of its rollouts; None: of rows of no domain.
        of_files: tools of the run's files, name -> schema.
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        loops: Mapping[str, str | None],
        default_loop: str,
        shown: Mapping[str | None, tuple[str, Mapping[str, dict]]],
        of_files: Mapping[str, dict],
        template_kwargs: Mapping[str, Any],
        limit: int,
    ):
        self._loops, self._default, self._shown, self._of_files = loops, default_loop, shown, of_files
        self._tokenizer, self._kwargs, self._limit = tokenizer, template_kwargs, limit
        self._counter = functools.cache(self._make_counter)

    def __call__(self, messages: Messages, row: Mapping[str, Any]) -> int:
        selection = (row.get("extra_info") or {}).get("tool_selection")
        names = None if selection is None or len(selection) == 0 else tuple(selection)
        source = row.get("data_source")
        loop = self._loops.get(row.get("agent_name") or self._default)
        return self._counter(loop, source if source in self._shown else None, names)(messages)

    def _make_counter(
        self, loop: str | None, source: str | None, names: tuple[str, ...] | None
    ) -> Callable[[Messages], int]:
        shown: list[dict] | None = list(self._of_files.values()) or None
        if loop is not None:
            protocol, tools = self._shown[source]
            chosen = {name: each for name, each in tools.items() if names is None or name in names}
            protocol = make_protocol(loop or protocol, self._tokenizer, self._kwargs, max_parallel_calls=1)
            shown = protocol.schemas(chosen)
            count = prompt_length(self._tokenizer, shown, self._kwargs, self._limit)
            return lambda messages: count(protocol.prompt(messages))
        return prompt_length(self._tokenizer, shown, self._kwargs, self._limit)
