import asyncio

import pytest

from verl_ext.reward.verifiers.exact import ChoiceVerifier, ExactVerifier


def verdict(verifier, response, ground_truth):
    return asyncio.run(verifier.verify(response, ground_truth, {})).verdict


@pytest.mark.parametrize(
    ("response", "ground_truth", "expected"),
    [
        (r"\boxed{Paris}", "Paris", "correct"),
        (r"\boxed{\text{paris }}", "Paris", "correct"),
        ("<answer>New\nYork</answer>", "new  york", "correct"),
        (r"\boxed{0.5}", "1/2", "wrong"),
        (r"\boxed{Paris or London}", "Paris", "wrong"),
        ("Paris", "Paris", "no_answer"),
        (r"\boxed{}", "Paris", "no_answer"),
        (r"<interpreter>\boxed{Paris}</interpreter>", "Paris", "no_answer"),
    ],
)
def test_string_is_compared_as_it_stands(response, ground_truth, expected):
    assert verdict(ExactVerifier({}), response, ground_truth) == expected


def test_a_score_has_the_answer_as_it_was_compared():
    score = asyncio.run(ExactVerifier({}).verify(r"\boxed{\text{New  York}}", "x", {}))
    assert (score.pred, score.normalised) == (r"\text{New  York}", "new york")
    assert asyncio.run(ChoiceVerifier({}).verify(r"\boxed{\textbf{(C)} 12}", "D", {})).normalised == "C"


def test_case_counts_if_told_so():
    assert verdict(ExactVerifier({}, ignore_case=False), r"\boxed{paris}", "Paris") == "wrong"


@pytest.mark.parametrize(
    ("response", "ground_truth", "expected"),
    [
        (r"\boxed{C}", "C", "correct"),
        (r"\boxed{(C)}", "C", "correct"),
        (r"\boxed{\textbf{(C)} 12}", "(C)", "correct"),
        (r"\boxed{C. because of it}", "C", "correct"),
        (r"\boxed{C. Both A and B}", "C", "correct"),
        (r"\boxed{\text{(C) I, II}}", "C", "correct"),
        (r"\boxed{E: A polygenic risk score}", "E", "correct"),
        (r"\boxed{Option C}", "C", "correct"),
        (r"\boxed{C}", "C. Both A and B", "correct"),
        (r"\boxed{C or none}", "C", "wrong"),
        (r"\boxed{C^2}", "C", "wrong"),
        (r"\boxed{C+1}", "C", "wrong"),
        (r"\boxed{C. or D}", "C", "wrong"),
        ("The answer is (C).", "C", "correct"),
        ("First I thought that the answer is B. **Answer: C**", "C", "correct"),
        (r"\boxed{B}", "C", "wrong"),
        (r"\boxed{C or D}", "C", "wrong"),
        (r"\boxed{not C, D}", "C", "wrong"),
        (r"\boxed{Cat}", "C", "wrong"),
        ("I like C", "C", "no_answer"),
        ("The answer is a mystery.", "A", "no_answer"),
        ("The answer: I think it is hard.", "I", "no_answer"),
        ("The answer is C. This choice is a good one.", "C", "correct"),
        ("The answer is C; option B is wrong.", "C", "correct"),
        ("I take option c.", "C", "correct"),
        ("Answer A is too small, answer B too big. The correct choice is D.", "D", "correct"),
        ("The answer is (a).", "A", "correct"),
        ("The answer is a.", "A", "correct"),
        ("The answer isn't B. It is option C.", "C", "correct"),
        ("The answer is x = 4, which is option C.", "C", "correct"),
        ("The answer is C - because of it.", "C", "correct"),
        ("At first I thought the answer is B, but the correct answer is option C.", "C", "correct"),
        ("If the answer is B, we get 7, impossible. So the correct option is C.", "C", "correct"),
        ("The correct answer is C - 12.", "C", "correct"),
        ("Answer: B = 7", "B", "correct"),
        ("Answer: C\n- 5 is too small", "C", "correct"),
        ("<b>Answer: C</b>", "C", "correct"),
        ("The answer is a) 5.", "A", "correct"),
        ("The correct option is a because it fits.", "A", "correct"),
        ("Answer: a", "A", "correct"),
        ("<interpreter>the answer is C</interpreter>", "C", "no_answer"),
    ],
)
def test_one_letter_is_chosen(response, ground_truth, expected):
    assert verdict(ChoiceVerifier({}), response, ground_truth) == expected


def test_ground_truth_of_another_kind_is_an_error_of_the_data():
    with pytest.raises(ValueError, match="expected one letter"):
        verdict(ChoiceVerifier({}), r"\boxed{C}", "12")
    with pytest.raises(ValueError, match="ground truth is empty"):
        verdict(ExactVerifier({}), r"\boxed{C}", " ")
