"""Compare two normalised answers part by part: labels, lists, sets, tuples, intervals, unions, matrices, plus-minus.

Parts that are not themselves made of parts go to a `compare_values` given by the caller (score.py).
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from verl_ext.reward.normalisation import closing_index, key, split_top_level, unwrap_group

MAX_PARTS = 64
MAX_UNMATCHED = 8  # values of a list that are not the same string: each pair may cost a symbolic comparison

RELATION = re.compile(r"<|>|\\(?:le|ge|ne)(?![a-zA-Z])")


class Comparison(NamedTuple):
    """`equal` is None where the question could not be decided; `method` names the rule that decided."""

    equal: bool | None
    method: str


CompareValues = Callable[[str, str], Comparison]


@dataclass(frozen=True)
class Parts:
    """`kind`: "values" (a list or set) and "union" have no order; "(]" and such, and "matrix 2x2", are ordered."""

    kind: str
    items: list[str]

    @property
    def ordered(self) -> bool:
        return self.kind not in ("values", "union")


def compare_answers(pred: str, gold: str, compare_values: CompareValues) -> Comparison:
    """Compare two normalised answers; more or fewer values than the gold has is wrong.

    Args:
        pred: the response's answer, normalised.
        gold: the ground truth, normalised.
        compare_values: decides for two single values; it sees whole equations and inequalities too.
    """
    if r"\approx" in pred and r"\approx" not in gold:
        exact, rounded = pred.split(r"\approx", 1)
        pred = f"{exact}={rounded}" if _is_label(exact) and "=" not in exact else exact.strip()
    if key(pred) == key(gold):
        return Comparison(True, "string")
    (pred_label, pred_value), (gold_label, gold_value) = split_label(pred), split_label(gold)
    if pred_label and not _is_consistent(pred, pred_value, compare_values):
        return Comparison(False, "chain")
    if pred_label and gold_label and key(pred_label) == key(gold_label):
        return compare_answers(pred_value, gold_value, compare_values)
    if pred_label and not gold_label and not split_top_level(gold, "=")[1:]:
        return compare_answers(pred_value, gold, compare_values)
    if gold_label and not pred_label and not split_top_level(pred, "=")[1:]:
        return compare_answers(pred, gold_value, compare_values)

    if pred_label and not gold_label and pred_label[0] == "(":
        pred = _label_each(pred_label, pred_value) or pred
    elif gold_label and not pred_label and gold_label[0] == "(":
        gold = _label_each(gold_label, gold_value) or gold
    if r"\cup" in gold:
        pred = _as_union(pred) or pred
    elif r"\cup" in pred:
        gold = _as_union(gold) or gold
    pred_parts, gold_parts = split_parts(pred), split_parts(gold)
    if pred_parts is None and gold_parts is None:
        return compare_values(pred, gold)
    if _mixes_notations(pred, gold):
        return compare_values(pred, gold)
    pred_parts, gold_parts = pred_parts or Parts("values", [pred]), gold_parts or Parts("values", [gold])
    if not pred_parts.ordered and len(pred_parts.items) > len(gold_parts.items) > 1:
        pred_parts = Parts(pred_parts.kind, list({key(item): item for item in pred_parts.items}.values()))
    if len(pred_parts.items) != len(gold_parts.items) or len(gold_parts.items) > MAX_PARTS:
        return Comparison(False, "count")
    if pred_parts.kind != gold_parts.kind and {pred_parts.kind, gold_parts.kind} != {"values", "()"}:
        return Comparison(False, "structure")
    if len(gold_parts.items) == 1:
        return compare_answers(pred_parts.items[0], gold_parts.items[0], compare_values)
    if pred_parts.ordered or gold_parts.ordered:
        if r"\{" in (pred[:2], gold[:2]):  # a set has no order, a tuple does
            return Comparison(False, "structure")
        return _all_equal(pred_parts.items, gold_parts.items, compare_values)
    return _equal_in_any_order(pred_parts.items, gold_parts.items, compare_values)


def split_label(text: str) -> tuple[str, str]:
    r"""`x = 3` -> ("x", "3"), `f(x) = y = 3` -> ("f(x)", "3"), `x \in S` -> ("x", "S"); ("", text) for anything else.

    A label names what is asked for: a letter in it, and nothing to work out (no power or coefficient, no sum but of
    letters: `m+n = 42`). The equations `2x = 6` and `x^2 = 9` have none. `3 = x` is read as `x = 3`.
    """
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
    return bool(re.search(r"[^\W\d_]", text)) and not re.search(r"^\s*\d|[-+^<>]|\\cdot|\\sqrt", text)


def split_parts(text: str) -> Parts | None:
    """The parts an answer is made of, plus-minus written out; None for a single value."""
    if matrix := re.fullmatch(
        r"(?:\[|\()?\s*\\begin\{[pb]?(?:matrix|array)\}(?:\{[clr|]*\})?(.*)\\end\{\w+\}\s*[\])]?", text
    ):
        # Some data sets lost one of the two backslashes between rows.
        rows = [row.split("&") for row in re.split(r"\\\\|\\(?=-?\d)", matrix[1].strip().removesuffix(r"\\"))]
        shape = "x".join(str(len(row)) for row in rows)
        return Parts(f"matrix {shape}", [cell.strip() for row in rows for cell in row])
    union = split_top_level(text, r"\cup")
    if len(union) > 1:
        return Parts("union", union)
    if text.startswith(r"\{") and text.endswith(r"\}") and closing_index(text[1:]) == len(text) - 2:
        inside = text[2:-2]
        return None if re.search(r"\||:|\\colon", inside) else Parts("values", _write_out(split_top_level(inside)))
    if text[:1] in ("{", "(", "[") and closing_index(text) == len(text) - 1:
        inside = split_top_level(text[1:-1])
        if len(inside) > 1:
            return Parts("values", _write_out(inside)) if text[0] == "{" else Parts(text[0] + text[-1], inside)
        return None
    values = _write_out(split_top_level(text))
    return Parts("values", values) if len(values) > 1 else None


def _as_union(text: str) -> str | None:
    r"""`x < -1, x \ge 3` (by now without its "or") -> `(-\infty,-1)\cup[3,\infty)`; None for anything else."""
    intervals, variables = [], set()
    for part in split_top_level(text):
        sides = [side.strip() for side in RELATION.split(part)]
        signs = RELATION.findall(part)
        if r"\ne" in signs or len({sign in ("<", r"\le") for sign in signs}) != 1:  # 1 < x > 3
            return None
        if signs[0] not in ("<", r"\le"):
            sides, signs = sides[::-1], [{">": "<", r"\ge": r"\le"}[sign] for sign in signs[::-1]]
        if len(sides) == 2:
            first = bool(re.fullmatch("[a-zA-Z]", sides[0]))
            sides, signs = ([r"-\infty", *sides], ["<", *signs]) if first else ([*sides, r"\infty"], [*signs, "<"])
        if len(sides) != 3 or not re.fullmatch("[a-zA-Z]", sides[1]):
            return None
        variables.add(sides[1])
        intervals.append(f"{'(' if signs[0] == '<' else '['}{sides[0]},{sides[2]}{')' if signs[1] == '<' else ']'}")
    return r"\cup ".join(intervals) if len(intervals) > 1 and len(variables) == 1 else None


def _write_out(values: list[str]) -> list[str]:
    r"""`1 \pm x` as the two values 1+x and 1-x."""
    written = []
    for value in values:
        if not re.search(r"\\(?:pm|mp)(?![a-zA-Z])", value):
            written.append(value)
            continue
        for plus, minus in (("+", "-"), ("-", "+")):
            one = re.sub(r"\\pm(?![a-zA-Z])\s*", plus, re.sub(r"\\mp(?![a-zA-Z])\s*", minus, value))
            written.append(re.sub(r"(^|=\s*)\+", r"\1", one))
    return written


def _mixes_notations(pred: str, gold: str) -> bool:
    """An interval may be written as an inequality, or a union as a difference of sets: not comparable part by part."""
    return any(
        bool(pattern.search(pred)) != bool(pattern.search(gold))
        for pattern in (RELATION, re.compile(r"\\(?:setminus|backslash|cap)(?![a-zA-Z])|\\mathbb"))
    )


def _all_equal(preds: list[str], golds: list[str], compare_values: CompareValues) -> Comparison:
    undecided = None
    for pred, gold in zip(preds, golds, strict=True):
        comparison = compare_answers(unwrap_group(pred), unwrap_group(gold), compare_values)
        if comparison.equal is False:
            return comparison
        if comparison.equal is None:
            undecided = comparison
    return undecided or Comparison(True, "structure")


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
            comparison = compare_answers(pred, gold, compare_values)
            if comparison.equal:
                preds.remove(pred)
                break
            if comparison.equal is None:
                undecided = comparison
        else:
            return undecided or Comparison(False, "structure")
    return Comparison(True, "structure")
