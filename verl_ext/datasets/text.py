"""Texts of problems: the instructions around them, and keys by which two spellings of a problem are found equal."""

import re
import unicodedata
from collections.abc import Iterable

# What the model is told beside the problem: by `retool.protocol` of the run, and behind "_" which of its texts. SFT and
# RL data need the same.
PROMPTS = {
    # ReTool's own (arXiv:2504.11536; every row of JoeYing/ReTool-SFT), but with code and answer as our protocol writes
    # them: no Markdown fence, no <answer> tags, and \boxed{} without the doubled braces of an unused format string.
    "code": (
        "Solve the following problem step by step. You now have the ability to selectively write executable Python "
        "code to enhance your reasoning process. The Python code will be executed by an external sandbox, and the "
        "output (wrapped in `<interpreter>output_str</interpreter>`) can be returned to aid your reasoning and help "
        "you arrive at the final answer. The Python code should be complete scripts, including necessary imports.\n"
        "Each code snippet is wrapped with `<code>\ncode snippet\n</code>`.\n"
        "The last part of your response should be in the following format:\n"
        "\\boxed{{'The final answer goes here.'}}\n\n"
        "*user question:*\n{problem}"
    ),
    # The code protocol for a model that is too small for the text above.
    "code_short": (
        "Solve the problem with Python: write code between <code> and </code>, read its output, then put the answer in "
        "\\boxed{{}}.\n\n{problem}"
    ),
    # The same task without the tool: what Python adds is measured against it.
    "no_tool_short": (
        "Solve the problem: write the calculation and its result, then put the answer in \\boxed{{}}.\n\n{problem}"
    ),
    # The published run's: the tool's schema, in the system prompt, says how to call it (verl-recipe@2ae2c59,
    # retool/retool_dataset_utils.py).
    "hermes": "{problem}\nThe answer format must be: \\boxed{{'The final answer goes here.'}}",
}

# Instructions that public data sets carry around a problem: (before, behind).
_WRAPPERS = [
    (  # BytedTsinghua-SIA/DAPO-Math-17k. It asks for "Answer: ...", which a scorer of \boxed{} never sees.
        r"Solve the following math problem step by step\. The last line of your response should be of the form Answer: "
        r"\$Answer \(without quotes\) where \$Answer is the answer to the problem\.",
        r'Remember to put your answer on its own line after "Answer:"\.',
    ),
    (  # JoeYing/ReTool-SFT, and what verl's recipe made of it
        r"(?:Solve the following problem step by step\..*?)?\*user question:\*\s*"
        r"(?:Answer the following Math Problem and put the answer in the format of \\boxed\{+answer\}+)?",
        r"(?:Remember to place the final answer in the last part using the format:\s*"
        r"(?:<answer>)?\s*\\boxed\{+'The final answer goes here\.'\}+\s*(?:</answer>)?)?",
    ),
    (
        r"Solve the problem with Python: write code between <code> and </code>, read its output, then put the answer "
        r"in \\boxed\{\}\.",
        r"",
    ),
    (r"Solve the problem: write the calculation and its result, then put the answer in \\boxed\{\}\.", r""),
    (r"", r"The answer format must be: \\boxed\{+'The final answer goes here\.'\}+"),
]
_WRAPPED = [re.compile(rf"\s*{before}\s*(.*?)\s*{behind}\s*", re.DOTALL) for before, behind in _WRAPPERS]

_SPACING = re.compile(r"\\(?:left|right|displaystyle|quad|qquad|[,;:! ])(?![a-zA-Z])|[\s${}~]|\\[()\[\]]")
_PUNCTUATION = re.compile(r"[\"'’“”?;。、]|(?<!\d)[.,:]|[.,:](?!\d)")  # not the point of 1.5
_PRIMES = re.compile(r"(?<![a-zA-Z'’])(?:[a-zA-Z]['’]+)+(?![a-z])")  # f'(2), A'B'; not Ann's, the n's, 'A'
_FRACTIONS = re.compile(r"\\[dt]frac(?![a-zA-Z])")
_COMMANDS = re.compile(r"\\(?:[a-zA-Z]+|.)", re.DOTALL)
_DRAWINGS = re.compile(r"\[asy\].*?\[/asy\]", re.DOTALL)
_NO_WORD = re.compile(r"[\W_]+")

