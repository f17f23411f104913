"""Which answers of a majority vote are the same: 0.5, \\frac12 and 1/2 are. No computer algebra is used."""

import re
from functools import lru_cache
from typing import Any

from verl_ext.reward.maths.choices import read_choice
from verl_ext.reward.maths.normalisation import key, normalise
from verl_ext.reward.maths.rationals import quantity_or_none
from verl_ext.reward.maths.structure import MAX_PARTS, split_parts
from verl_ext.reward.score import MAX_ANSWER_CHARS

RIGHT = "right"
_DEPTH = 4  # of sets in sets
_OPTION = re.compile(r"\([A-J]\) [^\\]*[a-zA-Z]{3}")  # (C) Increasing, but neither the product (a) b nor A. Smith
_WORDS = re.compile(r"(?:(?:[Yy]es|[Nn]o|[A-Za-z][a-z]{3,})\b[ ,.'-]*)+")  # not Mgh and ABC, which may be products
_POWER_BITS = 2**14  # of a number that is read for a vote; a larger one votes by its text


def vote(pred: str, normalised: str = "", acc: float | None = None) -> Any:
    """Return what an answer votes for: equal values for equal answers, None for no answer.

    Answers that a rule with a normal spelling found right are equal, because each equals the ground truth. Others are
    equal by their normal spelling, and rational numbers by their value, also within sets, lists and tuples. The case of
    words does not count, nor does the text after the letter of a choice.

    Args:
        pred, normalised, acc: as in `score.Score`.
    """
    pred = pred.strip()
    if not pred:
        return None
    return RIGHT if normalised and acc == 1 else _value(normalised or pred)


@lru_cache(maxsize=2**14)
def _value(answer: str) -> Any:
    text = normalise(answer) if len(answer) <= MAX_ANSWER_CHARS else ""
    return _of_parts(text, _DEPTH) if text else answer


def _of_parts(text: str, depth: int) -> Any:
    """Return a number as itself; several values as their values, in order if they have one; anything else as text."""
    if number := quantity_or_none(text, _POWER_BITS):
        return number.value, number.percent, number.unit
    parts = split_parts(text) if depth else None
    if parts is None or len(parts.items) > MAX_PARTS:
        return _spelling(text)
    values = [_of_parts(item, depth - 1) for item in parts.items]
    return parts.kind, tuple(values if parts.ordered else sorted(values, key=repr))


def _spelling(text: str) -> str:
    plain = re.sub(r"\\text\s*\{([^{}]*)\}", r"\1", text).strip()
    if _OPTION.match(plain) and (choice := read_choice(plain)):
        return choice[0]
    is_words = _WORDS.fullmatch(plain.lower() if text.startswith(r"\text") else plain)
    return key(text).lower() if is_words else key(text)
