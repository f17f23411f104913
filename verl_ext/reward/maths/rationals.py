"""Read exact rational numbers, with or without a unit, by a small dedicated parser: no eval, no floats.

Sizes are limited before anything is computed, so that `9^{9^9}` or `100000!` costs nothing.
"""

import math
import re
from collections.abc import Set
from dataclasses import dataclass
from fractions import Fraction

from verl_ext.reward.maths.units import read_phrase, same_unit

MAX_CHARS = 4000  # of a number as written; Python itself refuses to read more than 4300 digits
MAX_POWER_BITS = 2_000_000  # 2^{1000000} still counts
MAX_OPERAND_BITS = 200_000  # of a summand, factor or divisor: a gcd is quadratic
MAX_TOTAL_BITS = 8 * MAX_OPERAND_BITS  # of all of them together
MAX_FACTORIAL = 10_000
MAX_DEPTH = 40

_TOKEN = re.compile(
    r"""\s*(?:
    (?P<mixed> (\d++)(?: \s*\\frac\s*\{\s*(\d+)\s*\}\s*\{\s*(\d+)\s*\} | \s+(\d+)\s*/\s*(\d+) ))
  | (?P<scientific> (\d++\.?\d*+|\.\d++)(?: \s*\\cdot\s*10\s*\^\s*(?:\{\s*([+-]?\d+)\s*\}|(\d+))
                                          | [eE]([+-]?\d+)(?![a-zA-Z]) ))
  | (?P<periodic> (\d*+)\.(\d*+)(?: \\(?:overline|bar|dot)\s*(?:\{(\d+)\}|(\d)) | \((\d+)\)$ ))
  | (?P<decimal> \d++\.?\d*+|\.\d++)
  | (?P<operator> \\frac|\\cdot|[-+/^!(){}])
    )""",
    re.VERBOSE,
)


_GROUPED = re.compile(  # 1,234 or 1 234, by itself or before words
    r"[-+]?\s*\d{1,3}(?:(?:,\d{3})+|(?:\s\d{3})+)(?:\.\d+)?(?=\s*(?:%|\\text|[a-zA-Z\u4e00-\u9fff]|$))"
)
_WORDS = re.compile(r"\s*(?:\\text\s*\{|[a-zA-Z(/\u4e00-\u9fff‰])")


@dataclass(frozen=True)
class Quantity:
    """An exact number: `value` without its unit; `percent` if it carried a % sign (28% has the value 28).

    `unit` is the canonical spelling of a unit or noun, "" without one. `calculated` is True if sums or products were
    left to the reader (58*20+87), unlike in a fraction, a power or scientific notation.
    """

    value: Fraction
    percent: bool = False
    unit: str = ""
    calculated: bool = False

    def equals(self, other: "Quantity") -> bool:
        """Return whether the numbers are equal; a unit or % on only one side is ignored: 28% is both 28 and 0.28."""
        if not same_unit(self.unit, other.unit):
            return False
        if self.value == other.value:  # golds leave the sign out if the problem asks for a percentage: 6% and 6
            return True
        return self.percent != other.percent and self._fraction_of_one() == other._fraction_of_one()

    def _fraction_of_one(self) -> Fraction:
        return self.value / 100 if self.percent else self.value


class NotANumber(ValueError):
    """The text has only digits and operators, yet is no number: malformed, or beyond the limits above."""


class _Foreign(Exception):
    """The text is not a rational number: a letter or a root, for example, is not for this parser."""


def read_quantity(text: str, power_bits: int = MAX_POWER_BITS, nouns: Set[str] = frozenset()) -> Quantity | None:
    """Read a normalised answer as a number; None if it is something else (words, letters, roots, lists).

    Args:
        power_bits: a power of more bits is too large.
        nouns: words that may be counted here (`units.nouns_of`).
    Raises:
        NotANumber: `text` has only digits and operators and is still malformed or too large.
    """
    text = text.strip()
    if grouped := _GROUPED.match(text):
        text = re.sub(r"[,\s]", "", grouped[0]) + text[grouped.end() :]
    words = ""
    try:
        tokens, end = _tokenise(text)
        if text[end:] and tokens and tokens[-1] in ("(", "/"):  # 5 (cm), 5/day
            tokens, end = tokens[:-1], text.rindex(str(tokens[-1]), 0, end)
        percent = text[end : end + 1] == "%"
        words = text[end + percent :]
        if words and not (tokens and _WORDS.match(words)):
            return None
        parser = _Parser(tokens, power_bits)
        value = parser.parse()
    except _Foreign:
        return None
    except (ValueError, ZeroDivisionError) as error:
        if words:
            return None
        raise NotANumber(f"{text[:60]!r} is not a number: {error}") from error
    if not words:
        return Quantity(value, percent, "", parser.calculated)
    in_text = words[0] in " (" or words.startswith("\\text")
    phrase = read_phrase(words, in_text=in_text, one=0 < abs(value) <= 1, nouns=nouns)
    return phrase and Quantity(value * phrase.factor, percent, phrase.unit, parser.calculated)


