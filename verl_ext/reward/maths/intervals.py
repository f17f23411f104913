"""Subsets of the reals as answers: inequalities as intervals, and unions of intervals and points, compared exactly.

`-3 < x \\le 4` is `(-3,4]`, never the list `-3,4`. All texts are normalised.
"""

import math
import re
from fractions import Fraction
from typing import NamedTuple

from verl_ext.reward.maths.normalisation import RELATION, closing_index, key, split_top_level
from verl_ext.reward.maths.rationals import quantity_or_none

MAX_PIECES = 64  # of a union
_LETTER = re.compile(r"(?<!\\)\b[a-zA-Z]\b")

_TURNED = {">": "<", r"\ge": r"\le"}
_CONDITION = re.compile(r"\\\{\s*(?P<variable>[a-zA-Z])\s*(?:\\in\s*\\mathbb\s*\{?\s*R\s*\}?\s*)?[|:](?P<rest>.*)\\\}")
_SET = re.compile(r"\\(?:cup|cap|setminus|mathbb|emptyset|infty)(?![a-zA-Z])|^\\\{.*[|:].*\\\}$")

_REALS = re.compile(r"\\mathbb\s*\{?\s*R\s*\}?|\(-\\infty\s*,\s*\\infty\s*\)")
_IN_REALS = re.compile(rf"([a-zA-Z])\s*\\in\s*(?:{_REALS.pattern})")
_DIFFERENCE = re.compile(
    rf"(?:(?P<variable>[a-zA-Z])\s*\\in\s*)?(?:{_REALS.pattern})\s*\\setminus\s*"
    r"\\\{(?P<points>[^{}]*(?:\{[^{}]*\}[^{}]*)*)\\\}"
)
_ALL_EXCEPT = re.compile(
    r"\s*(?:[a-z]\s*(?:is|can be)\s+)?(?:all|any) reals?(?: numbers?| values?)?(?: of [a-z])?,?\s*"
    r"(?:except|but|other than|excluding)(?: for)?\s+(?:[a-z]\s*=\s*)?(?P<points>.*[^\s.])",
    re.IGNORECASE,
)
_NOT_IN = re.compile(r"([a-zA-Z])\s*\\notin\s*\\\{(.*)\\\}")
_MEMBER = re.compile(r"([a-zA-Z])\s*\\in\s*([(\[])([^()\[\]]*)([)\]])")
_INFINITE = {r"\infty", r"+\infty"}

# (end, 0 if the end itself is in and 1 if not, likewise for the other end); plus and minus infinity are floats.
Piece = tuple[Fraction | float, int, Fraction | float, int]


def condition_of(text: str) -> str:
    """Return the condition of a set of reals, `\\{x \\mid -3<x<4\\}` as `-3<x<4`; any other text as it is."""
    match = _CONDITION.fullmatch(text)
    if not match or not (RELATION.search(match["rest"]) or r"\notin" in match["rest"]):
        return text
    letters = set(_LETTER.findall(_REALS.sub("", match["rest"])))
    return match["rest"].strip() if letters == {match["variable"]} else text


def intervals_of(text: str) -> tuple[str, str] | None:
    r"""Read `x < -1 \lor x \ge 3` as ("x", `(-\infty,-1)\cup [3,\infty)`), `x>1 \land x<3` as ("x", "(1,3)").

    Returns None for other texts. A comma is an "or", but an "and" between two bounds that leave a bounded interval:
    `x>1, x<3`. Next to another condition, `-\infty<x<\infty` only says that x is a real number.
    """
    intervals, variables = [], set()
    alternatives = split_top_level(text, r"\lor")
    for alternative in alternatives:
        parts = split_top_level(alternative, r"\land")
        texts = parts if len(parts) > 1 else split_top_level(alternative)
        excluded = [exclusions_of(part) if r"\ne" in part else None for part in texts]
        holes = [hole for hole in excluded if hole]
        read = [_bounds_of(part) for part, hole in zip(texts, excluded, strict=True) if not hole]
        conditions = [each for each in read if each]
        if not conditions or len(conditions) < len(read):
            return None
        variables |= {condition.variable for condition in conditions} | {variable for variable, _ in holes}
        conditions = [each for each in conditions if not each.is_any_number] or conditions[:1]
        both = _both(conditions)
        low, high = (_read_end(both.low), _read_end(both.high)) if both else (None, None)
        bounded = len(conditions) == 2 and low is not None and high is not None and low < high
        if len(conditions) > 1 and (len(parts) > 1 or bounded or holes):
            if both is None:
                return None
            conditions = [both]
        if holes:
            points = [each[2:-2] for _, each in holes]
            pieces, whole = _without(conditions[0], points), _without(conditions[0], [])
            if pieces is None:
                return None
            # A point that lies outside may be meant for another alternative: x<1 or x>5, x \ne 0.
            if len(alternatives) > 1 and any(_without(conditions[0], [point]) == whole for point in points):
                return None
            intervals += pieces
            continue
        intervals += [f"{c.opening}{c.low},{c.high}{c.closing}" for c in conditions]
    return (variables.pop(), r"\cup ".join(intervals)) if len(variables) == 1 and intervals else None


