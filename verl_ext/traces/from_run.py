"""Make traces of the records of a finished training or evaluation run: expert iteration, rejection sampling.

    retool traces from-run outputs/my_run --step 200:400 --out kept.parquet

They pass the same check as the traces of any file. Their answers count as the run judged them.
"""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl_ext.runs.folder import files_of, training_folder
from verl_ext.traces import check
from verl_ext.traces.from_records import read_run


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of an RL run, an evaluation or the quickstart")
    parser.add_argument("--step", metavar="A:B", help="only of step A, or of A to B")
    parser.add_argument("--min-score", type=float, metavar="X", help="only responses with this score or more")
    parser.add_argument("--domain", metavar="NAME", help="only rows of this data_source")
    check.add_shared_options(parser)


def run(args: argparse.Namespace) -> None:
    """Check the traces of a run.

    Raises:
        ValueError: there is no run, or no such step.
    """
    folder = training_folder(args.run, "rl", "evaluation")
    steps = _steps(args.step)
    there = sorted({file.step for file in files_of(folder)})
    if not any(steps is None or step in steps for step in there):
        has = f"It has steps {there[0]} to {there[-1]}." if there else "It has none."
        raise ValueError(f"{folder} has no records of step {args.step}. {has}")

    def is_wanted(row: Mapping[str, Any]) -> bool:
        has_score = args.min_score is None or (row["score"] is not None and row["score"] >= args.min_score)
        return has_score and args.domain in (None, row["domain"])

    check.check(read_run(folder, steps, is_wanted), args, run=folder)


def _steps(text: str | None) -> range | None:
    if text is None:
        return None
    first, colon, last = text.partition(":")
    try:
        return range(int(first or 0), int(last or 10**9) + 1) if colon else range(int(first), int(first) + 1)
    except ValueError:
        raise ValueError(f"--step is {text!r}: expected a step, such as 200, or two, such as 200:400.") from None
