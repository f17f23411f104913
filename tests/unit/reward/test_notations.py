"""Spellings of one answer, each kind with similar ones that are another answer. Rows: (answer, ground truth, right)."""

import time

import pytest

from verl_ext.reward.maths.normalisation import normalise
from verl_ext.reward.maths.unicode_signs import to_latex
from verl_ext.reward.score import compare

M, TWICE_M = r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix}2&4\\6&8\end{pmatrix}"

DEGREES = [  # count in the argument of a function; an angle may leave its degree sign out
    (r"\sin 45^\circ", r"\frac{\sqrt2}{2}", True),
    (r"\sin 45^\circ", r"\sin 45", False),
    (r"\sin 45", r"\frac{\sqrt2}{2}", False),
    (r"\sin 45^\circ", "45", False),
    (r"\sin{45^{\circ}}", r"\frac{1}{\sqrt2}", True),
    ("cos(60°)", "1/2", True),
    (r"\cos 60\degree", "0.5", True),
    (r"\sin(45)^\circ", r"\frac{\sqrt2}{2}", True),
    (r"\sin 45\text{ degrees}", r"\frac{\sqrt2}{2}", True),
    (r"\sin^2 30^\circ", r"\frac14", True),
    (r"\sin^2 30^\circ", r"\frac12", False),
    (r"2\sin 30^\circ\cos 30^\circ", r"\frac{\sqrt3}{2}", True),
    (r"\sin 45^\circ", r"\sin\frac{\pi}{4}", True),
    (r"\sin(x+30^\circ)", r"\sin(x+\frac{\pi}{6})", True),
    (r"\sin(x+30^\circ)", r"\sin(x+30)", False),
    (r"\cos 120^\circ+i\sin 120^\circ", r"-\frac12+\frac{\sqrt3}{2}i", True),
    (r"\cot 1^\circ\csc 1^\circ", r"\frac{\cos 1^\circ}{\sin^2 1^\circ}", True),
    (r"\frac{\cos 1}{\sin^2 1}", r"\frac{\cos 1^\circ}{\sin^2 1^\circ}", False),
    (r"45^\circ", "45", True),
    (r"45°", r"45^{\circ}", True),
    (r"\angle A=45^\circ, \angle B=60^\circ", "45,60", True),
    (r"\sin 30^\circ \text{ and } \cos 60^\circ", r"\frac12,\frac12", True),
    (r"90^\circ-x", "90-x", True),
    (r"\sin 30^\circ\cdot 4", "2", True),
    (r"\sin 30^\circ\times 4", r"\sin 120^\circ", False),
    (r"\sin 45^\circ\sqrt{2}", "1", True),
    (r"\sin 30^\circ\cdot\cos 60^\circ", r"\frac14", True),
    (r"\sin 30^\circ/2", r"\frac14", True),
    (r"\sin 30^\circ/2", r"\sin 15^\circ", False),
    (r"\sin 180^\circ/n", r"\sin\frac{\pi}{n}", True),
    ("cos 60 degrees", "1/2", True),
    (r"\sin 30^\circ=\frac12", r"\frac12", True),
    (r"\sin 30^\circ=\frac13", r"\frac12", False),
    ("sin 45º", r"\frac{\sqrt2}{2}", True),
    (r"\operatorname{sin} 45^\circ", r"\frac{\sqrt2}{2}", True),
    (r"\mathrm{cos}\,60°", "0.5", True),
]
ROOTS = [
    ("3√13", r"3\sqrt{13}", True),
    ("3√13", r"13\sqrt{3}", False),
    ("3√13", r"\sqrt[3]{13}", False),
    ("√2.25", "1.5", True),
    ("√(x+1)", r"\sqrt{x+1}", True),
    ("√x+1", r"\sqrt{x+1}", False),
    ("√(x+√2)", r"\sqrt{x+\sqrt{2}}", True),
    ("√√16", "2", True),
    ("√½", r"\frac{\sqrt2}{2}", True),
    ("√π", r"\sqrt{\pi}", True),
    ("2√3√5", r"2\sqrt{15}", True),
    ("√10", r"\sqrt{10}", True),
    ("√1 0", r"\sqrt{10}", False),
    ("∛13", r"\sqrt[3]{13}", True),
    ("∛13", r"\sqrt{13}", False),
    ("∜2", r"\sqrt[4]{2}", True),
]
FRACTIONS = [
    ("½π", r"\frac{\pi}{2}", True),
    ("½π", r"\frac{1}{2\pi}", False),
    ("½x", r"\frac{x}{2}", True),
    ("½a", r"\frac{1}{2a}", False),
    ("½√3", r"\frac{\sqrt3}{2}", True),
    ("½(a+b)", r"\frac{a+b}{2}", True),
    ("3½π", r"\frac{7\pi}{2}", True),
    ("3½π", r"\frac{3\pi}{2}", False),
    ("-1½", r"-\frac32", True),
    ("-1½", r"-\frac12", False),
    ("1²⁄₃", r"\frac53", True),
    ("²⁄₃", "2/3", True),
    ("x²½", r"\frac{x^2}{2}", True),
    ("π½", r"\frac{\pi}{2}", True),
    ("⅐", "1/7", True),
    ("⅒", "0.1", True),
    ("4½%", "4.5", True),
    ("2½ cm", "2.5", True),
]
RELATIONS = [
    *((f"x{sign}3", ground_truth, right) for sign in "⩾≥≧⪖" for ground_truth, right in
      ((r"x\ge 3", True), ("x>3", False), (r"[3,\infty)", True), (r"(3,\infty)", False), ("3", False))),
    *((f"x{sign}3", ground_truth, right) for sign in "⩽≤≦⪕" for ground_truth, right in
      ((r"x\le 3", True), ("x<3", False), (r"(-\infty,3]", True), (r"(-\infty,3)", False), ("3", False))),
    (r"x\geqq 3", r"x\ge 3", True),
    ("x≠3", r"x\ne 3", True),
    (r"x\not=3", r"x\ne 3", True),
    ("x≠3", "x=3", False),
    ("x≠3", r"\mathbb{R}\setminus\{3\}", True),
    ("x≯3", r"x\le 3", True),
    ("x≯3", "x>3", False),
    ("x≰3", "x>3", True),
    ("x≱3", "x<3", True),
    ("x≱3", "x>3", False),
    (r"x\nleq 3", "x>3", True),
    (r"x\ngtr 3", r"x\le 3", True),
    (r"x\ngtr 3", "x<3", False),
    ("x⋜3", r"x\le 3", True),
    ("x＞3", "x>3", True),
]  # fmt: skip
DASHES_AND_SPACES = [
    *((f"{dash}5", ground_truth, ground_truth == "-5") for dash in "‐‑‒–—―−﹣－˗⁃" for ground_truth in ("-5", "5")),
    *((f"x{dash}5", "x-5", True) for dash in "‐‑−"),
    *((f"12{space}000", "12000", True) for space in "\u00a0\u2009\u202f\u2007\u3000\u200b\u2060\ufeff"),
    *((f"12{space}34", "1234", False) for space in "\u00a0\u2009\u202f"),
    ("\u200e42\u200f", "42", True),
    ("4\u00ad2", "42", True),
    ("2\u2062x", "2x", True),
    ("3✕x", "3x", True),
    ("3∶2", "3:2", True),
]
SIGNS = [
    ("ℝ", r"\mathbb{R}", True),
    ("ℝ", r"\mathbb{Z}", False),
    ("x∈ℝ", r"x\in\mathbb{R}", True),
    ("ℝ∖{0}", r"\mathbb{R}\setminus\{0\}", True),
    ("α+β", r"\alpha+\beta", True),
    ("α", r"\beta", False),
    (r"2+\lambda", r"\lambda+2", True),  # the letter, not Python's word
    ("2+λ", r"\lambda+3", False),
    (r"\varphi", "φ", True),
    ("⌊x⌋", r"\lfloor x\rfloor", True),
    ("⌊x⌋", r"\lceil x\rceil", False),
    ("(−∞,3)∪(5,∞)", r"(-\infty,3)\cup(5,\infty)", True),
    ("(−∞,3)∩(5,∞)", r"(-\infty,3)\cup(5,\infty)", False),
    ("1±√2", r"1+\sqrt2,1-\sqrt2", True),
    ("𝑥+𝟏", "x+1", True),
]
ARGUMENTS = [  # one token, if there are no braces
    (r"\frac\pi2", r"\frac{\pi}{2}", True),
    (r"\frac{\pi}{2}", r"\frac\pi 2", True),
    (r"\frac\pi2", r"\frac{2}{\pi}", False),
    (r"\frac ab", "a/b", True),
    (r"\frac ab", "b/a", False),
    (r"\frac1\pi", r"1/\pi", True),
    (r"\frac1{\sqrt2}", r"\frac{\sqrt2}2", True),
    (r"\frac{\frac12}3", r"\frac16", True),
    (r"\frac{\frac12}3", r"\frac23", False),
    (r"\sqrt x", r"\sqrt{x}", True),
    (r"x^{1/2}", r"\sqrt x", True),
    (r"\sqrt ab", r"b\sqrt{a}", True),
    (r"\sqrt ab", r"\sqrt{ab}", False),
    (r"\sqrt13", r"3\sqrt{1}", True),
    (r"\sqrt\pi", r"\pi^{1/2}", True),
    (r"\sqrt[3]2", "2^{1/3}", True),
    (r"\sqrt[3]2", r"\sqrt{2}", False),
    (r"\sqrt\frac12", r"\frac{\sqrt2}{2}", True),
    (r"e^\frac12", r"\sqrt e", True),
    (r"\binom nk", r"\binom{n}{k}", True),
    (r"\binom nk", r"\binom{k}{n}", False),
    ("3sqrt13", r"3\sqrt{13}", True),
    ("sqrt 13/2", r"\frac{\sqrt{13}}{2}", True),
    ("2sqrt x", r"2\sqrt{x}", True),
    ("sqrt10", r"\sqrt{1}", False),
    (",".join([r"\frac12"] * 60), ",".join([r"\frac{1}{2}"] * 60), True),
]
BRACKETS = [
    (r"\lbrack 0,1\rbrack", "[0,1]", True),
    (r"\left\lbrack 0,1\right)", "[0,1)", True),
    (r"\lbrack 0,1)", "[0,1]", False),
    (r"\lparen 1,2\rparen", "(1,2)", True),
    (r"\lbrace 1,2\rbrace", r"\{2,1\}", True),
    (r"\left\lbrace 1,2\right\rbrace", "(1,2)", False),
    (r"\langle 1,2\rangle", "(1,2)", True),
    ("⟨1,2⟩", "(2,1)", False),
    (r"\left\lvert x\right\rvert", "|x|", True),
    (r"\lVert x\rVert", r"\|x\|", True),
    (r"\lVert x\rVert", "|x|", False),
    ("]0,1[", "(0,1)", True),
    ("]0,1]", "(0,1]", True),
    ("]0,1[", "[0,1]", False),
    ("[0,1[", "[0,1)", True),
]
FACTORS = [
    ("2" + M, TWICE_M, True),
    (TWICE_M, "2" + M, True),
    (r"\frac{1}{2}" + TWICE_M, M, True),
    ("2" + M, M, False),
    ("3" + M, TWICE_M, False),
    ("-" + M, r"\begin{pmatrix}-1&-2\\-3&-4\end{pmatrix}", True),
    ("-" + M, M, False),
    (r"2\cdot" + M, TWICE_M, True),
    ("2" + M, r"\begin{pmatrix}2&4\\6&9\end{pmatrix}", False),
    ("2" + M, r"\begin{pmatrix}2&4&6&8\end{pmatrix}", False),
    (r"2\begin{vmatrix}1&2\\3&4\end{vmatrix}", TWICE_M, False),
    (M + M, M, False),
    (M + "^T", M, False),
    ("2" + M + "+1", TWICE_M, False),
    (r"\frac13\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1/3\\2/3\end{pmatrix}", True),
    (r"\frac13\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1/3&2/3\end{pmatrix}", False),
    (r"\sqrt2\begin{pmatrix}1\\1\end{pmatrix}", r"\begin{pmatrix}\sqrt2\\\sqrt2\end{pmatrix}", True),
    (r"(a+b)\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}a+b\\2a+2b\end{pmatrix}", True),
    (r"a+b\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}a+b\\2a+2b\end{pmatrix}", False),
    (r"2^{3}\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}8\\16\end{pmatrix}", True),
    (r"2^n\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}2^n\\2^{n+1}\end{pmatrix}", True),
    (r"2^n\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}2n\\4n\end{pmatrix}", False),
    (r"e^{2}\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}e^2\\2e^2\end{pmatrix}", True),
    (r"\lambda\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}\lambda\\2\lambda\end{pmatrix}", True),
    (r"\mu\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}\lambda\\2\lambda\end{pmatrix}", False),
    (
        r"\tfrac15\left(\begin{array}{rr}1&2\\3&4\end{array}\right)",
        r"\begin{pmatrix}1/5&2/5\\3/5&4/5\end{pmatrix}",
        True,
    ),
    (r"\tfrac15\left(\begin{array}{rr}1&2\\3&4\end{array}\right)", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", False),
    (r"\begin{pmatrix}1\\2\end{pmatrix}\cdot 3", r"\begin{pmatrix}3\\6\end{pmatrix}", True),
    (r"\begin{pmatrix}1\\2\end{pmatrix}\cdot 3", r"\begin{pmatrix}1\\2\end{pmatrix}", False),
    (r"\det\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}", False),
    (r"\frac12(1,2)", r"(\frac12,1)", True),
    ("2(1,2)", "(2,4)", True),
    ("2(1,2)", "(1,2)", False),
    ("f(1,2)", "(1,2)", False),
    (r"2\begin{smallmatrix}1&2\\3&4\end{smallmatrix}", TWICE_M, True),
    (r"\begin{Bmatrix}1&2\\3&4\end{Bmatrix}", M, True),
    (r"\begin{vmatrix}1&2\\3&4\end{vmatrix}", M, False),
]
SMALL = [
    (r"e^{-999}", "0", False),
    (r"\pi^{-999}", "0", False),
    (r"\frac{\pi}{9999!}", "0", False),
    (r"\sqrt2+\sqrt3-\sqrt{5+2\sqrt6}", "0", True),
    (r"\sqrt[3]{7+5\sqrt2}-1-\sqrt2", "0", True),
    (r"\cos 36^\circ-\cos 72^\circ-\frac12", "0", True),
    (r"e^{i\pi}+1", "0", True),
    (r"\sin 2x-2\sin x\cos x", "0", True),
]
TABLES = {name: table for name, table in globals().items() if name.isupper() and isinstance(table, list)}


@pytest.mark.parametrize(
    ("answer", "ground_truth", "right"),
    [pytest.param(*row, id=f"{name}-{i}") for name, table in TABLES.items() for i, row in enumerate(table)],
)
def test_notation_is_judged_as_its_table_says(answer, ground_truth, right):
    assert compare(answer, ground_truth).equal is right


@pytest.mark.parametrize(
    ("text", "latex"),
    [
        ("3½", r"\frac{7}{2}"),
        ("0.5½", r"0.5\frac{1}{2}"),  # no mixed number
        ("x²½", r"x^{2}\frac{1}{2}"),
        ("√(2", r"\sqrt (2"),  # never closed
        ("√x²", r"\sqrt{x}^{2}"),  # as TeX reads \sqrt x^2
        ("ℝ", r"\mathbb{R} "),
        ("x̸=1", "x̸=1"),
        ("plain", "plain"),
    ],
)
def test_signs_become_latex(text, latex):
    assert to_latex(text) == latex


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        (r"\sin 45^\circ+1", r"\sin (45\cdot\frac{\pi }{180})+1"),
        (r"\sin^2(2x^\circ)", r"\sin^2(2x\cdot\frac{\pi }{180})"),
        (r"\arcsin\frac12=30^\circ", r"\arcsin\frac{1}{2}=30"),  # what the function gives, not what it takes
        (r"\sin A=1, A=90^\circ", r"\sin A=1, A=90"),
        (r"\tan 5^\circ<x", r"\tan (5\cdot\frac{\pi }{180})<x"),
    ],
)
def test_degrees_become_radians_in_an_argument_only(text, normal):
    assert normalise(text) == normal


@pytest.mark.parametrize(
    "piece",
    [
        "9",
        "9 ",
        "(1)",
        r"\frac{1}{2}",
        r"\frac",
        r"\sqrt1{",
        r"\sin ",
        r"\sin(",
        r"\{",
        r"\{x|",
        r"\cup ",
        "√(",
        "½",
        "1<x,",
        "]1,",
        "x<",
    ],
)
def test_long_answer_of_any_notation_is_read_at_once(piece):
    start = time.process_time()
    for end in ("", ")", r"^\circ", r"\begin{pmatrix}1", "["):
        compare(piece * (1900 // len(piece)) + end, "(1,2)")
    assert time.process_time() - start < 2.0
