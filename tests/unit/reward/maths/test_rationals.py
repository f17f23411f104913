import time
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_ext.reward.maths.rationals import NotANumber, read_quantity
from verl_ext.reward.maths.units import nouns_of


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("42", 42),
        ("-007", -7),
        (".75", Fraction(3, 4)),
        ("1,234,567", 1_234_567),
        ("1 234", 1234),
        (r"\frac{3}{4}", Fraction(3, 4)),
        (r"-2\frac{3}{5}", Fraction(-13, 5)),  # -(2 + 3/5)
        ("5 1/4", Fraction(21, 4)),
        (r"1.5\cdot 10^{-3}", Fraction(15, 10_000)),
        ("2e3", 2000),
        (r"0.1\overline{6}", Fraction(1, 6)),  # 1/10 + 6/90
        (r"0.\overline{27}", Fraction(3, 11)),  # 27/99
        ("2^3^2", 512),  # 2^(3^2)
        ("-2^2", -4),
        ("2^{-1}", Fraction(1, 2)),
        ("5!/3!", 20),
        ("58\\cdot 20+87", 1247),
        ("+".join(["1/3"] * 900), 300),
        ("3 million", 3_000_000),
        ("5万元", 50_000),
    ],
)
def test_number_is_read_exactly(text, value):
    assert read_quantity(text).value == value


@pytest.mark.parametrize(
    "text", ["x", r"\pi", r"\sqrt{4}", "4^{1/2}", "1,2", "1,22", "3xyz", "2 sin x", "7!!", "3 mod 2"]
)
def test_what_is_not_a_rational_number_is_left_to_others(text):
    assert read_quantity(text) is None


@pytest.mark.parametrize(
    "text", ["12-", "1.2.3", "((3", "1/0", "12 34", "", "10001!", "9^{9^{9}}", "1" * 4001, "1e9999", "2^" * 900 + "1"]
)
def test_malformed_or_huge_number_is_refused_at_once(text):
    start = time.process_time()
    with pytest.raises(NotANumber):
        read_quantity(text)
    assert time.process_time() - start < 0.2


@pytest.mark.parametrize(
    ("text", "unit"),
    [
        ("5 cm", "cm"),
        ("5 inches", "in"),
        (r"5\text{ inches}", "in"),
        ("5 apples", "apple"),
        ("5 ordered pairs", "pair"),
        ("5 dollars per day", "dollar/day"),
        (r"5\text{ m}^2", "m"),
        ("5", ""),
    ],
)
def test_unit_is_told_from_the_number(text, unit):
    quantity = read_quantity(text, nouns=nouns_of("How many apples, how many ordered pairs?"))
    assert (quantity.value, quantity.unit) == (5, unit)


@pytest.mark.parametrize("text", ["5m", "5 xyz", "5 or", "5 apples", "5 less", r"5\text{ or more}"])
def test_what_may_be_maths_or_a_condition_is_no_unit(text):
    assert read_quantity(text) is None


@pytest.mark.parametrize(
    ("first", "second", "equal"),
    [
        ("28%", "28", True),
        ("28%", "0.28", True),
        ("28%", "2800", False),
        ("28%", "0.28%", False),
        ("5 m", "5 meters", True),
        ("5 m", "5", True),
        ("5 m", "5 km", False),
    ],
)
def test_percent_and_units_compare_as_documented(first, second, equal):
    first, second = read_quantity(first), read_quantity(second)
    assert first.equals(second) is equal
    assert second.equals(first) is equal


@pytest.mark.parametrize(
    ("text", "calculated"),
    [("3/4", False), ("2^{10}", False), (r"1.5\cdot 10^3", False), ("-5", False), ("2+2", True), (r"6\cdot 7", True)],
)
def test_calculation_is_told_from_a_number(text, calculated):
    assert read_quantity(text).calculated is calculated


@settings(deadline=None, derandomize=True)
@given(st.fractions())
def test_every_fraction_survives(value):
    assert read_quantity(str(value)).value == value
