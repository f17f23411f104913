"""Write the data of the small run: word problems as SFT traces, RL problems and a test, and SVAMP as a second test.

    python data/small/prepare.py --out outputs/small/data
    python data/small/prepare.py --out outputs/small/data --mawps FOLDER        # MAWPS' train.csv and dev.csv instead

Deterministic in `--seed`; no network. The problems are ours (templates.txt: SFT, RL and test have other templates).
SVAMP (data/svamp) is only for testing. MAWPS is not included, because its own repository names no licence.
"""

import argparse
import random
import sys
from pathlib import Path

from verl_ext.datasets.problems import Problem, read_problems
from verl_ext.datasets.rows import DataError

DATA = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(DATA / "small"), str(DATA)]
from prepare_mawps import split_fold  # noqa: E402
from word_problems import make_problems  # noqa: E402
from worked import NO_TOOL, PROTOCOL, Worked, problem_of, split_apart, write_task  # noqa: E402

SVAMP = DATA / "svamp" / "svamp.jsonl"
TEST_SEED = 1604  # the test does not depend on --seed: runs with different seeds are compared on the same problems


def own_problems(args: argparse.Namespace) -> list[list[Worked]]:
    """Make test, SFT (its validation at the end) and RL problems from our templates."""
    rng = random.Random(args.seed)
    test = make_problems("test", args.test, random.Random(TEST_SEED))
    return [test, make_problems("sft", args.sft + args.sft_val, rng), make_problems("rl", args.rl, rng)]


def svamp_problems(count: int) -> list[Problem]:
    """Return the first `count` problems of a fixed shuffle: SVAMP's file is sorted by kind."""
    problems = list(read_problems(str(SVAMP)))
    random.Random(TEST_SEED).shuffle(problems)
    return problems[:count]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the parquet files")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mawps", type=Path, metavar="FOLDER", help="use train.csv and dev.csv of a fold instead")
    parser.add_argument("--sft", type=int, default=128, help="SFT traces (default: %(default)s)")
    parser.add_argument("--sft-val", type=int, default=48, help="traces of SFT's validation (default: %(default)s)")
    parser.add_argument("--rl", type=int, default=1500, help="RL problems (default: %(default)s)")
    parser.add_argument("--test", type=int, default=384, help="held-out problems (default: %(default)s)")
    parser.add_argument("--svamp", type=int, default=100, help="test problems from SVAMP (default: %(default)s)")
    parser.add_argument(
        "--no-tool", action="store_true", help="traces of the same problems without calls, with the calculation as text"
    )
    args = parser.parse_args()
    if args.mawps:
        sizes = {"sft": args.sft + args.sft_val, "rl": args.rl, "test": args.test}
        test, sft, rl = split_fold(args.mawps, seed=args.seed, **sizes)
    else:
        (test, sft, rl), report = split_apart(*own_problems(args))
        print(report)
    name = "mawps" if args.mawps else "word_problems"
    write_task(
        args.out,
        sft=sft[args.sft_val :],
        sft_val=sft[: args.sft_val],
        rl=rl,
        rl_source=name,
        evaluation={name: [problem_of(worked) for worked in test], "svamp_ood": svamp_problems(args.svamp)},
        protocol=NO_TOOL if args.no_tool else PROTOCOL,
    )


if __name__ == "__main__":
    try:
        main()
    except DataError as error:
        raise SystemExit(str(error)) from None
