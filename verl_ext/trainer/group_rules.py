"""Which rollouts of a group are excluded, have a void turn, or are left out where twice as many were generated.

The sampler asks (sampler.py).
"""

import random
from collections.abc import Mapping, Sequence
from typing import Any

from verl_ext.objectives.grpo_roc import keep, penalty
from verl_ext.outcome import VOID_TURN, infrastructure_failure


def has_void_turn(extra: Mapping[str, Any]) -> bool:
    """Whether a turn of a rollout had neither code nor an answer; `extra` are its `extra_fields`."""
    return bool(extra.get("tool_use", {}).get("void_turns"))


def exclusion(extra: Mapping[str, Any], void_turn_filter: bool | str) -> str | None:
    """Why a rollout is kept out of baseline and loss, or None."""
    reason = infrastructure_failure({"finish_reason": extra.get("finish_reason"), **extra["reward_extra_info"]})
    return reason or (VOID_TURN if void_turn_filter is True and has_void_turn(extra) else None)


def left_out(
    rows: Sequence[tuple[str, Mapping[str, Any], str | None]], rule: str | None, rng: random.Random
) -> list[str]:
    """Keys of half of a group; those that infrastructure failed first, of which a used group has less than half.

    Args:
        rows: key, `extra_fields` and reason of exclusion of each rollout.
        rule: `paper` or `code`; None leaves nothing out.
    """
    valid = [(key, extra) for key, extra, reason in rows if reason is None]
    if not rule or not valid:  # a group without a valid rollout is replaced
        return []
    right = [extra["reward_extra_info"]["acc"] > 0 for _, extra in valid]
    uses = [extra.get("tool_use", {"ok": 0, "errors": {}}) for _, extra in valid]  # another's loop counts no calls
    failed = [sum(use["errors"].values()) for use in uses]
    penalties = [penalty(use["ok"] + lost, lost) for use, lost in zip(uses, failed, strict=True)]
    kept = {valid[i][0] for i in keep(right, penalties, min(len(rows) // 2, len(valid)), rule=rule, rng=rng)}
    return [key for key, *_ in rows if key not in kept]
