"""Prepare DAPO-Math-17k for RL, as parquet in verl's columns: each problem once, and none of the evaluation sets.

    python data/prepare_dapo_math_17k.py                                     # from the hub
    python data/prepare_dapo_math_17k.py --input dapo-math-17k.parquet       # a file, in any of its public forms

The published file holds 17,917 problems 100 times each, some with different answers. Its instruction to end with
"Answer: ..." is replaced by ours, which asks for a box. All rows take about two minutes and 2 GB.
"""

import argparse
from pathlib import Path

from verl_ext.datasets.problems import clean_problems, evaluation_problems, read_problems, write_problems
from verl_ext.datasets.rows import DataError
from verl_ext.datasets.text import PROMPTS

HUB = "BytedTsinghua-SIA/DAPO-Math-17k"  # Apache-2.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--input", default=HUB, help="parquet or JSONL file, or hub data set (default: the hub's %(default)s)"
    )
    parser.add_argument("--split", default="train", help="split of a hub data set (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent / "dapo_math_17k.parquet")
    parser.add_argument(
        "--evaluation", nargs="*", default=[], metavar="FILE", help="problems to exclude besides AIME 2024 and 2025"
    )
    parser.add_argument(
        "--protocol", choices=PROMPTS, default="code", help="retool.protocol of the run (default: %(default)s)"
    )
    args = parser.parse_args()
    problems, report = clean_problems(
        read_problems(args.input, split=args.split),
        evaluation=evaluation_problems(args.evaluation),
        integer_answers=True,
    )
    print(report)
    write_problems(problems, args.out, data_source="math_dapo", split="train", protocol=args.protocol)


if __name__ == "__main__":
    try:
        main()
    except DataError as error:
        raise SystemExit(str(error)) from None
