"""Turn problems with answers from public data sets into verl's RL columns: find columns, clean, report, write.

Used by data/prepare_dapo_math_17k.py, prepare_aime.py and prepare_jsonl.py. Only distinct problems are held in memory.
"""

import contextlib
import functools
import math
import re
import textwrap
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_ext.datasets.rows import DataError, progress_bar, read_rows, write_parquet
from verl_ext.datasets.rows import field as column_of
from verl_ext.datasets.text import PROMPTS, EvaluationProblems, bare_problem, has_no_words, same_problem_key
from verl_ext.reward.score import compare, score_answer
from verl_ext.settings import REPO

if TYPE_CHECKING:
    import datasets

BUILT_IN = REPO / "data" / "aime"
# Columns of (problem, answer) in public data sets, tried in this order.
KNOWN_COLUMNS = (
    ("prompt.0.content", "reward_model.ground_truth"),  # verl's own; if there are several messages, the last user's
    ("prompt", "reward_model.ground_truth"),
    ("problem", "answer"),
    ("Problem", "Answer"),
    ("question", "answer"),
    ("input", "output"),
)
_ID_COLUMNS = ("id", "ID", "extra_info.index")


@functools.cache
def features() -> "datasets.Features":
    """Return verl's RL columns."""
    import datasets  # 0.8 s, only for callers that write

    text = datasets.Value("string")
    return datasets.Features(
        {
            "data_source": text,
            "prompt": [{"role": text, "content": text}],
            "ability": text,
            "reward_model": {"style": text, "ground_truth": text},
            # `index` is the row of this file, `id` the source's name for the problem
            "extra_info": {"index": datasets.Value("int64"), "split": text, "id": text},
        }
    )


@dataclass(slots=True)
class Problem:
    """`text` is the problem without instructions around it; `id` names it in its source."""

    text: str
    answer: str
    id: str


@dataclass
class Report:
    """What became of the rows of a source: counts, and the first three rows of each kind that was left out."""

    rows: int = 0
    distinct: int = 0
    kept: int = 0
    dropped: Counter[str] = field(default_factory=Counter)  # reason -> problems
    examples: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))

    def drop(self, reason: str, example: str) -> None:
        self.dropped[reason] += 1
        if len(self.examples[reason]) < 3:
            self.examples[reason].append(example)

    def __str__(self) -> str:
        lines = [f"{self.rows:,} rows, {self.distinct:,} distinct, {self.kept:,} kept"]
        for reason, count in self.dropped.most_common():
            lines += [f"  dropped {count:,}: {reason}", *(f"    {example}" for example in self.examples[reason])]
        return "\n".join(lines)


def read_problems(source: str, *, split: str = "train", columns: tuple[str, str] | None = None) -> Iterator[Problem]:
    """Yield the problems of a parquet or JSONL file, or of a data set of the hub.

    Args:
        columns: of problem and answer; by default the first of KNOWN_COLUMNS that the first row has.
    Raises:
        DataError: a row lacks one of them or has a value of another type; the message names the row and the column.
    """
    for where, row in read_rows(source, split=split):
        columns = columns or _find_columns(row, where)
        text = column_of(row, _last_user(row, columns[0]), where)
        yield Problem(bare_problem(text), _answer_of(row, columns[1], where), _find_id(row, where))


def _answer_of(row: dict[str, Any], column: str, where: str) -> str:
    answer = column_of(row, column, where, object)
    if isinstance(answer, list):
        raise DataError(
            f"{where}, column {column}: found {shortened(str(answer))}; expected one answer. For several right answers "
            "use verl's columns, with the list as reward_model.ground_truth."
        )
    answer = column_of(row, column, where, (str, int, float))
    if isinstance(answer, float) and not math.isfinite(answer):
        raise DataError(f"{where}, column {column}: found {answer}; expected a finite number, or text.")
    return str(int(answer) if isinstance(answer, float) and answer.is_integer() else answer).strip()


def check_row(
    row: dict[str, Any], where: str, prompt_key: str, *, needs_user: bool = True
) -> tuple[list[dict[str, Any]], Any]:
    """Return messages and answer of a row in verl's RL columns.

    Args:
        needs_user: whether the last message must be the user's; else there may also be only system messages.
    Raises:
        DataError: one of them is missing, empty or of another type, or the last message is not the user's; the message
            names the row.
    """
    messages = column_of(row, prompt_key, where, list)
    for number in range(len(messages)):
        column_of(row, f"{prompt_key}.{number}.role", where)
        column_of(row, f"{prompt_key}.{number}.content", where)
    column_of(row, "data_source", where)
    answer = column_of(row, "reward_model.ground_truth", where, (str, int, float, list))
    if answer in ("", []) or (isinstance(answer, str) and not answer.strip()):
        raise DataError(f"{where}, column reward_model.ground_truth: it is empty, so no answer could be right.")
    is_bare = bool(messages) and all(message["role"] == "system" for message in messages)
    if not (is_bare and not needs_user) and (not messages or messages[-1]["role"] != "user"):
        raise DataError(f"{where}, column {prompt_key}: the last message is not the user's.")
    return messages, answer


def evaluation_problems(sources: Iterable[str]) -> EvaluationProblems:
    """Return the problems of AIME 2024 and 2025, and of `sources`."""
    files = [*(str(path) for path in sorted(BUILT_IN.glob("*.jsonl"))), *sources]
    return EvaluationProblems(
        (f"{Path(source).stem} {problem.id}", problem.text) for source in files for problem in read_problems(source)
    )


