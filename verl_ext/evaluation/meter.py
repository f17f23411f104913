"""What samples use of a model, and when it is enough."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from verl_ext.usage import USAGE, Usage


@dataclass
class Meter:
    """Counts requests and tokens of samples: a chat endpoint's own numbers, else the tokens that the model wrote.

    Attributes:
        max_tokens, max_requests: once so many are used, also by earlier starts, no sample is begun; None: no limit.
        price: of a million tokens of prompt and of response, in any currency; None shows no cost.
        used: by all samples so far.
    """

    max_tokens: int | None = None
    max_requests: int | None = None
    price: tuple[float, float] | None = None
    used: Usage = field(default_factory=Usage)

    def add(self, row: Mapping[str, Any]) -> None:
        """Count a sample, given as a row of the records. One that failed counts only if the endpoint answered it."""
        if told := json.loads(row["sampling"] or "{}").get(USAGE):
            self.used += Usage(**told)
        else:
            turns = [turn for turn in row["turns"] or () if turn["role"] == "model"]
            self.used += Usage(len(turns), 0, sum(turn["tokens"] for turn in turns))

    @property
    def is_spent(self) -> bool:
        """Return whether no further sample may begin."""
        tokens = self.used.prompt_tokens + self.used.completion_tokens
        limits = ((tokens, self.max_tokens), (self.used.requests, self.max_requests))
        return any(limit is not None and used >= limit for used, limit in limits)

    def cost(self) -> float | None:
        """Return what the tokens cost so far; None without a price."""
        if self.price is None:
            return None
        counts = self.used.prompt_tokens, self.used.completion_tokens
        return sum(count * price for count, price in zip(counts, self.price, strict=True)) / 1e6

    def shown(self) -> dict[str, str]:
        """Return what a progress bar shows: nothing unless someone limits or pays it."""
        if self.max_tokens is None and self.max_requests is None and self.price is None:
            return {}
        cost = self.cost()
        tokens = self.used.prompt_tokens + self.used.completion_tokens
        shown = {"requests": f"{self.used.requests:,}", "tokens": f"{tokens:,}"}
        return shown | ({"cost": f"{cost:.2f}"} if cost is not None else {})

    def summary(self) -> str:
        """Return what was used, in words; only an endpoint counts the tokens of prompts."""
        used, cost = self.used, self.cost()
        prompts = f"{used.prompt_tokens:,} of prompts, " if used.prompt_tokens else ""
        tokens = f"tokens: {prompts}{used.completion_tokens:,} of responses"
        paid = f"; cost {cost:.2f}" if cost is not None else ""
        return f"{used.requests:,} requests; {tokens}{paid}; {used.refusals:,} refusals"
