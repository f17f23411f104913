"""Texts of problems: keys that show that two spellings are the same problem."""

import re
import unicodedata
from collections.abc import Iterable
from functools import lru_cache

from verl_ext.protocols.instructions import PROMPTS, bare_problem

__all__ = ["PROMPTS", "EvaluationProblems", "bare_problem", "has_no_words", "same_problem_key", "template_key"]

_LAYOUT = r"\\(?:left|right|displaystyle|quad|qquad|[,;:! ])(?![a-zA-Z])|[\s$~]|\\[()\[\]]"  # shows nothing
_SPACING = re.compile(_LAYOUT)
_PUNCTUATION = re.compile(r"[\"'’“”?;。、]|(?<!\d)[.,:]|[.,:](?!\d)")  # not the point of 1.5
_PRIMES = re.compile(r"(?<![a-zA-Z'’])(?:[a-zA-Z]['’]+)+(?![a-z])")  # f'(2), A'B'; not Ann's, the n's, 'A'
_FRACTIONS = re.compile(r"\\[dt]frac(?![a-zA-Z])")
_BARE_ARGUMENTS = re.compile(r"\\(frac|binom)\s*+(\d)\s*+(\d)|\\(sqrt)\s*+(\d)(?=\d)")  # \frac12, \sqrt23: of one digit
_SINGLE = re.compile(
    r"(?<!\\)\{[\s\x01]*+([+-]?(?:\d++(?:\.\d++)?|[^\W\d]|\\[a-zA-Z]++)|[.,])[\s\x01]*+\}"
)  # braces that group nothing
_EDGE = "\x01"  # where such a brace was
_THOUSANDS = re.compile(r"(?<=\d)\\,(?=\d{3}(?!\d))")
_BETWEEN_DIGITS = re.compile(rf"(?<=\d)(?:{_LAYOUT}|[{_EDGE}\"'’“”?;。、.,:!])++(?=\d)")
_APART = "\x02"  # between digits that make two numbers
_COMMANDS = re.compile(r"\\(?:[a-zA-Z]+|.)", re.DOTALL)
_NO_WORD = re.compile(r"[\W_]+")

# Signs with the same meaning share one letter. A hyphen within words is not a sign.
_SIGNS = {"le": "≤", "leq": "≤", "leqslant": "≤", "ge": "≥", "geq": "≥", "geqslant": "≥", "ne": "≠", "neq": "≠"}
_SIGNS |= {"lt": "<", "gt": ">", "pm": "±", "times": "×", "cdot": "×", "div": "/", "equiv": "≡", "mid": "|"}
_SIGN_COMMANDS = re.compile(rf"\\({'|'.join(_SIGNS)})(?![a-zA-Z])")
_SAME_SIGNS = str.maketrans({"−": "-", "–": "-", "*": "×", "·": "×", "⋅": "×", "÷": "/"})
_SIGN_LETTERS = "≤≥≠<>±×/≡|+=^-"
_HYPHENS = re.compile(  # well-known, x-axis, and of a list; not x-y, nor x-yz
    r"(?<=[^\W\d]{2})-(?=[^\W\d]{2})|(?<=[^\W\d]{3})-(?=[^\W\d])|(?<=[^\W\d])-(?=[^\W\d]{3})|^[ \t]*-(?=\s)",
    re.MULTILINE,
)
_COMMA_OF_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_NO_SIGN = re.compile(rf"(?:(?!(?<=\d)\.(?=\d))[^\w{_SIGN_LETTERS}]|_)+")
_AROUND_SIGNS = re.compile(rf" ?([{_SIGN_LETTERS}]) ?")

SHINGLE_CHARS = 30  # letters and digits; about seven words
MIN_SHORT = 3  # characters of a shorter problem that is searched for within a text; it also has a number or a sign
_CALCULATES = re.compile(rf"[\d{_SIGN_LETTERS}]")
MIN_SHARE = 0.5  # of an evaluation problem's shingles that a leaked spelling has, see find_overlap


@lru_cache(maxsize=2**15)  # DAPO-Math-17k has each of its problems 100 times
def same_problem_key(problem: str) -> str:
    r"""Return a key that is equal for texts that differ only in spaces, case, punctuation, `$` and needless braces.

    It is not equal if they differ in an operator, in the prime of a name, in what is grouped (`2^{3}4` and `2^{34}`,
    `\frac{x}{2}+1` and `\frac{x}{2+1}`), or in where a number ends (`1 23` and `12 3`).
    """
    text = _FRACTIONS.sub(r"\\frac", unicodedata.normalize("NFKC", problem))
    text = _PRIMES.sub(lambda found: re.sub("['’]", "′", found[0]), text)
    text = _without_needless_braces(text)
    text = _BETWEEN_DIGITS.sub(_gap, _THOUSANDS.sub("", text)).replace(_EDGE, "")
    return _PUNCTUATION.sub("", _SPACING.sub("", text)).casefold()


def template_key(problem: str) -> str:
    """Return a key that is equal for problems of one template, without numbers and capitalised words (maybe names)."""
    text = re.sub(r"\b[A-Z]\w*", " ", re.sub(r"\d[\d,.]*", " ", problem))
    return _NO_WORD.sub(" ", text).casefold()


def has_no_words(problem: str) -> bool:
    r"""Return whether nothing is asked: the text is empty, or only a number such as `$\frac{2020}{6063}$`."""
    rest = re.sub(r"[\s${}()\[\].,/-]", "", _COMMANDS.sub("", problem))
    return rest == "" or rest.isdecimal()


