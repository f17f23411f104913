"""A teacher's rewriting of text reasoning, in which programs stand in place of calculations: is it what was asked for?

ReTool's cold start is made so (arXiv:2504.11536, section 2.2). Nothing that stands in an interpreter block comes from
the teacher: the text is split at its programs here, the sandbox runs them, and what the text says afterwards must agree
with what they printed. The rest of the text must be the text that was there.
"""

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation

from verl_ext.protocols.base import strip_fence
from verl_ext.traces.trace import LeftOut, Reason

MAX_LEAD_WORDS = 25  # that a teacher may add before and after a program, to say what it is for
NEAR_WORDS = 12  # within which of a program a word stands next to it
MAX_CUT_WORDS = 120  # of the calculation that a program replaces
MAX_CUT_SHARE = 0.6  # of the reasoning that all programs together replace
_BLOCK = re.compile(r"<code>(.*?)</code>(?:\s*<interpreter>(.*?)</interpreter>)?", re.DOTALL)
_TAG = re.compile(r"</?(?:code|interpreter)>")
_PROGRAM, _ANSWER = "\x00", "\x01"  # stand for a program, and for a boxed answer, among words
_BOXED = re.compile(r"\\boxed\s*\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\}")
_WORD = re.compile(r"[\x00\x01]|\\?\w+(?:[.,]\d+)*|[^\w\s]")
_NUMBER = re.compile(r"(?<![\w.])-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:e[+-]?\d+)?(?![\w])", re.IGNORECASE)
_FRACTION = re.compile(r"\\[dt]?frac\{(-?\d+)\}\{(\d+)\}|(?<![\w./])(-?\d+)\s*/\s*(\d+)(?![\w./])")
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

    Words next to a program may be new (MAX_LEAD_WORDS) or gone (MAX_CUT_WORDS, MAX_CUT_SHARE). Elsewhere no number may
    change, and no more than a share `max_change` of the words. What a box holds is the verifier's business.

    Raises:
        LeftOut: it did not.
    """
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


def check_outputs_agree(problem: str, rewriting: Rewriting, outputs: Sequence[str]) -> None:
    """Check that the text after each program agrees with what the program printed.

    A number contradicts the output if nothing explains it (the problem, the text and the programs before, an output, a
    rounded output, an equation next to it that is right), and the text claims it as a result: in the first sentence
    with a number after a program, or after a word such as "is", or "=".

    Raises:
        LeftOut: the teacher wrote another output than the program's, or a number contradicts it.
    """
    known = _numbers(problem)
    printed: list[Decimal] = []
    texts = rewriting.texts
    pairs = zip(rewriting.programs, rewriting.stated, outputs, texts[:-1], texts[1:], strict=True)
    for program, stated, output, before, after in pairs:
        if stated is not None and _plain(stated) != _plain(output):
            raise LeftOut(Reason.FORGED_OUTPUT, f"the teacher wrote {stated[:80]!r}, the program {output[:80]!r}")
        known |= _numbers(before) | _numbers(program) | _numbers(output)
        printed += _numbers(output)
        _check_claims(after, known, printed, output)


def _check_claims(text: str, known: set[Decimal], printed: Sequence[Decimal], output: str) -> None:
    is_first = True
    for sentence in _SENTENCE.split(_LIST_MARK.sub("", text)):
        found = [
            (match.start(), number) for match in _NUMBER.finditer(sentence) if (number := _number(match[0])) is not None
        ]
        for start, number in found:
            is_claim = is_first or _CLAIM.search(sentence[:start])
            if is_claim and not _is_explained(number, sentence, known, printed):
                raise LeftOut(
                    Reason.CONTRADICTS_OUTPUT, f"the text says {number} after an output of {output.strip()[:80]!r}"
                )
            known.add(number)
        is_first = is_first and not found


def _is_explained(number: Decimal, sentence: str, known: set[Decimal], printed: Sequence[Decimal]) -> bool:
    if number in known or -number in known:
        return True
    exponent = number.as_tuple().exponent
    half = Decimal(10) ** exponent / 2
    if any(abs(number - each) <= half for each in printed):
        return True
    percent = number / 100
    if percent in known or any(abs(percent - each) <= half / 100 for each in printed):
        return True
    return any(number == right for right in _right_equations(sentence))


def _right_equations(sentence: str) -> set[Decimal]:
    """Return the right sides of the plain equations of a sentence that hold, such as 3 * 4 = 12."""
    plain = re.sub(r"\\times|\\cdot|×|·", "*", sentence.replace("−", "-").replace("÷", "/").replace(",", ""))
    plain = re.sub(r"[$\\]|\{|\}", " ", re.sub(r"\\[dt]?frac\{(-?\d+)\}\{(\d+)\}", r"(\1/\2)", plain))
    results = set()
    for match in re.finditer(r"((?:-?\d+(?:\.\d+)?\s*[-+*/]\s*)+-?\d+(?:\.\d+)?)\s*=\s*(-?\d+(?:\.\d+)?)", plain):
        left, right = _value(match[1]), Decimal(match[2])
        if left is not None and abs(left - right) <= Decimal(10) ** right.as_tuple().exponent / 2:
            results.add(right)
    return results


def _value(sum_of_products: str) -> Decimal | None:
    """Return the value of numbers with + - * / between them, without parentheses; None if it has none."""
    tokens = re.findall(r"\d+(?:\.\d+)?|[-+*/]", sum_of_products)
    total, product, sign, operator = Decimal(0), None, 1, "*"
    for token in tokens:
        if token in "+-" and product is None:
            sign *= -1 if token == "-" else 1
        elif token in "+-":
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
    found = {number for match in _NUMBER.finditer(text) if (number := _number(match[0])) is not None}
    for match in _FRACTION.finditer(text):
        top, bottom = (match[1], match[2]) if match[1] else (match[3], match[4])
        found |= {Decimal(top), Decimal(bottom)}
        if int(bottom):
            found.add(Decimal(top) / Decimal(bottom))
    return found


def _number(text: str) -> Decimal | None:
    try:
        number = Decimal(text.replace(",", ""))
    except InvalidOperation:
        return None
    return number if number.is_finite() and abs(number.adjusted()) < 300 else None


def _words(text: str) -> list[str]:
    return _WORD.findall(_BOXED.sub(f" {_ANSWER} ", text))


def _plain(text: str) -> str:
    return " ".join(text.split())
