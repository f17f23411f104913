"""Prepare GSM8K as SFT traces, RL problems and a test; its calculator annotations become programs, which are run.

    python data/prepare_gsm8k.py --out outputs/gsm8k                                             # from the hub
    python data/prepare_gsm8k.py --train gsm8k_train.jsonl --test gsm8k_test.jsonl --out outputs/gsm8k

The files are github.com/openai/grade-school-math's (MIT). A problem whose annotations do not give its answer is left
out of SFT and RL, and counted. SmolLM2-135M cannot do GSM8K; take a larger model.
"""

import argparse
import random
from pathlib import Path

from verl_ext.datasets.gsm8k import read_test, read_worked
from verl_ext.datasets.rows import DataError
from verl_ext.datasets.worked import Worked, split_apart, write_task

HUB = "openai/gsm8k/main"  # MIT


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


if __name__ == "__main__":
    try:
        main()
    except DataError as error:
        raise SystemExit(str(error)) from None
