"""Compare two normalised answers part by part: labels, lists, sets, tuples, intervals, unions, matrices, plus-minus.

Parts that are not themselves made of parts go to a `compare_values` given by the caller (score.py).
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from verl_ext.reward.maths.intervals import is_braced, is_set, pieces_of_union, read_reals, same_notation
from verl_ext.reward.maths.normalisation import (
    DEGREES_AS_RADIANS,
    RELATION,
    closing_index,
    key,
    split_top_level,
    unwrap_group,
)
from verl_ext.reward.maths.rationals import quantity_or_none

MAX_PARTS = 64
MAX_FACTOR_BITS = 6500  # of a factor before a matrix, of its cells, and of their products, where they are worked out
MAX_UNMATCHED = 8  # values of a list that are not the same string: each pair may cost a symbolic comparison

# What may stand before a matrix or a vector as its factor: a sign, a number, a root, a bracket, with powers; letters
# for a matrix, which may have its factor after a dot, too.
# Possessive throughout: what does not fit is found in one pass.
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
# A row may end with the space to the next; and some data sets lost one of the two backslashes.
_ROW_END = re.compile(r"\\\\(?:\s*\[\s*-?[\d.]+\s*(?:pt|em|ex|mm|cm|in)\s*\])?|\\(?=-?\d)")
_PLUS_MINUS = re.compile(r"\\(?:pm|mp)(?![a-zA-Z])")
_VECTOR = re.compile(rf"(?P<factor>{_FACTOR % ''})(?P<vector>\(.*\))", re.DOTALL)


class Comparison(NamedTuple):
    """`equal` is None where the question could not be decided; `method` names the rule that decided."""

    equal: bool | None
    method: str


# What is a set as it stands: the answer \{\emptyset\} is not \emptyset, while \{5\} may be 5.
_NO_VALUE = re.compile(r"\[|.*\\(?:emptyset|cup|mathbb|infty)(?![a-zA-Z])", re.DOTALL)

# A union may be written as a difference of sets, which is not comparable part by part.
_DIFFERENCE = re.compile(r"\\(?:setminus|backslash|cap)(?![a-zA-Z])|\\mathbb")
_CONNECTIVE = re.compile(r"\\l(?:or|and)(?![a-zA-Z])")

CompareValues = Callable[[str, str], Comparison]


@dataclass(frozen=True)
class Parts:
    """`kind`: "values" (a list or set) and "union" have no order; "(]" and such, and "matrix 2x2", are ordered."""

    kind: str
    items: list[str]

    @property
    def ordered(self) -> bool:
        return self.kind not in ("values", "union")


def compare_answers(pred: str, gold: str, compare_values: CompareValues, *, element: bool = False) -> Comparison:
    """Compare two normalised answers; more or fewer values than the gold has is wrong.

    Args:
        pred: the response's answer, normalised.
        gold: the ground truth, normalised.
        compare_values: decides for two single values; it sees whole equations and inequalities too.
        element: they are parts of something: there `\\{1\\}` is not 1, while a whole answer may be either.
    """
    if r"\approx" in pred and r"\approx" not in gold:
        exact, rounded = pred.split(r"\approx", 1)
        pred = f"{exact}={rounded}" if _is_label(exact) and "=" not in exact else exact.strip()
    if key(pred) == key(gold):
        return Comparison(True, "string")
    (pred_label, pred_value), (gold_label, gold_value) = split_label(pred), split_label(gold)
    if pred_label and not _is_consistent(pred, pred_value, compare_values):
        return Comparison(False, "chain")
    same = pred_label and gold_label and key(pred_label) == key(gold_label)
    # Without a label, a side has its text for a value; `2x = 6` is one side's equation, and no value.
    bare = bool(pred_label) != bool(gold_label) and not split_top_level(gold if pred_label else pred, "=")[1:]
    if same or bare:
        return compare_answers(pred_value, gold_value, compare_values, element=element)
    if not gold_label and pred_label[:1] == "(":
        pred = _label_each(pred_label, pred_value) or pred
    elif not pred_label and gold_label[:1] == "(":
        gold = _label_each(gold_label, gold_value) or gold
    pred, gold = same_notation(pred, gold)
    if bool(RELATION.search(pred)) != bool(RELATION.search(gold)):
        # -3 < x < 4 is no list -3, 4, which math-verify takes it for.
        sets = is_set(gold if RELATION.search(pred) else pred)
        return compare_values(pred, gold) if sets else Comparison(False, "structure")
    if bool(_DIFFERENCE.search(pred)) != bool(_DIFFERENCE.search(gold)):
        return compare_values(pred, gold)
    if any(len(split_top_level(side, r"\cup")) > 1 for side in (pred, gold)):
        return _compare_unions(pred, gold, compare_values)
    pred_parts, gold_parts = split_parts(pred), split_parts(gold)
    if pred_parts is None and gold_parts is None:
        return compare_values(pred, gold)
    pred_parts, gold_parts = pred_parts or Parts("values", [pred]), gold_parts or Parts("values", [gold])
    if is_braced(pred) or is_braced(gold):  # a set has each value once
        pred_parts, gold_parts = _once(pred_parts), _once(gold_parts)
    if is_braced(pred) != is_braced(gold):
        braced, other, bare = (pred_parts, gold_parts, gold) if is_braced(pred) else (gold_parts, pred_parts, pred)
        if element or _NO_VALUE.match(bare):
            return Comparison(False, "structure")
        if len(braced.items) == 1:  # \{(1,2)\} and (1,2)
            whole = other.items[0] if len(other.items) == 1 and not other.ordered else bare
            pair = (braced.items[0], whole) if is_braced(pred) else (whole, braced.items[0])
            return compare_answers(*pair, compare_values, element=True)
    if not pred_parts.ordered and len(pred_parts.items) > len(gold_parts.items) > 1:
        pred_parts = _once(pred_parts)
    if len(pred_parts.items) != len(gold_parts.items) or len(gold_parts.items) > MAX_PARTS:
        return Comparison(False, "count")
    if pred_parts.kind != gold_parts.kind and {pred_parts.kind, gold_parts.kind} != {"values", "()"}:
        return Comparison(False, "structure")
    if pred_parts.ordered != gold_parts.ordered:  # y=5, x=3 is (3,5)
        pred_parts, gold_parts = _by_label(pred_parts), _by_label(gold_parts)
    if pred_parts.ordered or gold_parts.ordered:
        if r"\{" in (pred[:2], gold[:2]):  # a set has no order, a tuple does
            return Comparison(False, "structure")
        undecided = None
        for one, other in zip(pred_parts.items, gold_parts.items, strict=True):
            compared = compare_answers(unwrap_group(one), unwrap_group(other), compare_values, element=True)
            if compared.equal is False:
                return compared
            undecided = undecided if compared.equal else compared
        return undecided or Comparison(True, "structure")
    return _equal_in_any_order(pred_parts.items, gold_parts.items, compare_values)


def split_label(text: str) -> tuple[str, str]:
    r"""`x = 3` -> ("x", "3"), `f(x) = y = 3` -> ("f(x)", "3"), `x \in S` -> ("x", "S"); ("", text) for anything else.

    A label names what is asked for: a letter in it, and nothing to work out (no power or coefficient, no sum but of
    letters: `m+n = 42`). The equations `2x = 6` and `x^2 = 9` have none. `3 = x` is read as `x = 3`.
    """
    if _CONNECTIVE.search(text):  # x=5 or x<1
        return "", text
    label, *values = split_top_level(text, "=")
    if not values:
        label, *values = split_top_level(text, r"\in ")
    if len(values) == 1 and re.fullmatch("[a-zA-Z]", values[0]) and not re.search("[a-zA-Z=]", label):
        label, values = values[0], [label]
    several = len(values) > 1 and len(split_top_level(text)) > 1  # x=1, y=2
    several = several or any(part.endswith(label) for part in values[:-1])  # x=1 x=2
    return (label, values[-1]) if values and values[-1] and _is_label(label) and not several else ("", text)


def _is_consistent(chain: str, value: str, compare_values: CompareValues) -> bool:
    """Whether the plain numbers in the middle of `x = 84/2 = 42` are its value: `x = 7 = 42` is no answer."""
    numbers = [part for part in split_top_level(chain, "=")[1:-1] if re.fullmatch(r"-?\d+(?:\.\d+)?", part)]
    return all(compare_values(number, value).equal for number in numbers)


def _label_each(labels: str, values: str) -> str | None:
    """`(x,y)`, `(1,2)` -> `x=1,y=2`."""
    names, items = split_top_level(labels[1:-1]), split_top_level(values[1:-1])
    if values[:1] != "(" or len(names) != len(items):
        return None
    return ",".join(f"{name}={item}" for name, item in zip(names, items, strict=True))


def _is_label(text: str) -> bool:
    if re.fullmatch(r"[a-zA-Z](?:\s*\+\s*[a-zA-Z])+", text):
        return True
    text = text.replace(DEGREES_AS_RADIANS, "")  # \sin 30^\circ
    return bool(re.search(r"[^\W\d_]", text)) and not re.search(r"^\s*\d|[-+^<>]|\\cdot|\\sqrt", text)


def split_parts(text: str) -> Parts | None:
    """The parts an answer is made of, plus-minus written out; None for a single value."""
    if matrix := _MATRIX.fullmatch(text) if r"\begin" in text else None:
        rows = [row.split("&") for row in _ROW_END.split(matrix["cells"].strip().removesuffix(r"\\"))]
        shape = "x".join(str(len(row)) for row in rows)
        cells = _times(matrix["factor"], [cell.strip() for row in rows for cell in row])
        return Parts(f"matrix {shape}", _times(matrix["after"] or "", cells))
    if split_top_level(text, r"\cup")[1:]:
        return Parts("union", pieces_of_union(text))
    if is_braced(text):
        inside = text[2:-2]
        if re.search(r"\||:|\\colon", inside):
            return None
        return Parts("values", _write_out(split_top_level(inside)))
    if text[:1] in ("{", "(", "[") and closing_index(text) == len(text) - 1:
        inside = split_top_level(text[1:-1])
        if len(inside) > 1 and text[0] == "(" and len(_PLUS_MINUS.findall(text)) == 1:  # two points
            return Parts("values", _write_out([text]))
        if len(inside) > 1:
            return Parts("values", _write_out(inside)) if text[0] == "{" else Parts(text[0] + text[-1], inside)
        return None
    vector = _VECTOR.fullmatch(text) if text.endswith(")") else None
    if vector and closing_index(vector["vector"]) == len(vector["vector"]) - 1:
        if len(cells := split_top_level(vector["vector"][1:-1])) > 1:
            return Parts("()", _times(vector["factor"], cells))
    values = _write_out(split_top_level(text))
    return Parts("values", values) if len(values) > 1 else None


def _write_out(values: list[str]) -> list[str]:
    r"""`1 \pm x` as the two values 1+x and 1-x."""
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
    """Without values that are written twice, where they have no order."""
    return parts if parts.ordered else Parts(parts.kind, list({key(item): item for item in parts.items}.values()))


def _by_label(parts: Parts) -> Parts:
    """Values that are labelled x, y and so on, in the order of the alphabet, which is a tuple's.

    Of others, such as m and b of a line, nobody knows which comes first.
    """
    labels = [split_label(item)[0] for item in parts.items]
    if parts.ordered or "".join(sorted(labels)) not in ("xy", "xyz", "ab", "abc", "abcd"):
        return parts
    return Parts(parts.kind, [item for _, item in sorted(zip(labels, parts.items, strict=True))])


def _times(factor: str, cells: list[str]) -> list[str]:
    """The products, worked out where both are rational numbers: else they would count as not evaluated."""
    factor = re.sub(r"\\cdot\s*$", "", factor).strip()
    if factor in ("", "+"):
        return cells
    factor = "-1" if factor == "-" else factor
    number = _number(factor) if len(cells) <= MAX_PARTS else None
    return [_product(factor, cell, number, _number(cell) if number is not None else None) for cell in cells]


def _product(factor: str, cell: str, *numbers: Fraction | None) -> str:
    if None in numbers:
        return rf"({factor})\cdot ({cell})"
    value = math.prod(numbers)
    return str(value) if value.denominator == 1 else rf"\frac{{{value.numerator}}}{{{value.denominator}}}"


def _number(text: str) -> Fraction | None:
    """A rational number by itself, if it is not too large to write out."""
    quantity = quantity_or_none(text, MAX_FACTOR_BITS)
    if quantity is None or quantity.unit or quantity.percent:
        return None
    bits = max(quantity.value.numerator.bit_length(), quantity.value.denominator.bit_length())
    return quantity.value if bits <= MAX_FACTOR_BITS else None


def _compare_unions(pred: str, gold: str, compare_values: CompareValues) -> Comparison:
    r"""As sets of reals where all ends are rational, else piece by piece: `\{5\}` is not (5), nor 5."""
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