def _without(interval: "_Bounds", points: list[str]) -> list[str] | None:
    """Return the interval without some points, as intervals; None if its ends or the points are not all rational."""
    ends = {text: _read_end(text) for text in points}
    numbers = {number: text for text, number in ends.items() if number is not None}
    low, high = _read_end(interval.low), _read_end(interval.high)
    if None in ends.values() or low is None or high is None:
        return None
    opening, start, closing, pieces = interval.opening, interval.low, interval.closing, []
    for number, text in sorted(numbers.items()):
        if number == low:
            opening = "("
        elif number == high:
            closing = ")"
        elif low < number < high:
            pieces.append(f"{opening}{start},{text})")
            opening, start = "(", text
    return [*pieces, f"{opening}{start},{interval.high}{closing}"]


class _Bounds(NamedTuple):
    """An interval of values of a variable, as text: opening is "(" or "[", an end may be infinite."""

    variable: str
    opening: str
    low: str
    high: str
    closing: str

    @property
    def is_any_number(self) -> bool:
        return (_read_end(self.low), _read_end(self.high)) == (-math.inf, math.inf)


def _bounds_of(part: str) -> _Bounds | None:
    """Read `1 < x \\le 3`, `x > 1` or `x = 5` as bounds; None for anything else, such as `1 < x > 3`."""
    sides, signs = [side.strip() for side in RELATION.split(part)], RELATION.findall(part)
    if not signs:
        if inside := _MEMBER.fullmatch(part):
            ends = split_top_level(inside[3])
            return _Bounds(inside[1], inside[2], ends[0], ends[1], inside[4]) if len(ends) == 2 else None
        if real := _IN_REALS.fullmatch(part):
            return _Bounds(real[1], "(", r"-\infty", r"\infty", ")")
        point = re.fullmatch(r"([a-zA-Z])\s*=([^=]+)", part)
        return _Bounds(point[1], "[", point[2].strip(), point[2].strip(), "]") if point else None
    if not all(sides) or r"\ne" in signs or len({sign in ("<", r"\le") for sign in signs}) != 1:
        return None
    if signs[0] not in ("<", r"\le"):
        sides, signs = sides[::-1], [_TURNED[sign] for sign in signs[::-1]]
    if len(sides) == 2 and re.fullmatch("[a-zA-Z]", sides[0]):
        sides, signs = [r"-\infty", *sides], ["<", *signs]
    elif len(sides) == 2:
        sides, signs = [*sides, r"\infty"], [*signs, "<"]
    if len(sides) != 3 or not re.fullmatch("[a-zA-Z]", sides[1]):
        return None
    low, variable, high = sides
    return _Bounds(variable, "(" if signs[0] == "<" else "[", low, high, ")" if signs[1] == "<" else "]")


def _both(conditions: list[_Bounds]) -> _Bounds | None:
    """Return the interval of values that meet all conditions; None with two lower or two upper bounds."""
    lows = [c for c in conditions if r"\infty" not in c.low]
    highs = [c for c in conditions if r"\infty" not in c.high]
    if not len(lows) == len(highs) == 1:
        return None
    return _Bounds(lows[0].variable, lows[0].opening, lows[0].low, highs[0].high, highs[0].closing)


