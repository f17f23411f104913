import pytest

from verl_ext.reward.guards import refusal


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("__import__('os')", "code"),
        ('open("x")', "code"),
        ("Integer(42).doit", "code"),
        ("x^{9^{9^9}}", "tower"),
        ("x^{12345}", "large exponent"),
        ("x+12345!", "large factorial"),
        (r"\binom{10^9}{5}", "large binomial"),
        ("x+" + "9" * 60, "long number"),
        ("(" * 11 + "x" + ")" * 11, "nesting"),
        ("|" * 10 + "x" + "|" * 10, "bars"),
        ("x+" * 400, "length"),
        (r"\sum_{k=1}^n k", "unevaluated sum"),
        (r"\det A", "unevaluated det"),
        ("f'(x)", "derivative"),
        (r"0.333\ldots", "dots"),
        ("42:1", "ratio"),
        ("x+42_7", "base"),
        ("x=7 x=42", "chain"),
    ],
)
def test_answer_is_refused(answer, reason):
    assert refusal(answer, "x") == reason


@pytest.mark.parametrize(
    "answer",
    ["x^{y^2}", r"\frac{x+2}{7}", "f'(x)", "f''(x)", r"e^{-x^2}", r"\binom{n}{k}", "n!", r"\sqrt[3]{4}", "x^{2024}"],
)
def test_ordinary_answer_passes(answer):
    assert refusal(answer, answer) is None


def test_what_the_gold_has_the_answer_may_have():
    assert refusal(r"\sum_{k=1}^n k^2", r"\sum_{j=1}^n j^2") is None
    assert refusal("x+" * 400, "y+" * 400) is None
