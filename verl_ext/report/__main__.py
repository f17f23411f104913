"""Write one self-contained page (`report.html`) and `summary.json` of a run: training, evaluations, rollouts.

    retool report --run outputs/quickstart              # SFT, RL, and the evaluations before and after RL
    retool report --run outputs/qwen2-32b_dapo          # any RL run, SFT run or evaluation
    retool report --run outputs/a --run outputs/b       # side by side: comparison.html, comparison.json

The page shows what is in the run's folder; it names each missing part and what makes it.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from verl_ext.report.comparison import write_comparison
from verl_ext.report.page import write_report


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="retool report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = "folder of an RL run, an SFT run, an evaluation or a quickstart; several are compared"
    parser.add_argument("--run", type=Path, required=True, nargs="+", action="extend", metavar="RUN", help=what)
    parser.add_argument("--out", type=Path, help="folder of the comparison of several runs (default: the first run's)")
    args = parser.parse_args(argv)
    if args.out and len(args.run) == 1:
        parser.error("--out is for several runs; the report of one run is written into its folder")
    try:
        if len(args.run) == 1:
            print(write_report(args.run[0]))
        else:
            print(write_comparison(args.run, args.out or args.run[0]))
    except (OSError, ValueError) as error:  # no run, or a folder that cannot be written
        sys.exit(f"report: {error}")


if __name__ == "__main__":
    main()
