"""The tool protocols by name, as `retool.protocol` (RL) and `data.retool.protocol` (SFT) choose them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from verl_ext.protocols.base import ToolProtocol
from verl_ext.protocols.code import CodeProtocol
from verl_ext.protocols.hermes import HermesProtocol
from verl_ext.protocols.text import TextProtocol

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def make_protocol(
    name: str,
    tokenizer: PreTrainedTokenizerBase | None,
    template_kwargs: Mapping[str, Any],
    *,
    max_parallel_calls: int,
    repair_json: bool = False,
) -> ToolProtocol:
    """Return the protocol "code", "hermes" or "text"; only hermes uses the last two arguments. Without a tokenizer it
    cannot reply.

    Raises:
        ValueError: the name is none of these.
    """
    if name == "code":
        return CodeProtocol(tokenizer, template_kwargs)
    if name == "text":
        return TextProtocol(tokenizer, template_kwargs)
    if name == "hermes":
        return HermesProtocol(
            tokenizer, template_kwargs, max_parallel_calls=max_parallel_calls, repair_json=repair_json
        )
    raise ValueError(f"The tool protocol (retool.protocol) is {name!r}; expected one of code, hermes, text.")
