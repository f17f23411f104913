"""Whether a teacher's rewriting is what it was asked for: pure text, no endpoint and no sandbox."""

import contextlib

import pytest

from verl_ext.traces import template
from verl_ext.traces.rewriting import check_outputs_agree, check_text, split
from verl_ext.traces.trace import LeftOut, Reason

PROBLEM = "A shop sells 24 boxes with 17 pens each, and 9 pens are broken. How many pens are whole?"
REASONING = (
    "We count all pens first. 24 times 17 is 24*10 + 24*7 = 240 + 168 = 408. The broken ones are taken away, so we "
    "have 408 - 9 = 399. The answer is 399."
)
GOOD = (
    "We count all pens first.\n<code>\nprint(24 * 17)\n</code>\nThat is 408. The broken ones are taken away, so we "
    "have 408 - 9 = 399. The answer is \\boxed{399}."
)


def judged(text: str, *outputs: str, problem: str = PROBLEM, reasoning: str = REASONING) -> Reason | None:
    """Return why a rewriting is left out, by all checks; None if it is kept."""
    try:
        rewriting = split(text)
        check_text(reasoning, rewriting, max_change=0.15)
        check_outputs_agree(problem, reasoning, rewriting, outputs or ("408\n",) * len(rewriting.programs))
    except LeftOut as why:
        return why.reason
    return None


def test_a_good_rewriting_is_kept_in_parts():
    assert judged(GOOD) is None
    rewriting = split(GOOD)
    assert rewriting.programs == ["print(24 * 17)"] and rewriting.texts[0] == "We count all pens first."
    assert split(GOOD.replace("print(24 * 17)", "```python\nprint(24 * 17)\n```")).programs == rewriting.programs


def test_the_example_of_the_template_passes_its_own_checks():
    problem, reasoning = template.EXAMPLE_IN
    assert judged(template.EXAMPLE_OUT, "408\n", problem=problem, reasoning=reasoning) is None


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (REASONING, Reason.NO_CALL),
        ("", Reason.NO_CALL),
        (GOOD.replace("</code>", "", 1), Reason.NOT_A_TRACE),
        (GOOD.replace("<code>", "", 1), Reason.NOT_A_TRACE),
        (GOOD + "<interpreter>", Reason.NOT_A_TRACE),
        (GOOD.replace("print(24 * 17)", " "), Reason.NOT_A_TRACE),
        (GOOD.replace("print(24 * 17)", "<code>\nprint(24 * 17)"), Reason.NOT_A_TRACE),
        (GOOD.replace("</code>", "</code>\n<interpreter>\n407\n</interpreter>"), Reason.FORGED_OUTPUT),
        (GOOD.replace("408 - 9", "408 - 8"), Reason.NUMBER_CHANGED),
        (GOOD.replace("= 399.", "= 397."), Reason.NUMBER_CHANGED),
        ("Es gibt viele Stifte im Laden.\n<code>\nprint(24 * 17)\n</code>\nDas sind 408 Stifte.", Reason.TEXT_CHANGED),
        ("<code>\nprint(24 * 17)\n</code>\n\\boxed{399}", Reason.TEXT_CHANGED),
        (GOOD.replace("That is 408.", "Всего карандашей 408."), Reason.TEXT_CHANGED),
        (GOOD.replace("That is 408.", "所以一共有四百零七支笔。"), Reason.TEXT_CHANGED),
        (GOOD.replace("24 * 17", "408 + 0"), Reason.LITERAL_ONLY),
        (GOOD.replace("24 * 17", "int('408')"), Reason.LITERAL_ONLY),
    ],
)
def test_a_rewriting_that_is_something_else_is_left_out(text, reason):
    assert judged(text) == reason


def test_an_output_that_the_teacher_guessed_right_is_not_forged():
    assert judged(GOOD.replace("</code>", "</code>\n<interpreter>\n408\n</interpreter>")) is None
    assert judged(GOOD.replace("</code>", "</code>\n<interpreter>\n</interpreter>")) is None


