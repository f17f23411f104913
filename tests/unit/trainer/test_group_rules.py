"""What becomes of each rollout of a group that ended, by the end of the group and by what excludes the rollout."""

import pytest

from verl_ext.episode import EpisodeKey
from verl_ext.outcome import PromptEnd, RolloutEnd
from verl_ext.trainer.group_rules import TOO_OLD, EndedGroup

U = [EpisodeKey("u", session) for session in range(7)]
ENDS = [PromptEnd.EQUAL, PromptEnd.VOID, PromptEnd.FAILED, PromptEnd.SURPLUS]


def group(end, **changes):
    """Four rollouts, and a fifth that the sandbox failed."""
    parts = {
        "valid": dict.fromkeys(U[:4], 1.0),
        "excluded": {U[4]: RolloutEnd.SANDBOX_FAILURE},
        "void": [],
        "dropped": [],
        "oldest": {},
    }
    return EndedGroup(end, **parts | changes)


@pytest.mark.parametrize("end", ENDS)
def test_rollouts_of_a_group_that_does_not_train_are_filtered_but_for_those_that_failed(end):
    assert group(end).fates() == {f"filtered/{end}": 4, "failed/sandbox_failure": 1}


def test_each_rollout_of_a_group_that_trains_has_its_own_fate():
    excluded = {U[4]: TOO_OLD, U[5]: "void_turn", U[6]: RolloutEnd.UNVERIFIED}
    made = group(PromptEnd.TRAINED, excluded=excluded, void=[U[0]], dropped=[U[1], U[6]])
    filtered = {"filtered/void_turn": 2, "filtered/resampling": 1}
    assert made.fates() == filtered | {"trained": 2, "stale": 1, "failed/verifier_unknown": 1}


def test_rollouts_of_a_group_that_aged_are_stale():
    assert group(PromptEnd.STALE, void=[U[0]]).fates() == {"stale": 4, "failed/sandbox_failure": 1}


def test_a_group_of_which_resampling_keeps_only_void_turns_trains_nothing():
    accs = {U[0]: 1.0, U[1]: 1.0, U[2]: 0.0, U[3]: 0.0}
    made = group(PromptEnd.OPEN, valid=accs, excluded={}, void=[U[0], U[2]], dropped=[U[1], U[3]])
    assert made.judge(lost=PromptEnd.FAILED) is PromptEnd.VOID
    made.dropped = [U[2], U[3]]  # it keeps one that trains
    assert made.judge(lost=PromptEnd.FAILED) is PromptEnd.OPEN
