"""How long a prompt of RL is, as a rollout renders it: for the doctor, and for the start of a run."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from verl_ext.protocols.base import render

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Messages = Sequence[Mapping[str, Any]]


def prompt_length(
    tokenizer: "PreTrainedTokenizerBase", schemas: list[dict] | None, template_kwargs: Mapping[str, Any], limit: int
) -> Callable[[Messages], int]:
    """A function that counts the tokens of a prompt, or says 0 if its bytes show that they are within `limit`.

    Both raise ValueError if the chat template refuses the messages.

    Args:
        schemas: of the tools, as the run's protocol shows them to the chat template.
    """

    empty = render(tokenizer, [{"role": "user", "content": ""}], template_kwargs, tools=schemas)
    room = limit - len(empty.encode())  # bytes: no text has more tokens than bytes

    def length(messages: Messages) -> int:
        if len(messages) == 1 and messages[0]["role"] == "user" and len(messages[0]["content"].encode()) <= room:
            return 0
        text = render(tokenizer, messages, template_kwargs, tools=schemas)
        return len(tokenizer.encode(text, add_special_tokens=False))

    return length
