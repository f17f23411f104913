"""What a request asks of the gateway, whatever the format of its body: `Asked`, and what the run decides instead."""

from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from verl_ext.gateway.messages import Refused

MAX_STOPS = 16  # strings; the engine looks for each after every token
Body = TypeVar("Body", bound=msgspec.Struct)

# Of a request in either format: the run's decide, and the answer's header IGNORED names those that were sent.
SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "frequency_penalty", "presence_penalty", "repetition_penalty"),
    *("length_penalty", "min_tokens", "ignore_eos", "parallel_tool_calls", "reasoning_effort", "verbosity", "thinking"),
)


@dataclass
class Asked:
    """One request for a turn.

    Attributes:
        messages: as the client wrote them, at least one.
        tools: schemas in OpenAI's form, or None.
        may_call: a call in the turn is told as a call; else as text (`tool_choice: none`).
        stops: strings that end the turn.
        max_tokens: the client's limit; None if it has none.
        log_probs: tell the log-prob of each token.
        stream: answer by events. with_usage: the last event tells the numbers of tokens.
        is_open: the last message is the assistant's, and the turn continues it.
        model: as the client names it, to be repeated in the answer.
        ignored: parameters of the client that the run's replace.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    may_call: bool = True
    stops: list[str] = field(default_factory=list)
    max_tokens: int | None = None
    log_probs: bool = False
    stream: bool = False
    with_usage: bool = False
    is_open: bool = False
    model: str | None = None
    ignored: list[str] = field(default_factory=list)


def decoded(decoder: "msgspec.json.Decoder[Body]", body: bytes) -> Body:
    """Return the body of a request by its schema.

    Raises:
        Refused: it is no JSON, or a value has another type.
    """
    try:
        return decoder.decode(body)
    except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
        raise Refused(f"The body cannot be read: {error}") from None


def checked_stops(stops: str | list[str] | None) -> list[str]:
    """Return the stop strings as a list. Raises Refused if one is empty, or if there are over MAX_STOPS."""
    found = [stops] if isinstance(stops, str) else stops or []
    if len(found) > MAX_STOPS or not all(found):
        raise Refused(f"Expected at most {MAX_STOPS} stop strings, none of them empty; got {len(found)}.")
    return found


def checked_limit(name: str, tokens: int | None) -> int | None:
    """Return a limit on the tokens of a turn. Raises Refused unless it is positive."""
    if tokens is not None and tokens < 1:
        raise Refused(f"Expected {name} of at least 1, got {tokens}.")
    return tokens