def exclusions_of(text: str) -> tuple[str, str] | None:
    r"""Read all reals except some: `x \in \mathbb{R}, x \ne 2`, `(-\infty,2)\cup (2,\infty)`.

    Returns (variable, the excluded reals as a set), with "" if no variable is named; None for anything else, such as
    `x \ne 2 \lor x \ne 3`.
    """
    if difference := _DIFFERENCE.fullmatch(text):
        return (difference["variable"] or "").strip(), rf"\{{{difference['points']}\}}"
    if _REALS.fullmatch(text):
        return "", r"\mathbb{R}"
    if spoken := _ALL_EXCEPT.fullmatch(re.sub(r"\\text(?![a-zA-Z])|[{}]", "", text)):
        return "", rf"\{{{spoken['points']}\}}"
    if r"\ne" in text or r"\notin" in text:
        return _excluded_by(text)
    if r"\cup" not in text or r"\infty" not in text:
        return None
    following = {}
    for piece in pieces_of_union(text):
        ends = split_top_level(piece[1:-1])
        if piece[:1] != "(" or piece[-1:] != ")" or len(ends) != 2 or key(ends[0]) in following:
            return None
        following[key(ends[0])] = ends[1]
    points, at = [], following.pop(r"-\infty", r"\infty")
    while key(at) in following:
        points.append(at)
        at = following.pop(key(at))
    return ("", rf"\{{{','.join(points)}\}}") if points and not following and key(at) in _INFINITE else None


def _all_but(text: str) -> tuple[str, str] | None:
    """Read as `exclusions_of` does, and `x < 2 \\lor x > 2` as well."""
    if not re.search(r"\\(?:ne|notin|setminus|cup|lor)(?![a-zA-Z])|,.*[<>]|\breals?\b|\\mathbb|\\infty\s*\)", text):
        return None
    if found := exclusions_of(text):
        return found
    interval = intervals_of(text) if RELATION.search(text) else None
    outside = exclusions_of(interval[1]) if interval else None
    return (interval[0], outside[1]) if interval and outside else None


def _excluded_by(text: str) -> tuple[str, str] | None:
    """Read `x \\ne 2, x \\ne 3`, `x \\ne 2,3`, `x \\notin \\{2,3\\}`; a `x \\in \\mathbb{R}` there adds nothing."""
    variables, points = set(), []
    for condition in (each for part in split_top_level(text, r"\land") for each in split_top_level(part) if each):
        if real := _IN_REALS.fullmatch(condition):
            variables.add(real[1])
            continue
        if outside := _NOT_IN.fullmatch(condition):
            variables.add(outside[1])
            points.append(outside[2])
            continue
        sides = [side.strip() for side in condition.split(r"\ne")]
        if len(sides) == 1 and points and not RELATION.search(condition) and "=" not in condition:
            points.append(condition)  # x \ne 2, 3
            continue
        if len(sides) != 2 or RELATION.search("".join(sides)) or r"\l" in condition:
            return None
        if re.fullmatch("[a-zA-Z]", sides[1]) and not re.fullmatch("[a-zA-Z]", sides[0]):
            sides.reverse()
        if not re.fullmatch("[a-zA-Z]", sides[0]) or not sides[1]:
            return None
        variables.add(sides[0])
        points.append(sides[1])
    return (variables.pop(), rf"\{{{','.join(points)}\}}") if len(variables) == 1 and points else None


def same_notation(pred: str, gold: str) -> tuple[str, str]:
    """Return both as intervals, if one is an inequality in one variable and the other is one too, or a set of reals.

    All reals except some become the set of the excluded ones: `x \\ne 2` and `(-\\infty,2)\\cup (2,\\infty)`. One side
    is also an interval if the other is an inequality of absolute values in the same variable, which computer algebra
    solves. Anything else comes back with commas for "and" and "or": `x < 3` against `y < 3`, or against the number 3.
    """
    pred, gold = condition_of(pred), condition_of(gold)
    one, other = _all_but(pred), _all_but(gold)
    if one and other and (one[0] == other[0] or not (one[0] and other[0])):
        return one[1], other[1]
    one, other = (intervals_of(side) if RELATION.search(side) else None for side in (pred, gold))
    if one and other:
        return (one[1], other[1]) if one[0] == other[0] else (_listed(pred), _listed(gold))
    if one and (_is_absolute(gold, one[0]) or (is_set(gold) and not RELATION.search(gold))):
        return one[1], gold
    if other and (_is_absolute(pred, other[0]) or (is_set(pred) and not RELATION.search(pred))):
        return pred, other[1]
    both = {sign for side in (pred, gold) for sign in (r"\lor", r"\land") if sign in side}
    return _listed(pred), gold if len(both) > 1 else _listed(gold)  # x>1 or y>1 is not x>1 and y>1


