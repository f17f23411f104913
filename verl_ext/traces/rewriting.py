"""A teacher's rewriting of text reasoning, in which programs stand in place of calculations: is it what was asked for?

ReTool's cold start is made so (arXiv:2504.11536, section 2.2). Nothing that stands in an interpreter block comes from
the teacher: the text is split at its programs here, the sandbox runs them, and what the text says afterwards must agree
with what they printed. The rest of the text must be the text that was there.
"""

import difflib
import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation

from verl_ext.protocols.base import strip_fence
from verl_ext.traces.trace import LeftOut, Reason

MAX_LEAD_WORDS = 25  # that a teacher may add before and after a program, to say what it is for
NEAR_WORDS = 12  # within which of a program a word stands next to it
MAX_CUT_WORDS = 120  # of the calculation that a program replaces
CLAIM_CHARS = 60  # before a number, in which a word such as "is" is looked for: a whole text for each takes minutes
MAX_CUT_SHARE = 0.6  # of the reasoning that all programs together replace
_BLOCK = re.compile(r"<code>(.*?)</code>(?:\s*<interpreter>(.*?)</interpreter>)?", re.DOTALL)
_TAG = re.compile(r"</?(?:code|interpreter)>")
_PROGRAM, _ANSWER = "\x00", "\x01"  # stand for a program, and for a boxed answer, among words
_BOXED = re.compile(r"\\boxed\s*\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\}")
_UNITS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen"
)
_UNITS += " eighteen nineteen"
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety"
_HAN = r"\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"  # scripts without spaces: each sign is a word
_WORD = re.compile(rf"[\x00\x01]|[{_HAN}]|\\?[^\W{_HAN}]+(?:[.,]\d+)*|[^\w\s]")
_NUMBER = re.compile(  # also before a unit, as in 5cm; not the 2 of 2x and 2nd
    r"(?<![A-Za-z\d_.])(?:(?<![)\]}])-)?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:e[+-]?\d+)?"
    r"(?!\d|\.\d|[A-Za-z_](?![A-Za-z])|(?:st|nd|rd|th)\b)",
    re.IGNORECASE,
)
_FRACTION = re.compile(
    r"(?:(?<![\w.])(\d+)\s*)?\\[dt]?frac\{(-?\d+)\}\{(\d+)\}|(?<![\w./])(?:(\d+) )?(-?\d+)\s*/\s*(\d+)(?![\w./])"
)
_SCRIPT = re.compile(r"(\w+) (?:(?:CAPITAL|SMALL) )?(?:LETTER|SYLLABLE|UNIFIED|IDEOGRAPH)")
_OF_FORMULAS = {"LATIN", "GREEK"}
_PERCENT = re.compile(r"\s*(?:\\?%|percent)")
_SPELLED = {word: value for value, word in enumerate(_UNITS.split())} | {
    word: 10 * value for value, word in enumerate(_TENS.split(), 2)
}
_SCALES = {"hundred": 100, "thousand": 1000, "million": 10**6}
_SPELLED_NUMBER = re.compile(
    r"\b(?:{0})(?:(?:\s+and)?[\s-]+(?:{0}))*\b".format("|".join(sorted(_SPELLED | _SCALES, key=len, reverse=True))),
    re.IGNORECASE,
)
_SENTENCE = re.compile(r"(?<=[.!?;])\s+|\n+")
_LIST_MARK = re.compile(r"^\s*(?:\(?\d+[.)]|Step \d+[.:]?)\s", re.MULTILINE)
_CLAIM = re.compile(
    r"(?:=|\\approx|≈|\\boxed\{|\b(?:is|are|equals?|gives?|gets?|obtain|yields?|total(?: of)?)\b)"
    r"[\s$\\(]*(?:about |exactly )?\Z"
)


@dataclass(frozen=True)
class Rewriting:
    """`texts` stand around `programs`, so there is one more. `stated`: the output that the teacher wrote, or None."""

    texts: list[str]
    programs: list[str]
    stated: list[str | None]


def split(text: str) -> Rewriting:
    """Split a rewriting at its programs.

    Raises:
        LeftOut: it has no program, an empty one, or tags that do not belong together.
    """
    texts, programs, stated, position = [], [], [], 0
    for block in _BLOCK.finditer(text):
        texts.append(text[position : block.start()].strip())
        programs.append(strip_fence(block[1]).strip("\n"))
        stated.append(None if block[2] is None or not block[2].strip() else block[2].strip())
        position = block.end()
    texts.append(text[position:].strip())
    if broken := [tag for part in (*texts, *programs) for tag in _TAG.findall(part)]:
        raise LeftOut(Reason.NOT_A_TRACE, f"{broken[0]} has no counterpart")
    if not programs:
        raise LeftOut(Reason.NO_CALL, "the teacher put no program into the text")
    if empty := [program for program in programs if not program.strip()]:
        raise LeftOut(Reason.NOT_A_TRACE, f"a program is empty: {empty[0]!r}")
    return Rewriting(texts, programs, stated)


