"""Is the answer of a response equal to the ground truth? `score_answer` is the one place where that is decided.

Cheap and exact rules come first (strings, rational numbers, structure); only what they leave open is compared by
computer algebra, in a process that can be killed. This module knows nothing of rewards and verl: see manager.py.
"""

import re
from collections.abc import Set
from functools import lru_cache

from verl_ext.episode import Score
from verl_ext.outcome import UNVERIFIED_VERDICT
from verl_ext.reward.guards import refusal
from verl_ext.reward.maths import symbolic
from verl_ext.reward.maths.choices import read_choice
from verl_ext.reward.maths.extraction import PLACEHOLDER, extract_answer
from verl_ext.reward.maths.labels import split_label
from verl_ext.reward.maths.normalisation import BASES, normalise
from verl_ext.reward.maths.rationals import NotANumber, quantity_or_none, read_quantity
from verl_ext.reward.maths.structure import Comparison, compare_answers
from verl_ext.reward.maths.units import nouns_of, same_unit, split_unit

MAX_ANSWER_CHARS = 2000
# Comparisons by computer algebra for one answer; an answer that needs more is wrong. Only lists need more than one: at
# most 64 ordered values (structure.MAX_PARTS), or each of 8 with each other (structure.MAX_UNMATCHED).
MAX_SYMBOLIC = 64

_BASED = re.compile(
    r"(-?)\s*([0-9A-F]+(?:\.[0-9A-F]+)?)\s*(?:_\s*(?:base[\s-]*)?|(?:in )?base[\s-]*)(\d+|[a-z]+)", re.IGNORECASE
)
MAX_CANONICAL_BITS = 4000  # of a number that is written out for logs
_CLOCK = re.compile(r"(\d+(?:\s*:\s*\d+)+)\s*([ap]\.?m\.?)?", re.IGNORECASE)
_RATIO = re.compile(r"(\d+)\s*(?:/|\\text\s*\{\s*to\s*\}|to)\s*(\d+)|\\frac\{(\d+)\}\{(\d+)\}")
_CONSTANT = re.compile(r"\+\s*[cCkK]$")  # of an integral
# Units that differ, though normalise() drops some of them: dollars are not cents, degrees are not radians.
_CLASHES = [
    (re.compile(r"\\\$|[€£¥₹]|\bdollars?\b"), re.compile(r"¢|\bcents?\b")),
    (re.compile(r"°|\\circ|\bdegrees?\b"), re.compile(r"\brad(?:ians?)?\b")),
]
_NOT_NORMALISED = ("guard: length", "unit")  # rules that read an answer as it is written
_MATHS_WORDS = {"sin", "cos", "tan", "cot", "sec", "csc", "log", "exp"}


def score_answer(
    response_text: str, ground_truth: str, *, problem: str = "", unfinished_thinking: bool = False
) -> Score:
    """Score one response: deterministic, safe in any thread, and fast if no computer algebra is needed.

    Args:
        response_text: the model's text, best without tool output; code and tool blocks of both protocols are dropped
            here too.
        ground_truth: the reference answer, plain or LaTeX, without a sentence around it.
        problem: what was asked. The answer may count its nouns: `18 apples` is 18 if the problem, or the ground truth,
            speaks of apples.
        unfinished_thinking: a box after a `<think>` that is never closed counts as well.
    Raises:
        ValueError: the ground truth is empty.
        RuntimeError: computer algebra is needed and cannot be started.
    """
    if not ground_truth.strip():
        raise ValueError("The ground truth is empty: expected an answer to compare with. Check the data row.")
    pred = extract_answer(response_text, unfinished_thinking=unfinished_thinking)
    if pred is None or (PLACEHOLDER.fullmatch(pred.replace("?", "")) and pred.strip() != ground_truth.strip()):
        return Score(0.0, "", "no_answer", "no_box" if pred is None else "empty")
    pred = pred.strip()
    comparison = compare(pred, ground_truth.strip(), problem)
    normalised = "" if comparison.method in _NOT_NORMALISED else canonical(pred)
    if comparison.equal is None:
        return Score(None, pred, UNVERIFIED_VERDICT, comparison.method, normalised)
    return Score.graded(float(comparison.equal), pred, comparison.method, normalised)


