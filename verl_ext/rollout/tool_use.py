"""How the episodes of a step used their tools, and their agents the gateway, in numbers."""

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import fields

import numpy as np

from verl_ext.episode import AgentUse, Episode, ToolUse
from verl_ext.outcome import RolloutEnd

# Of those below, from a clock:
TIME_METRICS = {"tool/time_share", "tool/seconds", "tool/queue_s", "tool/run_s", "agent/agent_s"}
# verl's MetricsAggregator takes the largest value instead of the mean if a metric has "max" in its name.
_METRIC_NAMES = {RolloutEnd.MAX_TURNS: "turn_limit", RolloutEnd.MAX_TOKENS: "token_limit"}


def tool_metrics(episodes: Sequence[Episode]) -> dict[str, float]:
    """Return metrics over episodes: those that the figures of ReTool (arXiv:2504.11536) show, and more; 0 for no cases.

    Args:
        episodes: scored ones that count their use of tools.
    """
    if not episodes:
        return {}
    uses = [episode.use or ToolUse() for episode in episodes]
    calls = np.array([use.calls for use in uses])
    right = np.array([episode.given_reward.acc > 0 for episode in episodes])
    ok = np.array([use.ok for use in uses])
    errors = sum((Counter(use.errors) for use in uses), Counter())
    malformed = sum((Counter(use.malformed) for use in uses), Counter())
    num_calls, num_failed = int(calls.sum()), errors.total() + malformed.total()
    generate_s, tool_s = _sum(uses, "generate_s"), _sum(uses, "tool_s")
    positions = [
        use.first_call_token / episode.row.model_spans[-1][1]
        for use, episode in zip(uses, episodes, strict=True)
        if use.first_call_token is not None
    ]
    spans = [row.model_spans for episode in episodes for row in episode.rows]
    turns = [end - start for own in spans for start, end in own]
    blocks = [begin - end for own in spans for (_, end), (begin, _) in itertools.pairwise(own)]
    ends = Counter(episode.end for episode in episodes)
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
        "turn/void_rate": float(np.mean([use.void_turns > 0 for use in uses])),  # rollouts with a void turn
    }
    per_call = [each.name for each in fields(ToolUse) if each.metadata.get("is_per_call")]
    metrics |= {f"tool/{name}": _ratio(_sum(uses, name), num_calls) for name in per_call}
    for name in sorted({name for use in uses for name in use.tools}):
        done, failed = (sum(use.tools.get(name, (0, 0))[i] for use in uses) for i in (0, 1))
        metrics[f"tool/calls/{name}"] = (done + failed) / len(episodes)
        metrics[f"tool/error_rate/{name}"] = failed / (done + failed)
    metrics |= {f"tool/error/{kind}": count / num_calls for kind, count in errors.items()}
    metrics |= {f"tool/malformed/{kind}": count / len(episodes) for kind, count in malformed.items()}
    stored = [end for end in RolloutEnd if end != RolloutEnd.RAISED]
    metrics |= {f"finish/{_METRIC_NAMES.get(end, end)}": ends[end] / len(episodes) for end in stored}
    return metrics


def agent_metrics(episodes: Sequence[Episode]) -> dict[str, float]:
    """Return the mean per episode of each count of `AgentUse`, and of its forks by reason; {} if no agent made one."""
    uses = [episode.agent for episode in episodes if episode.agent is not None]
    if not uses:
        return {}
    names = [each.name for each in fields(AgentUse) if each.name != "forks"]
    forks = sum((Counter(use.forks) for use in uses), Counter())
    metrics = {f"agent/{name}": _sum(uses, name) / len(uses) for name in names}
    metrics["agent/forks"] = forks.total() / len(uses)
    return metrics | {f"agent/forks/{why}": count / len(uses) for why, count in forks.items()}


def _sum(uses: Sequence[ToolUse | AgentUse], name: str) -> float:
    return float(sum(getattr(use, name) for use in uses))


def _ratio(part: float, whole: float) -> float:
    return float(part / whole) if whole else 0.0
