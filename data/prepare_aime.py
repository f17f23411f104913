"""Prepare AIME 2024 and 2025 for validation and evaluation, as parquet in verl's columns. They are built in: no hub.

    python data/prepare_aime.py                       # data/aime_2024.parquet and data/aime_2025.parquet
    python data/prepare_aime.py --input yentinglin/aime_2025 --name aime_2025 --out data/aime_2025.parquet

Stops if an answer is not an integer from 0 to 999, or a problem occurs twice.
"""

import argparse
from pathlib import Path

from verl_ext.datasets.problems import BUILT_IN, clean_problems, read_problems, write_problems
from verl_ext.datasets.rows import DataError
from verl_ext.datasets.text import PROMPTS

FOLDER = Path(__file__).resolve().parent


def prepare(source: str, name: str, out: Path, *, split: str = "train", protocol: str = "code") -> None:
    """Write one year; the data source is `name`.

    Raises:
        DataError: a problem occurs twice or cannot be used, or an answer is not one that AIME allows.
    """
    problems, report = clean_problems(read_problems(source, split=split), evaluation=None, integer_answers=True)
    print(report)
    if report.kept < report.rows:
        raise DataError(f"{source}: {report.rows - report.kept} of {report.rows} rows are unusable or duplicates.")
    for problem in problems:
        if not 0 <= int(problem.answer) <= 999:
            raise DataError(f"{source}, {problem.id}: the answer is {problem.answer}; AIME's are from 0 to 999.")
    write_problems(problems, out, data_source=name, split="test", protocol=protocol)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input", help="parquet or JSONL file, or hub data set, instead of the built-in problems")
    parser.add_argument("--split", default="train", help="split of a hub data set (default: %(default)s)")
    parser.add_argument("--name", help="data source of the rows of --input, e.g. aime_2025")
    parser.add_argument("--out", type=Path, help="parquet file to write with --input, else the folder (default: data)")
    parser.add_argument(
        "--protocol", choices=PROMPTS, default="code", help="retool.protocol of the run (default: %(default)s)"
    )
    args = parser.parse_args()
    if args.input:
        if not args.name or not args.out:
            parser.error("--input needs --name and --out")
        prepare(args.input, args.name, args.out, split=args.split, protocol=args.protocol)
        return
    for path in sorted(BUILT_IN.glob("*.jsonl")):
        prepare(str(path), path.stem, (args.out or FOLDER) / f"{path.stem}.parquet", protocol=args.protocol)


if __name__ == "__main__":
    try:
        main()
    except DataError as error:
        raise SystemExit(str(error)) from None
