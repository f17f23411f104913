"""What the agent loops keep of an episode while it grows: loop.py its one response, all of them the counts of calls."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from verl_ext.episode import Episode, EpisodeKey, Reply, TokenRow, ToolUse, Turn
from verl_ext.protocols.base import Call


@dataclass
class CallCounts:
    """Counts the calls of an episode, in their order."""

    use: ToolUse
    _last_failed: bool = False  # the newest call was malformed, or did not end well

    def add(self, call: Call, error: str | None) -> None:
        """Count one call that was run; `error` is None if it ended well."""
        use = self.use
        use.tools.setdefault(call.tool, [0, 0])[error is not None] += 1
        if error is None:
            use.ok += 1
            use.fixed += self._last_failed
        else:
            use.errors[error] += 1
        self._last_failed = error is not None
        use.json_repairs += call.repaired
        code: Any = call.arguments.get("code")
        if isinstance(code, str):
            use.code_lines += sum(bool(line.strip()) for line in code.splitlines())

    def pass_malformed(self) -> None:
        """Note that a malformed call comes next in the order of the calls."""
        self._last_failed = True


@dataclass
class Rollout:
    """An episode of one row while it grows, and what the next request depends on."""

    key: EpisodeKey
    prompt_ids: list[int]
    limit: int  # tokens of the response
    stop: str | None = None  # at which the engine stops the next request
    requests: int = 0
    is_turn_open: bool = False  # the newest turn continues with the next request
    begins_thinking: bool = False  # the newest turn began within the thinking that prompt or reply opened
    use: ToolUse = field(init=False, default_factory=ToolUse)
    episode: Episode = field(init=False)
    counts: CallCounts = field(init=False)

    def __post_init__(self) -> None:
        self.episode = Episode(self.key, rows=[TokenRow(self.prompt_ids)], use=self.use)
        self.counts = CallCounts(self.use)

    @property
    def row(self) -> TokenRow:
        return self.episode.row

    @property
    def room(self) -> int:
        return self.limit - len(self.row.ids)

    @property
    def turn_start(self) -> int:
        """Return the index at which the turn that the model's next tokens belong to begins."""
        return self.row.model_spans[-1][0] if self.is_turn_open else len(self.row.ids)

    def add_to_turn(self, ids: list[int], log_probs: list[float], turn: Turn) -> None:
        """Append what a request brought; `turn` has the text and the tokens of all of the turn."""
        row, turns = self.row, self.episode.turns
        if self.is_turn_open:
            before = turns.pop()
            turn = replace(turn, started_s=before.started_s, generate_s=before.generate_s + turn.generate_s)
        turns.append(turn)
        row.model_spans[len(row.model_spans) - self.is_turn_open :] = [(self.turn_start, len(row.ids) + len(ids))]
        row.add(ids, 1, log_probs)

    def add_reply(
        self, ids: list[int], text: str = "", shown: Sequence[str] = (), role: Literal["tool", "user"] = "tool"
    ) -> None:
        if self.episode.turns:
            self.episode.turns[-1].reply = Reply(text, len(ids), len(self.row.ids), list(shown), role)
        self.row.add(ids, 0, [0.0] * len(ids))
