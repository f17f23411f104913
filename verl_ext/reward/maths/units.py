r"""Read the words after a number: `km/h`, `dollars per day`, `kg of sand`, `red apples`, `million people`, `permille`.

A unit comes from a list. A counted noun is a plural or, after 1, a singular, and a word of the problem or of the ground
truth: an unknown noun may change the number, as in `6 vingtaines`. Words that are known to change it (number words,
pairs, magnitudes, operations, comparisons, negations, verbs) are never nouns. Text that fits no rule of the grammar is
not a unit, so that `6 seven`, `6 xor 7` and `6 reciprocal` are not 6.

    phrase = [magnitude] (unit | noun) {per (unit | noun)} ["of" words] [measured] | "per" (unit | noun)
"""

import re
from collections.abc import Set
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

MAX_CHARS = 200  # of a phrase
MAX_WORDS = 12

# One unit between bars, its canonical spelling first. Two different known units make two quantities different.
_UNITS = """
m meter meters metre metres 米|cm centimeter centimeters centimetre centimetres 厘米|mm millimeter millimeters 毫米
km kilometer kilometers kilometre kilometres 千米 公里|in inch inches|ft foot feet|yd yard yards|mi mile miles
s sec secs second seconds 秒|min mins minute minutes 分钟|h hr hrs hour hours 小时|day days 天|week weeks wk wks
month months 个月|year years yr yrs 岁 年|g gram grams gm 克|kg kilogram kilograms kilos kgs 千克
mg milligram milligrams|lb lbs pound pounds|oz ounce ounces|ton tons tonne tonnes 吨|L l liter liters litre litres 升
mL ml milliliter milliliters millilitre millilitres 毫升|gal gallon gallons|pint pints|quart quarts|cup cups
tbsp tablespoon tablespoons|tsp teaspoon teaspoons|acre acres|hectare hectares ha|degree degrees deg 度
rad radian radians|unit units 单位|degC Celsius|degF Fahrenheit|dollar dollars USD buck bucks 美元|cent cents
yuan RMB 元|euro euros EUR|GBP|rupee rupees|yen|penny pennies pence|mph|kph kmh|mps|Hz hertz|kHz|MHz|J joule joules|kJ
cal|kcal|N newton newtons|W watt watts|kW|kWh|V volt volts|amp amps|Pa|kPa|ohm ohms|mol mole moles|bit bits
decade decades|century centuries|dL deciliter deciliters decilitre decilitres
byte bytes|KB|MB|GB|TB|rpm|fps|knot knots|人 位 名|分|种|次|个|只|条|本|张|件|页|块
"""
_UNIT_OF = {word: unit.split()[0] for unit in re.split(r"[|\n]", _UNITS) for word in unit.split()}
_CANONICAL = set(_UNIT_OF.values()) | {"degC", "degF"}
_POWERED = {"square", "sq", "cubic", "cu"}
_MEASURED = set("total altogether each long tall wide high deep old away left remaining apart overall".split())
_MEASURED_IN = {("in", "total"), ("in", "all"), ("in", "length"), ("in", "area"), ("in", "height"), ("in", "width")}
_TOTALS = {("total",), ("altogether",), ("each",), ("in", "total"), ("in", "all")}  # also without a noun

_NUMBERS = set(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
    "seventeen eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety first once twice thrice half "
    "halve halves third quarter fourth single double doubled triple tripled quadruple quadrupled couple duo trio "
    "pairwise none nil null naught nought both many few several infinite infinity infinitely hundred thousand".split()
)
_ORDINAL = re.compile(
    r"(?:.*(?:teen|ie|hundred|thousand|illion)|third|four|fif|six|seven|eigh|nin|ten|eleven|twelf)ths?"
)
_MAGNITUDES = {
    word: Fraction(10) ** exponent
    for exponent, words in {
        1: "十", 2: "hundred hundreds 百", 3: "thousand thousands thousandfold 千", 4: "myriad myriads 万",
        5: "lakh lakhs lac lacs", 6: "million millions mln mil mio mill mills", 7: "crore crores",
        8: "亿", 9: "billion billions bn bln milliard milliards", 12: "trillion trillions tn 兆",
        15: "quadrillion quadrillions", 18: "quintillion quintillions", 21: "sextillion sextillions", 100: "googol",
        -3: "permille permil permill promille ‰", -4: "bp bps", -6: "ppm", -9: "ppb",
    }.items()
    for word in words.split()
}  # fmt: skip
_MAGNITUDES |= {word: Fraction(number) for number, words in ((12, "dozen dozens"), (20, "score scores"), (144, "gross"))
                for word in words.split()}  # fmt: skip