def quantity_or_none(text: str, power_bits: int = MAX_POWER_BITS, nouns: Set[str] = frozenset()) -> Quantity | None:
    """Read as `read_quantity` does, but return None for a malformed or too large number as well."""
    try:
        return read_quantity(text, power_bits, nouns)
    except NotANumber:
        return None


class _Parser:
    """Recursive descent: sum > product > sign > power > factorial > number, bracket or \\frac."""

    def __init__(self, tokens: list[Fraction | str], power_bits: int):
        self._power_bits = power_bits
        self.tokens = tokens
        self.calculated = False
        self._index = 0
        self._depth = 0
        self._bits = 0

    def parse(self) -> Fraction:
        value = self._sum()
        if self._index < len(self.tokens):
            raise ValueError(f"unexpected {self._next()}")
        return value

    def _next(self) -> Fraction | str:
        return self.tokens[self._index] if self._index < len(self.tokens) else "end"

    def _take(self, *symbols: str) -> str:
        token = self._next()
        if isinstance(token, str) and token in symbols:
            self._index += 1
            return token
        return ""

    def _sum(self) -> Fraction:
        value = self._product()
        while sign := self._take("+", "-"):
            self.calculated = True
            term = self._small(self._product())
            value = self._small(value) + term if sign == "+" else self._small(value) - term
        return value

    def _product(self) -> Fraction:
        value = self._signed()
        while True:
            if self._take("/"):
                value = self._small(value) / self._small(self._signed())
            elif self._take("\\cdot") or self._next() in ("(", "\\frac"):
                self.calculated = True
                value = self._small(value) * self._small(self._signed())
            else:
                return value

    def _signed(self) -> Fraction:
        sign = 1
        while symbol := self._take("+", "-"):
            sign = -sign if symbol == "-" else sign
        return sign * self._power()

    def _power(self) -> Fraction:
        base = self._factorial()
        if not self._take("^"):
            return base
        self._deeper()
        exponent = self._signed()  # right-associative: 2^3^2 is 2^9
        self._depth -= 1
        if exponent.denominator != 1:
            raise _Foreign  # a root
        bits = max(base.numerator.bit_length(), base.denominator.bit_length())
        if abs(exponent) * bits > self._power_bits:
            raise ValueError(f"a power of more than {self._power_bits} bits")
        return base ** int(exponent)

    def _factorial(self) -> Fraction:
        value = self._atom()
        if not self._take("!"):
            return value
        if self._next() == "!":
            raise _Foreign  # a double factorial
        if value.denominator != 1 or not 0 <= value <= MAX_FACTORIAL:
            raise ValueError(f"factorial of a number outside 0..{MAX_FACTORIAL}")
        return Fraction(math.factorial(int(value)))

    def _atom(self) -> Fraction:
        token = self._next()
        self._index += 1
        if isinstance(token, Fraction):
            return token
        self._deeper()
        if token == "\\frac":
            value = self._small(self._atom()) / self._small(self._atom())
        elif token in ("(", "{"):
            value = self._sum()
            if not self._take(")" if token == "(" else "}"):
                raise ValueError(f"unclosed {token}")
        else:
            raise ValueError(f"unexpected {token}")
        self._depth -= 1
        return value

    def _small(self, value: Fraction) -> Fraction:
        """Return an operand; raise ValueError if it is too large, or all so far together are."""
        bits = value.numerator.bit_length(), value.denominator.bit_length()
        self._bits += sum(bits)
        if max(bits) > MAX_OPERAND_BITS or self._bits > MAX_TOTAL_BITS:
            raise ValueError(f"an operand of more than {MAX_OPERAND_BITS} bits, or {MAX_TOTAL_BITS} in all")
        return value

    def _deeper(self) -> None:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise ValueError(f"nested deeper than {MAX_DEPTH}")


def _tokenise(text: str) -> tuple[list[Fraction | str], int]:
    """Return the tokens of the number that `text` begins with, and where something else begins."""
    if len(text) > MAX_CHARS:
        raise ValueError(f"{len(text)} characters, at most {MAX_CHARS}")
    tokens, position = [], 0
    while match := _TOKEN.match(text, position):
        tokens.append(_read_token(match))
        position = match.end()
    return tokens, position


def _read_token(match: re.Match[str]) -> Fraction | str:
    kind, parts = match.lastgroup, [part for part in match.groups() if part is not None]
    if kind == "mixed":  # 2\frac{3}{5} is 13/5
        whole, top, bottom = map(int, parts[1:])
        return whole + Fraction(top, bottom)
    if kind == "scientific":
        mantissa, power = Fraction(parts[1]), int(parts[2])
        if abs(power) > MAX_CHARS:
            raise ValueError(f"an exponent of ten beyond {MAX_CHARS}")
        return mantissa * Fraction(10) ** power
    if kind == "periodic":  # 0.1\overline{6} is 1/10 + 6/90
        before, once, cycle = parts[1:]
        return Fraction(f"{before or 0}.{once or 0}") + Fraction(int(cycle), (10 ** len(cycle) - 1) * 10 ** len(once))
    return Fraction(parts[0]) if kind == "decimal" else parts[0]
