"""Which rollouts of a group that was generated twice as large are left out (verl_ext/objectives/grpo_roc.py)."""

import random
from collections.abc import Mapping, Sequence
from typing import Any

from verl_ext.objectives.grpo_roc import keep, penalty


def left_out(
    rows: Sequence[tuple[str, Mapping[str, Any], str | None]], rule: str | None, rng: random.Random
) -> list[str]:
    """Keys of half of a group; those that infrastructure failed first, of which a used group has less than half.

    Args:
        rows: key, `extra_fields` and reason of exclusion of each rollout.
        rule: `paper` or `code`; None leaves nothing out.
    """
    if not rule:
        return []
    valid = [(key, extra) for key, extra, reason in rows if reason is None]
    right = [extra["reward_extra_info"]["acc"] > 0 for _, extra in valid]
    uses = [extra["tool_use"] for _, extra in valid]
    failed = [sum(use["errors"].values()) for use in uses]
    penalties = [penalty(use["ok"] + lost, lost) for use, lost in zip(uses, failed, strict=True)]
    kept = {valid[i][0] for i in keep(right, penalties, min(len(rows) // 2, len(valid)), rule=rule, rng=rng)}
    return [key for key, *_ in rows if key not in kept]