_TWO_WORDS = {("per", "mille"): "permille", ("per", "mil"): "permille", ("per", "thousand"): "permille",
              ("basis", "points"): "bp", ("basis", "point"): "bp", ("per", "million"): "ppm",
              ("parts", "per", "million"): "ppm", ("parts", "per", "thousand"): "permille",
              ("parts", "per", "billion"): "ppb"}  # fmt: skip
# Words that change a number, or say something about it. Each also stands for its plural and -ed form.
_CHANGING = set(
    "and or nor xor nand xnor if iff not no non never neither either but except without unless than then else "
    "otherwise to mod modulo modulus remainder more less most least fewer greater smaller larger bigger lower "
    "higher above below under over between beyond within before after from into onto by at on as so yet still also "
    "instead rather plus minus times time divide multiply multipl add subtract sum difference product quotient "
    "ratio proportion fraction percent percentage percentile decimal digit reciprocal inverse invert inversion "
    "opposite negate negation negative complement conjugate factorial root radical power exponent exponential log "
    "logarithm logarithmic ln sine cosine tangent sin cos tan cot sec csc exp sqrt arcsin arccos arctan sinh cosh "
    "tanh base pi tau phi euler imaginary complex integral derivative limit gradient function fold floor ceiling "
    "round rounded absolute square cube squared cubed tensor increment decrement increase decrease reduce shift "
    "halv quadratic cubic choose permute permutate binomial is isn aren wasn doesn don didn was were are be been "
    "being am do did has have had can cannot could may might must shall should will would equal exceed differ mean "
    "imply impl denote give become contradict fail fals lie wrong incorrect invalid valid maybe perhap perhaps "
    "probably possibly certainly definitely actually really approximate approximately approx about around roughly "
    "almost nearly exactly precisely only just merely barely circa hardly unknown undefined undetermined uncertain "
    "unclear unsure nothing something anything everything any some all every nobody versus vs via whereas while "
    "because since though although however nevertheless hence thus therefore thu yes this that these those it its "
    "he she they them his her their here there where when what which who whose how why always sometime beside "
    "toward afterward backward forward off out up down again answer correction error mistake guess estimate star "
    "kilo mega giga tera peta milli micro nano pico deci centi deca hecto hex octal binary hexadecimal other "
    "another anti divid modded doubl tripl say seem appear suggest think believe know claim show prove hold satisfy "
    "follow contain include remain need require make turn go come get see look work teen tres trois dos uno deux "
    "sept infinity wait sorry ignore disregard scratch oops typo edit nope false".split()
)
_IRREGULAR = set(
    "people persons children men women feet teeth geese mice fish sheep deer dice oxen cattle data series species "
    "vertices matrices indices axes buses money".split()
)
_WITH_POWERS = {"m", "cm", "mm", "km", "in", "ft", "yd", "mi", "s", "min", "h", "unit", "kg", "L", "mol", "K"}
_FACTORS = {"N", "m", "kW", "kWh", "W", "h", "s", "kg", "Pa", "V"}  # of a product: N m, kW h
_COUNTED = set(  # also names of operations; they may be counted as the last word
    "squares cubes roots digits fractions decimals differences sums products functions integrals mistakes errors "
    "answers stars bases axes limits points degrees powers factors tangents permutations ratios rounds".split()
)
_GROUPS = set("pair ream quire dizaine douzaine vingtaine".split())  # of a number of things
_TUPLES = {(order, name) for order in ("ordered", "unordered") for name in ("pairs", "triples", "quadruples")}
_PLAIN = set("different distinct possible total us".split())  # before any noun
_ROOTS = {("square", "roots"), ("cube", "roots"), ("cubic", "roots")}
_PIECE = re.compile(
    r"\s*(?:(?P<open>\\text\s*\{)|(?P<close>\})|(?P<word>[a-zA-Z]+(?:'s)?\.?|[\u4e00-\u9fff]+|‰)|(?P<per>/)"
    r"|(?P<dot>\\cdot(?![a-zA-Z])|-|·)|\^\s*(?P<power>\{\s*-?\d\s*\}|-?\d)|(?P<skip>[().]))"
)
_CJK = re.compile("[\u4e00-\u9fff]+")
_CJK_CHANGING = re.compile("[零一二三四五六七八九十百千万亿兆半倍分之负非不或和与加减乘除否以上下双对打]")


class Phrase(NamedTuple):
    """`factor` multiplies the number; `unit` is canonical, "km/h", or the singular of a noun; "" for none."""

    factor: Fraction
    unit: str


def is_unit(word: str) -> bool:
    """Return whether a word by itself is a unit of the list."""
    return _unit_of(word) is not None


def _unit_of(word: str) -> str | None:
    """Return the canonical spelling of a unit; case counts only for single letters: M is not a meter."""
    return _UNIT_OF.get(word) or (_UNIT_OF.get(word.lower()) if len(word) > 1 else None)


