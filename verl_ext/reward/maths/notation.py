r"""Write arguments, powers and names as LaTeX does: `2^(n-1)`, `sqrt(2+sqrt(3))`, `abs(x-3)`, `alpha`, `\frac12`.

A small grammar: tokens, which brackets group, and a rule for each token that takes an argument. An argument is a group,
or without brackets what TeX takes as one: a digit, a letter, a command with its own arguments. After plain names and in
exponents it is a whole number, as people write it there.
In and out: text without `\left`, fonts and spacing commands (normalisation.py). Nothing is judged.
"""

import re
from collections.abc import Callable

from verl_ext.reward.maths.units import is_unit

MAX_DEPTH = 40  # brackets within brackets; what is deeper stays as it is
_TOKEN = re.compile(r"\\[a-zA-Z]+|\\.|[a-zA-Z]+|\d+(?:\.\d+)?|\s+|.", re.DOTALL)
_NEEDED = re.compile(r"[_^\\]|[a-zA-Z]{2}|[ur]\d")
_CLOSING = {"(": ")", "[": "]", "{": "}"}
_GREEK = (
    "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi pi rho sigma tau upsilon phi chi psi "
    "omega"
).split()
_SYMBOLS = {name: rf"\{name} " for name in [*_GREEK, "infty", "cup", "cap", "emptyset", "Delta", "Gamma", "Omega"]}
_SYMBOLS |= dict.fromkeys(("infinity", "Infinity", "INFINITY", "inf", "Inf", "oo"), r"\infty ")
_SYMBOLS |= {
    "union": r"\cup ",
    "intersection": r"\cap ",
    "intersect": r"\cap ",
    "Pi": r"\pi ",
    "varnothing": r"\emptyset ",
}
_FUNCTIONS = {name: rf"\{name}" for name in "sin cos tan cot sec csc arcsin arccos arctan ln log exp".split()}
_FUNCTIONS |= {name: rf"\{name}" for name in "sinh cosh tanh gcd lcm max min".split()}
_FUNCTIONS |= {"asin": r"\arcsin", "acos": r"\arccos", "atan": r"\arctan", "frac": r"\frac", "sqrt": r"\sqrt"}
_CALLS: dict[str, Callable[[str], str]] = {  # plain names that need the bracket after them
    "sqrt": r"\sqrt{{{}}}".format,
    "cbrt": r"\sqrt[3]{{{}}}".format,
    "cuberoot": r"\sqrt[3]{{{}}}".format,
    "abs": "|{}|".format,
    "Abs": "|{}|".format,
    "floor": r"\lfloor {}\rfloor ".format,
    "ceil": r"\lceil {}\rceil ".format,
    "ceiling": r"\lceil {}\rceil ".format,
    "factorial": lambda inside: f"{inside}!" if inside.strip().isalnum() else f"({inside})!",
}
_PAIRS = {"binom", "choose", "binomial", "nCr"}  # of two arguments
_NAME = "|".join(sorted({*_SYMBOLS, *_FUNCTIONS, *_CALLS, *_PAIRS} - {"oo", "frac"}, key=len, reverse=True))
_NAME_IN_TEXT = re.compile(rf"\\text\s*\{{\s*({_NAME})\s*\}}")
_VERBATIM = re.compile(r"\\(?:text|begin|end)\s*\{[^{}]*\}|\\[a-zA-Z]+")
_ARGUMENTS = {rf"\{prefix}{name}": 2 for name in ("frac", "binom") for prefix in "dtc"}
_ARGUMENTS |= {r"\frac": 2, r"\binom": 2, r"\sqrt": 1}


def write_latex(text: str) -> str:
    """Write `text` with braces around arguments of powers, roots, fractions and binomials, and names as commands."""
    if not _NEEDED.search(text):
        return text
    text = _NAME_IN_TEXT.sub(r" \1 ", text)
    return _Writer(text).write()


def _has_prose(text: str) -> bool:
    """Return whether a text has words that are not notation: `beta` is then a word as well."""
    words = re.findall("[a-zA-Z]{3,}", _VERBATIM.sub(" ", text))
    known = {*_SYMBOLS, *_FUNCTIONS, *_CALLS, *_PAIRS, "and"}
    return any(word not in known and not is_unit(word) and not word.isupper() for word in words)


