"""Prepare ReTool-SFT, or your own traces, for SFT: parquet in verl's columns, without problems of the evaluation sets.

    python data/prepare_retool_sft.py                                   # from the hub
    python data/prepare_retool_sft.py --input train-00000-of-00001.parquet

Reads `messages` with calls as objects and the interpreter as role `tool` (as verl's recipe published it), with code and
the interpreter's output inside the assistant's text (the original), or with the interpreter as a separate role.
"""

import argparse
from pathlib import Path

from verl_ext.datasets.problems import evaluation_problems
from verl_ext.datasets.rows import DataError
from verl_ext.datasets.text import PROMPTS
from verl_ext.datasets.traces import clean_traces, read_traces, write_traces

HUB = "JoeYing/ReTool-SFT"  # 2,000 traces


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--input", default=HUB, help="parquet or JSONL file, or hub data set (default: the hub's %(default)s)"
    )
    parser.add_argument("--split", default="train", help="split of a hub data set (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent / "retool_sft.parquet")
    parser.add_argument(
        "--evaluation", nargs="*", default=[], metavar="FILE", help="problems to exclude besides AIME 2024 and 2025"
    )
    parser.add_argument(
        "--protocol",
        choices=PROMPTS,
        default="code",
        help="retool.protocol of the run, which decides on the instructions in the prompt (default: %(default)s)",
    )
    args = parser.parse_args()
    traces, report = clean_traces(
        read_traces(args.input, split=args.split, protocol=args.protocol),
        evaluation=evaluation_problems(args.evaluation),
    )
    print(report)
    write_traces(traces, args.out)


if __name__ == "__main__":
    try:
        main()
    except DataError as error:
        raise SystemExit(str(error)) from None