def changes_a_number(word: str) -> bool:
    """Return whether a word changes the number next to it, or negates or compares it."""
    word = word.lower().rstrip(".")
    if word in _NUMBERS or word in _CHANGING or word in _MAGNITUDES or _ORDINAL.fullmatch(word):
        return True
    stems = [word[: -len(end)] for end in ("s", "es", "ed", "d", "ly", "ing") if word.endswith(end)]
    stems += [word[:-3] + "y"] * word.endswith("ies")
    return any(stem in _NUMBERS or stem in _CHANGING or stem in _MAGNITUDES for stem in stems) or "illion" in word


def _is_number_word(word: str) -> bool:
    return changes_a_number(word) or _singular(word) in _GROUPS


@lru_cache(maxsize=128)
def nouns_of(text: str) -> frozenset[str]:
    """Return the words of a problem or a ground truth, each with its possible singulars, and its Chinese characters."""
    words = re.findall(r"(?<![\\a-z])[a-z]{3,}|[\u4e00-\u9fff]", text.lower())
    return frozenset().union(*map(_forms, words))


def _forms(word: str) -> set[str]:
    return {word, word.removesuffix("s"), _singular(word)}


def same_unit(first: str, second: str) -> bool:
    """Return whether two canonical units agree as far as both say: "dollar" is "dollar/day", and "" is any."""
    return all(
        not one or not other or one == other for one, other in zip(first.split("/"), second.split("/"), strict=False)
    )


def split_unit(text: str) -> tuple[str, str]:
    r"""Split `36\pi\text{ cm}^3`, which is not rational, into (`36\pi`, "cm"); "" without a unit of the list.

    Letters without a font are factors, except a unit of three or more: `2\pi hr` is an area, `2\pi rad` is not.
    """
    value, text_sign, words = text.partition(r"\text")
    if not text_sign:
        value, words = _split_words(text)
    phrase = read_phrase(text_sign + words, in_text=True) if value.strip() and words else None
    if phrase is None or phrase.factor != 1 or re.split("[/·]", phrase.unit)[0] not in _CANONICAL | {""}:
        return text, ""
    return value.rstrip(), phrase.unit


def _split_words(text: str) -> tuple[str, str]:
    """Split off the last words of a text, which begin after a space with a unit of three letters or more."""
    pieces = text.split(" ")
    for count in range(min(len(pieces) - 1, MAX_WORDS), 0, -1):
        first = pieces[-count]
        if (
            len(first) > 2
            and first.isalpha()
            and is_unit(first)
            and re.search(r"[\d)}]$|\\pi$|/\d+$", pieces[-count - 1])
        ):
            return " ".join(pieces[:-count]), " ".join(pieces[-count:])
    return text, ""


def read_phrase(text: str, *, in_text: bool, one: bool = False, nouns: Set[str] = frozenset()) -> Phrase | None:
    """Read the words after a number; None if they are not a unit.

    Args:
        text: the rest of the normalised answer, after the number.
        in_text: the text is in `\\text` or after a space: `5m` may be 5 times m, `5 m` is not.
        one: the number is 1, whose noun is a singular.
        nouns: words that may be counted here, as `nouns_of` gives them.
    """
    pieces = _read_pieces(text) if len(text) <= MAX_CHARS else None
    if not pieces or len(pieces) > MAX_WORDS:
        return None
    factor = Fraction(1)
    words = tuple(piece.lower() for piece in pieces)
    for length in (3, 2):
        if words[:length] in _TWO_WORDS:
            return Phrase(_MAGNITUDES[_TWO_WORDS[words[:length]]], "") if len(words) == length else None
    while pieces and (magnitude := _MAGNITUDES.get(pieces[0].lower())):  # in 5万元 the magnitude is a separate piece
        factor, pieces = factor * magnitude, pieces[1:]
    if not pieces:
        return Phrase(factor, "")
    if pieces[0] == "/" and not (len(pieces) > 1 and len(pieces[1]) > 1 and is_unit(pieces[1])):
        return None  # 6/x
    if not in_text and pieces[0] != "/" and pieces[0].isascii() and (len(pieces[0]) == 1 or not is_unit(pieces[0])):
        return None
    unit = _Grammar(pieces, one, nouns).read()
    return None if unit is None else Phrase(factor, unit)


def _read_pieces(text: str) -> list[str] | None:
    """Return words, "/" and powers such as "^2"; None if there is anything else."""
    pieces, position, inside = [], 0, False
    text = text.strip()
    while position < len(text):
        match = _PIECE.match(text, position)
        if not match or (match["open"] and inside) or (match["close"] and not inside):
            return None
        position, inside = match.end(), bool(match["open"]) or (inside and not match["close"])
        if match["word"]:
            word = match["word"].rstrip(".").removesuffix("'s")
            pieces += _split_chinese(word) if _CJK.fullmatch(word) else [word]
        elif match["per"]:
            pieces.append("/")
        elif match["power"]:
            pieces.append("^" + match["power"].strip("{ }"))
    return None if inside else pieces


