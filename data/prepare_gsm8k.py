"""Prepare GSM8K (Cobbe et al., 2021) as SFT traces, RL problems and a test.

Its calculator annotations, `<<48/2=24>>`, become programs, which are run.

    python data/prepare_gsm8k.py --out outputs/gsm8k                                             # from the hub
    python data/prepare_gsm8k.py --train gsm8k_train.jsonl --test gsm8k_test.jsonl --out outputs/gsm8k

The files are github.com/openai/grade-school-math's (MIT). A problem whose annotations do not give its answer is left
out of SFT and RL, and counted. SmolLM2-135M cannot do GSM8K; take a larger model.
"""

import argparse
import random
import re
from collections.abc import Iterator
from pathlib import Path

from worked import Worked, keep_worked, split_apart, write_task

from verl_ext.datasets.problems import Problem, Report
from verl_ext.datasets.rows import DataError, field, read_rows

HUB = "openai/gsm8k/main"  # MIT
_ANNOTATION = re.compile(r"<<([^<>]*)=([^<>=]*)>>")
_ANY_ANNOTATION = re.compile(r"<<[^<>]*>>")
_ARITHMETIC = "-$0123456789.,%+*/x×() "  # what stands before an annotation
_RESULT = re.compile(r"\s*\$?-?[\d,]*\.?\d*%?")  # and after it
_NUMBER = re.compile(r"-?(?:\d++(?:\.\d++)?|\.\d++)")
_NUMBER_IN_TEXT = re.compile(r"(?<![\w.])(?:\d++(?:\.\d++)?+|\.\d++)(?![\w.])")
_PERCENT = re.compile(r"(?<!\d)(\d++(?:\.\d++)?|\.\d++)%")
_SIGNS = str.maketrans({",": None, "$": None, " ": None, "x": "*", "X": "*", "×": "*", "÷": "/"})
_NAMES = "abcdefghijklmnop"  # of results, in order


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", default=HUB, help="JSONL or parquet file, or hub data set (default: %(default)s)")
    parser.add_argument("--test", default=HUB, help="the same (default: %(default)s)")
    parser.add_argument("--out", type=Path, required=True, help="folder for the parquet files")
    parser.add_argument("--seed", type=int, default=0, help="seed of the order of the training problems")
    parser.add_argument("--sft", type=int, default=3000, help="SFT traces; the rest is for RL (default: %(default)s)")
    parser.add_argument("--sft-val", type=int, default=48, help="traces of SFT's validation (default: %(default)s)")
    args = parser.parse_args()
    worked, report = read_worked(args.train, split="train")
    print(report)
    random.Random(args.seed).shuffle(worked)
    test = read_test(args.test, split="test")
    held_out = [Worked(problem.text, "", "", problem.answer, problem.id) for problem in test]
    sft = args.sft + args.sft_val
    (_, traces, rl), report = split_apart(held_out, worked[:sft], worked[sft:])
    print(report)
    val, train = traces[: args.sft_val], traces[args.sft_val :]
    write_task(args.out, sft=train, sft_val=val, rl=rl, rl_source="gsm8k", evaluation={"gsm8k": test})


def read_worked(source: str, *, split: str) -> tuple[list[Worked], Report]:
    """Return the problems of a file or a hub data set whose annotations give the answer, and what was left out."""
    report = Report()
    rows = [(question, answer, name) for question, answer, name in _rows(source, split)]
    worked = list(keep_worked(((q, program(a), gold(a), name) for q, a, name in rows), report))
    report.distinct = len({each.text for each in worked})
    return worked, report


def read_test(source: str, *, split: str) -> list[Problem]:
    """Return all problems, with the number after `####` as answer."""
    return [Problem(question, gold(answer), name) for question, answer, name in _rows(source, split)]


def gold(answer: str) -> str:
    """Return the answer, e.g. 1080 for `... #### 1,080`."""
    return answer.rpartition("####")[2].strip().translate(_SIGNS).rstrip(".")


def program(answer: str) -> str:
    """Return a program that prints the result of the last annotation, or nothing if there is no annotation.

    Each line of a solution becomes a comment (its words, without the arithmetic), each annotation a statement over the
    results before it.
    """
    statements: list[str] = []
    results: dict[str, str] = {}  # number -> name of the result with this value
    names = iter(_NAMES)
    last = ""
    for line in answer.rpartition("####")[0].splitlines():
        annotations = _ANNOTATION.findall(line)
        if annotations and (words := _words(line)):
            statements.append(f"# {words}")
        for expression, result in annotations:
            if not (last := next(names, "")):
                return ""
            statements.append(f"{last} = {_expression(expression, results)}")
            number = result.translate(_SIGNS)
            if _NUMBER.fullmatch(number) and number.lstrip("-") not in ("0", "1"):  # 0 and 1 stand for themselves
                results[number] = last
    return "\n".join([*statements, f"print({last})"]) if last else ""


def _expression(text: str, results: dict[str, str]) -> str:
    """Format `48/2` as `48 / 2`, `5%` as `(5 / 100)`, and a number that is an earlier result as the result's name."""
    plain = _PERCENT.sub(r"(\1/100)", text.translate(_SIGNS))
    plain = re.sub(r"(?<![\d.])0+(?=\d)", "", plain)  # 05 is not valid Python
    plain = _NUMBER_IN_TEXT.sub(lambda found: results.get(found[0], found[0]), plain)
    return re.sub(r"(?<=[\w)])([+\-*/])(?=[\w(.])", r" \1 ", plain)


def _words(line: str) -> str:
    """Return `Natalia sold clips in May` for `Natalia sold 48/2 = <<48/2=24>>24 clips in May.`"""
    *parts, last = _ANY_ANNOTATION.split(line)
    kept, position = [], 0  # in the part, after the result of the previous annotation
    for part in parts:
        kept.append(part[position:].rstrip(" \t$").removesuffix("=").rstrip(_ARITHMETIC))
        following = last if len(kept) == len(parts) else parts[len(kept)]
        position = _RESULT.match(following).end()
    text = " ".join(" ".join([*kept, last[position:]]).split())
    return re.sub(r"\s+([.,])", r"\1", text).strip(" =.,")


def _rows(source: str, split: str) -> Iterator[tuple[str, str, str]]:
    for number, (where, row) in enumerate(read_rows(source, split=split)):
        yield field(row, "question", where).strip(), field(row, "answer", where), f"{split}-{number}"


if __name__ == "__main__":
    try:
        main()
    except DataError as error:
        raise SystemExit(str(error)) from None
