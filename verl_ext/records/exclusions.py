"""Rollouts that cannot be judged for reasons outside the model: their causes, what to do, and an alarm when they rise.

The sampler (trainer/sampler.py) keeps such rollouts out of training, the trainer (trainer/failed_samples.py) out of a
validation's figures. A policy that learns to provoke a cause would buy itself out of being judged: `ExclusionWatch`
shows every cause's share of the rollouts, and warns.
"""

import logging
import math
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from verl_ext.rollout.tool_use import end_reason

logger = logging.getLogger(__name__)
logger.setLevel(os.getenv("VERL_LOGGING_LEVEL", "INFO"))

FAILURES = ("sandbox_failure", "verifier_unknown", "aborted")  # of a rollout, outside the model
CAUSES = (*FAILURES, "void_turn", "raised")  # of an exclusion; void_turn is the policy's own, and an option

REMEDIES = {
    "sandbox_failure": "Start the sandbox (the agent loop's warnings say what it answered)",
    "verifier_unknown": "See the reward manager's warnings for what could not be verified",
    "aborted": "See the log of the rollout servers",
    "void_turn": "Set trainer.v1.sampler.sampler_kwargs.void_turn_filter=false, which trains on such rollouts",
    "raised": "Correct what the log has as 'Error in _run_prompt'",
}

RETRY_PAUSE_S = 2.0  # before a failed part of a validation sample is tried again, longer by as much each time

ALARM_LEVEL = 0.05  # share of a step's rollouts; a cause above it is an alarm, the option void_turn aside
ALARM_FLOOR = 0.01  # below it a rise is no alarm
ALARM_SIGMAS = 4.0  # a rise is a step's share so many standard deviations above the run's, of binomial draws


class NothingStored(RuntimeError):
    """Every rollout of a validation raised."""


def failure(info: Mapping[str, Any]) -> str | None:
    """Which of FAILURES kept a rollout from being judged; None: it was judged.

    Args:
        info: `reward_extra_info` of verl_ext/reward/manager.py, or of another manager with the loop's `finish_reason`.
    """
    reason = "sandbox_failure" if info.get("sandbox_failure") else end_reason(info)
    return reason if reason in FAILURES else None


@dataclass
class Ended:
    """Training rollouts that ended, by what became of them."""

    rollouts: int = 0  # of groups in which no rollout raised
    groups: int = 0
    excluded: Counter = field(default_factory=Counter)  # CAUSES -> rollouts; "raised" counts groups

    def __iadd__(self, other: "Ended") -> "Ended":
        self.rollouts += other.rollouts
        self.groups += other.groups
        self.excluded.update(other.excluded)
        return self

    def out_of(self, cause: str) -> int:
        """A rollout that raised takes its whole group along, so that the share of the groups is that of rollouts."""
        return self.groups if cause == "raised" else self.rollouts

    def share(self, cause: str) -> float:
        return self.excluded[cause] / max(self.out_of(cause), 1)


def is_alarm(cause: str, step: Ended, before: Ended) -> bool:
    """Whether a cause's share of a step is too high, by itself or against the steps before.

    The share of the run so far is (excluded + 1) / (rollouts + 2), so that a run without exclusions has one as well.
    512 rollouts after 5,000 without exclusion: p = 1/5002, 4 standard deviations are 0.25%, and ALARM_FLOOR decides.
    512 after 5,000 with 50: p = 51/5002 = 1.02%, one standard deviation 0.44%, and more than 2.80% is a rise.
    """
    number, share = step.out_of(cause), step.share(cause)
    if not step.excluded[cause]:
        return False
    if share > ALARM_LEVEL and cause != "void_turn":
        return True
    if not before.out_of(cause):
        return False
    usual = (before.excluded[cause] + 1) / (before.out_of(cause) + 2)
    return share > max(ALARM_FLOOR, usual + ALARM_SIGMAS * math.sqrt(usual * (1 - usual) / number))


class ExclusionWatch:
    """Shares of the excluded rollouts per step and per run, over all starts of the run."""

    def __init__(self, journal: Any):
        """
        Args:
            journal: a `trainer.journal.StepJournal`.
        """
        self._journal = journal
        self._run = Ended()

    def resume(self, step: int) -> None:
        self._run = Ended()
        for record in self._journal.resume(step):
            self._run += Ended(record["rollouts"], record["groups"], Counter(record["excluded"]))

    def end_step(self, step: int, ended: Ended) -> dict[str, float]:
        """Note what ended in a step, and warn of causes that rise.

        Returns:
            `failure/share_CAUSE` of the step, `failure/run_share_CAUSE` of the run up to here, and `failure/alarm`, the
            number of causes that were warned of. Nothing where nothing ended.
        """
        if not ended.groups:
            return {}
        alarms = [cause for cause in CAUSES if is_alarm(cause, ended, self._run)]
        for cause in alarms:
            self._warn(step, cause, ended)
        self._run += ended
        self._journal.append(step, rollouts=ended.rollouts, groups=ended.groups, excluded=+ended.excluded)
        shares = {f"failure/share_{cause}": ended.share(cause) for cause in CAUSES}
        run_shares = {f"failure/run_share_{cause}": self._run.share(cause) for cause in CAUSES}
        return shares | run_shares | {"failure/alarm": float(len(alarms))}

    def _warn(self, step: int, cause: str, ended: Ended) -> None:
        unit = "groups" if cause == "raised" else "rollouts"
        logger.warning(
            "step %d: %s kept %.1f%% of %d %s out of training (%.1f%% of %d in the run before). %s. Then read such "
            "rollouts in the run's trajectories: if the model's own text or code brings the failure about, the policy "
            "learns to avoid being judged, and sandbox or verifier must count it as the model's error.",
            *(step, cause, 100 * ended.share(cause), ended.out_of(cause), unit),
            *(100 * self._run.share(cause), self._run.out_of(cause), REMEDIES[cause]),
        )


def describe(causes: Counter) -> str:
    """ "sandbox_failure 12, raised 3": the most frequent first."""
    return ", ".join(f"{cause} {number}" for cause, number in causes.most_common() if number)