def _split_chinese(word: str) -> list[str]:
    rest = word.lstrip("十百千万亿兆")
    return [*word[: len(word) - len(rest)], *([rest] if rest else [])]


class _Grammar:
    """Recursive descent over the pieces of one phrase."""

    def __init__(self, pieces: list[str], one: bool, nouns: Set[str]):
        self._pieces, self._one, self._nouns = pieces, one, nouns
        self._at = 0

    def read(self) -> str | None:
        """Return the canonical unit of the whole phrase; None if it does not fit."""
        if tuple(map(str.lower, self._pieces)) in _TOTALS:
            return ""
        units = []
        if self._peek() not in ("per", "/"):
            if (unit := self._unit() or self._noun(one=self._one)) is None:
                return None
            units.append(unit)
        elif self._at + 1 == len(self._pieces):
            return None
        else:
            units.append("unit")
        while self._peek() in ("per", "/", "a", "an", "each", "every") and self._at + 1 < len(self._pieces):
            self._at += 1
            if (unit := self._unit() or self._noun(one=True)) is None:
                return None
            units.append(unit)
        if self._peek() == "of" and not self._of():
            return None
        rest = tuple(piece.lower() for piece in self._pieces[self._at :])
        if rest and rest not in _MEASURED_IN and not (len(rest) == 1 and rest[0] in _MEASURED):
            return None
        return "/".join("" if unit == "unit" else unit for unit in units)

    def _peek(self, ahead: int = 0) -> str:
        at = self._at + ahead
        return self._pieces[at].lower() if at < len(self._pieces) else ""

    def _unit(self) -> str | None:
        start = self._at
        if self._peek() in _POWERED and self._peek(1):
            self._at += 1
        word = self._pieces[self._at] if self._at < len(self._pieces) else ""
        unit = _unit_of(word)
        if unit is None:
            self._at = start
            return None
        self._at += 1
        if unit == "degree" and self._peek() in ("celsius", "fahrenheit", "c", "f"):
            unit = "deg" + self._peek()[0].upper()
            self._at += 1
        if unit in _WITH_POWERS and (self._peek() in ("squared", "cubed") or re.fullmatch(r"\^-?[1-3]", self._peek())):
            self._at += 1
        if self._at < len(self._pieces) and self._pieces[self._at] in _FACTORS and word in _FACTORS:
            unit += f"·{self._unit()}"
        return unit

    def _noun(self, *, one: bool) -> str | None:
        """Return the words up to the first plural; after 1, or "per", a singular is enough."""
        end = self._at
        while end < len(self._pieces) and self._pieces[end].isalpha() and end - self._at < 5:
            word = self._pieces[end].lower()
            if word in ("per", "of", "a", "an", "each", "every", "in") or (
                word in _MEASURED and end + 1 == len(self._pieces)
            ):
                break
            end += 1
        words = [piece.lower() for piece in self._pieces[self._at : end]]
        if not words:
            return None
        *others, head = words
        if not all(self._is_counted(word) for word in others):
            return None
        if tuple(words[-2:]) not in _TUPLES and (not self._is_counted(head, last=True) or tuple(words[-2:]) in _ROOTS):
            return None
        if not (_is_plural(head) or _CJK.fullmatch(head) or (one and len(head) > 2)):
            return None
        self._at = end
        return _singular(head)

    def _is_counted(self, word: str, *, last: bool = False) -> bool:
        if _CJK.fullmatch(word):
            known = all(char in self._nouns or is_unit(char) for char in word)
            return known and not _CJK_CHANGING.search(word)
        if _is_number_word(word) and not (last and word in _COUNTED):
            return False
        return word in _PLAIN or is_unit(word) or not self._nouns.isdisjoint(_forms(word))

    def _of(self) -> bool:
        """Read `of sand` or `of olive oil`: words that do not change a number."""
        words = self._pieces[self._at + 1 : self._at + 5]
        while words and words[-1].lower() in _MEASURED:
            words.pop()
        self._at += 1 + len(words)
        return bool(words) and all(
            word.isalpha()
            and len(word) > 1
            and (word.lower() in ("the", "a", "an", "all", "her", "his") or not _is_number_word(word.lower()))
            for word in words
        )


def _is_plural(word: str) -> bool:
    return word in _IRREGULAR or (len(word) > 3 and word.endswith("s") and not word.endswith(("ss", "us", "is")))


def _singular(noun: str) -> str:
    if noun.endswith("ies") and len(noun) > 4:
        return noun[:-3] + "y"
    if noun.endswith(("ches", "shes", "sses", "xes", "zes")):
        return noun[:-2]
    return noun[:-1] if noun.endswith("s") and not noun.endswith("ss") else noun
