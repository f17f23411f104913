import time

import pytest

from verl_ext.evaluation.samples import Sample
from verl_ext.report.rollouts import pick_rollouts, pick_training_rollouts, split_rollout

CASES = {
    "the <code> protocol": (
        "Let me see. <code>\nprint(6*7)\n</code>\n<interpreter>\n42\n</interpreter>\nSo \\boxed{42}.",
        [
            *[("text", "Let me see. "), ("code", "print(6*7)"), ("tool", "42")],
            *[("text", "\nSo "), ("boxed", "\\boxed{42}"), ("text", ".")],
        ],
    ),
    "an error of the model's code": (
        "<code>prin(1)</code><interpreter>NameError: name 'prin' is not defined</interpreter>",
        [("code", "prin(1)"), ("tool_error", "NameError: name 'prin' is not defined")],
    ),
    "a whole traceback": (
        "<code>1/0</code><interpreter>Traceback (most recent call last):\nZeroDivisionError: x</interpreter>",
        [("code", "1/0"), ("tool_error", "Traceback (most recent call last):\nZeroDivisionError: x")],
    ),
    "hermes": (
        'Hm.\n<tool_call>\n{"name": "code_interpreter", "arguments": {"code": "a = 1\\nprint(a)"}}\n</tool_call>'
        "\nuser\n<tool_response>\n1\n</tool_response>\nassistant\nDone \\boxed{1}",
        [
            *[("text", "Hm.\n"), ("code", "a = 1\nprint(a)"), ("tool", "1")],
            *[("text", "Done "), ("boxed", "\\boxed{1}")],
        ],
    ),
    "a hermes call that is no JSON stays as written": (
        "<tool_call>{'code': 1}</tool_call>",
        [("code", "{'code': 1}")],
    ),
    "cut in the code": ("x <code>print(1", [("text", "x "), ("code", "print(1")]),
    "cut in the output": ("<code>p</code><interpreter>12", [("code", "p"), ("tool", "12")]),
    "nested braces": ("\\boxed{\\frac{1}{2}} ok", [("boxed", "\\boxed{\\frac{1}{2}}"), ("text", " ok")]),
    "an unclosed box is text": ("\\boxed{1", [("text", "\\boxed{1")]),
    "a box within a box is part of it, and one in an unclosed box is a box": (
        "\\boxed{\\boxed{1}+{2}} \\boxed{ \\boxed{3}",
        [("boxed", "\\boxed{\\boxed{1}+{2}}"), ("text", " \\boxed{ "), ("boxed", "\\boxed{3}")],
    ),
    "a box in the tool's output is the tool's": (
        "<code>p</code><interpreter>\\boxed{9}</interpreter>",
        [("code", "p"), ("tool", "\\boxed{9}")],
    ),
    "no answer at all": ("", []),
}


@pytest.mark.parametrize("case", CASES)
def test_split_rollout(case):
    output, expected = CASES[case]
    assert [tuple(segment) for segment in split_rollout(output)] == expected


def sample(problem, *, acc=1.0, calls=1, errors=0, source="tiny_tools", failed=False, session=0):
    return Sample(
        uid=f"{problem}_{session}_0",
        input=f"user\n{problem}\nassistant\n",
        output=f"about {problem}, {acc}, {calls}, {errors}",
        gts="7",
        pred="7",
        data_source=source,
        finish_reason="answer",
        acc=acc,
        score=2 * acc - 1,
        tool_calls=calls,
        tool_errors=errors,
        tool_timeouts=0,
        model_turns=1,
        response_tokens=9,
        truncated=0,
        unverified=0,
        sandbox_failure=float(failed),
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
    split_rollout(text)
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
    rows = [
        {"input": f"q{i}", "output": "a", "gts": "7", "score": 1.0, "step": step} for step in (40, 1) for i in range(8)
    ]
    picks = pick_training_rollouts(rows)
    assert len(picks) == 10
    assert [pick.where for pick in picks] == sorted((pick.where for pick in picks), key=lambda w: int(w.split()[-1]))
    assert picks == pick_training_rollouts(rows[::-1])
