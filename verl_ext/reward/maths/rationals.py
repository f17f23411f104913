"""Read exact rational numbers, with or without a unit, by a small parser of our own: no eval, no floats.

Sizes are limited before anything is computed, so that `9^{9^9}` or `100000!` costs nothing.
"""

import math
import re
from dataclasses import dataclass
from fractions import Fraction

MAX_CHARS = 4000  # of a number as written; Python itself refuses to read more than 4300 digits
MAX_POWER_BITS = 2_000_000  # 2^{1000000} still counts
MAX_OPERAND_BITS = 200_000  # of what is added, multiplied or divided: a gcd is quadratic
MAX_FACTORIAL = 10_000
MAX_DEPTH = 40

# One unit between bars, its canonical spelling first. Two different known units make two quantities different.
_UNITS = """
m meter meters metre metres 米|cm centimeter centimeters centimetre centimetres 厘米|mm millimeter millimeters
km kilometer kilometers kilometre kilometres 千米 公里|in inch inches|ft foot feet|yd yard yards|mi mile miles
s sec second seconds 秒|min minute minutes 分钟|h hr hrs hour hours 小时|day days 天|week weeks|month months
year years 岁 年|g gram grams 克|kg kilogram kilograms 千克|lb lbs pound pounds|oz ounce ounces|ton tons 吨
L l liter liters litre litres 升|mL ml milliliter milliliters|gal gallon gallons|degree degrees deg 度|rad radians
unit units 单位|degC|degF|dollar dollars USD|cent cents|yuan RMB 元|euro euros|mph|km/h kmh kph|m/s mps|Hz|J|N|W|V|K
sq|cu|人|分|种|次|个
"""
_UNIT_OF = {word: unit.split()[0] for unit in re.split(r"[|\n]", _UNITS) for word in unit.split()}
_MAGNITUDES = {"hundred": 2, "thousand": 3, "万": 4, "million": 6, "亿": 8, "billion": 9, "trillion": 12}
_NOT_UNITS = set(
    "and or nor if not no to mod modulo more less than of over else with for plus minus times divided by choose "
    "half halves third thirds quarter quarters fourth fourths fifth fifths sixth sixths seventh sevenths "
    "eighth eighths ninth ninths tenth tenths eleventh elevenths twelfth twelfths fifteenths "
    "sixteenths twentieths fiftieths hundredths thousandths millionths billionths dozen dozens score "
    "squared cubed factorial root power base pi infinity negative positive zero except but either neither "
    "is isn't was are be equals wrong incorrect false invalid maybe perhaps probably possibly otherwise "
    "approximately approx about around roughly almost nearly least most greater smaller below above under between "
    "sin cos tan cot sec csc log ln exp sqrt arcsin arccos arctan sinh cosh tanh".split()
)
_TAIL = re.compile(
    r"(?P<number>.*[\d})!%])(?P<gap>\s*)"
    r"(?:\\text\s*\{(?P<text>[^{}]*)\}|(?P<bare>[a-zA-Z\u4e00-\u9fff][a-zA-Z\u4e00-\u9fff/ .]*))"
    r"(?:\s*\^\s*(?:\d|\{\d\}))?",
    re.DOTALL,
)
_UNIT_AFTER_EXPRESSION = re.compile(
    r"(?P<value>.*\S)\s*\\text\s*\{(?P<text>[^{}]*)\}(?:\s*\^\s*(?:\d|\{\d\}))?", re.DOTALL
)
_QUALIFIERS = ("square", "sq", "cubic", "cu")
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


@dataclass(frozen=True)
class Quantity:
    """An exact number: `value` without its unit; `percent` if it carried a % sign (28% has the value 28).

    `unit` is the canonical spelling of a known unit, "" for none or an unknown one. `calculated` says that sums or
    products were left to the reader (58*20+87), unlike in a fraction, a power or scientific notation.
    """

    value: Fraction
    percent: bool = False
    unit: str = ""
    calculated: bool = False

    def equals(self, other: "Quantity") -> bool:
        """Same number: a unit or % that only one side has is ignored, and 28% is 28 as well as 0.28."""
        if self.unit and other.unit and self.unit != other.unit:
            return False
        if self.value == other.value:
            return True
        return self.percent != other.percent and self._fraction_of_one() == other._fraction_of_one()

    def _fraction_of_one(self) -> Fraction:
        return self.value / 100 if self.percent else self.value


class NotANumber(ValueError):
    """Only digits and operators, yet no number: malformed, or beyond the limits above."""


class _Foreign(Exception):
    """Something other than a rational number, such as a letter or a root: not for this parser."""