@lru_cache(maxsize=4096)
def canonical(pred: str) -> str:
    r"""Return one spelling for equal answers as far as that is cheap: 0.5, 1/2 and `x = \frac12` are `\frac{1}{2}`."""
    if re.fullmatch(r"-?\d{1,18}", pred):
        return str(int(pred))
    text = normalise(pred)  # cached by `compare`
    value = split_label(text)[1]
    quantity = quantity_or_none(value, MAX_CANONICAL_BITS)
    if quantity is None or quantity.calculated:
        return value
    top, bottom = quantity.value.numerator, quantity.value.denominator
    if max(top.bit_length(), bottom.bit_length()) > MAX_CANONICAL_BITS:
        return value
    number = str(top) if bottom == 1 else rf"\frac{{{top}}}{{{bottom}}}"
    return number + "%" * quantity.percent


def compare(pred: str, gold: str, problem: str = "") -> Comparison:
    """Compare two answers as written; equality is mathematical and exact (0.33 is not 1/3). See `score_answer`."""
    if re.fullmatch(r"-?\d{1,18}", pred) and re.fullmatch(r"-?\d{1,18}", gold):
        return Comparison(int(pred) == int(gold), "integer")
    if len(pred) > max(MAX_ANSWER_CHARS, 2 * len(gold)):
        return Comparison(False, "guard: length")
    for first, second in _CLASHES:
        if (first.search(pred) and second.search(gold)) or (first.search(gold) and second.search(pred)):
            return Comparison(False, "unit")
    if gold[:1] in "(ABCDEFGHIJ\\OoTt$" and (choice := read_choice(gold)):
        return _compare_choice(pred, *choice, problem)
    pred, gold = normalise(pred), normalise(gold)
    if not pred:
        return Comparison(False, "empty")
    if gold.endswith("C") and _CONSTANT.search(gold):
        pred = _CONSTANT.sub("+C", pred)
    nouns = nouns_of(problem) | nouns_of(gold)
    return _compare_quantities(pred, gold, nouns) or compare_answers(pred, gold, _ValueComparison(nouns))


def _compare_choice(pred: str, letter: str, option: str, problem: str) -> Comparison:
    """Compare by the letter, or without one by the option's text; if both texts are numbers, they must agree too."""
    choice = read_choice(pred) or read_choice(normalise(pred))
    if choice is None:
        if not option or re.search(r"(?<![\\a-zA-Z])[a-zA-Z]{3}", option):  # words are compared as they are
            return Comparison(bool(option) and _fold(pred) == _fold(option), "choice")
        return compare(pred, option, problem)
    numbers = [quantity_or_none(normalise(text)) for text in (choice[1], option)]
    return Comparison(choice[0] == letter and (None in numbers or numbers[0] == numbers[1]), "choice")


class _ValueComparison:
    """Compares the single values, equations or inequalities of one answer, in their normalised spelling.

    After one comparison without an answer no other is begun, so that an answer costs at most one deadline.
    """

    def __init__(self, nouns: Set[str]) -> None:
        self.nouns = nouns
        self.symbolic_left = MAX_SYMBOLIC
        self.rest = Comparison(False, "guard: comparisons")  # the result when no comparison is left

    def __call__(self, pred: str, gold: str) -> Comparison:
        if decided := _compare_quantities(pred, gold, self.nouns) or _compare_notations(pred, gold):
            return decided
        if (words := _compare_words(pred, gold)) and words.equal:
            return words
        (pred_value, pred_unit), (gold_value, gold_unit) = split_unit(pred), split_unit(gold)
        if same_unit(pred_unit, gold_unit):  # otherwise they differ as words do
            pred, gold = pred_value, gold_value
        if decided := _compare_words(pred, gold):
            return decided
        if re.fullmatch(r"[-+]?\s*\\infty", gold):
            return Comparison(False, "infinity")  # another spelling of it: \infty+1 is no number
        if reason := refusal(pred, gold):
            return Comparison(False, f"guard: {reason}")
        if self.symbolic_left == 0:
            return self.rest
        self.symbolic_left -= 1
        try:
            compared = Comparison(symbolic.is_equal(pred, gold), "symbolic")
        except symbolic.TooCostly:
            compared = Comparison(False, "guard: cost")
        if compared.equal is None or compared.method == "guard: cost":
            self.symbolic_left, self.rest = 0, compared
        return compared


