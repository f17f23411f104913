"""How a rollout used its tools, in numbers: `ToolUse` of one rollout, `tool_metrics` over the rollouts of a step.

The agent loop leaves `ToolUse.as_dict()` in `extra_fields["tool_use"]`; the sampler (verl_ext/trainer/sampler.py) makes
metrics of it, in every trainer mode.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from verl_ext.outcome import RolloutEnd, rollout_end
from verl_ext.protocols.base import CODE_TOOL, Call

TIME_METRICS = {"tool/time_share", "tool/seconds", "tool/queue_s", "tool/run_s"}  # of `tool_metrics`, from a clock
# verl's MetricsAggregator takes the largest value instead of the mean if a metric has "max" in its name.
_METRIC_NAMES = {RolloutEnd.MAX_TURNS: "turn_limit", RolloutEnd.MAX_TOKENS: "token_limit"}


@dataclass
class ToolUse:
    """Counts and seconds of one rollout."""

    ok: int = 0  # calls that ended well
    errors: Counter = field(default_factory=Counter)  # calls that did not, by `error_kind`
    malformed: Counter = field(default_factory=Counter)  # by MALFORMED_KINDS
    fixed: int = 0  # failed or malformed calls whose next call ended well
    json_repairs: int = 0  # calls that `retool.repair_json` made readable
    outputs_cut: int = 0
    void_turns: int = 0  # turns of the model with neither a call that can be run nor a boxed answer (arXiv:2509.02479)
    code_lines: int = 0  # not blank, of all calls
    first_call_token: int | None = None  # position in the response, estimated within its turn by characters
    generate_s: float = 0.0  # waited for the model
    tool_s: float = 0.0  # waited for tools, which splits into queue_s, run_s and the way there and back
    queue_s: float = 0.0  # includes the attempts that failed because of the infrastructure
    run_s: float = 0.0
    _last_failed: bool = False

    def add_call(self, call: Call, error: str | None) -> None:
        """Count one call that was run; `error` is None if it ended well."""
        if error is None:
            self.ok += 1
            self.fixed += self._last_failed
        else:
            self.errors[error] += 1
        self._last_failed = error is not None
        self.json_repairs += call.repaired
        if call.tool == CODE_TOOL:
            self.code_lines += sum(bool(line.strip()) for line in call.arguments["code"].splitlines())

    def add_malformed(self, kind: str) -> None:
        """Count one call that could not be run; `pass_malformed` says where it stands among the others."""
        self.malformed[kind] += 1

    def pass_malformed(self) -> None:
        """Note that a malformed call comes next in the order of the calls."""
        self._last_failed = True

    @property
    def calls(self) -> int:
        return self.ok + self.errors.total()

    def as_dict(self) -> dict[str, Any]:
        numbers = {name: value for name, value in vars(self).items() if name != "_last_failed"}
        return numbers | {"errors": dict(self.errors), "malformed": dict(self.malformed)}


def tool_metrics(rollouts: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return metrics over rollouts: those that the figures of ReTool (arXiv:2504.11536) show, and more; 0 for no cases.

    Args:
        rollouts: `extra_fields` of each, with `reward_extra_info`, `tool_use` and `model_spans`.
    """
    if not rollouts:
        return {}
    uses = [rollout["tool_use"] for rollout in rollouts]
    infos = [rollout["reward_extra_info"] for rollout in rollouts]
    calls = np.array([use["ok"] + sum(use["errors"].values()) for use in uses])
    right = np.array([info["acc"] > 0 for info in infos])
    ok = np.array([use["ok"] for use in uses])
    errors, malformed = (sum((Counter(use[name]) for use in uses), Counter()) for name in ("errors", "malformed"))
    num_calls, num_failed = int(calls.sum()), errors.total() + malformed.total()
    generate_s, tool_s = _sum(uses, "generate_s"), _sum(uses, "tool_s")
    positions = [
        use["first_call_token"] / rollout["model_spans"][-1][1]
        for use, rollout in zip(uses, rollouts, strict=True)
        if use["first_call_token"] is not None
    ]
    turns = [end - start for rollout in rollouts for start, end in rollout["model_spans"]]
    blocks = [
        begin - end
        for rollout in rollouts
        for (_, end), (begin, _) in zip(rollout["model_spans"], rollout["model_spans"][1:], strict=False)
    ]
    ends = Counter(map(rollout_end, infos))
    metrics = {
        "tool/code_ratio": float(np.mean(calls > 0)),
        "tool/calls": float(calls.mean()),
        "tool/ok_rate": _ratio(ok.sum(), num_calls),
        "tool/ok_rate/right": _ratio(ok[right].sum(), calls[right].sum()),  # in rollouts with the right answer
        "tool/ok_rate/wrong": _ratio(ok[~right].sum(), calls[~right].sum()),
        "tool/error_rate": _ratio(errors.total(), num_calls),
        "tool/timeout_rate": _ratio(errors["timeout"], num_calls),
        "tool/malformed_rate": _ratio(malformed.total(), num_calls + malformed.total()),
        "tool/fixed_rate": _ratio(_sum(uses, "fixed"), num_failed),  # self-correction: the next call ended well
        "tool/first_call_position": float(np.mean(positions)) if positions else 0.0,  # share of the response before it
        "tool/time_share": _ratio(tool_s, tool_s + generate_s),  # of a rollout's time
        "tool/seconds": _ratio(tool_s, num_calls),  # a call: waiting, running, the way there and back
        "turn/model_tokens": float(np.mean(turns)),
        "turn/tool_tokens": float(np.mean(blocks)) if blocks else 0.0,
        "turn/void_rate": float(np.mean([use["void_turns"] > 0 for use in uses])),  # rollouts with a void turn
    }
    per_call = ("code_lines", "json_repairs", "outputs_cut", "queue_s", "run_s")
    metrics |= {f"tool/{name}": _ratio(_sum(uses, name), num_calls) for name in per_call}
    metrics |= {f"tool/error/{kind}": count / num_calls for kind, count in errors.items()}
    metrics |= {f"tool/malformed/{kind}": count / len(rollouts) for kind, count in malformed.items()}
    stored = [end for end in RolloutEnd if end != RolloutEnd.RAISED]
    metrics |= {f"finish/{_METRIC_NAMES.get(end, end)}": ends[end] / len(rollouts) for end in stored}
    return metrics


def _sum(uses: Sequence[Mapping[str, Any]], name: str) -> float:
    return float(sum(use[name] for use in uses))


def _ratio(part: float, whole: float) -> float:
    return float(part / whole) if whole else 0.0
