import pytest

from verl_ext.reward.maths.normalisation import closing_index, key, normalise, split_top_level, unwrap_group


@pytest.mark.parametrize(
    ("spelling", "canonical"),
    [
        (r"\dfrac{1}{2}", r"\frac{1}{2}"),
        (r"\frac12", r"\frac{1}{2}"),
        (r"\frac{a}2", r"\frac{a}{2}"),
        (r"\sqrt2", r"\sqrt{2}"),
        (r"x \leqslant 2", r"x \le 2"),
        (r"x² + 1", "x^{2} + 1"),
        (r"204₅", "204_{5}"),
        (r"\left[0,1\right)", "[0,1)"),
        (r"\displaystyle 5\!", "5"),
        (r"\$5", "5"),
        (r"90^{\circ}", "90"),
        (r"\mathrm{cm}", r"\text{cm}"),
        (r"19, 46, and 82", "19, 46, 82"),
        (r"(0;1)", "(0,1)"),
        (r"p=5,q=2; p=7,q=2", "(p=5,q=2),(p=7,q=2)"),
        (r"{ ( 5 ) }.", "5"),
    ],
)
def test_spellings_meet(spelling, canonical):
    assert normalise(spelling) == canonical


def test_conditions_that_letters_set_are_kept():
    assert normalise(r"\leftarrow x") == r"\leftarrow x"  # not \left
    assert normalise(r"\frac{n}{k}!") == r"\frac{n}{k}!"  # not a full stop
    assert normalise("floor or") == "floor or"  # no separator, neither in a word nor without a second value


@pytest.mark.parametrize(
    ("text", "parts"),
    [("1, 2", ["1", "2"]), ("(1,2), 3", ["(1,2)", "3"]), ("[0,1), (2,3]", ["[0,1)", "(2,3]"]), ("a", ["a"])],
)
def test_split_leaves_brackets_whole(text, parts):
    assert split_top_level(text) == parts


def test_brackets_are_matched_by_depth():
    assert closing_index("(a(b)c)d") == 6
    assert closing_index("((a)") == -1


def test_brackets_of_a_single_value_are_dropped_and_of_a_tuple_kept():
    assert unwrap_group("({5})") == "5"
    assert unwrap_group("(5)(6)") == "(5)(6)"
    assert unwrap_group("(5,6)") == "(5,6)"


def test_key_ignores_spaces_but_not_between_digits():
    assert key(r"2 \pi x^{2}") == key(r"2\pi  x^2")
    assert key("1 2") != key("12")
