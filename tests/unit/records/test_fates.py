import pytest

from verl_ext.outcome import PromptEnd
from verl_ext.records.fates import why, why_left_out

RIGHT, WRONG = {"end_reason": "answer", "acc": 1.0}, {"end_reason": "answer", "acc": 0.0}
FAILED = {"end_reason": "sandbox_failure", "acc": None}
RAISED = {"end_reason": "raised"}


@pytest.mark.parametrize(
    ("end", "rows", "expected"),
    [
        (PromptEnd.TRAINED, [RIGHT, WRONG], None),
        (PromptEnd.OPEN, [RIGHT], None),
        (PromptEnd.EQUAL, [RIGHT, RIGHT, FAILED], "all right"),
        (PromptEnd.EQUAL, [WRONG, WRONG], "all wrong"),
        (PromptEnd.EQUAL, [RIGHT, WRONG], "all equal to the filter"),
        (
            PromptEnd.FAILED,
            [FAILED, FAILED, RAISED, RIGHT],
            "3 of 4 rollouts failed outside the model: 2 sandbox_failure, 1 raised",
        ),
        (PromptEnd.VOID, [WRONG, WRONG], "most of its 2 rollouts have a turn without code and answer"),
        (PromptEnd.SURPLUS, [RIGHT, WRONG], "useful, but the batch was full"),
        (PromptEnd.STALE, [RIGHT], "useful, but its weights were too old by the time a batch had room"),
    ],
)
def test_why_a_group_ended_so(end, rows, expected):
    assert why(end, rows) == expected


def test_a_filler_says_so_and_a_rollout_that_is_left_out_why():
    assert why(PromptEnd.EQUAL, [WRONG], is_filler=True) == "all wrong; fills the batch with advantage 0"
    assert why_left_out(FAILED) == "left out of the batch: sandbox_failure"
    assert why_left_out(RIGHT) == "left out of the batch by the sampler's rules"
