"""Spellings of an answer, and look-alikes of them, by kind: tests/data/answer_variants.jsonl."""

import time
from pathlib import Path

import pytest

from verl_ext.reward import score_answer
from verl_ext.reward.score import canonical, compare
from verl_ext.runs import jsonl

ROWS = list(jsonl.read(Path(__file__).parents[2] / "data" / "answer_variants.jsonl"))
KINDS = list(dict.fromkeys(row["kind"] for row in ROWS))


@pytest.mark.parametrize("kind", KINDS)
def test_variants_of_a_kind_are_judged_as_labelled(kind):
    rows = [row for row in ROWS if row["kind"] == kind]
    assert min(sum(row["right"] is right for row in rows) for right in (True, False)) >= 15
    misjudged = []
    for row in rows:
        response = row.get("response") or rf"So the answer is \boxed{{{row['pred']}}}."
        score = score_answer(response, row["gold"], problem=row.get("problem", ""))
        if score.verdict == "unknown" or (score.acc == 1.0) != row["right"]:
            misjudged.append((response, row["gold"], row["right"], score))
    assert misjudged == []


@pytest.mark.parametrize(
    "same",
    [
        ("0.5", r"\frac12", "1/2", r"\dfrac{1}{2}", "x=0.5", r"0.50\text{ cm}", "½"),
        ("6", "06", "6.0", r"\boxed{6}", "6 hours", "x = 6", r"\text{Area}=6"),
        ("2^(n-1)", "2^{n-1}", "2**(n-1)"),
        ("1,331", "1331"),
    ],
)
def test_equal_answers_are_written_the_same(same):
    assert len({canonical(answer) for answer in same}) == 1


def test_unequal_answers_are_written_apart():
    assert len({canonical(answer) for answer in ("6", "6%", "6 million", "0.6", "-6", "6x", r"\sqrt6", "6,7")}) == 8


@pytest.mark.parametrize(
    "piece",
    [
        *("^(", "2^(n", "sqrt(", "abs(x", "alpha ", "^-", r"\sqrt", r"\frac1", "{1}", "_(", "binom(", r"\text{pi}"),
        *("dollars per ", "red ", "kg of ", "5 million ", "per ", r"\text{km}/", "cm^2 ", "十"),
        *("x=1,", "x_1=", "(x,", r"\text{area of }", "AB+", r"\angle A", "f(", r"\approx 1", "6\\approx"),
        *("(C) ", "C. ", "option ", "A and ", "C or "),
        *(r"x\ne ", r"x\ne 1,", r"x\in\mathbb{R},", r"(-\infty,1)\cup", r"\setminus\{1\}", "all real numbers except "),
        *(r"\begin{cases}x=1\\", r"\\ ", "& ", r"\& ", "1_{(", "base ", "9{:}", "1,234 and "),
    ],
)
def test_long_answer_is_read_in_linear_time(piece):
    start = time.process_time()
    for gold in ("6", r"\sqrt{2}", "(1,2)", "C", r"x\ne 2", "x=1,y=2", "11101_2", r"5\text{ kg of sand}"):
        for before in ("", "6 ", "x=", r"\{", "C. "):
            compare(before + piece * (1900 // len(piece)), gold)
    assert time.process_time() - start < 4.0  # s, for 40 comparisons