def check_text(reasoning: str, rewriting: Rewriting, *, max_change: float) -> None:
    """Check that the teacher kept the text outside of programs, and the calculations that they replace.

    Words next to a program may be new (MAX_LEAD_WORDS, in no other script) or gone (MAX_CUT_WORDS, MAX_CUT_SHARE).
    Elsewhere no number may change, and no more than a share `max_change` of the words. What a box holds is the
    verifier's business.

    Raises:
        LeftOut: it did not.
    """
    if new_scripts := _scripts("".join(rewriting.texts)) - _scripts(reasoning):
        raise LeftOut(
            Reason.TEXT_CHANGED, f"it has {', '.join(sorted(new_scripts)).lower()} letters, the reasoning none"
        )
    before, after = _words(reasoning), _words(f" {_PROGRAM} ".join(rewriting.texts))
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    changed = cut = 0
    for kind, i, j, k, m in matcher.get_opcodes():
        if kind == "equal":
            continue
        gone, new = before[i:j], after[k:m]
        is_beside = _PROGRAM in after[max(0, k - NEAR_WORDS) : m + NEAR_WORDS]
        new = [word for word in new if word not in (_PROGRAM, _ANSWER)]
        if is_beside and len(new) <= MAX_LEAD_WORDS and len(gone) <= MAX_CUT_WORDS:
            cut += len(gone)
            continue
        if not is_beside and (numbers := [word for word in new if word[0].isdigit() and word not in gone]):
            there = " ".join(gone) or "nothing"
            raise LeftOut(Reason.NUMBER_CHANGED, f"{numbers[0]!r} stands where the reasoning has {there[:80]!r}")
        changed += max(len(gone), len(new))
    words = max(len(before), 1)
    if changed > max_change * words:
        raise LeftOut(Reason.TEXT_CHANGED, f"{changed / words:.0%} of the words, more than {max_change:.0%}")
    if cut > MAX_CUT_SHARE * words:
        raise LeftOut(Reason.TEXT_CHANGED, f"programs replace {cut / words:.0%} of the words")


def check_outputs_agree(problem: str, reasoning: str, rewriting: Rewriting, outputs: Sequence[str]) -> None:
    """Check that the text after each program agrees with what the program printed.

    The first sentence with a number after a program speaks of its output: a result that it states must be an output
    (rounded, as a percentage or a fraction), stand before, or be the right side of an equation that holds. Later
    numbers may also be those of the reasoning. Numbers below 10 count only after a word such as "is", or "=".

    Raises:
        LeftOut: the teacher wrote another output than the program's, a number contradicts it, or a program computes
            nothing because it states what it prints.
    """
    known, stays = _numbers(problem), _numbers(reasoning)
    printed: list[Decimal] = []
    texts = rewriting.texts
    pairs = zip(rewriting.programs, rewriting.stated, outputs, texts[:-1], texts[1:], strict=True)
    for program, stated, output, before, after in pairs:
        if stated is not None and _plain(stated) != _plain(output):
            raise LeftOut(Reason.FORGED_OUTPUT, f"the teacher wrote {stated[:80]!r}, the program {output[:80]!r}")
        known |= _numbers(before)
        own, of_program = _numbers(output), _numbers(program)
        if own and own <= of_program and any(len(each.normalize().as_tuple().digits) > 2 for each in own - known):
            raise LeftOut(Reason.LITERAL_ONLY, f"the program states what it prints: {output.strip()[:80]!r}")
        printed += own
        _check_claims(after, known | of_program, stays, own, printed, output.strip()[:80])
        known |= of_program | own


def _check_claims(
    text: str, known: set[Decimal], stays: set[Decimal], own: set[Decimal], printed: Sequence[Decimal], output: str
) -> None:
    """Raise LeftOut if a number of the text behind a program with the numbers `own` is explained by nothing."""
    new, is_first, known = own - known, True, known | own
    for sentence in _SENTENCE.split(_LIST_MARK.sub("", _with_digits(text))):
        sentence = _FRACTION.sub(lambda match: _blank_if_explained(match, known, printed), sentence)
        found = [(match, number) for match in _NUMBER.finditer(sentence) if (number := _number(match[0])) is not None]
        claims = [
            number
            for match, number in found
            if _CLAIM.search(sentence, max(0, match.start() - CLAIM_CHARS), match.start())
        ]
        if is_first and own and claims and not any(_is_printed(number, own) for _, number in found):
            raise _contradiction(claims[0], output)
        is_of_output = not is_first or any(_is_printed(number, new) for _, number in found)
        for match, number in found:
            is_percent = _PERCENT.match(sentence, match.end()) is not None
            is_claim = is_first or number in claims or abs(number) >= 10
            is_kept = is_of_output and number in stays
            if is_claim and not (is_kept or _is_explained(number, is_percent, sentence, known, printed)):
                raise _contradiction(number, output)
            known.add(number)
        is_first = is_first and not found


def _contradiction(number: Decimal, output: str) -> LeftOut:
    return LeftOut(Reason.CONTRADICTS_OUTPUT, f"the text says {number} after an output of {output!r}")


