"""Answers that are a fixed string, or one letter among choices: no mathematics.

With `unfinished_thinking`, text after a `<think>` that is never closed counts as well.
"""

import re
from collections.abc import Mapping
from typing import Any

from verl_ext.reward.maths.choices import read_choice
from verl_ext.reward.maths.extraction import extract_answer, strip_tool_blocks
from verl_ext.reward.score import Score

_TEXT = re.compile(r"\\text(?:bf|it|rm)?\s*\{([^{}]*)\}")
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
# "the answer is a mystery", "I think", "x = 4" and "isn't" name no choice.
_CHOICE = (
    r"(?:\(([A-Za-z])\)|(?:([A-HJ-Zb-hj]|I(?!\s+[a-z])|a(?=\s*(?:[.,;!*\n):]|because|\Z)))\b"
    r"(?![ \t]*[=+/^_]|[ \t]*-[ \t]*\d|['’])))"
)
_NAMES = r"\b(?i:answer|option|choice)\b"
_STATED = [  # the last match counts, of the first form that a response has
    re.compile(
        rf"(?:{_NAMES}(?i:\s+is)(?:[\s:*]+|(?=\())(?:(?i:option|choice)[\s:*]*)?|\b(?i:answer)[\s*]*:[\s*]*){_CHOICE}"
    ),
    re.compile(rf"{_NAMES}(?i:\s+is)?[\s:*]*{_CHOICE}"),
    re.compile(rf"{_NAMES}(?i:\s+is)?[\s:*]*\(?([A-HJ-Z])\b(?!['’])"),  # C - 12
]


class ExactVerifier:
    """The boxed (or `<answer>`-tagged) text is the ground truth, up to white space and, by default, case."""

    def __init__(self, config: Mapping[str, Any], *, ignore_case: bool = True, unfinished_thinking: bool = False):
        self._ignore_case = ignore_case
        self._unfinished_thinking = unfinished_thinking

    async def verify(self, response_text: str, ground_truth: Any, sample: Mapping[str, Any]) -> Score:
        if not str(ground_truth).strip():
            raise ValueError("The ground truth is empty: expected the string to compare with. Check the data row.")
        pred = extract_answer(response_text, unfinished_thinking=self._unfinished_thinking)
        if pred is None or not pred.strip():
            return Score(0.0, "", "no_answer", "no_box" if pred is None else "empty")
        folded = self._fold(pred)
        return Score.graded(float(folded == self._fold(str(ground_truth))), pred.strip(), "exact", folded)

    @staticmethod
    def gold(ground_truth: Any) -> str:
        """Return a response that is right."""
        return f"\\boxed{{{ground_truth}}}"

    def _fold(self, text: str) -> str:
        text = " ".join(_TEXT.sub(r"\1", text).split())
        return text.casefold() if self._ignore_case else text


class ChoiceVerifier:
    """The chosen letter is the ground truth's: boxed, tagged, or stated last: "the answer is C", or else "option C".

    More than one letter in the box (`C or D`) is wrong.
    """

    def __init__(self, config: Mapping[str, Any], *, unfinished_thinking: bool = False):
        self._unfinished_thinking = unfinished_thinking

    async def verify(self, response_text: str, ground_truth: Any, sample: Mapping[str, Any]) -> Score:
        choice = read_choice(str(ground_truth), _LETTERS)
        if choice is None:
            raise ValueError(
                f"The ground truth is {ground_truth!r}: expected one letter such as 'C'. Check the data row."
            )
        pred = extract_answer(response_text, unfinished_thinking=self._unfinished_thinking)
        if pred is None:
            spoken = strip_tool_blocks(response_text, unfinished_thinking=self._unfinished_thinking)
            stated = next((found for form in _STATED if (found := form.findall(spoken))), None)
            if not stated:
                return Score(0.0, "", "no_answer", "no_choice")
            pred = "".join(stated[-1]).upper()
        letter, _ = read_choice(pred, _LETTERS) or ("", "")
        return Score.graded(float(letter == choice[0]), pred.strip(), "choice", letter)

    gold = staticmethod(ExactVerifier.gold)
