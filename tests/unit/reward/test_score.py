"""Cases of the scorer: each row of the tables is a decision that someone may want to change."""

from dataclasses import FrozenInstanceError

import pytest

from verl_ext.reward import Score, score_answer
from verl_ext.reward.maths import symbolic

# (content of the box, ground truth, is it right, why)
EXACT = [
    ("42", "42", True, "the same integer"),
    ("42", "43", False, "another integer"),
    ("-42", "42", False, "the sign counts"),
    ("073", "73", True, "leading zeros"),
    ("7", "007", True, "leading zeros in the gold"),
    ("42.", "42", True, "final dot"),
    ("42.0", "42", True, "an integer as a decimal"),
    (r"\text{42}", "42", True, "text font"),
    (r"\mathbf{42}", "42", True, "bold"),
    ("$42$", "42", True, "dollars around"),
    (r"\left(42\right)", "42", True, "brackets around"),
    ("1,234", "1234", True, "thousands separator"),
    (r"1{,}234", "1234", True, "LaTeX thousands separator"),
    (r"12\,000\,023", "12000023", True, "thin spaces"),
    ("12 34", "1234", False, "not a thousands separator"),
    (r"(991,\,997,\, 1009)", "(991,997,1009)", True, "a comma and a thin space part values"),
    (r"991,\,997", "991997", False, "a comma and a thin space part values"),
    (r"32,\!349", "32349", True, "a comma drawn close is a thousands separator"),
    (r"\frac1x", r"\frac{1}{x}", True, "one letter without braces"),
    (r"\frac1xy", r"\frac{1}{xy}", False, "one letter only"),
    ("32, 349", "32349", False, "two values"),
    ("14.916", "14,916", False, "a dot is no thousands separator"),
    ("１２３", "123", True, "fullwidth digits"),
    ("−5", "-5", True, "a Unicode minus"),
    ("1/2", "0.5", True, "fraction and decimal"),
    (r"\frac12", r"\frac{1}{2}", True, "no braces"),
    (r"{1 \over 2}", "1/2", True, "TeX fraction"),
    ("½", "1/2", True, "vulgar fraction"),
    ("2/4", "1/2", True, "not in lowest terms"),
    ("0.33", "1/3", False, "a rounded decimal of an exact gold"),
    ("0.333333333333", "1/3", False, "however many digits"),
    (r"0.\overline{3}", "1/3", True, "repeating decimal"),
    (r"0.1\overline6", "1/6", True, "repeating from the second digit: 1/10 + 6/90"),
    (r"2\frac{3}{5}", "2.6", True, "mixed number"),
    ("3½", "7/2", True, "mixed number in Unicode"),
    (r"1.5\times10^3", "1500", True, "scientific notation"),
    ("1e-4", "0.0001", True, "e notation"),
    ("10 million", "10000000", True, "a magnitude is part of the number"),
    ("10 million", "10", False, "a magnitude is not a unit"),
    ("1/2003!", "1/2004!", False, "equal to any fixed number of decimals"),
    (r"\frac{1}{2004!}", "1/2004!", True, "exact"),
    ("2^{10^6}", "2^{1000000}", True, "large, and cheap"),
    ("2^{10}", "1024", True, "a power is a number"),
    ("20000000000000000000001", "20000000000000000000000", False, "exact beyond floats"),
    (r"28\%", "28", True, "a missing % is ignored"),
    ("28 percent", r"28\%", True, "percent in words"),
    ("0.28", r"28\%", True, "28% is 0.28"),
    ("28", "0.28", False, "no % anywhere"),
    (r"74^\circ", "74", True, "degrees"),
    (r"\$15,000", "15000", True, "currency"),
    (r"10~\text{km/h}", "10", True, "unit in text"),
    (r"15\,\text{cm}^2", r"15\mbox{ cm}^2", True, "the same unit"),
    ("5 inches", "5 in", True, "spellings of a unit"),
    (r"5\text{ km}", r"5\text{ m}", False, "another unit"),
    ("42 apples", "42", True, "a noun"),
    (r"36\pi\text{ cm}^3", r"36\pi", True, "a unit after what is no rational number"),
    (r"2\pi hr", r"2\pi rh", True, "letters without a font are factors"),
    (r"\pi", r"\pi hr^2", False, "letters without a font are factors"),
    (r"5\sqrt{2}\ {\text{cm}}^2", r"5\sqrt{2}\text{ cm}^2", True, "a unit in a group"),
    (r"9\pi\text{ sq. cm}", r"9\pi\text{ cm}^2", True, "spellings of a unit"),
    ("n", r"n\text{ odd}", False, "a condition is no unit"),
    (r"5\sqrt2", r"5\sqrt{2}\text{ cm}", True, "a unit that only the gold has"),
    (r"5\sqrt2\text{ cm}", r"5\sqrt2\mbox{ centimeters}", True, "spellings of a unit"),
    (r"5\sqrt2\text{ m}", r"5\sqrt2\text{ cm}", False, "another unit"),
    (r"2x \text{ square feet}", "2x", True, "a unit of two words"),
    (r"5\sqrt2\text{ is wrong}", r"5\sqrt2", False, "a sentence is no unit"),
    (r"5\sqrt2\text{ squared}", r"5\sqrt2", False, "a power in words"),
    (r"2\pi\text{ west}", r"2\pi\text{ east}", False, "other words"),
    (r"6\pi m", r"6\pi", False, "one letter is a factor"),
    ("3 fifths", "3", False, "a fraction in words"),
    (r"3\text{ fourths}", "3", False, "a fraction in words"),
    ("3 paths", "3", True, "no ordinal, though it ends like one"),
    ("3xyz", "3", False, "letters are factors"),
    ("2 sin x", "2", False, "a function is not a unit"),
    ("58*20+87", "1247", False, "the question restated"),
    ("6*7=42", "42", False, "a calculation, not an answer"),
    (r"129^{34}+96^{38} \bmod 11", "9", False, "the question restated"),
    ("41, 42, 43", "42", False, "more values than the gold"),
    ("42 or 43", "42", False, "a choice left to the reader"),
    (r"42\text{ and }7", "42", False, "more values than the gold"),
    (r"\pm 42", "42", False, "two values"),
    ("not 42", "42", False, "words"),
    (r"\text{the sum}", "42", False, "words"),
    ("None", "42", False, "words"),
    ("x", "42", False, "a letter"),
    ("204_{5}", "204_5", True, "base"),
    ("204_6", "204_5", False, "another base"),
    ("204", "204_5", False, "a missing base"),
    ("7:32", "7:32", True, "time"),
    ("7", "7:32", False, "part of a time"),
    ("(C)", "C", True, "choice"),
    (r"\textbf{(C)}", r"\text{(C)}", True, "choice in fonts"),
    (r"\textbf{(C)}\ 12", "C", True, "choice with its value"),
    ("C or D", "C", False, "two choices"),
    ("Cat", "C", False, "a word, not a choice"),
    ("c", "C", False, "a variable"),
    ("no", r"\text{No}", True, "case of a word"),
    ("yes and no", r"\text{Yes}", False, "both"),
    ("parabola", r"\text{hyperbola}", False, "another word"),
    (r"x<3\text{ if odd}", r"x>3\text{ if odd}", False, "symbols among words count"),
    (r"\textcolor{red}{42}", "42", True, "colour"),
    (r"{\Large 42}", "42", True, "size"),
    (r"\mathbf{4}2", "42", True, "a bold digit"),
    ("The final answer is 42", "42", True, "a preamble"),
    ("Answer: 42", "42", True, "a preamble"),
    ("the answer is not 42", "42", False, "the opposite"),
    ("= 42", "42", True, "an equals sign before"),
    ("0.(3)", "1/3", True, "repeating decimal in brackets"),
    (r"0.333\ldots", "1/3", False, "dots leave the rest open"),
    ("1'234", "1234", True, "Swiss thousands separator"),
    (r"1010_{\text{two}}", "1010_2", True, "base in words"),
    ("42_7", "42", False, "a base that the gold has not"),
    ("-204_5", "204_5", False, "the sign of a based number"),
    ("3/2", "3:2", True, "ratio"),
    ("3+2", "3:2", False, "the same digits, another sign between"),
    ("42:1", "42", False, "a ratio"),
    (r"7:32\text{ a.m.}", r"7:32\text{ AM}", True, "half of the day"),
    ("7:32 AM", "7:32 PM", False, "the other half of the day"),
    ("5 cents", r"\$5", False, "cents are not dollars"),
    ("USD 5", "5", True, "currency in letters"),
    (r"5^\circ\text{C}", "5", True, "degrees Celsius"),
    ("5°F", "5°C", False, "another scale"),
    ("5 rad", r"5^\circ", False, "radians are not degrees"),
    ("42 squared", "42", False, "a power in words"),
    ("42 thousandths", "42", False, "a fraction in words"),
    (r"42\text{ is wrong}", "42", False, "a sentence is no unit"),
    (r"42\text{ pi}", "42", False, "a constant is no unit"),
    ("f'(x)", "f(x)", False, "the derivative"),
    (r"\infty+1", r"\infty", False, "no calculation with infinity"),
    ("a_n!", "a_n", False, "a factorial among letters"),
    (r"\text{odd}?", r"\text{odd}", False, "a question"),
    (r"x<35\text{ if odd}", r"x<3.5\text{ if odd}", False, "a point among digits counts"),
]  # fmt: skip
STRUCTURE = [
    ("1,-2", "-2,1", True, "a list has no order"),
    (r"\{1,-2\}", "-2, 1", True, "a set is a list"),
    ("{-3, 3}", r"\pm 3", True, "plus-minus written out"),
    (r"-1\pm\sqrt{19}", r"1\pm\sqrt{19}", False, "other values"),
    ("1", "1,-2", False, "fewer values than the gold"),
    ("1,1", "1,-2", False, "each value once"),
    ("1.2", "1,2", False, "a dot is no comma"),
    (r"n=1\text{ or }n=-2", "1,-2", True, "labelled values"),
    ("(3,2)", "(3, 2)", True, "tuple"),
    ("(2,3)", "(3,2)", False, "a tuple is ordered"),
    (r"(3,2,1)", r"\{1,2,3\}", False, "a tuple is no set"),
    ("(3,4),(1,2)", "(1,2),(3,4)", True, "points in any order"),
    ("(0;1),(2;3)", "(0,1),(2,3)", True, "semicolons"),
    (r"(\pm 3,0)", "(3,0),(-3,0)", True, "two points in one"),
    ("(-3,0), (3,0)", r"(\pm 3, 0)", True, "two points in one"),
    ("(3,0)", r"(\pm 3, 0)", False, "one of two points"),
    (r"(\pm 3,\pm 2)", r"(\pm 3,\pm 2)", True, "as it stands"),
    ("y=5, x=3", "(5,3)", False, "labels say which is which"),
    ("y=3, x=5", "(5,3)", True, "labels say which is which"),
    ("m=2, b=3", "(2,3)", True, "labels whose order nobody knows"),
    ("x=2, x=10", "(2,10)", True, "labels whose order nobody knows"),
    ("(5,3)", "y=3, x=5", True, "labels say which is which"),
    ("p=5,q=2;p=7,q=2", "(5,2),(7,2)", True, "groups of labelled values"),
    ("[0,1)", r"\left[0,1\right)", True, "interval"),
    ("(0,1]", "[0,1)", False, "open at the other end"),
    (r"[-1,0)\cup(0,1]", r"(0,1]\cup[-1,0)", True, "a union has no order"),
    ("x=42", "42", True, "labelled"),
    (r"\angle APC = 74^\circ", "74", True, "label of several letters"),
    ("(p,q)=(3,2)", "(3,2)", True, "labelled tuple"),
    ("x=-42", "42", False, "label and sign"),
    ("2x=84", "42", False, "an equation still to solve"),
    ("x^2=9", "9", False, "the right side of an equation is not its answer"),
    ("1+x", "f(x)=x^2+1", False, "another function"),
    (r"x = 1/3 \approx 0.333", "1/3", True, "an approximation after the value"),
    (r"\begin{bmatrix}1&2\\3&4\end{bmatrix}", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", True, "matrix brackets"),
    (r"\begin{pmatrix}1&2\\3&5\end{pmatrix}", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", False, "one entry differs"),
    (r"\begin{pmatrix}\frac12\\[4pt]3\end{pmatrix}", r"\begin{pmatrix}1/2\\3\end{pmatrix}", True, "space between rows"),
    (r"\begin{pmatrix}1&2&3&4\end{pmatrix}", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", False, "another shape"),
    (r"\emptyset", r"\{0\}", False, "the empty set"),
    ("m+n=42", "42", True, "a sum of letters is what is asked for"),
    ("x+1=42", "42", False, "an equation still to solve"),
    ("42=x", "42", True, "label on the right"),
    ("x=84/2=42", "42", True, "worked out in the label's line"),
    ("x=7=42", "42", False, "two values"),
    ("x=7 x=42", "42", False, "two values"),
    ("(x,y)=(1,2)", "x=1,y=2", True, "labels together or each by itself"),
    ("(x,y)=(1,2)", "x=2,y=1", False, "the other way round"),
    ("1,2,2", "1,2", True, "a value said twice"),
    (r"\{0,1\}", r"\{0,0,1\}", True, "a set has each once"),
    (r"\{1,1,2\}", "1,1,2", True, "a set has each once, so its list does"),
    ("2,2", r"\{2,2\}", True, "a set has each once, so its list does"),
    ("1,2", r"\left\{ {1,2} \right\}", True, "a set around a group"),
    (r"2^{2021}(1,2)", r"(2^{2021},2^{2022})", True, "a year as an exponent of a factor"),
    (r"x<0\text{ or }x\ge1", r"(-\infty,0)\cup[1,\infty)", True, "inequalities for a union"),
    (r"0<x<1, 3\le x", r"(0,1)\cup[3,\infty)", True, "from both sides"),
    (r"x\le0,x>1", r"(-\infty,0)\cup(1,\infty)", False, "closed at one end"),
    (r"x<0,y>1", r"(-\infty,0)\cup(1,\infty)", False, "two variables"),
]  # fmt: skip
SYMBOLIC = [
    ("2*sqrt(3)", r"2\sqrt{3}", True, "ASCII root"),
    (r"\frac{\sqrt{4}}{4}", "1/2", True, "a fraction is no ratio"),
    (r"\log_4 2", r"\frac{1}{2}", True, "a fraction is no ratio"),
    ("pi/4", r"\frac{\pi}{4}", True, "ASCII pi"),
    (r"\sqrt2+10^{-80}", r"\sqrt2", False, "a difference far after the point"),
    (r"\frac{x^2}{2}+c", r"\frac{x^2}{2}+C", True, "constant of an integral"),
    (r"\frac{x^2}{2}", r"\frac{x^2}{2}+C", False, "a missing constant"),
    (r"\sqrt{2}_7", r"\sqrt2", False, "a base that the gold has not"),
    (r"3\sqrt2\ldots", r"3\sqrt2", False, "dots leave the rest open"),
    (r"3\cdot\sqrt{13}", r"3\sqrt{13}", True, "a product sign"),
    (r"\sqrt2/2", r"\frac{1}{\sqrt{2}}", True, "rationalised"),
    (r"\sqrt{16}", "4", True, "an integer in disguise"),
    ("1.414214", r"\sqrt2", False, "a rounded decimal"),
    (r"4^{\frac13}", r"\sqrt[3]{4}", True, "root as a power"),
    (r"\frac17(x+2)", r"\frac{x+2}{7}", True, "factor"),
    ("6xy^2", "6x^2y", False, "exponents"),
    ("0.5x", r"\frac{x}{2}", True, "decimal coefficient"),
    (r"\sqrt{x^2}", "x", False, "x may be negative"),
    (r"\sec^2 y", r"\tan^2 y+1", True, "identity"),
    (r"\sin^2 1+\cos^2 1-1", "0", True, "zero by an identity"),
    (r"\frac{\sqrt2}{2023!}", r"\frac{\sqrt2}{2024!}", False, "compared relative to their size"),
    (r"2^{2023}\sqrt3", r"2^{2024}\frac{\sqrt3}{2}", True, "a year as an exponent"),
    (r"\csc^2 y", r"\tan^2 y+1", False, "not an identity"),
    (r"\ln 5", r"\ln 6", False, "another constant"),
    (r"e^{\pi\sqrt{163}}", "262537412640768744", False, "differs after 30 digits"),
    (r"\frac{3i}{4}", r"\frac34 i", True, "imaginary unit"),
    ("C(10,3)", r"\binom{10}{3}", True, "binomial"),
    ("1", r"\frac{y_2-y_1}{x_2-x_1}", False, "a slope is not 1"),
    (r"\frac{x_2-x_1}{y_2-y_1}", r"\frac{y_2-y_1}{x_2-x_1}", False, "nor its inverse"),
    (r"\frac{y_1-y_2}{x_1-x_2}", r"\frac{y_2-y_1}{x_2-x_1}", True, "the same slope"),
    ("9(x_2-x_1)", "1", False, "a difference of symbols is no constant"),
    (r"\lfloor n/3\rfloor", r"\lfloor n/2\rfloor", False, "another floor"),
    (r"\lfloor n/2\rfloor+1", r"\lceil n/2\rceil", False, "differs where n is even"),
    (r"\lfloor (n+1)/2\rfloor", r"\lceil n/2\rceil", True, "equal for all integers"),
    (r"\lfloor (x+1)/2\rfloor", r"\lceil x/2\rceil", False, "equal for integers alone"),
    (r"\lfloor n/100\rfloor", r"\lfloor n/99\rfloor", False, "differs at large ones"),
    (r"\binom{n}{\lfloor n/2\rfloor}", r"\frac{n!}{\lfloor n/2\rfloor!(n-\lfloor n/2\rfloor)!}", True, "from 1 on"),
    (r"3^{\lfloor n/2\rfloor\lceil n/2\rceil}", r"3^{\lfloor n^2/4\rfloor}", True, "powers, at small integers"),
    (r"3^{\lfloor n^2/2\rfloor}", r"3^{\lfloor n^2/4\rfloor}", False, "other powers"),
    (r"\lfloor n/16\rfloor+1", r"\lceil n/16\rceil", False, "differs at multiples of 16"),
    (r"\lfloor (n+1)/24\rfloor", r"\lfloor n/24\rfloor", False, "differs before multiples of 24"),
    (r"y-\lfloor x/3\rfloor=0", r"y-\lfloor x/2\rfloor=0", False, "another floor in an equation"),
    ("-2x-4y+3=0", "2x+4y-3=0", True, "equation times -1"),
    ("y=3x+2", "y=2x+3", False, "another line"),
    ("-x<-5", "x>5", True, "inequality turned round"),
    (r"x\in(5,\infty)", "x>5", True, "interval for an inequality"),
    ("x>3", r"x\ge 3", False, "strict"),
    (r"|x|>8", r"(-\infty,-8)\cup(8,\infty)", True, "absolute value"),
    (r"(3,\frac{\pi}{2})", r"(3,\pi/2)", True, "inside a tuple"),
]  # fmt: skip


RESPONSES = [
    (r"We get \boxed{42}. Correction: \boxed{24}.", "42", False, "the last box wins"),
    (r"\boxed{41} or \boxed{42}", "42", False, "two boxes joined by a word are one answer of two values"),
    (r"\boxed{-2} and \boxed{1}", "1,-2", True, "the same for a gold of two values"),
    (r"<think>\boxed{42}</think> The answer is \boxed{41}.", "42", False, "thoughts are no answer"),
    (r"\boxed{42}^\circ", "42", True, "what follows the box is not read"),
    (r"\boxed{42} and now a long check: " + "it holds. " * 500, "42", True, "the whole text is searched"),
    (r"<code>print(r'\boxed{42}')</code>", "42", False, "the model's code is no answer"),
    ("<interpreter>\n\\boxed{42}\n</interpreter>", "42", False, "nor is what a tool prints"),
    (r"The answer is 42.", "42", False, "no box"),
    (r"\boxed{42", "42", False, "an unclosed box"),
    (r"\boxed{}", "42", False, "an empty box"),
    (r"<answer>41</answer> no: <answer>42</answer>", "42", True, "answer tags where there is no box"),
    (r"因此答案是 \boxed{42}。", "42", True, "another language"),
    (r"\boxed{\boxed{42}}", "42", True, "a box in a box"),
    ("", "42", False, "nothing"),
]  # fmt: skip


@pytest.mark.parametrize(("answer", "ground_truth", "right", "why"), EXACT + STRUCTURE + SYMBOLIC)
def test_answer_is_judged_as_the_table_says(answer, ground_truth, right, why):
    problem = "How many apples are there? How many paths?"
    score = score_answer(rf"So it is \boxed{{{answer}}}.", ground_truth, problem=problem)
    assert score.acc == float(right), f"{why}: {score}"
    assert score.verdict == ("correct" if right else "wrong")
    assert score.pred == answer


@pytest.mark.parametrize(("response", "ground_truth", "right", "why"), RESPONSES)
def test_response_is_judged_as_the_table_says(response, ground_truth, right, why):
    score = score_answer(response, ground_truth)
    assert score.acc == float(right), f"{why}: {score}"


@pytest.mark.parametrize(
    "response",
    ["The answer is 42.", r"\boxed{42", r"\boxed{ }", "", r"\boxed{?}", r"\boxed{...}", r"\boxed{\text{your answer}}"],
)
def test_response_without_an_answer_is_told_from_a_wrong_one(response):
    assert score_answer(response, "42") == Score(0.0, "", "no_answer", "empty" if "}" in response else "no_box")
    assert score_answer(r"\boxed{?}", "?").acc == 1.0  # a blank that the gold has


@pytest.mark.parametrize(
    "answer",
    ["1247", "-3", "0012", "1,247", "12 47", "58*20+87", "1247.0", "1/2", "12-", "((3", "x", "no", "1e5", "?", "1.2.3"],
)
def test_integer_task_never_starts_a_process(answer, monkeypatch):
    monkeypatch.setattr(symbolic, "is_equal", lambda *_: pytest.fail("computer algebra was asked"))
    score_answer(rf"\boxed{{{answer}}}", "1247")


@pytest.mark.parametrize(
    ("answer", "ground_truth", "normalised"),
    [
        ("0012", "12", "12"),
        (r"\dfrac12", "0.5", r"\frac{1}{2}"),
        (r"\text{ paris}.", "Paris", r"\text{ paris}"),
        (r"3 \text{ cents}", r"\$3", ""),  # told apart by their units, as they are written
        ("9" * 3000, "12", ""),  # too long to look at
    ],
)
def test_a_score_has_the_answer_as_it_was_compared(answer, ground_truth, normalised):
    assert score_answer(rf"\boxed{{{answer}}}", ground_truth).normalised == normalised


def test_empty_ground_truth_is_our_error():
    with pytest.raises(ValueError, match="ground truth is empty"):
        score_answer(r"\boxed{42}", " ")


def test_score_is_frozen():
    with pytest.raises(FrozenInstanceError):
        score_answer(r"\boxed{42}", "42").acc = 0.0
