"""What the agent loop (loop.py) keeps of one response while it grows."""

from dataclasses import dataclass, field
from typing import Any

from verl_ext.rollout.tool_use import ToolUse
from verl_ext.rollout.weight_versions import Span


@dataclass
class Rollout:
    """The tokens of one response and what became of them. `ids`, `mask` and `log_probs` always have the same length."""

    limit: int  # tokens of the response
    ids: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    spans: list[tuple[int, int]] = field(default_factory=list)  # [start, end) of each turn of the model
    use: ToolUse = field(default_factory=ToolUse)
    turns: list[dict[str, Any]] = field(default_factory=list)  # for the records
    tool_rewards: list[float] = field(default_factory=list)
    version_spans: list[Span] = field(default_factory=list)  # see rollout/weight_versions.py
    lost_servers: list[str] = field(default_factory=list)  # they died during a request, which continued elsewhere
    from_server: dict[str, Any] = field(default_factory=dict)  # what else the server sent with the newest turn
    requests: int = 0
    stop: str | None = None  # at which the engine stops the next request
    is_turn_open: bool = False  # the newest turn continues with the next request
    begins_thinking: bool = False  # the newest turn began within the thinking that prompt or reply opened

    @property
    def room(self) -> int:
        return self.limit - len(self.ids)

    @property
    def turn_start(self) -> int:
        """Return the index at which the turn that the model's next tokens belong to begins."""
        return self.spans[-1][0] if self.is_turn_open else len(self.ids)

    def add_to_turn(self, ids: list[int], log_probs: list[float], note: dict[str, Any]) -> None:
        """Append what a request brought; `note` is the turn's entry in the records, text and tokens of all of it."""
        if self.is_turn_open:
            seconds = self.turns[-1]["generate_s"] + note["generate_s"]
            self.turns[-1] |= note | {"started_s": self.turns[-1]["started_s"], "generate_s": seconds}
        else:
            self.turns.append(note)
        self.spans[len(self.spans) - self.is_turn_open :] = [(self.turn_start, len(self.ids) + len(ids))]
        self.ids += ids
        self.mask += [1] * len(ids)
        self.log_probs += log_probs

    def add_reply(self, ids: list[int], text: str = "") -> None:
        if self.turns:
            self.turns[-1]["reply"] = {"text": text, "tokens": len(ids), "start": len(self.ids)}
        self.ids += ids
        self.mask += [0] * len(ids)
        self.log_probs += [0.0] * len(ids)
