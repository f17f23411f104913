"""Properties of any answer, drawn by hypothesis."""

from fractions import Fraction

from hypothesis import given, settings
from hypothesis import strategies as st

from verl_ext.reward import score_answer
from verl_ext.reward.score import compare


@settings(deadline=None, derandomize=True)
@given(st.integers(), st.integers())
def test_integer_equals_itself_only(pred, gold):
    assert score_answer(rf"\boxed{{{pred}}}", str(gold)).acc == float(pred == gold)


@settings(deadline=None, derandomize=True)
@given(
    st.fractions(), st.sampled_from(["{}", " {} ", "${}$", r"\displaystyle {}", r"\left({}\right)", "{}.", "x = {}"])
)
def test_fraction_is_recognised_in_any_layout(value, layout):
    latex = rf"\frac{{{value.numerator}}}{{{value.denominator}}}"
    assert score_answer(rf"\boxed{{{layout.format(latex)}}}", str(value)).acc == 1.0
    assert score_answer(rf"\boxed{{{layout.format(latex)}}}", str(value + Fraction(1, 7))).acc == 0.0


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.lists(st.sampled_from([*r"\{}()[]<>/^_!,;.%$&0129ax =", r"\frac", r"\boxed{", r"\pm", "<code>", "½"])))
def test_any_text_gets_a_verdict(pieces):
    text = "".join(pieces)
    assert score_answer(text + r"\boxed{" + text, "42").verdict in ("correct", "wrong", "no_answer", "unknown")


RATIONAL = st.one_of(
    st.integers(-999, 999).map(str),
    st.fractions(max_denominator=99).map(lambda f: rf"\frac{{{f.numerator}}}{{{f.denominator}}}"),
    st.decimals(-99, 99, places=2).map(lambda d: f"{d:f}"),
)
RADICAL = st.builds(r"{}\sqrt{{{}}}".format, st.integers(2, 9), st.integers(2, 99))
STRUCTURED = st.one_of(
    st.lists(RATIONAL, min_size=2, max_size=3).map(lambda v: f"({', '.join(v)})"),
    st.lists(RATIONAL, min_size=2, max_size=3).map(lambda v: rf"\{{{', '.join(v)}\}}"),
    st.builds("[{},{})".format, st.integers(-9, 0), st.integers(1, 9)),
)
LAYOUTS = [
    "{}",
    " {} ",
    "\n{}\n",
    "${}$",
    r"\({}\)",
    r"\displaystyle {}",
    r"\left.{}\right.",
    "{}.",
    r"\boxed{{{}}}",
    r"{}\!",
]


@settings(deadline=None, derandomize=True, max_examples=150)
@given(st.one_of(RATIONAL, STRUCTURED), st.one_of(RATIONAL, STRUCTURED))
def test_equality_of_exact_values_is_symmetric(one, other):
    assert compare(one, other).equal == compare(other, one).equal
    assert compare(one, one).equal is True


@settings(deadline=None, derandomize=True, max_examples=40)
@given(RADICAL, RADICAL)
def test_equality_of_radicals_is_symmetric_and_exact(one, other):
    def squared(text):
        factor, radicand = text.removesuffix("}").split(r"\sqrt{")
        return int(factor) ** 2 * int(radicand)

    assert compare(one, other).equal == compare(other, one).equal == (squared(one) == squared(other))


@settings(deadline=None, derandomize=True, max_examples=200)
@given(st.one_of(RATIONAL, RADICAL, STRUCTURED), st.one_of(RATIONAL, STRUCTURED), st.sampled_from(LAYOUTS))
def test_layout_changes_no_verdict(pred, gold, layout):
    for other in (gold, pred):
        plain = score_answer(rf"\boxed{{{pred}}}", other).acc
        assert score_answer(rf"\boxed{{{layout.format(pred)}}}", other).acc == plain
        assert score_answer(rf"\boxed{{{pred}}}", layout.format(other)).acc == plain


@settings(deadline=None, derandomize=True, max_examples=200)
@given(
    st.integers(-2000, 2000),
    st.integers(-2000, 2000),
    st.sampled_from(
        [*LAYOUTS, "{} cm", r"{}^\circ", "x = {}"],
    ),
)
def test_another_integer_is_never_equal(pred, gold, layout):
    said = layout.format(pred)
    assert score_answer(rf"\boxed{{{said}}}", str(gold)).acc == float(pred == gold)