class _Writer:
    def __init__(self, text: str):
        self._tokens: list[str] = _TOKEN.findall(text)
        self._symbols = {} if any(token in _SYMBOLS for token in self._tokens) and _has_prose(text) else _SYMBOLS
        self._end_of: dict[int, int] = {}  # index of an opening bracket -> of its closing one
        opened: list[int] = []
        for index, token in enumerate(self._tokens):
            if token in _CLOSING:
                opened.append(index)
            elif token in ")]}" and opened:
                self._end_of[opened.pop()] = index

    def write(self) -> str:
        return self._write(0, len(self._tokens), 0)

    def _write(self, start: int, end: int, depth: int) -> str:
        if depth > MAX_DEPTH:
            return "".join(self._tokens[start:end])
        written = []
        while start < end:
            latex, start = self._write_one(start, end, depth)
            written.append(latex)
        return "".join(written)

    def _write_one(self, at: int, end: int, depth: int) -> tuple[str, int]:
        """Return one token with its arguments, and where the next one begins."""
        token = self._tokens[at]
        if token in ("^", "_"):
            return self._script(at, end, depth)
        if token in _ARGUMENTS:
            return self._command(at, end, depth)
        if token == r"\text" and (close := self._group(at + 1, "{")):
            return "".join(self._tokens[at : close + 1]), close + 1
        if token in _CLOSING and at in self._end_of:
            close = self._end_of[at]
            if token == "{" and close == at + 2 and at and self._tokens[at + 1].isdigit() and self._ends_factor(at - 1):
                return " " + self._tokens[at + 1], close + 1  # braces that TeX does not show
            return f"{token}{self._write(at + 1, close, depth + 1)}{self._tokens[close]}", close + 1
        if token[0].isalpha() and token.isascii():
            return self._word(at, end, depth)
        return token, at + 1

    def _script(self, at: int, end: int, depth: int) -> tuple[str, int]:
        """Write `^(n-1)`, `^-2`, `^sqrt(2)`, `_(2)` with braces; plain TeX stays."""
        sign, after = self._tokens[at], self._skip_spaces(at + 1)
        first = self._tokens[after] if after < end else ""
        close = self._group(after, "(") or (self._group(after, "[") if sign == "^" else None)
        if close:
            return f"{sign}{{{self._write(after + 1, close, depth + 1)}}}", close + 1
        if sign == "^" and first in ("-", "+"):
            bracketed = self._group(self._skip_spaces(after + 1), "(")
            argument, following = self._argument(after + 1, end, depth, whole=True)
            if argument is not None:
                return f"^{{{first}({argument})}}" if bracketed else f"^{{{first}{argument}}}", following
        if first in _ARGUMENTS or first in self._symbols or first in _CALLS:
            latex, following = self._write_one(after, end, depth + 1)
            return f"{sign}{{{latex.strip()}}}", following
        return sign, at + 1

    def _command(self, at: int, end: int, depth: int) -> tuple[str, int]:
        """Write `\\frac12`, `\\sqrt[3]2`, `\\sqrt(2)` with braces, up to the first missing argument."""
        command, start = self._tokens[at], at + 1
        if command == r"\sqrt" and (close := self._group(self._skip_spaces(start), "[")):
            command += "".join(self._tokens[self._skip_spaces(start) : close + 1])
            start = close + 1
        for _ in range(_ARGUMENTS[self._tokens[at]]):
            argument, following = self._argument(start, end, depth)
            if argument is None:
                break
            command, start = f"{command}{{{argument}}}", following
        if self._tokens[at] == r"\sqrt" and start < end and start == self._skip_spaces(at + 1):
            command += r"\cdot " * self._tokens[start].isdigit()  # what TeX leaves of \sqrt13 is a factor
        return command, start

    def _argument(self, at: int, end: int, depth: int, *, whole: bool = False) -> tuple[str | None, int]:
        """Return the argument that begins at a token, without its brackets; None if there is none."""
        at = self._skip_spaces(at)
        if at >= end or depth > MAX_DEPTH:
            return None, at
        token = self._tokens[at]
        if close := self._group(at, "{") or self._group(at, "("):
            return self._write(at + 1, close, depth + 1).strip(), close + 1
        if token in _ARGUMENTS:
            return self._command(at, end, depth + 1)
        if token in self._symbols or (token[1:] in _GREEK and token[0] == "\\"):
            return self._symbols.get(token, token).strip(), at + 1
        if not token[0].isalnum() or not token.isascii():
            return None, at
        if (whole and token[0].isdigit()) or len(token) == 1:
            return token, at + 1
        self._tokens[at] = token[1:]  # TeX takes one digit or letter
        return token[0], at

    def _word(self, at: int, end: int, depth: int) -> tuple[str, int]:
        word, after = self._tokens[at], self._skip_spaces(at + 1)
        before = ""
        if word.endswith("sqrt") and len(word) == 5:  # isqrt(3)
            before, word = word[0], "sqrt"
        if close := self._group(after, "("):
            inside = self._write(after + 1, close, depth + 1) if word in _CALLS or word in _PAIRS else ""
            if word in _CALLS:
                return before + _CALLS[word](inside), close + 1
            if word in _PAIRS and inside.count(",") == 1:
                top, bottom = inside.split(",")
                return rf"\binom{{{top.strip()}}}{{{bottom.strip()}}}", close + 1
        if word == "sqrt" and after < end and self._tokens[after][0].isalnum() and self._group(after, "{") is None:
            argument, following = self._argument(after, end, depth, whole=True)
            if argument is not None and (self._tokens[after] in self._symbols or following == after + 1):
                return rf"{before}\sqrt{{{argument}}}", following
        if word[:4] == "sqrt" and len(word) == 5:
            return rf"\sqrt{{{word[4]}}}", at + 1
        return before + (_FUNCTIONS.get(word) or self._symbols.get(word, word)), at + 1

    def _group(self, at: int, opening: str) -> int | None:
        """Return where the group that opens at a token ends, if it closes with the same kind of bracket."""
        if at >= len(self._tokens) or self._tokens[at] != opening:
            return None
        close = self._end_of.get(at)
        return close if close is not None and self._tokens[close] == _CLOSING[opening] else None

    def _ends_factor(self, at: int) -> bool:
        at -= self._tokens[at].isspace()
        return self._tokens[at] in (")", "]", "}") or self._tokens[at].isalnum()

    def _skip_spaces(self, at: int) -> int:
        return at + 1 if at < len(self._tokens) and self._tokens[at].isspace() else at
