import time

import pytest

from verl_ext.reward.score import score_answer
from verl_ext.reward.votes import vote


@pytest.mark.parametrize(
    "same",
    [
        ("0.5", r"\frac12", "1/2", r"\frac{1}{2}", r"\dfrac{1}{2}", " .5 ", "$0.50$"),
        ("1,234", "1234", "1234.0"),
        ("(1/2, 3)", "(0.5,3)", r"\left(\frac12, 3\right)"),
        (r"\{1, 0.5\}", r"\{\frac12, 1\}"),
        (r"\{(0.5,1),(2,3)\}", r"\{(2,3),(\frac12,1)\}"),
        (r"\{(\{0.5,2\},1)\}", r"\{(\{2,\frac12\},1)\}"),
        ("x = 3", "x=3"),
        (r"\text{yes}", "yes", r"\text{Yes}", "Yes", r"\textbf{YES}"),
        ("No solution", r"\text{no solution}", r"\text{No Solution}."),
        (r"\text{(C) Increasing}", "C", "(C)", r"\textbf{(C) Increasing}", "(C) Increasing", r"\text{C}"),
        ("12 cm", r"12\text{ cm}"),
        (r"\begin{pmatrix}1\\0.5\end{pmatrix}", r"\begin{pmatrix} 1 \\ \frac{1}{2} \end{pmatrix}"),
    ],
)
def test_equal_answers_vote_together(same):
    assert len({vote(answer) for answer in same}) == 1


@pytest.mark.parametrize(
    "others",
    [
        ("1/2", "1/3", "0.33", "0.333"),
        ("(1,2)", "(2,1)", "[1,2]", "1,2"),
        ("12", "12 cm", "12 kg", "12%"),
        ("x^2", "X^2", "x2", "-x^2"),
        ("9^{9^9}", "9^{9^8}"),
        ("1/0", "2/0"),
        ("", "0"),
        ("ABC", "abc", "Mgh", "mgh"),  # products, sides, angles
        ("yes", "no", r"\text{Yes and no}"),
        ("(A) Increasing", "(B) Increasing", "Increasing", "increasing (A)"),
        ("A", "(A) B", "(a) sin x", "A. Smith", "A or B"),
    ],
)
def test_other_answers_vote_apart(others):
    assert len({vote(answer) for answer in others}) == len(others)


def test_no_answer_does_not_vote():
    assert vote("") is None and vote("  \n") is None


def test_answers_that_were_found_right_are_one_vote_however_written():
    r"""2\sqrt2 and \sqrt8 are equal by computer algebra, which the scorer has asked already."""
    scores = [score_answer(rf"\boxed{{{pred}}}", r"2\sqrt{2}") for pred in (r"2\sqrt2", r"\sqrt{8}", "2.83")]
    votes = [vote(score.pred, score.normalised, score.acc) for score in scores]
    assert [score.acc for score in scores] == [1.0, 1.0, 0.0] and votes[0] == votes[1] != votes[2]
    # Without a normal spelling (a judge, a program) nothing shows that two right answers are equal.
    assert vote("a poem", "", 1.0) != vote("another poem", "", 1.0)


def test_a_hostile_answer_costs_little():
    started = time.process_time()
    for answer in (
        "(" * 1000,
        "{" * 900 + "1" + "}" * 900,
        "1," * 900,
        "((1,2)," * 200,
        "9" * 50_000,
        "2^" * 500 + "2",
    ):
        assert vote(answer) is not None
    assert time.process_time() - started < 1.0
