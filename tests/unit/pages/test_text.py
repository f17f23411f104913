"""Numbers as pages write them, and text of a model that cannot act, hide or reorder."""

import html
import re
import time

import pytest
import regex

from verl_ext.pages import text


def test_numbers_have_four_digits_or_all_before_the_point() -> None:
    assert [*map(text.number, (None, 7, 0.123456, 9999.6, 12345.6, -1e6, 1e20))] == [
        *("–", "7", "0.1235", "10000", "12346", "-1000000", "1e+20")
    ]


def test_what_cannot_be_seen_is_named() -> None:
    assert text.plain("\x1b[1m\u202eabc\0\u0085") == "␛[1m<U+202E>abc␀<U+0085>"
    assert text.plain("tab\tline\r\nend é 中 אב") == "tab\tline\nend é 中 אב"
    assert text.plain("\ud800") == "<U+D800>" and text.plain(None) == ""


@pytest.mark.parametrize(
    ("first", "last"),
    [
        *((code, code) for code in (0xAD, 0x34F, 0x61C, 0x3164, 0xFEFF, 0xFFA0)),
        *((0x7F, 0x9F), (0x115F, 0x1160), (0x180B, 0x180F), (0x200B, 0x200F), (0x2028, 0x202E), (0x2060, 0x206F)),
        *((0xFE00, 0xFE0F), (0xFFF9, 0xFFFB), (0xE0000, 0xE007F), (0xE0100, 0xE01EF), (0xD800, 0xDFFF)),
    ],
)
def test_every_character_without_a_look_is_named(first: int, last: int) -> None:
    for code in range(first, last + 1):
        assert text.plain(f"a{chr(code)}b") == f"a<U+{code:04X}>b"


def test_a_long_text_is_cut_and_counted() -> None:
    shown = text.cut("x" * 1_000_000)
    assert shown.startswith("x" * text.MAX_SHOWN + "\n… 980,000 more") and len(shown) < text.MAX_SHOWN + 100


@pytest.mark.parametrize("blank", ["\n", "  \n", "\n\t\n", "\n    "])
def test_blank_lines_of_a_program_cost_no_more_than_others_and_stay(blank: str) -> None:
    """The lexer looks through all blank lines that follow, at each of them: 20,000 characters took 5 s."""
    started = time.process_time()
    for before, behind in (("x = 1", "y = '<'"), ("", ""), ("s = '''a", "b'''")):
        code = before + blank * (text.MAX_SHOWN // len(blank) - 20) + behind
        shown = html.unescape(re.sub("<[^<>]*>", "", text.highlight(code)))
        assert shown == code.rstrip("\n") + "\n" * (len(code) - len(code.rstrip("\n")) or 1)
    assert time.process_time() - started < 1


def test_code_has_colours_and_loses_nothing() -> None:
    code = "\n\nfor i in range(3):\n    print('<b>', i)\n\n"
    marked = text.highlight(code)
    assert '<span class="k">for</span>' in marked and "&lt;b&gt;" in marked
    assert '<span class="nt">' in text.highlight('{"price": 3}')


@pytest.mark.nightly
def test_every_character_that_unicode_calls_ignorable_is_named() -> None:
    ignorable = [chr(code) for code in range(0x110000) if regex.match(r"\p{Default_Ignorable_Code_Point}", chr(code))]
    assert len(ignorable) > 4000
    assert [each for each in ignorable if text.plain(each) != f"<U+{ord(each):04X}>"] == []


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        ((None,), "–"), ((float("nan"),), "–"), ((1.0, None), "–"),
        ((0.125, 0.125), "250 ms"), ((4.2,), "4.20 s"), ((307.4,), "5 min 07 s"), ((11_100.0,), "3 h 05 min"),
    ],
)  # fmt: skip
def test_durations_have_the_unit_that_fits(seconds, shown) -> None:
    assert text.duration(*seconds) == shown


def test_shares_and_differences_have_their_interval_if_they_have_one() -> None:
    estimate = {"value": 0.3125, "low": 0.284, "high": 0.341}
    assert (text.percent(estimate), text.points(estimate)) == ("31.2% [28.4, 34.1]", "+31.2 [+28.4, +34.1]")
    alone = estimate | {"low": None}
    assert (text.percent(alone), text.points(alone), text.percent(0.5)) == ("31.2%", "+31.2", "50.0%")
    assert text.percent(estimate, interval=False) == "31.2%" and text.percent(None) == text.points(None) == "–"