SHINGLE_CHARS = 30  # letters and digits; about seven words
MIN_SHARE = 0.5  # of an evaluation problem's shingles that a leaked spelling has, see find_overlap


def bare_problem(prompt: str) -> str:
    """The problem without the instructions that a known data set put around it."""
    for wrapped in _WRAPPED:
        match = wrapped.fullmatch(prompt)
        if match and match[1]:
            return bare_problem(match[1])
    return prompt.strip()


def same_problem_key(problem: str) -> str:
    """Equal for texts that differ in spaces, case, punctuation, dollar signs and braces only.

    Not for texts that differ in an operator, or in the prime of a name.
    """
    text = _FRACTIONS.sub(r"\\frac", unicodedata.normalize("NFKC", problem))
    text = _PRIMES.sub(lambda found: re.sub("['’]", "′", found[0]), text)
    return _PUNCTUATION.sub("", _SPACING.sub("", text)).casefold()


def template_key(problem: str) -> str:
    """Equal for problems of one template: numbers, and words with a capital, which may be names, are left out."""
    text = re.sub(r"\b[A-Z]\w*", " ", re.sub(r"\d[\d,.]*", " ", problem))
    return _NO_WORD.sub(" ", text).casefold()


def has_no_words(problem: str) -> bool:
    r"""Whether nothing is asked: an empty text, or only a number such as `$\frac{2020}{6063}$`."""
    rest = re.sub(r"[\s${}()\[\].,/-]", "", _COMMANDS.sub("", problem))
    return rest == "" or rest.isdecimal()


class EvaluationProblems:
    """Finds other spellings of evaluation problems, by shared runs of 30 letters and digits (shingles).

    LaTeX commands, drawings, spaces and punctuation do not count. Two public data sets spell the 60 problems of AIME
    2024 and 2025: 50 are equal without these, and shared runs find 58 (tests/unit/datasets).

    Args:
        problems: (name, text) of each, without instructions around it.
    """

    def __init__(self, problems: Iterable[tuple[str, str]]):
        self._problems: list[tuple[str, set[str]]] = []
        self._holders: dict[str, list[int]] = {}  # shingle -> problems that have it
        for name, text in problems:
            shingles = _shingles(_letters(text))
            for shingle in shingles:
                self._holders.setdefault(shingle, []).append(len(self._problems))
            self._problems.append((name, shingles))

    def __len__(self) -> int:
        return len(self._problems)

    def find_overlap(self, problem: str) -> tuple[str, float] | None:
        """Name of the evaluation problem that most of is in `problem`, and its share; None where none is half in it."""
        letters = _letters(problem)
        starts = range(0, max(1, len(letters) - SHINGLE_CHARS + 1), SHINGLE_CHARS // 2)  # a leak is longer than a step
        if not any(letters[start : start + SHINGLE_CHARS] in self._holders for start in starts):
            return None
        own, counts = _shingles(letters), {}
        for shingle in own:
            for index in self._holders.get(shingle, ()):
                counts[index] = counts.get(index, 0) + 1
        share, index = max((count / len(self._problems[index][1]), index) for index, count in counts.items())
        return (self._problems[index][0], share) if share >= MIN_SHARE else None


def _letters(problem: str) -> str:
    text = _COMMANDS.sub("", _DRAWINGS.sub("", unicodedata.normalize("NFKC", problem)))
    return _NO_WORD.sub("", text).casefold()


def _shingles(letters: str) -> set[str]:
    return {letters[i : i + SHINGLE_CHARS] for i in range(max(1, len(letters) - SHINGLE_CHARS + 1))}
