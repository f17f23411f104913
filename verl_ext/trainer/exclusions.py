"""Training rollouts that are excluded for reasons in outcome.EXCLUSIONS: their number, and an alarm when it rises.

The sampler (sampler.py) keeps these rollouts out of training, `failed_samples.py` out of a validation's figures. A
policy that learns to provoke an exclusion could escape being judged: `ExclusionWatch` shows every cause's share of the
rollouts, and warns.
"""

import logging
import math
import os
from collections import Counter

from verl_ext.events import Ended, EndedCounts, Observer, Started
from verl_ext.outcome import EXCLUSIONS, REMEDIES, VOID_TURN, RolloutEnd
from verl_ext.runs.journal import StepJournal

logger = logging.getLogger(__name__)
logger.setLevel(os.getenv("VERL_LOGGING_LEVEL", "INFO"))

ALARM_LEVEL = 0.05  # share of a step's rollouts; a cause above it raises an alarm, except the option void_turn
ALARM_FLOOR = 0.01  # a rise below it raises no alarm
ALARM_SIGMAS = 4.0  # a rise: a step's share is this many binomial standard deviations above the run's


class NothingStored(RuntimeError):
    """Every rollout of a validation raised."""


def is_alarm(cause: str, step: EndedCounts, before: EndedCounts) -> bool:
    """Tell whether a cause's share of a step is too high, by itself or compared with the steps before.

    The share of the run so far is (excluded + 1) / (rollouts + 2), so that a run without exclusions also has one.
    512 rollouts after 5,000 without exclusion: p = 1/5002, 4 standard deviations are 0.25%, and ALARM_FLOOR decides.
    512 after 5,000 with 50: p = 51/5002 = 1.02%, one standard deviation is 0.44%, and more than 2.80% is a rise.
    """
    number, share = step.out_of(cause), step.share(cause)
    if not step.excluded[cause]:
        return False
    if share > ALARM_LEVEL and cause != VOID_TURN:
        return True
    if not before.out_of(cause):
        return False
    usual = (before.excluded[cause] + 1) / (before.out_of(cause) + 2)
    return share > max(ALARM_FLOOR, usual + ALARM_SIGMAS * math.sqrt(usual * (1 - usual) / number))


class ExclusionWatch(Observer):
    """Shares of the excluded rollouts per step and per run, over all starts of the run."""

    def __init__(self, journal: StepJournal):
        self._journal = journal
        self._run = EndedCounts()

    def on_started(self, event: Started) -> None:
        self._run = EndedCounts()
        for record in self._journal.resume(event.step):
            self._run += EndedCounts(record["rollouts"], record["groups"], Counter(record["excluded"]))

    def on_ended(self, event: Ended) -> dict[str, float]:
        """Note what ended in a step, and warn of causes that rise.

        Returns:
            `failure/share_CAUSE` of the step, `failure/run_share_CAUSE` of the run up to here, and `failure/alarm`, the
            number of causes that were warned of. Nothing if nothing ended.
        """
        step, ended = event.step, event.counts
        if not ended.groups:
            return {}
        alarms = [cause for cause in EXCLUSIONS if is_alarm(cause, ended, self._run)]
        for cause in alarms:
            self._warn(step, cause, ended)
        self._run += ended
        self._journal.append(step, rollouts=ended.rollouts, groups=ended.groups, excluded=+ended.excluded)
        shares = {f"failure/share_{cause}": ended.share(cause) for cause in EXCLUSIONS}
        run_shares = {f"failure/run_share_{cause}": self._run.share(cause) for cause in EXCLUSIONS}
        return shares | run_shares | {"failure/alarm": float(len(alarms))}

    def _warn(self, step: int, cause: str, ended: EndedCounts) -> None:
        unit = "groups" if cause == RolloutEnd.RAISED else "rollouts"
        logger.warning(
            "step %d: %s kept %.1f%% of %d %s out of training (%.1f%% of %d in the run before). %s. Then read such "
            "rollouts in the run's trajectories: if the model's own text or code causes the failure, the policy learns "
            "to avoid being judged, and the sandbox or verifier must count it as the model's error.",
            *(step, cause, 100 * ended.share(cause), ended.out_of(cause), unit),
            *(100 * self._run.share(cause), self._run.out_of(cause), REMEDIES[cause]),
        )


def describe(causes: Counter) -> str:
    """Return "sandbox_failure 12, raised 3", with the most frequent first."""
    return ", ".join(f"{cause} {number}" for cause, number in causes.most_common() if number)


def stop_if_most_failed(failed: int, seen: EndedCounts, limit: float, step: int) -> None:
    """Raise if more groups failed than a step allows.

    Args:
        failed: number of groups, out of those in `seen`.
        limit: the most that may fail before a batch is full.
    Raises:
        RuntimeError: more failed, as when the sandbox is down.
    """
    if failed > limit:
        each = max(1, seen.rollouts // max(1, seen.groups - seen.excluded[RolloutEnd.RAISED]))  # rollouts of a group
        unit = {RolloutEnd.RAISED: each}  # its count is of groups
        remedy = REMEDIES[max(seen.excluded, key=lambda cause: seen.excluded[cause] * unit.get(cause, 1))]
        raise RuntimeError(
            f"{failed} of {seen.groups} prompt groups of step {step} failed for reasons outside the model "
            f"({describe(seen.excluded)}). {remedy}, then resume the run."
        )