def _compare_quantities(pred: str, gold: str, nouns: Set[str]) -> Comparison | None:
    """Decide if the gold is a rational number and the answer is one too, or tries to be."""
    gold_quantity = quantity_or_none(gold, nouns=nouns)
    if gold_quantity is None:
        return None
    try:
        pred_quantity = read_quantity(pred, nouns=nouns)
    except NotANumber:
        return Comparison(False, "malformed number")
    if pred_quantity is None:
        return None
    if pred_quantity.calculated and not gold_quantity.calculated and gold_quantity.value.denominator == 1:
        return Comparison(False, "unevaluated")  # 58*20+87 restates the question whose answer is 1247
    return Comparison(pred_quantity.equals(gold_quantity), "number")


def _compare_notations(pred: str, gold: str) -> Comparison | None:
    """Compare numbers in another base (204_5), clock times and ratios (7:32) by the same digits in the same places.

    The ratio 3:2 may be written as 3/2, and 3/2 as 3:2, but 9:30, which may be a time, not as 9/30. Other rules compare
    two fractions.
    """
    for read in (_read_based, _read_clock):
        one, other = read(pred), read(gold)
        if (one and other) or ((one or other) and read is _read_clock):
            return Comparison((one or _read_ratio(pred)) == (other or _read_ratio(gold)), "notation")
        if number := one or other:  # 29_{10} is 29
            plain = gold if one else pred
            return Comparison(number[1] == "base 10" and number[0][0] == plain, "notation")
    return None


def _read_based(text: str) -> tuple[list[str], str] | None:
    plain = re.sub(r"\\text(?![a-zA-Z])|^\\overline(?=\{\w+\}\s*_)|[(){}\[\]]", "", text)
    if not (match := _BASED.fullmatch(plain.strip())):
        return None
    base = BASES.get(match[3].lower(), match[3])
    if not str(base).isdigit() or not 2 <= int(base) <= 36 or not any(map(str.isdigit, match[2])):
        return None
    if any(int(digit, 36) >= int(base) for digit in match[2] if digit != "."):
        return None
    return [match[1] + (match[2].upper().lstrip("0") or "0")], f"base {base}"


def _read_clock(text: str) -> tuple[list[str], str] | None:
    match = _CLOCK.fullmatch(re.sub(r"\\text\s*\{([^{}]*)\}", r"\1", text).strip())
    if not match:
        return None
    first, *others = re.findall(r"\d+", match[1])
    half = (match[2] or "").replace(".", "").lower()
    hour = int(first) % 12 + 12 * (half == "pm") if half else int(first)
    is_time = half or (int(first) < 24 and all(len(digits) == 2 and digits < "60" for digits in others))
    return [str(hour), *others], "time" if is_time else ""


def _read_ratio(text: str) -> tuple[list[str], str] | None:
    match = _RATIO.fullmatch(text)
    return ([digits for digits in match.groups() if digits], "") if match else None


def _compare_words(pred: str, gold: str) -> Comparison | None:
    """Require the same words as a gold in words; words, or letters for a number, are wrong if the gold has none."""
    if _is_words(gold):
        return Comparison(_fold(pred) == _fold(gold), "words")
    if _is_words(pred) or (quantity_or_none(gold) and not re.search(r"[\d\\]", pred)):
        return Comparison(False, "words")
    return None


def _is_words(text: str) -> bool:
    if re.search(r"\\text\s*\{[^{}]*[^\W\d_]{2}", text):
        return True
    return bool(re.fullmatch(r"[^\W\d_][\w ,.'-]*", text)) and any(
        len(word) > 2 and word.lower() not in _MATHS_WORDS for word in re.findall(r"[^\W\d_]+", text)
    )


def _fold(text: str) -> str:
    text = re.sub(r"\.(?!\d)", "", re.sub(r"\\text(?![a-zA-Z])", " ", text))  # p.m. as pm
    return re.sub(r"[\s,{}]+", " ", text).strip().casefold()