@pytest.mark.parametrize(
    ("after", "output"),
    [
        ("That is 408. Done.", "408"),
        ("The total is 408, so 408 - 9 = 399 are whole.", "408"),  # an equation that is right
        ("About 0.33 of them.", "0.3333333333"),  # rounded
        ("That is 33.3% of them.", "0.33333"),
        ("It is \\frac{1}{3}.", "0.5 1/3"),
        ("We have 1,408 pens.", "1408"),
        ("Next we take the 9 broken pens away.", "408"),  # a number of the problem
        ("That is 408.\n1. First this.\n2. Then that.", "408"),  # marks of a list
        ("It is 408. We divide by 2 later.", "408"),  # no claim about a result
        ("It is $-3$.", "-3"),
        ("There are 408 pens, because 24 \\times 17 = 408.", "408"),
        ("That makes 408. Of these, 240 pens and 168 pens are in two stacks.", "408"),  # later, as in the reasoning
        ("Multiplying gives 240 pens + 168 pens = 408 pens.", "408"),  # beside the output, as in the reasoning
        ("It is \\frac{1}{3} of them.", "0.3333333333333333"),
        ("It is 2 1/3 of them, or 2\\frac{1}{3}.", "2.3333333333333335"),
        ("That is four hundred and eight.", "408"),
        ("It is 408cm long, and x is 2x.", "408"),
    ],
)
def test_numbers_that_something_explains_agree(after, output):
    check_outputs_agree(PROBLEM, REASONING, split(f"We count.\n<code>\nprint(24 * 17)\n</code>\n{after}"), [output])


@pytest.mark.parametrize(
    ("after", "output"),
    [
        ("That is 407.", "408"),
        ("So there are 418 pens.", "408"),
        ("Good. The total is then 410 pens.", "408"),
        ("It is 408. The rest is 398.", "408"),
        ("It is 408, so 408 - 9 = 398 are whole.", "408"),  # an equation that is wrong
        ("It is 408. The answer is \\boxed{397}.", "408"),
        ("About 0.35 of them.", "0.3333333333"),
        ("It is 408.", ""),
        ("It is 408.", "Traceback: no pens"),
        ("That is four hundred and seven.", "408"),
        ("That is 17.", "408"),  # known from the problem, but said of the output
        ("There are 240 pens and 168 pens.", "37"),  # of the reasoning, but nothing is said of the output
        ("It is 408. Number of boxes: 407.", "408"),
        ("That is 407pens.", "408"),
        ("That is -408.", "408"),
        ("That is 40800 of them.", "40.8"),
        ("一共有407支笔。", "408"),
    ],
)
def test_a_number_that_contradicts_the_output_is_found(after, output):
    with pytest.raises(LeftOut) as error:
        check_outputs_agree(PROBLEM, REASONING, split(f"We count.\n<code>\nprint(24 * 17)\n</code>\n{after}"), [output])
    assert error.value.reason == Reason.CONTRADICTS_OUTPUT


def test_a_number_counts_as_known_only_after_it_was_said():
    text = "We count.\n<code>\nprint(1)\n</code>\nIt is 408.\n<code>\nprint(24 * 17)\n</code>\nIt is 408."
    with pytest.raises(LeftOut, match="the text says 408 after an output of '1'"):
        check_outputs_agree(PROBLEM, REASONING, split(text), ["1", "408"])


def test_the_reasoning_s_own_script_and_the_letters_of_formulas_are_no_other_script():
    reasoning = "我们先数所有的笔：24乘17等于408。坏的要拿走，所以408-9=399。"
    text = "我们先数所有的笔：\n<code>\nprint(24 * 17)\n</code>\n等于408。坏的要拿走，所以408-9=399。"
    assert judged(text, reasoning=reasoning) is None
    assert judged(GOOD.replace("That is 408.", "With ∑ and α ∈ ℝ that is 408.")) is None


@pytest.mark.parametrize("after", ["1," * 20000, "1 1/2 " * 8000, "1 = 1 " * 20000, "one and " * 20000])
@pytest.mark.timeout(10)
def test_a_long_text_takes_no_minutes(after):
    with contextlib.suppress(LeftOut):
        check_outputs_agree("?", "!", split(f"We count.\n<code>\nprint(1)\n</code>\n{after}"), ["1"])