class EvaluationProblems:
    """Finds other spellings of evaluation problems, by shared runs of 30 letters, digits and signs (shingles).

    A shorter problem is searched for as a whole. Of LaTeX's commands, those for signs count, as `+` and `-` do;
    drawings, spaces and punctuation do not. Two public data sets have the 60 problems of AIME 2024 and 2025: 48 are
    equal without these, and shared runs find 58 (tests/unit/datasets).

    Args:
        problems: (name, text) of each, without instructions around it.
    """

    def __init__(self, problems: Iterable[tuple[str, str]]):
        self._problems: list[tuple[str, set[str]]] = []
        self._holders: dict[str, list[int]] = {}  # shingle -> problems that have it
        self._short: dict[str, str] = {}  # words of a problem -> its name
        for name, text in problems:
            words = _words(text)
            shingles = _shingles(_letters(words))
            if len(words) >= MIN_SHORT and len(_letters(words)) < SHINGLE_CHARS and _CALCULATES.search(words):
                self._short.setdefault(words, name)
            for shingle in shingles:
                self._holders.setdefault(shingle, []).append(len(self._problems))
            self._problems.append((name, shingles))

    def __len__(self) -> int:
        return len(self._problems)

    def find_overlap(self, problem: str) -> tuple[str, float] | None:
        """Return the name of the evaluation problem with the largest share in `problem`, and its share, if >= half."""
        words = _words(problem)
        letters = _letters(words)
        starts = range(0, max(1, len(letters) - SHINGLE_CHARS + 1), SHINGLE_CHARS // 2)  # a leak is longer than a step
        if any(letters[start : start + SHINGLE_CHARS] in self._holders for start in starts):
            own, counts = _shingles(letters), {}
            for shingle in own:
                for index in self._holders.get(shingle, ()):
                    counts[index] = counts.get(index, 0) + 1
            share, index = max((count / len(self._problems[index][1]), index) for index, count in counts.items())
            if share >= MIN_SHARE:
                return self._problems[index][0], share
        return next(((name, 1.0) for short, name in self._short.items() if _has_whole(words, short)), None)


def _without_needless_braces(text: str) -> str:
    r"""Mark the braces around a single number, letter or command, which TeX does not show, as edges."""
    text = _BARE_ARGUMENTS.sub(_with_braces, text)
    for _ in range(3):  # braces within braces
        text, count = _SINGLE.subn(rf"{_EDGE}\1{_EDGE}", text)
        if not count:
            break
    return text


def _with_braces(found: re.Match[str]) -> str:
    return f"\\{found[1]}{{{found[2]}}}{{{found[3]}}}" if found[1] else f"\\{found[4]}{{{found[5]}}}"


def _gap(found: re.Match[str]) -> str:
    """Return what keeps two digits apart: the sign of a number or a list, or a mark that there is something."""
    signs = found[0].strip(f"{_EDGE}$")
    return "." if signs == "." else next((sign for sign in ",:" if sign in _COMMANDS.sub("", signs)), _APART)


def _words(problem: str) -> str:
    r"""Return words, numbers and signs of a problem, words separated by blanks: `what is 2+3`, `1/2` for `\frac12`."""
    text = _without_drawings(unicodedata.normalize("NFKC", problem)).translate(_SAME_SIGNS).replace("$", "")
    text = _BARE_ARGUMENTS.sub(_with_braces, _FRACTIONS.sub(r"\\frac", text)).replace("}{", "/")
    text = _COMMANDS.sub("", _SIGN_COMMANDS.sub(lambda found: _SIGNS[found[1]], text))
    text = _NO_SIGN.sub(" ", _HYPHENS.sub(" ", _COMMA_OF_THOUSANDS.sub("", text)))
    return _AROUND_SIGNS.sub(r"\1", text).strip().casefold()


def _letters(words: str) -> str:
    """Return `_words` without blanks, except for a mark between two numbers."""
    return re.sub(r"(?<=\d) (?=\d)", _APART, words).replace(" ", "")


def _has_whole(words: str, short: str) -> bool:
    """Return whether `words` have `short`, and no word, number or expression continues beyond its ends."""
    at = words.find(short)
    while at >= 0:
        before, behind = words[:at][-2:], words[at + len(short) :][:2]
        if not (_goes_on(before[::-1], short[0]) or _goes_on(behind, short[-1])):
            return True
        at = words.find(short, at + 1)
    return False


def _goes_on(beyond: str, end: str) -> bool:
    """Return whether the text beyond an end, nearest first, belongs to the word, number or expression at that end."""
    if beyond[:1] == " ":
        return end.isdecimal() and beyond[1:].isdecimal()
    return beyond != "" and (beyond[0] in _SIGN_LETTERS + "." or (beyond[0] + end).isascii())


def _without_drawings(text: str) -> str:
    """Return the text without what stands between [asy] and [/asy]."""
    kept, position = [], 0
    while (start := text.find("[asy]", position)) >= 0 and (stop := text.find("[/asy]", start)) >= 0:
        kept.append(text[position:start])
        position = stop + len("[/asy]")
    return "".join([*kept, text[position:]])


def shingles_of(text: str, length: int = SHINGLE_CHARS) -> set[str]:
    """Return the runs of so many letters, digits and signs of a text; a shorter text is one run, an empty one none."""
    letters = _letters(_words(text))
    return _shingles(letters, length) if letters else set()


def _shingles(letters: str, length: int = SHINGLE_CHARS) -> set[str]:
    return {letters[i : i + length] for i in range(max(1, len(letters) - length + 1))}
