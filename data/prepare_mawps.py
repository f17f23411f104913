r"""Prepare MAWPS as SFT traces, RL problems and a test, from a fold's train.csv and dev.csv.

    python data/prepare_mawps.py --input cv_mawps/fold0 --out outputs/mawps

The files are in data/cv_mawps of github.com/arkilpatel/SVAMP. They are not in this repository, because MAWPS itself
(github.com/sroy9/mawps) names no licence, although SVAMP's repository is under MIT. Equations become programs, which
are run and must give the answer. This trains on them with 16 traces a step; the run's default of 8 steps would see 128:

    DATA_DIR=outputs/mawps OUTPUT_DIR=outputs/mawps/sft \
        bash recipe/retool/run_smollm2_sft.sh trainer.total_training_steps=37
"""

import argparse
from pathlib import Path

from verl_ext.datasets.mawps import split_fold
from verl_ext.datasets.rows import DataError
from verl_ext.datasets.worked import problem_of, write_task


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input", type=Path, required=True, help="folder of train.csv and dev.csv")
    parser.add_argument("--out", type=Path, required=True, help="folder for the parquet files")
    parser.add_argument("--seed", type=int, default=0, help="seed of the order of train.csv")
    parser.add_argument("--sft", type=int, default=600, help="SFT traces; the rest is for RL (default: %(default)s)")
    parser.add_argument("--sft-val", type=int, default=48, help="traces of SFT's validation (default: %(default)s)")
    args = parser.parse_args()
    test, sft, rl = split_fold(args.input, seed=args.seed, sft=args.sft + args.sft_val, rl=None, test=None)
    val, train = sft[: args.sft_val], sft[args.sft_val :]
    evaluation = {"mawps": [problem_of(worked) for worked in test]}
    write_task(args.out, sft=train, sft_val=val, rl=rl, rl_source="mawps", evaluation=evaluation)


if __name__ == "__main__":
    try:
        main()
    except DataError as error:
        raise SystemExit(str(error)) from None
