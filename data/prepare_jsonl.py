"""Prepare your own problems for RL or evaluation, as parquet in verl's columns, from JSONL or parquet.

    python data/prepare_jsonl.py --input mine.jsonl --name mine --out data/mine.parquet
    python data/prepare_jsonl.py --input mine.jsonl --name mine --out data/mine.parquet \\
        --problem-column task.statement --answer-column task.solution

Each line is an object with a problem and its answer: a number, or LaTeX such as \\frac{1}{2}, without a sentence around
it. In a prompt of verl's form the last user message is the problem; the other messages are left out.
"""

import argparse
from pathlib import Path

from verl_ext.datasets.problems import clean_problems, evaluation_problems, read_problems, write_problems
from verl_ext.datasets.rows import DataError
from verl_ext.datasets.text import PROMPTS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input", required=True, help="JSONL or parquet file, a folder of them, or hub data set")
    parser.add_argument("--out", type=Path, required=True, help="parquet file to write")
    parser.add_argument("--name", required=True, help="data source, under which metrics are reported")
    parser.add_argument("--split", default="train", help="train, or test for an evaluation set (default: train)")
    parser.add_argument("--problem-column", help="with dots for nested objects; a usual name is found by itself")
    parser.add_argument("--answer-column")
    parser.add_argument("--integer-answers", action="store_true", help="drop problems whose answer is not an integer")
    parser.add_argument(
        "--evaluation", nargs="*", default=[], metavar="FILE", help="problems to exclude besides AIME 2024 and 2025"
    )
    parser.add_argument(
        "--protocol", choices=PROMPTS, default="code", help="retool.protocol of the run (default: %(default)s)"
    )
    args = parser.parse_args()
    if bool(args.problem_column) != bool(args.answer_column):
        parser.error("--problem-column and --answer-column need each other")
    problems, report = clean_problems(
        read_problems(
            args.input,
            split=args.split,
            columns=(args.problem_column, args.answer_column) if args.problem_column else None,
        ),
        evaluation=evaluation_problems(args.evaluation) if args.split == "train" else None,
        integer_answers=args.integer_answers,
    )
    print(report)
    write_problems(problems, args.out, data_source=args.name, split=args.split, protocol=args.protocol)


if __name__ == "__main__":
    try:
        main()
    except DataError as error:
        raise SystemExit(str(error)) from None