def read_quantity(text: str, power_bits: int = MAX_POWER_BITS) -> Quantity | None:
    """The number that a normalised answer is, or None where it is something else (words, letters, roots, lists).

    Args:
        power_bits: a power of more bits is too large.
    Raises:
        NotANumber: `text` has nothing but digits and operators and is still malformed or too large.
    """
    text, unit, exponent = _split_unit(text.strip())
    percent = text.endswith("%")
    text = text.removesuffix("%").strip()
    if re.fullmatch(r"[-+]?\s*\d{1,3}(?:(?:,\d{3})+|(?:\s\d{3})+)(?:\.\d+)?", text):
        text = re.sub(r"[,\s]", "", text)
    try:
        parser = _Parser(text, power_bits)
        value = parser.parse()
    except _Foreign:
        return None
    except (ValueError, ZeroDivisionError) as error:
        raise NotANumber(f"{text[:60]!r} is not a number: {error}") from error
    return Quantity(value * 10**exponent, percent, unit, parser.calculated)


def quantity_or_none(text: str, power_bits: int = MAX_POWER_BITS) -> Quantity | None:
    """`read_quantity`, where what is malformed or too large is no number either."""
    try:
        return read_quantity(text, power_bits)
    except NotANumber:
        return None


def _split_unit(text: str) -> tuple[str, str, int]:
    """`10 million dollars` -> ("10", "dollar", 6). What cannot be a unit stays with the number."""
    match = _TAIL.fullmatch(text)
    if not match:
        return text, "", 0
    in_text = match["text"] is not None
    words = (match["text"] if in_text else match["bare"]).replace(".", "").split()
    exponent = 0
    if words and words[0] in _MAGNITUDES:
        exponent = _MAGNITUDES[words.pop(0)]
    elif words and words[0][0] in _MAGNITUDES:  # 5万元
        exponent, words[0] = _MAGNITUDES[words[0][0]], words[0][1:]

    def is_unit(word: str) -> bool:
        if word in _UNIT_OF or word.lower() in _UNIT_OF:
            return in_text or match["gap"] != "" or len(word) > 1 or not word.isascii()  # "5m" may be 5 times m
        if word.lower() in _NOT_UNITS or not word.replace("/", "").isalpha():
            return False
        return in_text or match["gap"] != "" and len(word) >= 4  # "42 apples", but not "3 xyz"

    if not all(map(is_unit, words)):
        return text, "", 0
    unit = _UNIT_OF.get(words[0], _UNIT_OF.get(words[0].lower(), "")) if len(words) == 1 else ""
    return match["number"].rstrip(), unit, exponent


def split_unit(text: str) -> tuple[str, str]:
    r"""`36\pi\text{ cm}^3` -> (`36\pi`, "cm"), for what is no rational number; "" without a unit that is known.

    Letters without a font are factors: `2\pi hr` is an area.
    """
    match = _UNIT_AFTER_EXPRESSION.fullmatch(text)
    words = match["text"].replace(".", "").split() if match and r"\text" not in match["value"] else []
    units = [_UNIT_OF.get(word, _UNIT_OF.get(word.lower())) for word in words if word.lower() not in _QUALIFIERS]
    return (match["value"], units[0]) if len(units) == 1 and units[0] else (text, "")


class _Parser:
    """Recursive descent: sum > product > sign > power > factorial > number, bracket or \\frac."""

    def __init__(self, text: str, power_bits: int):
        if len(text) > MAX_CHARS:
            raise ValueError(f"{len(text)} characters, at most {MAX_CHARS}")
        self._power_bits = power_bits
        self.tokens: list[Fraction | str] = []
        self.calculated = False
        self._index = 0
        self._depth = 0
        position = 0
        while text[position:].strip():
            match = _TOKEN.match(text, position)
            if not match:
                raise _Foreign
            self.tokens.append(_read_token(match))
            position = match.end()

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
            term = _small(self._product())
            value = _small(value) + term if sign == "+" else _small(value) - term
        return value

    def _product(self) -> Fraction:
        value = self._signed()
        while True:
            if self._take("/"):
                value = _small(value) / _small(self._signed())
            elif self._take("\\cdot") or self._next() in ("(", "\\frac"):
                self.calculated = True
                value = _small(value) * _small(self._signed())
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
            value = _small(self._atom()) / _small(self._atom())
        elif token in ("(", "{"):
            value = self._sum()
            if not self._take(")" if token == "(" else "}"):
                raise ValueError(f"unclosed {token}")
        else:
            raise ValueError(f"unexpected {token}")
        self._depth -= 1
        return value

    def _deeper(self) -> None:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise ValueError(f"nested deeper than {MAX_DEPTH}")


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


def _small(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_OPERAND_BITS:
        raise ValueError(f"an operand of more than {MAX_OPERAND_BITS} bits")
    return value
