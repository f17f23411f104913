"""Compare two normalised answers part by part: labels, lists, sets, tuples, intervals, unions, matrices, plus-minus.

Parts that are not themselves made of parts go to a `compare_values` given by the caller (score.py).
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from verl_ext.reward.maths.intervals import is_braced, is_set, joined_points, pieces_of_union, read_reals, same_notation
from verl_ext.reward.maths.labels import is_calculation, is_label, split_indexed, split_label
from verl_ext.reward.maths.normalisation import RELATION, closing_index, key, split_top_level, unwrap_group
from verl_ext.reward.maths.rationals import quantity_or_none

MAX_PARTS = 64
MAX_FACTOR_BITS = 6500  # of a factor before a matrix, of its cells, and of their products, if they are worked out
MAX_UNMATCHED = 8  # values of a list that are not the same string: each pair may cost a symbolic comparison

# The factor that may precede a matrix or a vector: a sign, a number, a root, a bracket, with powers; letters for a
# matrix, whose factor may also follow after a dot.
# The pattern is possessive throughout, so that one pass finds what does not fit.
_FACTOR = (
    r"[-+]?\s*(?:\d++(?:\.\d++)?+|\\(?:frac|sqrt)(?:\[\d+\])?+(?:\{(?:[^{}]|\{[^{}]*\})*+\}){1,2}+|\\pi ?"
    r"|\((?!\s*\\begin)[^(),]*+\)|\^\s*(?:\w|\{[^{}]*+\})%s|\s|\\cdot)*+"
)
_LETTERS = r"|[a-zA-Z]|\\(?:alpha|beta|gamma|delta|theta|lambda|mu|rho|sigma|tau|phi|omega)(?![a-zA-Z])"
_MATRIX = re.compile(
    rf"(?P<factor>{_FACTOR % _LETTERS})(?:\[|\()?\s*\\begin\{{(?:[pbB]?matrix|smallmatrix|array)\}}(?:\{{[clr|]*\}})?"
    rf"(?P<cells>(?:(?!\\begin).)*)\\end\{{\w+\}}\s*[\])]?(?:\s*\\cdot(?P<after>{_FACTOR % ''}))?+",
    re.DOTALL,
)
# A row end may give the space to the next row; and some data sets have lost one of the two backslashes.
_ROW_END = re.compile(r"\\\\(?:\s*\[\s*-?[\d.]+\s*(?:pt|em|ex|mm|cm|in)\s*\])?|\\(?=-?\d)")
_PLUS_MINUS = re.compile(r"\\(?:pm|mp)(?![a-zA-Z])")
_DECIMAL = re.compile(r"-?\d[\d,]*(?:\.(?P<places>\d+))?(?:\s*\\cdot\s*10\s*\^\s*\{?(?P<power>-?\d{1,4})\}?)?")
_VECTOR = re.compile(rf"(?P<factor>{_FACTOR % ''})(?P<vector>\(.*\))", re.DOTALL)


class Comparison(NamedTuple):
    """`equal` is None if the question could not be decided; `method` names the rule that decided."""

    equal: bool | None
    method: str


# Texts that are sets as they stand: the answer \{\emptyset\} is not \emptyset, while \{5\} may be 5.
_NO_VALUE = re.compile(r"\[|.*\\(?:emptyset|cup|mathbb|infty)(?![a-zA-Z])", re.DOTALL)

# A union may be written as a difference of sets, which is not comparable part by part.
_SET_ALGEBRA = re.compile(r"\\(?:setminus|cap)(?![a-zA-Z])|\\mathbb")

CompareValues = Callable[[str, str], Comparison]


@dataclass(frozen=True)
class Parts:
    """`kind`: "values" (a list or set) and "union" have no order; "(]" and the like, and "matrix 2x2", are ordered."""

    kind: str
    items: list[str]

    @property
    def ordered(self) -> bool:
        return self.kind not in ("values", "union")


def compare_answers(pred: str, gold: str, compare_values: CompareValues, *, element: bool = False) -> Comparison:
    """Compare two normalised answers; more or fewer values than in the gold are wrong.

    Args:
        pred: the response's answer, normalised.
        gold: the ground truth, normalised.
        compare_values: decides for two single values; it sees whole equations and inequalities too.
        element: the two are parts of an answer: there `\\{1\\}` is not 1, while a whole answer may be either.
    """
    if key(pred) == key(gold):
        return Comparison(True, "string")
    if r"\approx" in gold:
        exact, rounded = _exact_side(gold)
        gold = exact or rounded[0]
    if r"\approx" not in pred:
        return _compare_labelled(pred, gold, compare_values, element)
    exact, rounded = _exact_side(pred)
    compared = compare_answers(exact, gold, compare_values, element=element)
    if compared.equal and not all(_is_rounding(exact, each, compare_values) for each in rounded):
        return Comparison(False, "approximation")
    return compared


def _compare_labelled(pred: str, gold: str, compare_values: CompareValues, element: bool) -> Comparison:
    """Compare the texts to the right of the labels, if a side has one."""
    (pred_label, pred_value), (gold_label, gold_value) = split_label(pred), split_label(gold, trusted=True)
    if not pred_label and (compared := _compare_calculation(pred, gold, compare_values)):
        return compared
    if pred_label and not _is_consistent(pred, pred_value, compare_values):
        return Comparison(False, "chain")
    if pred_label and not gold_label:
        gold_label, gold_value = split_indexed(gold, pred_label) or ("", gold)
    elif gold_label and not pred_label:
        pred_label, pred_value = split_indexed(pred, gold_label) or ("", pred)
    same = pred_label and gold_label and key(pred_label) == key(gold_label)
    if same and (_is_only_member(pred, pred_value, gold) or _is_only_member(gold, gold_value, pred)):
        return Comparison(False, "structure")  # x in (2,3) is not x = 2 or x = 3
    # Without a label, the text of a side is its value; but `2x = 6` is an equation and not a value.
    bare = bool(pred_label) != bool(gold_label) and not split_top_level(gold if pred_label else pred, "=")[1:]
    is_list = gold_label and gold.count("=") > 1 and "," in gold_value and gold_value[:1] not in ("(", "[")
    if bare and is_list and pred[:1] in ("(", "["):
        return Comparison(False, "structure")  # x = 2 or x = 3 is neither a point nor an interval
    if same or bare:
        return compare_answers(pred_value, gold_value, compare_values, element=element)
    if not gold_label and pred_label[:1] == "(":
        pred = _label_each(pred_label, pred_value) or pred
    elif not pred_label and gold_label[:1] == "(":
        gold = _label_each(gold_label, gold_value) or gold
    return _compare_sets(pred, gold, compare_values, element)


def _compare_calculation(pred: str, gold: str, compare_values: CompareValues) -> Comparison | None:
    r"""Compare both sides of `\sin 30^\circ = 1/2` with the gold; None for another answer or an equation as gold."""
    left, *right = split_top_level(pred, "=")
    if not is_calculation(pred) or len(right) != 1 or split_top_level(gold, "=")[1:]:
        return None
    compared = compare_values(right[0], gold)
    return compare_values(left, gold) if compared.equal else compared


def _is_only_member(text: str, value: str, other: str) -> bool:
    """Return whether a text says `x \\in (2,3)`, and the other one with the same label does not."""
    return r"\in " in text and value[:1] in ("(", "[") and r"\in " not in other


def _compare_sets(pred: str, gold: str, compare_values: CompareValues, element: bool) -> Comparison:
    """Compare inequalities, domains and unions in one notation; lists, tuples and matrices part by part."""
    pred, gold = same_notation(joined_points(pred), joined_points(gold))
    if bool(RELATION.search(pred)) != bool(RELATION.search(gold)):
        # -3 < x < 4 is no list -3, 4, which math-verify takes it for.
        sets = is_set(gold if RELATION.search(pred) else pred)
        return compare_values(pred, gold) if sets else Comparison(False, "structure")
    if bool(_SET_ALGEBRA.search(pred)) != bool(_SET_ALGEBRA.search(gold)):
        return compare_values(pred, gold)
    if any(len(split_top_level(side, r"\cup")) > 1 for side in (pred, gold)):
        return _compare_unions(pred, gold, compare_values)
    pred_parts, gold_parts = split_parts(pred), split_parts(gold)
    if pred_parts is None and gold_parts is None:
        return compare_values(pred, gold)
    pred_parts, gold_parts = pred_parts or Parts("values", [pred]), gold_parts or Parts("values", [gold])
    if is_braced(pred) or is_braced(gold):  # a set has each value once
        pred_parts, gold_parts = _once(pred_parts), _once(gold_parts)
    if is_braced(pred) != is_braced(gold) and (
        compared := _compare_braced(pred, pred_parts, gold, gold_parts, compare_values, element)
    ):
        return compared
    if r"\{" in (pred[:2], gold[:2]) and (pred_parts.ordered or gold_parts.ordered):
        return Comparison(False, "structure")  # a set has no order, a tuple does
    return _compare_parts(pred_parts, gold_parts, compare_values)


def _compare_braced(
    pred: str, pred_parts: Parts, gold: str, gold_parts: Parts, compare_values: CompareValues, element: bool
) -> Comparison | None:
    r"""Compare a set in braces with an answer without them; None if it has several values."""
    is_pred = is_braced(pred)
    braced, other, bare = (pred_parts, gold_parts, gold) if is_pred else (gold_parts, pred_parts, pred)
    if element or _NO_VALUE.match(bare):
        return Comparison(False, "structure")
    if len(braced.items) != 1:
        return None
    if len(other.items) > 1 and not other.ordered and braced.items[0][:1] != "{":
        return Comparison(False, "count")
    whole = other.items[0] if len(other.items) == 1 and not other.ordered else bare  # \{(1,2)\} and (1,2)
    pair = (braced.items[0], whole) if is_pred else (whole, braced.items[0])
    return compare_answers(*pair, compare_values, element=True)


def _compare_parts(pred: Parts, gold: Parts, compare_values: CompareValues) -> Comparison:
    if not pred.ordered and len(pred.items) > len(gold.items) > 1:
        pred = _once(pred)
    if len(pred.items) != len(gold.items) or len(gold.items) > MAX_PARTS:
        return Comparison(False, "count")
    if pred.kind != gold.kind and {pred.kind, gold.kind} != {"values", "()"}:
        return Comparison(False, "structure")
    if pred.ordered != gold.ordered:  # y=5, x=3 is (3,5)
        pred, gold = _by_label(pred), _by_label(gold)
    if not (pred.ordered or gold.ordered):
        return _equal_in_any_order(pred.items, gold.items, compare_values)
    undecided = None
    for one, other in zip(pred.items, gold.items, strict=True):
        compared = compare_answers(unwrap_group(one), unwrap_group(other), compare_values, element=True)
        if compared.equal is False:
            return compared
        undecided = undecided if compared.equal else compared
    return undecided or Comparison(True, "structure")


def _is_consistent(chain: str, value: str, compare_values: CompareValues) -> bool:
    """Return whether the plain numbers inside `x = 84/2 = 42` equal its value: `x = 7 = 42` is no answer."""
    numbers = [part for part in split_top_level(chain, "=")[1:-1] if re.fullmatch(r"-?\d+(?:\.\d+)?", part)]
    return all(compare_values(number, value).equal for number in numbers)


def _exact_side(text: str) -> tuple[str, list[str]]:
    r"""Split `x = \frac13 \approx 0.333` into (`x = \frac13`, ["0.333"]), `x \approx 0.333` into ("x=0.333", [])."""
    exact, *rounded = (side.strip() for side in text.split(r"\approx"))
    if "=" not in exact and is_label(exact):
        return f"{exact}={rounded[0]}", rounded[1:]
    return exact, rounded


def _is_rounding(exact: str, rounded: str, compare_values: CompareValues) -> bool:
    """Return whether a decimal is an exact value, rounded or cut off at its last digit; tuples go part by part."""
    exact = split_label(exact)[1]
    whole, cut = split_parts(exact), split_parts(rounded)
    if whole is not None and cut is not None:
        pairs = zip(whole.items, cut.items, strict=False)
        same = whole.kind == cut.kind and len(whole.items) == len(cut.items) <= MAX_PARTS
        return same and all(_is_rounding(one, other, compare_values) for one, other in pairs)
    decimal = _DECIMAL.match(rounded)
    approximation = quantity_or_none(rounded, MAX_FACTOR_BITS) if decimal else None
    if decimal is None or approximation is None or approximation.calculated:
        return False
    places = len(decimal["places"] or "") - int(decimal["power"] or 0)
    if (value := quantity_or_none(exact)) is not None:
        off, unit = abs(value.value) - abs(approximation.value), Fraction(10) ** -places
        return value.value * approximation.value >= 0 and -unit <= 2 * off < 2 * unit
    scale = f"10^{{{places}}}"
    number = approximation.value * 10**places
    return number.denominator == 1 and any(
        compare_values(rf"\lfloor {scale}\cdot({exact}){half}\rfloor", str(number)).equal
        for half in (r"+\frac{1}{2}", "")
    )


def _label_each(labels: str, values: str) -> str | None:
    """Turn `(x,y)`, `(1,2)` into `x=1,y=2`."""
    names, items = split_top_level(labels[1:-1]), split_top_level(values[1:-1])
    if values[:1] != "(" or len(names) != len(items):
        return None
    return ",".join(f"{name}={item}" for name, item in zip(names, items, strict=True))


def split_parts(text: str) -> Parts | None:
    """Return the parts of an answer, with plus-minus written out; None for a single value."""
    if matrix := _MATRIX.fullmatch(text) if r"\begin" in text else None:
        return _matrix_parts(matrix)
    if split_top_level(text, r"\cup")[1:]:
        return Parts("union", pieces_of_union(text))
    if is_braced(text):
        inside = text[2:-2]
        return None if re.search(r"[|:]", inside) else Parts("values", _write_out(split_top_level(inside)))
    if text[:1] in ("{", "(", "[") and closing_index(text) == len(text) - 1:
        return _bracket_parts(text)
    vector = _VECTOR.fullmatch(text) if text.endswith(")") else None
    if (
        vector
        and closing_index(vector["vector"]) == len(vector["vector"]) - 1
        and len(cells := split_top_level(vector["vector"][1:-1])) > 1
    ):
        return Parts("()", _times(vector["factor"], cells))
    values = _write_out(split_top_level(text))
    return Parts("values", values) if len(values) > 1 else None


def _matrix_parts(matrix: re.Match[str]) -> Parts:
    rows = [row.split("&") for row in _ROW_END.split(matrix["cells"].strip().removesuffix(r"\\"))]
    cells = _times(matrix["factor"], [cell.strip() for row in rows for cell in row])
    return Parts(f"matrix {'x'.join(str(len(row)) for row in rows)}", _times(matrix["after"] or "", cells))


def _bracket_parts(text: str) -> Parts | None:
    """Return the parts of a tuple, an interval or `{1,2}`; None for a single value in brackets."""
    inside = split_top_level(text[1:-1])
    if len(inside) < 2:
        return None
    if text[0] == "(" and len(_PLUS_MINUS.findall(text)) == 1:  # two points
        return Parts("values", _write_out([text]))
    return Parts("values", _write_out(inside)) if text[0] == "{" else Parts(text[0] + text[-1], inside)


def _write_out(values: list[str]) -> list[str]:
    r"""Write out `1 \pm x` as the two values 1+x and 1-x."""
    written = []
    for value in values:
        if not _PLUS_MINUS.search(value):
            written.append(value)
            continue
        for plus, minus in ("+-", "-+"):
            one = re.sub(r"\\pm(?![a-zA-Z])\s*", plus, re.sub(r"\\mp(?![a-zA-Z])\s*", minus, value))
            written.append(re.sub(r"(^|=\s*)\+", r"\1", one))
    return written


def _once(parts: Parts) -> Parts:
    """Drop repeated values, if the parts have no order."""
    return parts if parts.ordered else Parts(parts.kind, list({key(item): item for item in parts.items}.values()))


def _by_label(parts: Parts) -> Parts:
    """Put values labelled x, y and so on into alphabetical order, which is a tuple's.

    Other labels, such as m and b of a line, have no known order.
    """
    labels = [split_label(item)[0] for item in parts.items]
    if parts.ordered or "".join(sorted(labels)) not in ("xy", "xyz", "ab", "abc", "abcd"):
        return parts
    return Parts(parts.kind, [item for _, item in sorted(zip(labels, parts.items, strict=True))])


def _times(factor: str, cells: list[str]) -> list[str]:
    """Return the products, worked out if both are rational numbers: otherwise they would count as not evaluated."""
    factor = re.sub(r"\\cdot\s*$", "", factor).strip()
    if factor in ("", "+"):
        return cells
    factor = "-1" if factor == "-" else factor
    number = _number(factor) if len(cells) <= MAX_PARTS else None
    return [_product(factor, cell, number, _number(cell) if number is not None else None) for cell in cells]


def _product(factor: str, cell: str, one: Fraction | None, other: Fraction | None) -> str:
    if one is None or other is None:
        return rf"({factor})\cdot ({cell})"
    value = one * other
    return str(value) if value.denominator == 1 else rf"\frac{{{value.numerator}}}{{{value.denominator}}}"


def _number(text: str) -> Fraction | None:
    """Return a rational number by itself, if it is not too large to write out."""
    quantity = quantity_or_none(text, MAX_FACTOR_BITS)
    if quantity is None or quantity.unit or quantity.percent:
        return None
    bits = max(quantity.value.numerator.bit_length(), quantity.value.denominator.bit_length())
    return quantity.value if bits <= MAX_FACTOR_BITS else None


def _compare_unions(pred: str, gold: str, compare_values: CompareValues) -> Comparison:
    r"""Compare as sets of reals if all ends are rational, else piece by piece: `\{5\}` is neither (5) nor 5."""
    reals = read_reals(pred), read_reals(gold)
    if None not in reals:
        return Comparison(reals[0] == reals[1], "structure")
    pred_pieces, gold_pieces = pieces_of_union(pred), pieces_of_union(gold)
    if len(pred_pieces) != len(gold_pieces) or len(gold_pieces) > MAX_PARTS:
        return Comparison(False, "count")
    return _equal_in_any_order(pred_pieces, gold_pieces, compare_values)


def _equal_in_any_order(preds: list[str], golds: list[str], compare_values: CompareValues) -> Comparison:
    preds, golds = [unwrap_group(pred) for pred in preds], [unwrap_group(gold) for gold in golds]
    for gold in list(golds):
        same = next((pred for pred in preds if key(pred) == key(gold)), None)
        if same is not None:
            preds.remove(same)
            golds.remove(gold)
    if len(golds) > MAX_UNMATCHED:
        return Comparison(False, "structure")
    undecided = None
    for gold in golds:
        for pred in preds:
            comparison = compare_answers(pred, gold, compare_values, element=True)
            if comparison.equal:
                preds.remove(pred)
                break
            if comparison.equal is None:
                undecided = comparison
        else:
            return undecided or Comparison(False, "structure")
    return Comparison(True, "structure")
