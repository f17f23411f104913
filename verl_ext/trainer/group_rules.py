"""Which rollouts of a group are excluded, have a void turn, are too old, or are left out if twice as many were
generated. The sampler (sampler.py) calls these rules.
"""

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verl_ext.objectives.grpo_roc import keep, penalty
from verl_ext.outcome import (
    INFRASTRUCTURE_FAILURES,
    RESAMPLING,
    VOID_TURN,
    PromptEnd,
    RolloutFate,
    infrastructure_failure,
)
from verl_ext.rollout.weight_versions import oldest

Row = tuple[str, Mapping[str, Any], str | None]  # key, `extra_fields` and reason of exclusion of a rollout
TOO_OLD = "a token from weights older than max_staleness allows"


@dataclass
class EndedGroup:
    """The rollouts of one prompt, all ended. `end` is OPEN while the group is useful and waits for a batch."""

    end: PromptEnd
    valid: dict[str, Any]  # key -> value of the filter's metric; None without a filter
    excluded: dict[str, str]  # key -> why
    void: list[str]  # keys of valid ones with a void turn, if `void_turn_filter` is `loss`
    dropped: list[str]  # keys of those that resampling leaves out
    oldest: dict[str, int | None]  # key -> oldest version of the weights in it

    def is_lost(self) -> bool:
        """Tell whether too few rollouts are left to fill the group with copies of them (the rule of GLM-5)."""
        return len(self.valid) <= len(self.excluded)

    def are_equal(self) -> bool:
        return None not in self.valid.values() and len(set(self.valid.values())) == 1

    def judge(self, lost: PromptEnd) -> PromptEnd:
        """Return what becomes of the group; `lost` if too few rollouts are left."""
        if self.is_lost():
            return lost
        if self.are_equal():
            return PromptEnd.EQUAL
        none_trains = self.valid.keys() - {*self.dropped} <= {*self.void}
        return PromptEnd.VOID if none_trains else PromptEnd.OPEN

    def drop_older_than(self, version: int) -> int:
        """Exclude rollouts with a token of older weights, and return their number.

        Raises:
            ValueError: the server reported no version.
        """
        unknown = [key for key in self.valid if self.oldest[key] is None]
        if unknown:
            raise ValueError(
                f"sampler_kwargs.max_staleness needs the version of the weights of every token, but {unknown[0]} has "
                "none because its server sends no `global_steps`. Set max_staleness=null."
            )
        stale = [key for key in self.valid if self.oldest[key] < version]
        for key in stale:
            del self.valid[key]
        self.excluded |= dict.fromkeys(stale, TOO_OLD)
        self.void = [key for key in self.void if key in self.valid]
        return len(stale)

    def fates(self) -> Counter[str]:
        """Return `outcome.RolloutFate`, with its reason -> number of rollouts, once `end` is decided."""
        return Counter(self._fate(key) for key in (*self.valid, *self.excluded))

    def _fate(self, key: str) -> str:
        why = self.excluded.get(key)
        if why in INFRASTRUCTURE_FAILURES:
            return f"{RolloutFate.FAILED}/{why}"
        if why == TOO_OLD or self.end is PromptEnd.STALE:
            return RolloutFate.STALE
        if why is None and self.end is not PromptEnd.TRAINED:
            why = self.end
        elif key in self.dropped:
            why = RESAMPLING
        elif key in self.void:
            why = VOID_TURN
        return f"{RolloutFate.FILTERED}/{why}" if why else RolloutFate.TRAINED


def has_void_turn(extra: Mapping[str, Any]) -> bool:
    """Tell whether a turn of a rollout had neither code nor an answer; `extra` are its `extra_fields`."""
    return bool(extra.get("tool_use", {}).get("void_turns"))


def exclusion(extra: Mapping[str, Any], void_turn_filter: bool | str) -> str | None:
    """Return why a rollout is kept out of baseline and loss, or None."""
    reason = infrastructure_failure({"finish_reason": extra.get("finish_reason"), **extra["reward_extra_info"]})
    return reason or (VOID_TURN if void_turn_filter is True and has_void_turn(extra) else None)


def metric_of(info: Mapping[str, Any], name: str | None) -> Any:
    """Return the value in a rollout's `reward_extra_info` that dynamic sampling compares; None without a filter.

    Raises:
        ValueError: the reward manager gives no such metric.
    """
    if name is None:
        return None
    if name not in info:
        numbers = sorted(key for key, value in info.items() if isinstance(value, float))
        raise ValueError(
            f"algorithm.filter_groups.metric is {name!r}, which the reward manager does not return. Expected one of "
            f"{', '.join(numbers)}."
        )
    return info[name]


def left_out(rows: Sequence[Row], rule: str | None, rng: random.Random) -> list[str]:
    """Return the keys of half of a group, failed rollouts first; fewer than half of a used group have failed.

    Args:
        rule: `paper` or `code`; None leaves nothing out.
    """
    valid = [(key, extra) for key, extra, reason in rows if reason is None]
    if not rule or not valid:  # a group without a valid rollout is replaced
        return []
    right = [extra["reward_extra_info"]["acc"] > 0 for _, extra in valid]
    uses = [extra.get("tool_use", {"ok": 0, "errors": {}}) for _, extra in valid]  # other loops count no calls
    failed = [sum(use["errors"].values()) for use in uses]
    penalties = [penalty(use["ok"] + lost, lost) for use, lost in zip(uses, failed, strict=True)]
    kept = {valid[i][0] for i in keep(right, penalties, min(len(rows) // 2, len(valid)), rule=rule, rng=rng)}
    return [key for key, *_ in rows if key not in kept]


def end_group(
    rows: Sequence[Row], *, metric: str | None, void_turn_filter: bool | str, resample: str | None, rng: random.Random
) -> EndedGroup:
    """Decide what becomes of a group by the rules above; `rows` is empty if a rollout raised.

    Args:
        metric: see `metric_of`.
        void_turn_filter, resample: settings of the sampler.
    """
    group = EndedGroup(
        end=PromptEnd.OPEN,
        valid={key: metric_of(extra["reward_extra_info"], metric) for key, extra, reason in rows if reason is None},
        excluded={key: reason for key, *_, reason in rows if reason is not None},
        void=[k for k, extra, why in rows if void_turn_filter == "loss" and why is None and has_void_turn(extra)],
        dropped=left_out(rows, resample, rng),
        oldest={key: oldest(extra.get("version_spans", ())) for key, extra, _ in rows},
    )
    # The policy itself causes void turns: a group lost only to them is used if nothing else is left.
    by_policy = rows and not any(reason in INFRASTRUCTURE_FAILURES for *_, reason in rows)
    group.end = group.judge(lost=PromptEnd.VOID if by_policy else PromptEnd.FAILED)
    return group
