import pytest

from verl_ext.reward.maths.structure import Comparison, Parts, compare_answers, split_label, split_parts


def by_text(pred, gold):
    return Comparison(pred == gold, "text")


@pytest.mark.parametrize(
    ("text", "label", "value"),
    [
        ("x = 3", "x", "3"),
        ("f(x) = y = 3", "f(x)", "3"),
        ("(p,q) = (3,2)", "(p,q)", "(3,2)"),
        (r"x \in [0,1]", "x", "[0,1]"),
        ("n = 1, 2", "n", "1, 2"),
        ("2x = 6", "", "2x = 6"),
        ("x^2 = 9", "", "x^2 = 9"),
        ("x + y = 3", "x + y", "3"),
        ("x + 1 = 3", "", "x + 1 = 3"),
        ("3 = x", "x", "3"),
        ("3 = 2x", "", "3 = 2x"),
        ("x = 1 x = 2", "", "x = 1 x = 2"),
        ("x = 1, y = 2", "", "x = 1, y = 2"),
        ("7 = 7", "", "7 = 7"),
        ("x =", "", "x ="),
    ],
)
def test_label_is_told_from_an_equation(text, label, value):
    assert split_label(text) == (label, value)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("1, 2", Parts("values", ["1", "2"])),
        (r"\{1, 2\}", Parts("values", ["1", "2"])),
        ("(1, 2]", Parts("(]", ["1", "2"])),
        ("(1,2),(3,4)", Parts("values", ["(1,2)", "(3,4)"])),
        (r"[0,1)\cup(2,3]", Parts("union", ["[0,1)", "(2,3]"])),
        (r"1\pm x", Parts("values", ["1+x", "1-x"])),
        (r"\pm x \mp 1", Parts("values", ["x -1", "-x +1"])),
        (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", Parts("matrix 2x2", ["1", "2", "3", "4"])),
        (r"\{x | x > 1\}", None),
        ("(x+1)(x-1)", None),
        ("5", None),
    ],
)
def test_answer_falls_into_its_parts(text, parts):
    assert split_parts(text) == parts


@pytest.mark.parametrize(
    ("pred", "gold", "equal", "method"),
    [
        ("a, b", "b, a", True, "structure"),
        ("a, a", "b, a", False, "structure"),
        ("a", "b, a", False, "count"),
        ("(a, b)", "(b, a)", False, "text"),
        ("(a, b)", "[a, b]", False, "structure"),
        ("a, b", "(a, b)", True, "structure"),
        (r"\{a, b\}", "(a, b)", False, "structure"),
        ("x = a", "a", True, "string"),
        ("x = a", "y = a", False, "text"),
        ("3.14", r"\approx 3.14", True, "text"),
    ],
)
def test_parts_are_compared_in_their_order(pred, gold, equal, method):
    assert compare_answers(pred, gold, by_text) == Comparison(equal, method)


def test_long_list_of_other_values_costs_no_comparison():
    asked = []
    golds, preds = ", ".join(f"a{i}" for i in range(30)), ", ".join(f"b{i}" for i in range(30))
    assert compare_answers(preds, golds, lambda *pair: asked.append(pair)).equal is False
    assert not asked
