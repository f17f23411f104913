"""Subsets of the reals as answers. Rows: (answer, ground truth, right)."""

import pytest

from verl_ext.reward.maths.intervals import condition_of, intervals_of, read_reals
from verl_ext.reward.score import compare

CHAINS = [
    ("-3<x<4", "-3,4", False),
    ("-3,4", "-3<x<4", False),
    ("-3<x<4", r"\{-3,4\}", False),
    ("-3<x<4", "(-3,4)", True),
    ("-3<x<4", "[-3,4]", False),
    (r"-3\le x<4", "[-3,4)", True),
    ("-3<x<4", r"(-\infty,4)", False),
    ("-3<x<4", r"(-\infty,-3)\cup(4,\infty)", False),
    ("4>x>-3", "-3<x<4", True),
    ("4>x>-3", "-3<y<4", False),
    ("-3<x<4", "-3<x<5", False),
    (r"\{x\mid -3<x<4\}", "(-3,4)", True),
    (r"\{x\in\mathbb{R}: -3<x<4\}", "-3<x<4", True),
    (r"\{x\in\mathbb{Z}: -3<x<4\}", "(-3,4)", False),
    (r"\{x\mid -3<x<a\}", "(-3,4)", False),
    (r"-\frac12<x\le\sqrt2", r"(-\frac12,\sqrt2]", True),
    (r"x\le-1\text{ or }x\ge2", r"(-\infty,-1]\cup[2,\infty)", True),
    (r"x\le-1\text{ or }x\ge2", "-1,2", False),
    ("|x|<3", "(-3,3)", True),
    ("|x|<3", "-3<x<3", True),
    ("-3<x<3", "|x|<3", True),
    ("|x|<3", r"-3\le x\le 3", False),
    ("|y|<3", "-3<x<3", False),
    ("|x|<3", "(-3,4)", False),
    (r"|x-2|\le 1", r"1\le x\le 3", True),
    ("|x|>2", r"x<-2\text{ or }x>2", True),
    ("x<4", "4", False),
    ("4", r"x\le4", False),
    ("x=-3,x=4", "-3<x<4", False),
    ("1<2", "(1,2)", False),
    ("a<b<c", "a,c", False),
]
SETS = [
    (r"[-1,2]\cup\{5\}", r"[-1,2]\cup(5)", False),
    (r"[-1,2]\cup\{5\}", r"[-1,2]\cup 5", False),
    (r"[-1,2]\cup\{5\}", r"\{5\}\cup[-1,2]", True),
    (r"[-1,2]\cup\{5\}", r"[-1,2]\cup[5,5]", True),
    (r"[-1,2]\cup\{5\}", r"[-1,2]\cup\{6\}", False),
    (r"[-1,2]\cup\{5\}", "[-1,2],5", False),
    (r"[-1,2]\cup\{5,6\}", r"[-1,2]\cup\{5\}\cup\{6\}", True),
    (r"[-1,2]\cup\{5,6\}", r"[-1,2]\cup(5,6)", False),
    (r"[-\sqrt2,2]\cup\{\sqrt5\}", r"[-\sqrt2,2]\cup(\sqrt5)", False),
    (r"[-\sqrt2,2]\cup\{\sqrt5\}", r"\{\sqrt{5}\}\cup[-\sqrt{2},2]", True),
    (r"(1,2)\cup\{2\}", "(1,2]", True),
    (r"(1,2)\cup(2,3)", "(1,3)", False),
    (r"[1,2]\cup[2,3]", "[1,3]", True),
    (r"\{1\}\cup\{2\}", r"\{1,2\}", True),
    ("[-1,2]∪{5}", r"[-1,2]\cup\{5\}", True),
    ("[-1,2] ∪ {5}", r"[-1,2]\cup(5)", False),
    ("[-1,2] ∪ {5}", r"[-1,2]\cup\{6\}", False),
    (r"]-\infty,3[\cup]5,\infty[", r"(-\infty,3)\cup(5,\infty)", True),
    (r"]-\infty,3]\cup[5,\infty[", r"(-\infty,3]\cup[5,\infty)", True),
    (r"]-\infty,3[\cup]5,\infty[", r"(-\infty,3]\cup[5,\infty)", False),
    (r"[1,2]\cup]3,4]", r"[1,2]\cup(3,4]", True),
    (r"(1,2)\bigcup(3,4)", r"(1,2)\cup(3,4)", True),
    (r"\mathbb R\backslash\{3\}", r"(-\infty,3)\cup(3,\infty)", True),
    (r"\mathbb{R}-\{3\}", r"(-\infty,3)\cup(3,\infty)", True),
    (r"\mathbb{R}-\{3\}", r"(-\infty,4)\cup(4,\infty)", False),
    (r"\left\{x\;\middle|\;x>3\right\}", r"(3,\infty)", True),
    (r"\left\{x\;\middle|\;x>3\right\}", r"[3,\infty)", False),
    (r"\{1\}\cup\{2\}", "(1,2)", False),
    (r"\{\emptyset\}", r"\emptyset", False),
    (r"\emptyset", r"\{\emptyset\}", False),
    (r"\{\{\}\}", r"\{\}", False),
    (r"\{\}", r"\emptyset", True),
    (r"\{\{1\}\}", r"\{1\}", False),
    (r"\{\{1\},2\}", r"\{1,2\}", False),
    (r"\{1\},2", r"1,2", False),
    (r"\{\{1,2\},\{3\}\}", r"\{\{3\},\{2,1\}\}", True),
    (r"\{\{1,2\},3\}", r"\{1,2,3\}", False),
    (r"\{\emptyset,\{\emptyset\}\}", r"\{\{\emptyset\},\emptyset\}", True),
    (r"\{\emptyset,\{\emptyset\}\}", r"\{\emptyset\}", False),
    (r"\{\{1,2\},\{1,3\}\}", "(1,2),(1,3)", False),
    (r"\{5\}", "5", True),
    (r"\{(1,2)\}", "(1,2)", True),
    (r"\{[1,2]\}", "[1,2]", False),
    (r"(2 \cup)", "x^2+1", False),
    (r"([1,2]\cup\{5\})", r"[1,2]\cup\{5\}", True),
]  # fmt: skip
CONNECTIVES = [
    (r"x<-1\text{ and }x>2", r"(-\infty,-1)\cup(2,\infty)", False),
    (r"x<-1\text{ and }x>2", r"x<-1\text{ or }x>2", False),
    (r"x>-1\text{ and }x<2", "(-1,2)", True),
    (r"x>-1\text{ and }x<2", "-1<x<2", True),
    (r"x>-1\text{ and }x<2", r"(-\infty,\infty)", False),
    (r"x>-1\text{ or }x<2", "(-1,2)", False),
    (r"x>-1\text{ or }x<2", r"(-\infty,\infty)", True),
    (r"x>-\sqrt2 \text{ and } x\le\sqrt3", r"(-\sqrt2,\sqrt3]", True),
    (r"x>-1, x<2", "(-1,2)", True),
    (r"x<-1, x>2", r"(-\infty,-1)\cup(2,\infty)", True),
    (r"x>-1 \land x<2", "-1<x<2", True),
    (r"x>-1 \wedge x<2", r"(-\infty,\infty)", False),
    *(
        (rf"x<-1 {sign} x>2", r"(-\infty,-1)\cup(2,\infty)", True)
        for sign in (r"\lor", r"\vee", "∨", "or", r"\text{ or }")
    ),
    (r"x<-1 \lor x>2", r"(-\infty,-1]\cup(2,\infty)", False),
    (r"0<x<1 \text{ or } x>2 \text{ and } x<3", r"(0,1)\cup(2,3)", True),
    (r"x<0 \text{ or } x=5", r"(-\infty,0)\cup\{5\}", True),
    (r"x=5 \text{ or } x<0", r"(-\infty,0)\cup\{5\}", True),
    (r"x<0 \text{ or } x=5", r"(-\infty,0)\cup\{6\}", False),
    (r"-1\le x\le 2 \text{ or } x=5", r"[-1,2]\cup\{5\}", True),
    (r"x=1 ∨ x=2", "1,2", True),
    (r"p \lor q", r"p \land q", False),
    (r"x>1 \text{ and } y<2", r"x>1, y<2", True),
    (r"x>1 \text{ and } y<2", r"y<2 \text{ and } x>1", True),
    (r"x>1 \text{ and } y<2", r"x>1, y<3", False),
    (r"x>1 \text{ or } y>1", r"x>1 \text{ and } y>1", False),
    (r"x>1 \text{ and } y>1", r"x>1 \text{ or } y>1", False),
    (r"x>1 \text{ or } y>1", r"y>1 \text{ or } x>1", True),
    (r"\{x\mid x<-1\text{ or }x>2\}", r"(-\infty,-1)\cup(2,\infty)", True),
    (r"\{x\mid x>-1\text{ and }x<2\}", "(-1,2)", True),
    (r"-\infty<x<\infty, \sqrt2<x<\sqrt3", r"(\sqrt2,\sqrt3)", True),  # x is a real number, and between the two
    (r"\sqrt2<x<\sqrt3, \infty>x>-\infty", r"(\sqrt2,\sqrt3)", True),
    (r"-\infty<x<\infty, \sqrt2<x<\sqrt3", r"(-\infty,\infty)", False),
    (r"-\infty<x<\infty, 1<x<2", "(1,2)", True),
    (r"-\infty<x<\infty \text{ and } x>1", r"(1,\infty)", True),
    (r"-\infty<x<\infty, x>1, x<3", "(1,3)", True),
    (r"-\infty<x<\infty, x<1, x>3", r"(-\infty,1)\cup(3,\infty)", True),
    (r"-\infty<x<\infty \text{ or } 1<x<2", r"(-\infty,\infty)", True),
    (r"-\infty<x<\infty, -\infty<x<\infty", r"(-\infty,\infty)", True),
    (r"1<x<2, \sqrt5<x<\sqrt7", r"(1,2)\cup(\sqrt5,\sqrt7)", True),  # two chains: a union
    (r"1<x<4, \sqrt2<x<\sqrt3", r"(\sqrt2,\sqrt3)", False),
]
TABLES = {"CHAINS": CHAINS, "SETS": SETS, "CONNECTIVES": CONNECTIVES}