def clean_problems(
    problems: Iterable[Problem], *, evaluation: EvaluationProblems | None, integer_answers: bool
) -> tuple[list[Problem], Report]:
    """Drop duplicates and unusable problems; the first of equal problems stays, in the order of the source.

    Left out are: all copies of a problem that has different answers; texts that ask nothing; with `integer_answers`,
    answers that are not integers, or are integers that were once floating-point numbers; answers that `score_answer`
    does not find equal to themselves; problems of the evaluation sets.

    Returns:
        The problems that are left, integers without leading zeros, and the report.
    """
    report = Report()
    distinct: dict[bytes, Problem] = {}
    other_answers: dict[bytes, str] = {}
    for problem in problems:
        report.rows += 1
        key = blake2b(same_problem_key(problem.text).encode("utf-8", "surrogatepass"), digest_size=16).digest()
        first = distinct.setdefault(key, problem)
        if first.answer != problem.answer and key not in other_answers:  # noqa: SIM102  results have this code's digest
            if not (first.answer and problem.answer and compare(problem.answer, first.answer).equal):
                other_answers[key] = problem.answer
    report.distinct = len(distinct)
    kept = []
    for key, problem in progress_bar(distinct.items(), desc="check", unit=" problems"):
        reason = _unusable(problem, integer_answers)
        if key in other_answers:
            reason = "the same problem has different answers", f"{problem.answer} and {other_answers[key]}"
        elif reason is None and evaluation and (overlap := evaluation.find_overlap(problem.text)):
            reason = "overlap with an evaluation set", f"{overlap[1]:.0%} of {overlap[0]}"
        if reason:
            report.drop(reason[0], f"{problem.id}: {reason[1]} | {shortened(problem.text)}")
            continue
        if integer_answers:
            problem.answer = str(int(problem.answer))
        kept.append(problem)
    report.kept = len(kept)
    return kept, report


def write_problems(problems: Sequence[Problem], path: Path, *, data_source: str, split: str, protocol: str) -> None:
    """Write parquet in verl's RL columns, and print the count and the first row.

    Args:
        protocol: key of PROMPTS, as `retool.protocol` of the run.
    Raises:
        DataError: there are no problems.
    """
    if not problems:
        raise DataError(f"No problem is left to write to {path}. See above why they were dropped.")
    columns = {"data_source": data_source, "split": split, "protocol": protocol}
    rows = (problem_row(problem, index, **columns) for index, problem in enumerate(problems))
    count = write_parquet(rows, path, features())
    first = problem_row(problems[0], 0, **columns)
    print(f"{path}: {count:,} rows. The first:")
    for column in ("data_source", "ability", "reward_model", "extra_info"):
        print(f"  {column}: {first[column]}")
    for message in first["prompt"]:
        print(textwrap.indent(f"{message['role']}: {message['content']}", "  | "))


def problem_row(problem: Problem, index: int, *, data_source: str, split: str, protocol: str) -> dict[str, Any]:
    """Return a row of `features`; `protocol` as in `write_problems`."""
    return {
        "data_source": data_source,
        "prompt": [{"role": "user", "content": PROMPTS[protocol].format(problem=problem.text)}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": problem.answer},
        "extra_info": {"index": index, "split": split, "id": problem.id},
    }


def _unusable(problem: Problem, integer_answers: bool) -> tuple[str, str] | None:
    """Return (reason, what was seen), or None for a problem that can be trained on."""
    answer = problem.answer
    if has_no_words(problem.text):
        return "the problem is empty or only a number", repr(problem.text)
    if not answer:
        return "the answer is empty", repr(answer)
    if integer_answers and not re.fullmatch(r"[+-]?[0-9]+", answer):
        return "the answer is not an integer", repr(answer)
    if re.fullmatch(r"[+-]?[0-9]{17,}", answer) and _was_float(int(answer)):
        return "the answer is an integer that was rounded to a floating-point number", repr(answer)
    if score_answer(f"\\boxed{{{answer}}}", answer).acc != 1.0:
        return "the scorer does not find the answer equal to itself", repr(answer)
    return None


def _was_float(number: int) -> bool:
    """Return True for 22099999999999998951424, all digits of a float; False for a round 2000000000000000000000."""
    rounded = float(number) if abs(number) < 10**308 else math.inf
    return rounded == number != int(Decimal(repr(rounded)))


def _find_columns(row: dict[str, Any], where: str) -> tuple[str, str]:
    for columns in KNOWN_COLUMNS:
        with contextlib.suppress(DataError):
            for column in columns:
                column_of(row, column, where, object)
            return columns
    known = "; ".join(" and ".join(columns) for columns in KNOWN_COLUMNS)
    raise DataError(
        f"{where}: no known columns of problem and answer; the row has {', '.join(row)}. Expected one of: {known}. For "
        "other names, use data/prepare_jsonl.py with --problem-column and --answer-column."
    )


def _last_user(row: dict[str, Any], column: str) -> str:
    """Return the column of the last user message if the prompt has several messages."""
    if column != "prompt.0.content" or not isinstance(row.get("prompt"), list):
        return column
    users = [i for i, m in enumerate(row["prompt"]) if isinstance(m, dict) and m.get("role") == "user"]
    return f"prompt.{users[-1] if users else 0}.content"


def _find_id(row: dict[str, Any], where: str) -> str:
    for column in _ID_COLUMNS:
        with contextlib.suppress(DataError):
            return str(column_of(row, column, where, (str, int)))
    return where.rpartition(", ")[2]


def shortened(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 100 else f"{line[:97]}..."
