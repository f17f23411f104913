"""When the share of excluded rollouts is an alarm."""

import logging
from collections import Counter

import pytest

from verl_ext.events import Ended, EndedCounts, Started
from verl_ext.trainer.exclusions import ExclusionWatch, is_alarm


def ended(rollouts, groups=None, **excluded):
    return EndedCounts(rollouts, rollouts // 8 if groups is None else groups, Counter(excluded))


@pytest.mark.parametrize(
    ("cause", "step", "before", "expected"),
    [
        ("verifier_unknown", ended(512), ended(5000), False),
        ("verifier_unknown", ended(512, verifier_unknown=27), ended(0), True),  # 5.3% at the first step: the level
        ("verifier_unknown", ended(512, verifier_unknown=25), ended(0), False),  # 4.9%, and nothing to compare with
        # After 50 of 5,000: 1.02% + 4 x 0.44% = 2.80%, which is 14.3 of 512.
        ("verifier_unknown", ended(512, verifier_unknown=14), ended(5000, verifier_unknown=50), False),
        ("verifier_unknown", ended(512, verifier_unknown=15), ended(5000, verifier_unknown=50), True),
        # After none of 5,000: 0.02% + 4 x 0.06% = 0.27%, below the floor of 1%, which is 5.1 of 512.
        ("sandbox_failure", ended(512, sandbox_failure=5), ended(5000), False),
        ("sandbox_failure", ended(512, sandbox_failure=6), ended(5000), True),
        # Small steps: after none of 128, 1/130 + 4 x 0.77% = 3.9%, which is 5.0 of 128.
        ("sandbox_failure", ended(128, sandbox_failure=4), ended(128), False),
        ("sandbox_failure", ended(128, sandbox_failure=6), ended(128), True),
        ("aborted", ended(512, sandbox_failure=100), ended(5000), False),  # each cause by itself
        ("void_turn", ended(512, void_turn=200), ended(0), False),  # an option that leaves out much: only its rise
        ("void_turn", ended(512, void_turn=200), ended(5000, void_turn=2000), False),
        ("void_turn", ended(512, void_turn=300), ended(5000, void_turn=2000), True),
        ("raised", ended(504, 64, raised=4), ended(0), True),  # 4 of 64 groups
    ],
)
def test_an_alarm_is_a_share_above_the_level_or_a_rise_against_the_run(cause, step, before, expected):
    assert is_alarm(cause, step, before) == expected


class Journal:
    def __init__(self, records=()):
        self.records = list(records)

    def resume(self, step):
        return [record for record in self.records if record["step"] <= step]

    def append(self, step, **values):
        self.records.append({"step": step} | values)


def end(watch, step, unknown):
    return watch.on_ended(Ended(step, ended(512, verifier_unknown=unknown)))


def test_a_policy_that_learns_to_provoke_exclusions_is_seen_before_the_level(caplog):
    """From 0.2% of 512 rollouts to 3.1% over 10 steps."""
    journal = Journal()
    watch = ExclusionWatch(journal)
    with caplog.at_level(logging.WARNING, logger="verl_ext.trainer.exclusions"):
        metrics = [end(watch, step, 1) for step in range(1, 21)]
        assert not any(data["failure/alarm"] for data in metrics) and caplog.text == ""
        rising = [end(watch, 20 + i, n) for i, n in enumerate(range(2, 17, 2), 1)]
    assert [bool(data["failure/alarm"]) for data in rising].index(True) <= 3
    assert "verifier_unknown kept 1.2% of 512 rollouts out of training (0.2% of 11264 in the run before)" in caplog.text
    assert "See the reward manager's warnings" in caplog.text and "read such rollouts in the run's traj" in caplog.text
    assert rising[-1]["failure/share_verifier_unknown"] == 16 / 512
    again = ExclusionWatch(journal)
    again.on_started(Started(22, decode=str))
    metrics = again.on_ended(Ended(23, ended(512)))
    assert metrics["failure/run_share_verifier_unknown"] == (20 + 2 + 4) / (23 * 512)
    assert watch.on_ended(Ended(29)) == {}


def test_the_alarm_counts_groups_where_rollouts_raised_and_names_the_remedy(caplog):
    """4 of 64 groups are 6.25%."""
    with caplog.at_level(logging.WARNING, logger="verl_ext.trainer.exclusions"):
        metrics = ExclusionWatch(Journal()).on_ended(Ended(1, ended(480, 64, raised=4)))
    assert metrics["failure/alarm"] == 1 and metrics["failure/share_raised"] == 4 / 64
    assert "step 1: raised kept 6.2% of 64 groups out of training" in caplog.text
    assert "Fix the error that the log reports as 'Error in _run_prompt'" in caplog.text
