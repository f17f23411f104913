"""Which rollouts of a group are excluded, have a void turn, are too old, or are left out if twice as many were
generated. The sampler (sampler.py) calls these rules.
"""

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verl_ext.episode import Episode, EpisodeKey, ToolUse
from verl_ext.objectives.grpo_roc import keep, penalty
from verl_ext.outcome import (
    INFRASTRUCTURE_FAILURES,
    RESAMPLING,
    VOID_TURN,
    PromptEnd,
    RolloutFate,
)

TOO_OLD = "a token from weights older than max_staleness allows"


@dataclass
class EndedGroup:
    """The rollouts of one prompt, all ended. `end` is OPEN while the group is useful and waits for a batch."""

    end: PromptEnd
    valid: dict[EpisodeKey, Any]  # -> value of the filter's metric; None without a filter
    excluded: dict[EpisodeKey, str]  # -> why
    void: list[EpisodeKey]  # valid ones with a void turn, if `void_turn_filter` is `loss`
    dropped: list[EpisodeKey]  # those that resampling leaves out
    oldest: dict[EpisodeKey, int | None]  # -> oldest version of the weights in it

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
        oldest = {key: age for key in self.valid if (age := self.oldest[key]) is not None}
        if unknown := [key for key in self.valid if key not in oldest]:
            raise ValueError(
                f"sampler_kwargs.max_staleness needs the version of the weights of every token, but {unknown[0]} has "
                "none because its server sends no `global_steps`. Set max_staleness=null."
            )
        stale = [key for key, age in oldest.items() if age < version]
        for key in stale:
            del self.valid[key]
        self.excluded |= dict.fromkeys(stale, TOO_OLD)
        self.void = [key for key in self.void if key in self.valid]
        return len(stale)

    def fates(self) -> Counter[str]:
        """Return `outcome.RolloutFate`, with its reason -> number of rollouts, once `end` is decided."""
        return Counter(self._fate(key) for key in (*self.valid, *self.excluded))

    def _fate(self, key: EpisodeKey) -> str:
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


def has_void_turn(episode: Episode) -> bool:
    """Tell whether a turn of an episode had neither code nor an answer."""
    return bool(episode.use and episode.use.void_turns)


def exclusion(episode: Episode, void_turn_filter: bool | str) -> str | None:
    """Return why an episode is kept out of baseline and loss, or None."""
    if episode.end in INFRASTRUCTURE_FAILURES:
        return episode.end
    return VOID_TURN if void_turn_filter is True and has_void_turn(episode) else None


def metric_of(info: Mapping[str, Any], name: str | None) -> Any:
    """Return the value in a reward's `info` that dynamic sampling compares; None without a filter.

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


def left_out(
    episodes: Sequence[Episode], excluded: Mapping[EpisodeKey, str], rule: str | None, rng: random.Random
) -> list[EpisodeKey]:
    """Return the keys of half of a group, excluded episodes first; fewer than half of a used group are excluded.

    Args:
        rule: `paper` or `code`; None leaves nothing out.
    """
    valid = [episode for episode in episodes if episode.key not in excluded]
    if not rule or not valid:  # a group without a valid episode is replaced
        return []
    right = [episode.given_reward.acc > 0 for episode in valid]
    uses = [episode.use or ToolUse() for episode in valid]  # other loops count no calls
    penalties = [penalty(use.calls, use.failed) for use in uses]
    kept = {valid[i].key for i in keep(right, penalties, min(len(episodes) // 2, len(valid)), rule=rule, rng=rng)}
    return [episode.key for episode in episodes if episode.key not in kept]


def end_group(
    episodes: Sequence[Episode],
    *,
    metric: str | None,
    void_turn_filter: bool | str,
    resample: str | None,
    rng: random.Random,
) -> EndedGroup:
    """Decide what becomes of a group by the rules above; `episodes` is empty if one raised.

    Args:
        metric: see `metric_of`.
        void_turn_filter, resample: settings of the sampler.
    """
    excluded = {each.key: why for each in episodes if (why := exclusion(each, void_turn_filter)) is not None}
    valid = [each for each in episodes if each.key not in excluded]
    group = EndedGroup(
        end=PromptEnd.OPEN,
        valid={each.key: metric_of(each.given_reward.info, metric) for each in valid},
        excluded=excluded,
        void=[each.key for each in valid if void_turn_filter == "loss" and has_void_turn(each)],
        dropped=left_out(episodes, excluded, resample, rng),
        oldest={each.key: each.oldest_version() for each in episodes},
    )
    # The policy itself causes void turns: a group lost only to them is used if nothing else is left.
    by_policy = episodes and not any(why in INFRASTRUCTURE_FAILURES for why in excluded.values())
    group.end = group.judge(lost=PromptEnd.VOID if by_policy else PromptEnd.FAILED)
    return group
