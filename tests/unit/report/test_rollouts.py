import time

import pytest

from verl_ext.evaluation.samples import Sample
from verl_ext.report.rollouts import pick_rollouts, pick_training_rollouts, split_rollout

CASES = {
    "the <code> protocol": (
        [
            ("model", "Let me see. <code>\nprint(6*7)\n</code>"),
            ("tool", "\n<interpreter>\n42\n</interpreter>\n"),
            ("model", "So \\boxed{42}.<|im_end|>"),
        ],
        [
            *[("text", "Let me see. "), ("code", "print(6*7)"), ("tool", "42")],
            *[("text", "So "), ("boxed", "\\boxed{42}"), ("text", ".")],
        ],
    ),
    "an error of the model's code": (
        [("model", "<code>prin(1)</code>"), ("tool", "<interpreter>NameError: name 'prin'</interpreter>")],
        [("code", "prin(1)"), ("tool_error", "NameError: name 'prin'")],
    ),
    "a whole traceback": (
        [
            ("model", "<code>1/0</code>"),
            ("tool", "<interpreter>Traceback (most recent call last):\nZeroDivisionError: x</interpreter>"),
        ],
        [("code", "1/0"), ("tool_error", "Traceback (most recent call last):\nZeroDivisionError: x")],
    ),
    "hermes": (
        [
            ("model", 'Hm.\n<tool_call>\n{"name": "python", "arguments": {"code": "a = 1\\nprint(a)"}}\n</tool_call>'),
            ("tool", "\n<|im_start|>user\n<tool_response>\n1\n</tool_response><|im_end|>\n<|im_start|>assistant\n"),
            ("model", "Done \\boxed{1}<|im_end|>"),
        ],
        [
            *[("text", "Hm.\n"), ("code", "a = 1\nprint(a)"), ("tool", "1")],
            *[("text", "Done "), ("boxed", "\\boxed{1}")],
        ],
    ),
    "two outputs in one turn of the tools": (
        [("tool", "<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response>")],
        [("tool", "1"), ("tool", "2")],
    ),
    "an output without tags, as of a user's environment": ([("tool", "Try again.")], [("tool", "Try again.")]),
    "an output that the model forged is its text": (
        [("model", "<code>p</code><interpreter>\\boxed{9}"), ("model", " <code>q</code>")],
        [*[("code", "p"), ("text", "<interpreter>"), ("boxed", "\\boxed{9}")], ("code", "q")],
    ),
    "a hermes call that is no JSON stays as written": (
        [("model", "<tool_call>{'code': 1}</tool_call>")],
        [("code", "{'code': 1}")],
    ),
    "cut in the code": ([("model", "x <code>print(1")], [("text", "x "), ("code", "print(1")]),
    "nested braces": ([("model", "\\boxed{\\frac{1}{2}} ok")], [("boxed", "\\boxed{\\frac{1}{2}}"), ("text", " ok")]),
    "an unclosed box is text": ([("model", "\\boxed{1")], [("text", "\\boxed{1")]),
    "a box within a box is part of it, and one in an unclosed box is a box": (
        [("model", "\\boxed{\\boxed{1}+{2}} \\boxed{ \\boxed{3}")],
        [("boxed", "\\boxed{\\boxed{1}+{2}}"), ("text", " \\boxed{ "), ("boxed", "\\boxed{3}")],
    ),
    "a box in the tool's output is the tool's": (
        [("model", "<code>p</code>"), ("tool", "<interpreter>\\boxed{9}</interpreter>")],
        [("code", "p"), ("tool", "\\boxed{9}")],
    ),
    "no answer at all": ([], []),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_split_rollout(case):
    turns, expected = CASES[case]
    assert [tuple(segment) for segment in split_rollout(turns)] == expected


def sample(problem, *, acc=1.0, calls=1, errors=0, source="tiny_tools", failed=False, session=0):
    return Sample(
        uid=f"{problem}_{session}_0",
        prompt=f"user\n{problem}\nassistant\n",
        turns=(("model", f"about {problem}, {acc}, {calls}, {errors}"),),
        ground_truth="7",
        pred="7",
        data_source=source,
        end_reason="sandbox_failure" if failed else "answer",
        acc=acc,
        score=2 * acc - 1,
        tool_calls=calls,
        tool_errors=errors,
        tool_timeouts=0,
        response_tokens=9,
    )


@pytest.fixture
def sides():
    before = [sample(f"p{i}", acc=0.0, calls=0) for i in range(5)] + [sample("p5", acc=0.0), sample("p6")]
    before += [sample("p7", calls=2, errors=1), sample("o1", acc=0.0, source="tiny_tools_ood_large")]
    after = [sample(f"p{i}") for i in range(7)] + [sample("p7", calls=2, errors=1), sample("p8", acc=0.0)]
    after += [sample("o1", source="tiny_tools_ood_large")]
    return before, after


@pytest.mark.parametrize(
    "text", ["\n" * 200_000, "\\boxed{" * 30_000, "\n \nuser\n" * 20_000, "<interpreter>" + "\n" * 200_000]
)
def test_a_response_that_repeats_itself_is_split_in_time(text):
    """Quadratic time would take minutes."""
    began = time.process_time()
    split_rollout([("model", text), ("tool", text)])
    assert time.process_time() - began < 5


def test_each_kind_of_behaviour_is_shown_before_and_after(sides):
    picks = pick_rollouts(*sides)
    assert [(pick.where, pick.why, pick.verdict) for pick in picks] == [
        ("Before RL", "wrong without code", "wrong"),
        ("Before RL", "wrong with code", "wrong"),
        ("Before RL", "right with code", "right"),
        ("Before RL", "an error, repaired", "right"),
        ("Before RL", "out of distribution, wrong", "wrong"),
        ("After RL", "the same problem", "right"),
        ("After RL", "right with code", "right"),
        ("After RL", "an error, repaired", "right"),
        ("After RL", "out of distribution, right", "right"),
        ("After RL", "wrong", "wrong"),
    ]
    assert picks[0].prompt == picks[5].prompt  # "the same problem", without the chat template's role names
    assert picks[0].prompt in {f"p{i}" for i in range(5)}
    assert picks[7].facts == "2 calls, 1 error, ended: answer"


def test_the_choice_does_not_depend_on_the_order_of_the_dump(sides):
    assert pick_rollouts(*sides) == pick_rollouts(sides[0][::-1], sides[1][::-1])


def test_places_without_their_kind_are_filled_without_repeats():
    after = [sample(f"p{i}", calls=0) for i in range(12)]
    picks = pick_rollouts([], after)
    assert len(picks) == 10
    assert {pick.why for pick in picks} == {"another"}
    assert len({pick.prompt for pick in picks}) == 10


def test_a_sample_that_infrastructure_failed_is_shown_as_not_judged():
    (pick,) = pick_rollouts([], [sample("p", acc=0.0, failed=True)])
    assert pick.verdict == "not judged"


def test_training_rollouts_are_shown_in_order_of_steps():
    rows = [(step, sample(f"q{i}")) for step in (40, 1) for i in range(8)]
    picks = pick_training_rollouts(rows)
    assert len(picks) == 10
    assert [pick.where for pick in picks] == sorted((pick.where for pick in picks), key=lambda w: int(w.split()[-1]))
    assert picks == pick_training_rollouts(rows[::-1])