def _is_absolute(text: str, variable: str) -> bool:
    """Return whether a text is an inequality like `|x-2|<1` in this variable only."""
    return bool(re.match(r"\|[^|]*\|\s*(?:<|>|\\[lg]e)", text)) and set(_LETTER.findall(text)) == {variable}


def _listed(text: str) -> str:
    return re.sub(r"\s*\\l(?:or|and)(?![a-zA-Z])\s*", ",", text) if RELATION.search(text) else text


def is_set(text: str) -> bool:
    """Return whether a text is written as a set of reals, not as values: an interval, or with signs of sets."""
    if _SET.search(text):
        return True
    return text[:1] in ("(", "[") and closing_index(text) == len(text) - 1 and len(split_top_level(text[1:-1])) == 2


def is_braced(text: str) -> bool:
    r"""Return whether one pair of set braces encloses the whole text: `\{1,2\}`, but not `\{1\}\cup\{2\}`."""
    return text.startswith(r"\{") and text.endswith(r"\}") and closing_index(text[1:]) == len(text) - 2


def joined_points(text: str) -> str:
    r"""Write `\{2\}\cup \{3\}` as `\{2,3\}`; leave any other text as it is."""
    parts = split_top_level(text, r"\cup")
    if len(parts) == 1 or not all(is_braced(part) and not re.search(r"\||:", part) for part in parts):
        return text
    return rf"\{{{','.join(part[2:-2] for part in parts)}\}}"


def pieces_of_union(text: str) -> list[str]:
    r"""Split `[-1,2]\cup\{5,6\}\cup[7,7]` into its intervals and points: `[-1,2]`, `\{5\}`, `\{6\}`, `\{7\}`."""
    pieces = []
    for part in split_top_level(text, r"\cup"):
        if is_braced(part) and not re.search(r"\||:", part):
            pieces += [rf"\{{{item}\}}" for item in split_top_level(part[2:-2])]
            continue
        ends = split_top_level(part[1:-1]) if part[:1] == "[" and part[-1:] == "]" else []
        same = len(ends) == 2 and key(ends[0]) == key(ends[1])
        pieces.append(rf"\{{{ends[0]}\}}" if same else part)
    return pieces


def read_reals(text: str) -> list[Piece] | None:
    r"""Read a set as pieces that neither touch nor overlap, in order: `[1,2)\cup\{2\}` and `[1,2]` read the same.

    Returns None if an end is neither rational nor infinite, or the text is not a union of intervals and points.
    """
    written = pieces_of_union(text)
    if len(written) > MAX_PIECES:
        return None
    pieces = []
    for part in written:
        inside = split_top_level(part[2:-2] if is_braced(part) else part[1:-1])
        if is_braced(part) and len(inside) == 1 and (point := _read_end(inside[0])) is not None:
            pieces.append((point, 0, point, 0))
            continue
        if len(inside) != 2 or part[:1] not in ("(", "[") or part[-1:] not in (")", "]"):
            return None
        low, high = map(_read_end, inside)
        if low is None or high is None or low >= high:
            return None
        pieces.append((low, int(part[0] == "("), high, int(part[-1] == ")")))
    merged: list[Piece] = []
    for low, low_open, high, high_open in sorted(pieces):
        if merged and (low < merged[-1][2] or (low == merged[-1][2] and not (low_open and merged[-1][3]))):
            start, start_open, end, end_open = merged.pop()
            end, end_open = max((end, -end_open), (high, -high_open))
            merged.append((start, start_open, end, -end_open))
        else:
            merged.append((low, low_open, high, high_open))
    return merged


def _read_end(text: str) -> Fraction | float | None:
    if infinite := re.fullmatch(r"([-+]?)\s*\\infty\s*", text):
        return float(f"{infinite[1]}inf")
    quantity = quantity_or_none(text)
    return None if quantity is None or quantity.unit or quantity.percent else quantity.value
