"""Refuse answers that are not worth, or not safe, handing to a computer algebra system.

A refusal depends on the answer, not on the machine: it is the same everywhere and makes the answer wrong. An answer
that passes still runs under the limits of symbolic.py.
"""

import re
from itertools import accumulate

MAX_CHARS = 600
MAX_DEPTH = 10
MAX_CELLS = 40
MAX_BARS = 8

_REFUSALS = [
    (reason, re.compile(pattern))
    for reason, pattern in [
        ("code", r"__|[\"`]|\('|[a-zA-Z)]\.[a-zA-Z]|(?<!\\)\b(?:import|lambda|eval|exec|open|print|return|sympify)\b"),
        ("tower", r"\d\s*\}*\s*\^\s*\{?\s*\d[\d!\s]*\}?\s*\^|\^\s*\{[^{}]*\^\s*\{[^{}]*\^"),
        ("large exponent", r"\^\s*\{?\s*-?\d{5,}"),
        ("large factorial", r"(?:\d{5,}|[)}!])\s*!"),
        ("large binomial", r"\\binom\s*\{[^{}]*(?:\d{5,}|\d\s*\^)"),
        ("long number", r"\d{60,}"),
    ]
]
# Operations that a question asks to work out. Allowed if the gold has them too.
_OPERATIONS = re.compile(r"\\(sum|prod|int|iint|oint|lim|bmod|pmod|mod|gcd|lcm|max|min|det|diff|partial)(?![a-zA-Z])")
# Text that the parser would overlook or misread, and so take 42... for 42. Allowed if the gold has it as often.
_OVERLOOKED = [
    ("derivative", re.compile("'")),
    ("differential", re.compile(r"(?<![a-zA-Z\\])d[a-z](?![a-zA-Z])")),
    ("dots", re.compile(r"\\[cl]?dots|\.\.")),
    ("ratio", re.compile(":")),
    ("base", re.compile(r"[\d})]\s*_")),
]
# A number after a factor: `\sqrt{2}\; 1` is two numbers, which the parser would multiply.
_SECOND_NUMBER = re.compile(
    r"(?:(?<![\\a-zA-Z])[a-zA-Z]|\\(?:alpha|beta|gamma|delta|theta|lambda|mu|pi|rho|sigma|tau|phi|omega|infty)(?![a-zA-Z])"
    r"|[)\]}!%])\s*\d|\d\s+\d"
)
# After these a number is an argument: \log_{2} 6, \sin^{2} 3.
_FUNCTION = re.compile(r"\\[a-zA-Z]+\s*(?:[_^]\s*(?:\{[^{}]*\}|\w)\s*)++(?=\d)|\\sqrt\s*\[[^\[\]]*\]\s*(?=\d)")


def refusal(pred: str, gold: str) -> str | None:
    """Return why a normalised `pred` must not be compared symbolically with `gold`; None if it may be.

    Each rule reads the text once and ignores its meaning: a few microseconds on an ordinary answer.
    """
    if len(pred) > max(MAX_CHARS, 2 * len(gold)):
        return "length"
    if _depth(pred) > max(MAX_DEPTH, 2 * _depth(gold)):
        return "nesting"  # which costs the parser exponential time
    if pred.count("|") > max(MAX_BARS, 2 * gold.count("|")):
        return "bars"
    if pred.count("&") > max(MAX_CELLS, 2 * gold.count("&")):
        return "cells"
    for reason, pattern in _REFUSALS:
        if pattern.search(pred):
            return reason
    if pred.count("=") > max(1, gold.count("=")):
        return "chain"  # x = 7 x = 42
    for reason, pattern in _OVERLOOKED:
        if len(pattern.findall(pred)) != len(pattern.findall(gold)):
            return reason
    second = [len(_SECOND_NUMBER.findall(_FUNCTION.sub("", side))) for side in (pred, gold)]
    if second[0] > second[1]:
        return "two numbers"
    unasked = set(_OPERATIONS.findall(pred)) - set(_OPERATIONS.findall(gold))
    return f"unevaluated {min(unasked)}" if unasked else None


def _depth(text: str) -> int:
    return max(accumulate(((char in "([{") - (char in ")]}") for char in text), initial=0))
