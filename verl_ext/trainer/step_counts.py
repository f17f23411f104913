"""Counts of what ended while a step's batches were taken, and the step's metrics, in all and by domain.

The sampler (sampler.py) counts; this module decides nothing.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from verl_ext.episode import Episode
from verl_ext.events import EndedCounts
from verl_ext.outcome import EXCLUSIONS, PromptEnd
from verl_ext.rollout.tool_use import agent_metrics, tool_metrics
from verl_ext.trainer.domains import Domains

REPLACEABLE = (PromptEnd.EQUAL, PromptEnd.VOID)  # useless by what the policy did


@dataclass
class StepCounts:
    """Training groups and rollouts of one batch or several."""

    seen: EndedCounts = field(default_factory=EndedCounts)
    judged: list[Episode] = field(default_factory=list)  # those that no infrastructure failure hit
    ends: Counter = field(default_factory=Counter)  # PromptEnd -> groups; OPEN: of those that ended, the useful ones
    aged: int = 0  # groups that were useful when they ended, but no longer without their oldest rollouts
    dropped_as_stale: int = 0  # rollouts
    ages: list[int] = field(default_factory=list)  # in versions, of the useful rollouts that were taken
    taken: int = 0  # groups of the batch
    filled: int = 0  # groups that were taken and had failed or stale rollouts
    fillers: int = 0  # groups that were taken and are not useful

    def __iadd__(self, other: "StepCounts") -> "StepCounts":
        self.seen += other.seen
        self.judged += other.judged
        self.ends.update(other.ends)
        self.aged += other.aged
        self.dropped_as_stale += other.dropped_as_stale
        self.ages += other.ages
        self.taken += other.taken
        self.filled += other.filled
        self.fillers += other.fillers
        return self

    def keep_rate(self) -> float | None:
        """Return the share of useful groups among those that ended neither failed nor too old; None if there are none.

        A group counts once, with its state when it ended.
        """
        useful = self.ends[PromptEnd.OPEN]
        ended = useful + sum(self.ends[end] for end in REPLACEABLE) - self.aged
        return useful / ended if ended else None

    def metrics(self) -> dict[str, float]:
        """Return metrics `train/`, `tool/`, `turn/`, `finish/`, `agent/`, `failure/`, `filter_groups/`, `staleness/`.

        A metric without any case is left out, such as `keep_rate` if no group ended.
        """
        failed, keep_rate = float(self.ends[PromptEnd.FAILED]), self.keep_rate()
        own = [episode for episode in self.judged if episode.use]  # others' loops count nothing
        metrics = {
            "filter_groups/failed": failed,
            "filter_groups/filled_with_equal": float(self.fillers),
            "failure/groups_dropped": failed,
            "failure/groups_filled": float(self.filled),
            **{f"failure/{reason}": float(self.seen.excluded[reason]) for reason in EXCLUSIONS},
            "staleness/dropped": float(self.dropped_as_stale),
            **tool_metrics(own),
            **agent_metrics(self.judged),
        }
        if keep_rate is not None:
            metrics["filter_groups/keep_rate"] = keep_rate
        if self.ages:
            ages = {"mean": np.mean(self.ages), "max": max(self.ages)}
            metrics |= {f"staleness/{name}": float(value) for name, value in ages.items()}
        if self.judged:
            metrics["train/acc"] = float(np.mean([episode.given_reward.acc for episode in self.judged]))
            metrics |= _parts_of_reward(self.judged)
        if own:
            metrics["train/truncation_rate"] = float(np.mean([each.is_truncated for each in own]))
            metrics["train/model_tokens"] = float(np.mean([each.num_model_tokens for each in own]))
        return metrics


def _parts_of_reward(episodes: Sequence[Episode]) -> dict[str, float]:
    """Return `train/reward_NAME`, the mean of each part of the reward; a part that is 0 for all is left out."""
    parts: dict[str, list[float]] = defaultdict(list)
    for episode in episodes:
        for name, value in episode.given_reward.info.items():
            if name.startswith("reward_"):
                parts[f"train/{name}"].append(float(value))
    return {name: float(np.mean(values)) for name, values in parts.items() if any(values)}


def domain_metrics(domains: Domains, of_domain: Mapping[str, StepCounts]) -> dict[str, float]:
    """Return `domain/NAME/...` of a step for each domain with a weight; begin to count its prompts anew.

    `share` and `run_share` are of the groups that the step's batches and all batches took, fillers included. `acc` and
    `keep_rate` are missing if nothing ended that they are of.
    """
    total, run_total = sum(counts.taken for counts in of_domain.values()), domains.taken.total()
    metrics = {}
    for name in domains.quotas.shares():
        counts = of_domain.get(name, StepCounts())
        own = {
            "share": counts.taken / max(total, 1),
            "run_share": domains.taken[name] / max(run_total, 1),
            "fillers": counts.fillers,
            "submitted": domains.submitted[name],
            "groups_failed": counts.ends[PromptEnd.FAILED],
            "paused": name in domains.paused,
        }
        if counts.judged:
            own["acc"] = np.mean([episode.given_reward.acc for episode in counts.judged])
        if (keep_rate := counts.keep_rate()) is not None:
            own["keep_rate"] = keep_rate
        metrics |= {f"domain/{name}/{figure}": float(value) for figure, value in own.items()}
    domains.submitted.clear()
    return metrics
