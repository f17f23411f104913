"""Answers that attack the scorer, change a right answer a little, or cost too much."""

import time

import pytest

from verl_ext.reward import Score, score_answer
from verl_ext.reward.maths import symbolic
from verl_ext.reward.score import compare

HOSTILE = [
    "9**9**9**9",
    "9^{9^{9^{9}}}",
    "x^{9^{9^{9}}}",
    r"\frac{100000!}{99999!}",
    "((((9999999!)!)!)!)",
    r"\binom{10^9}{5\cdot10^8}",
    "(" * 900 + "42" + ")" * 900,
    r"\sqrt{" * 300 + "42" + "}" * 300,
    r"\text{" * 300 + "42" + "}" * 300,
    r"\frac{1}{" * 200 + "1" + "}" * 200,
    "9" * 1999,
    "2^{1000000}(" + ",".join("1" * 900) + ")",
    r"3^{1000000}\begin{pmatrix}" + "&".join("1" * 60) + r"\end{pmatrix}",
    r"3\begin{pmatrix}" + "&".join(["3^{999999}"] * 60) + r"\end{pmatrix}",
    r"\sum_{k=1}^{1000000000} k",
    r"\int_0^1 \sin(\sin(\sin(x^7)))dx",
    r"\det\begin{pmatrix}"
    + r"\\".join("&".join(f"x_{{{i}{j}}}" for j in range(9)) for i in range(9))
    + r"\end{pmatrix}",
    "__import__('os').system('touch PWNED')",
    "42 if open('PWNED','w') else 42",
    "sympify(\"open('PWNED','w')\")",
    "Integer(42).__class__",
    "open('PWNED','w').close()",
    r"\boxed{" * 400,
    "+".join([r"\frac{2^{199000}}{3^{126000}}"] * 66),
]


GOLDS = [
    "42",
    r"\frac{3}{4}",
    r"3\sqrt{13}",
    "(1,2)",
    "1,-2",
    "x=5",
    r"\text{odd}",
    "[0,1)",
    "204_5",
    "7:32",
    r"28\%",
    r"74^\circ",
]
PREPENDED = [
    "7,",
    "not ",
    r"\text{not }",
    r"\neq ",
    "<",
    "7=",
    "z=7=",
    "7 ",
    "2",
    r"\sim ",
    r"\text{about }",
    "9-",
    r"7\to ",
]
APPENDED = [
    *(
        "+1",
        ",7",
        "; 7",
        " 7",
        "|7",
        "<7",
        "=7",
        "x",
        "i",
        "?",
        "_7",
        ":1",
        "'",
        "e3",
        "/2",
        r"\pm 1",
        r"\pi",
        r"\ldots",
    ),
    *(
        r"\text{ or }7",
        r"\text{ is false}",
        r"\text{ million}",
        r"\text{ dozen}",
        r"\text{ squared}",
        r"\text{ or more}",
    ),
    *(r"\div 2", r"\bmod 5", r"\to 0", r"\times 2", r"\neq 7", "{2}", "(2)", r"\%\%", r"\text{ maybe}"),
]


@pytest.mark.parametrize("gold", GOLDS)
def test_what_changes_an_answer_makes_it_wrong(gold):
    changed = [before + gold for before in PREPENDED] + [gold + after for after in APPENDED]
    changed += [
        "-" + gold,
        gold + gold,
        rf"\sqrt{{{gold}}}",
        rf"\frac{{1}}{{{gold}}}",
        rf"\{{{gold}, 9\}}",
        f"({gold},0)",
    ]
    assert [answer for answer in changed if compare(answer, gold).equal is not False] == []


@pytest.mark.parametrize("answer", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_answer_is_refused_at_once_and_runs_nothing(answer, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(symbolic, "is_equal", lambda *_: pytest.fail("computer algebra was asked"))
    start = time.process_time()
    score = score_answer(rf"\boxed{{{answer}}}", "43")
    assert time.process_time() - start < 2.0  # s
    assert score.acc == 0.0
    assert not list(tmp_path.iterdir())


def test_long_hostile_response_is_searched_in_linear_time():
    pieces = [r"\boxed{", "<code>", "<interpreter>", "```python\n", "</think>", "<answer>", "{", "```\n", r"\boxed{1}"]
    for piece in pieces:
        start = time.process_time()
        score_answer(piece * (200_000 // len(piece)) + r"</answer>}", "42")
        assert time.process_time() - start < 2.0, piece


def test_unverified_answer_is_neither_right_nor_wrong(monkeypatch):
    monkeypatch.setattr(symbolic, "is_equal", lambda *_: None)
    assert score_answer(r"\boxed{\sqrt{16}+x}", r"\sqrt{x}") == Score(None, r"\sqrt{16}+x", "unknown", "symbolic")


def test_unverified_value_leaves_a_list_open_unless_another_value_is_wrong(monkeypatch):
    monkeypatch.setattr(symbolic, "is_equal", lambda *_: None)
    assert score_answer(r"\boxed{(1, \sqrt{x})}", "(1, x)").verdict == "unknown"
    assert score_answer(r"\boxed{(2, \sqrt{x})}", "(1, x)").verdict == "wrong"


def test_answer_costs_one_deadline_at_most(monkeypatch):
    asked = []
    monkeypatch.setattr(symbolic, "is_equal", lambda *pair: asked.append(pair))
    assert score_answer(r"\boxed{\sqrt{a}, \sqrt{b}, \sqrt{c}}", "x, y, z").verdict == "unknown"
    assert len(asked) == 1


def test_answer_that_is_too_costly_is_wrong_and_costs_one_deadline(monkeypatch):
    asked = []

    def refuse(*pair):
        asked.append(pair)
        raise symbolic.TooCostly

    monkeypatch.setattr(symbolic, "is_equal", refuse)
    score = score_answer(r"\boxed{(\sqrt{a}, \sqrt{b})}", "(x, y)")
    assert score == Score(0.0, r"(\sqrt{a}, \sqrt{b})", "wrong", "guard: cost")
    assert score_answer(r"\boxed{\sqrt{a}, \sqrt{b}, \sqrt{c}}", "x, y, z").verdict == "wrong"
    assert len(asked) == 2


def test_more_comparisons_than_a_gold_can_need_are_wrong(monkeypatch):
    asked = []
    monkeypatch.setattr(symbolic, "is_equal", lambda *pair: asked.append(pair) or False)
    roots = [", ".join(rf"(\sqrt{{{letter}{n}}}, {n})" for n in range(8)) for letter in "xy"]
    assert score_answer(rf"\boxed{{{roots[0]}}}", roots[1]).verdict == "wrong"
    assert len(asked) <= 64
