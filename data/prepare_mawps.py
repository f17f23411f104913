r"""Prepare MAWPS (Koncel-Kedziorski et al., 2016) as SFT traces, RL problems and a test, from a fold's two CSV files.

    python data/prepare_mawps.py --input cv_mawps/fold0 --out outputs/mawps

The files are in data/cv_mawps of github.com/arkilpatel/SVAMP. They are not in this repository, because MAWPS itself
(github.com/sroy9/mawps) names no licence, although SVAMP's repository is under MIT. Equations become programs, which
are run and must give the answer. This trains on them with 16 traces a step; the run's default of 8 steps would see 128:

    DATA_DIR=outputs/mawps OUTPUT_DIR=outputs/mawps/sft \
        bash recipe/retool/run_smollm2_sft.sh trainer.total_training_steps=37
"""

import argparse
import csv
import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from arithmetic import plain
from worked import Worked, as_fraction, keep_worked, problem_of, split_apart, write_task

from verl_ext.datasets.problems import Report
from verl_ext.datasets.rows import DataError

COLUMNS = ("Question", "Numbers", "Equation", "Answer")


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


def read_fold(folder: Path) -> tuple[list[Worked], list[Worked]]:
    """Return the problems of train.csv and of dev.csv whose equation gives the answer, and print what was left out.

    Raises:
        DataError: a file is missing or lacks a column.
    """
    parts = []
    for name in ("train.csv", "dev.csv"):
        report = Report()
        parts.append(list(keep_worked(read_file(folder / name), report, exact=False)))
        report.distinct = len({worked.text for worked in parts[-1]})
        print(f"{folder / name}: {report}")
    return parts[0], parts[1]


def read_file(path: Path) -> Iterator[tuple[str, str, str, str]]:
    """Yield (text, program, answer, id) of each row, which has a question with `number0`, `number1`, ... for its
    numbers, and its equation in prefix form over them.

    Raises:
        DataError: the file is missing or lacks a column.
    """
    if not path.is_file():
        raise DataError(
            f"{path} does not exist. MAWPS is not in this repository. Download train.csv and dev.csv of a fold from "
            "github.com/arkilpatel/SVAMP, data/cv_mawps/fold0, and name their folder."
        )
    with open(path, encoding="utf-8", newline="") as file:
        for number, row in enumerate(csv.DictReader(file)):
            if missing := [column for column in COLUMNS if not row.get(column)]:
                raise DataError(f"{path}, row {number}: no {', '.join(missing)}; expected {', '.join(COLUMNS)}.")
            try:
                numbers = [plain(float(as_fraction(value))) for value in row["Numbers"].split()]
                text = re.sub(r"number(\d+)", lambda name, given=numbers: given[int(name[1])], row["Question"])
                program = f"print({infix(row['Equation'].split(), numbers)})"
            except (ValueError, ZeroDivisionError, IndexError, DataError) as error:
                raise DataError(
                    f"{path}, row {number}: {error}. Expected numbers, and a question and an equation over them, got "
                    f"Numbers={row['Numbers']!r}, Question={row['Question']!r}."
                ) from None
            yield tidy(text), program, row["Answer"], f"{path.stem}-{number}"


def infix(prefix: Sequence[str], numbers: Sequence[str]) -> str:
    """Return an equation in infix form: `- number0 * number1 2.0` with numbers 9 and 3 gives `9 - (3 * 2)`.

    Raises:
        DataError: the words are not an expression.
    """
    words = iter(prefix)

    def read(outermost: bool) -> str:
        word = next(words)
        if word in ("+", "-", "*", "/"):
            left, right = read(False), read(False)
            return f"{left} {word} {right}" if outermost else f"({left} {word} {right})"
        return numbers[int(word.removeprefix("number"))] if word.startswith("number") else plain(float(word))

    try:
        text = read(True)
    except (StopIteration, IndexError, ValueError):
        raise DataError(f"not an equation in prefix form: {' '.join(prefix)!r} over {len(numbers)} numbers.") from None
    if rest := list(words):
        raise DataError(f"not an equation in prefix form: {' '.join(prefix)!r} is followed by {' '.join(rest)!r}.")
    return text


def tidy(question: str) -> str:
    """Undo the tokenisation of MAWPS: remove spaces in front of punctuation, and begin sentences with capitals."""
    text = re.sub(r"\s+([.,?!])", r"\1", " ".join(question.split()))
    return re.sub(r"(^|[.?!] )([a-z])", lambda found: found[1] + found[2].upper(), text)


def split_fold(folder: Path, *, seed: int, sft: int, rl: int | None, test: int | None) -> list[list[Worked]]:
    """Return test, SFT and RL problems of a fold, without overlap, and print what was left out.

    dev.csv is the test. Of train.csv, shuffled, the first `sft` are for SFT and the others for RL, except those that
    are in an earlier set (`split_apart`).

    Raises:
        DataError: see `read_fold`; or fewer than `sft` are left.
    """
    train, dev = read_fold(folder)
    random.Random(seed).shuffle(train)
    (held_out, others), report = split_apart(dev, train)
    if len(others) < sft:
        raise DataError(
            f"{folder}: {len(others)} problems are left for training; expected at least {sft}. Ask for fewer."
        )
    print(f"without the problems of the test: {report}")
    (first, rest), report = split_apart(others[:sft], others[sft:])
    print(f"RL, without the problems of SFT: {report}")
    return [held_out[:test], first, rest[:rl]]


if __name__ == "__main__":
    try:
        main()
    except DataError as error:
        raise SystemExit(str(error)) from None