def _blank_if_explained(match: re.Match[str], known: set[Decimal], printed: Sequence[Decimal]) -> str:
    """Return blanks for a fraction whose value is known or printed, so that its parts do not count; else the text."""
    value = _fraction(match)
    if value is None or not any(abs(value - each) <= abs(value) / 10**9 for each in (*known, *printed)):
        return match[0]
    return " " * len(match[0])


def _is_printed(number: Decimal, printed: Iterable[Decimal]) -> bool:
    """Return whether a number is one of those that a program printed, perhaps rounded or as a percentage."""
    half = Decimal(10) ** int(number.as_tuple().exponent) / 2
    return any(
        abs(number - each) <= half  # also without its sign, as in "it falls by 3"
        or (each < 0 and abs(number + each) <= half)
        or abs(number / 100 - each) <= half / 100
        for each in printed
    )


def _is_explained(
    number: Decimal, is_percent: bool, sentence: str, known: set[Decimal], printed: Sequence[Decimal]
) -> bool:
    if number in known or (number > 0 and -number in known) or _is_printed(number, printed):
        return True
    return (is_percent and number / 100 in known) or number in _right_equations(sentence)


def _right_equations(sentence: str) -> set[Decimal]:
    """Return the right sides of the plain equations of a sentence that hold, such as 3 * 4 = 12."""
    plain = re.sub(r"\\times|\\cdot|×|·", "*", sentence.replace("−", "-").replace("÷", "/").replace(",", ""))
    plain = re.sub(r"[$\\]|\{|\}", " ", re.sub(r"\\[dt]?frac\{(-?\d+)\}\{(\d+)\}", r"(\1/\2)", plain))
    results = set()
    for match in re.finditer(r"((?:-?\d+(?:\.\d+)?\s*[-+*/]\s*)+-?\d+(?:\.\d+)?)\s*=\s*(-?\d+(?:\.\d+)?)", plain):
        left, right = _value(match[1]), Decimal(match[2])
        if left is not None and abs(left - right) <= Decimal(10) ** int(right.as_tuple().exponent) / 2:
            results.add(right)
    return results


def _value(sum_of_products: str) -> Decimal | None:
    """Return the value of numbers with + - * / between them, without parentheses; None if it has none."""
    tokens = re.findall(r"\d+(?:\.\d+)?|[-+*/]", sum_of_products)
    total, product, sign, operator = Decimal(0), None, 1, "*"
    for token in tokens:
        if token in "+-" and product is None:
            sign *= -1 if token == "-" else 1
        elif token in "+-" and product is not None:
            total, product, sign, operator = total + sign * product, None, -1 if token == "-" else 1, "*"
        elif token in "*/":
            operator = token
        elif product is None:
            product = Decimal(token)
        else:
            if operator == "/" and Decimal(token) == 0:
                return None
            product = product / Decimal(token) if operator == "/" else product * Decimal(token)
    return None if product is None else total + sign * product


def _numbers(text: str) -> set[Decimal]:
    text = _with_digits(text)
    found = {number for match in _NUMBER.finditer(text) if (number := _number(match[0])) is not None}
    for match in _FRACTION.finditer(text):
        found |= {Decimal(part) for part in match.groups() if part}
        if (value := _fraction(match)) is not None:
            found.add(value)
    return found


def _fraction(match: re.Match[str]) -> Decimal | None:
    """Return the value of a fraction, which may have a whole number before it; None if it has none."""
    whole, top, bottom = match.groups()[:3] if match[2] else match.groups()[3:]
    return int(whole or 0) + Decimal(top) / Decimal(bottom) if int(bottom) else None


def _with_digits(text: str) -> str:
    """Return a text with digits for numbers above twelve that are spelled out in English."""
    return _SPELLED_NUMBER.sub(_as_digits, text)


def _as_digits(match: re.Match[str]) -> str:
    total = group = 0
    for word in re.findall(r"[a-z]+", match[0].lower()):
        if word == "hundred":
            group = 100 * (group or 1)
        elif word in _SCALES:
            total, group = total + _SCALES[word] * (group or 1), 0
        else:
            group += _SPELLED.get(word, 0)
    return str(total + group) if total + group > 12 else match[0]


def _number(text: str) -> Decimal | None:
    try:
        number = Decimal(text.replace(",", ""))
    except InvalidOperation:
        return None
    return number if number.is_finite() and abs(number.adjusted()) < 300 else None


def _words(text: str) -> list[str]:
    return _WORD.findall(_BOXED.sub(f" {_ANSWER} ", text))


def _scripts(text: str) -> set[str]:
    """Return the scripts of a text's letters, such as CYRILLIC and CJK, without those that formulas use."""
    names = (unicodedata.name(letter, "") for letter in set(text) if letter.isalpha())
    return {match[1] for name in names if (match := _SCRIPT.match(name)) and match[1] not in _OF_FORMULAS}


def _plain(text: str) -> str:
    return " ".join(text.split())