@pytest.mark.parametrize(
    ("answer", "ground_truth", "right"),
    [pytest.param(*row, id=f"{name}-{i}") for name, table in TABLES.items() for i, row in enumerate(table)],
)
def test_set_of_reals_is_judged_as_its_table_says(answer, ground_truth, right):
    assert compare(answer, ground_truth).equal is right


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("-3<x<4", ("x", "(-3,4)")),
        (r"4\ge x", ("x", r"(-\infty,4]")),
        ("x>1,x<0", ("x", r"(1,\infty)\cup (-\infty,0)")),
        ("1<x>3", None),
        ("x<1,y<2", None),
        (r"x\ne 3", None),
        ("x<", None),
    ],
)
def test_inequality_becomes_an_interval(text, expected):
    assert intervals_of(text) == expected


def test_condition_with_another_letter_or_domain_stays():
    assert condition_of(r"\{x|x>1\}") == "x>1"
    assert condition_of(r"\{x|x>a\}") == r"\{x|x>a\}"
    assert condition_of(r"\{n\in \mathbb{Z}|n>1\}") == r"\{n\in \mathbb{Z}|n>1\}"


def test_reals_are_read_in_one_form():
    infinity = float("inf")
    assert read_reals(r"[2,3]\cup (1,2)\cup \{5\}") == [(1, 1, 3, 0), (5, 0, 5, 0)]
    assert read_reals(r"(1,2)\cup (2,3)") == [(1, 1, 2, 1), (2, 1, 3, 1)]
    assert read_reals(r"(-\infty,1)\cup (0,\infty)") == [(-infinity, 1, infinity, 1)]
    for foreign in (r"(\sqrt{2},2)", "(2,1)", r"\mathbb{R}", "5", r"[0,1)\cup 5"):
        assert read_reals(foreign) is None, foreign
