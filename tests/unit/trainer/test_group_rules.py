"""What becomes of each rollout of a group that ended, by the end of the group and by what excludes the rollout."""

import pytest

from verl_ext.outcome import PromptEnd, RolloutEnd
from verl_ext.trainer.group_rules import TOO_OLD, EndedGroup

ENDS = [PromptEnd.EQUAL, PromptEnd.VOID, PromptEnd.FAILED, PromptEnd.SURPLUS]


def group(end, **changes):
    """Four rollouts, and a fifth that the sandbox failed."""
    parts = {
        "valid": dict.fromkeys(["u_0_0", "u_1_0", "u_2_0", "u_3_0"], 1.0),
        "excluded": {"u_4_0": RolloutEnd.SANDBOX_FAILURE},
        "void": [],
        "dropped": [],
        "oldest": {},
    }
    return EndedGroup(end, **parts | changes)


@pytest.mark.parametrize("end", ENDS)
def test_rollouts_of_a_group_that_does_not_train_are_filtered_but_for_those_that_failed(end):
    assert group(end).fates() == {f"filtered/{end}": 4, "failed/sandbox_failure": 1}


def test_each_rollout_of_a_group_that_trains_has_its_own_fate():
    excluded = {"u_4_0": TOO_OLD, "u_5_0": "void_turn", "u_6_0": RolloutEnd.UNVERIFIED}
    made = group(PromptEnd.TRAINED, excluded=excluded, void=["u_0_0"], dropped=["u_1_0", "u_6_0"])
    filtered = {"filtered/void_turn": 2, "filtered/resampling": 1}
    assert made.fates() == filtered | {"trained": 2, "stale": 1, "failed/verifier_unknown": 1}


def test_rollouts_of_a_group_that_aged_are_stale():
    assert group(PromptEnd.STALE, void=["u_0_0"]).fates() == {"stale": 4, "failed/sandbox_failure": 1}


def test_a_group_of_which_resampling_keeps_only_void_turns_trains_nothing():
    accs = {"u_0_0": 1.0, "u_1_0": 1.0, "u_2_0": 0.0, "u_3_0": 0.0}
    made = group(PromptEnd.OPEN, valid=accs, excluded={}, void=["u_0_0", "u_2_0"], dropped=["u_1_0", "u_3_0"])
    assert made.judge(lost=PromptEnd.FAILED) is PromptEnd.VOID
    made.dropped = ["u_2_0", "u_3_0"]  # it keeps one that trains
    assert made.judge(lost=PromptEnd.FAILED) is PromptEnd.OPEN
