"""Your own problems by one command: the 135M model learns them, and its samples teach the tiny model.

    python -m scripts.studies.own_problems --input cv_mawps/fold0 [--out outputs/own]

Two sets of 500 problems: drawn from MAWPS, which `data/prepare_mawps.py` says where to get, and four sentences with
names and numbers drawn for each problem. First `quickstart.sh --data mawps.jsonl --model small`, as a user would type
it. The model that it ends with samples the training problems of both sets, `retool traces check` keeps what is right,
and `quickstart.sh --data SET.jsonl --traces SET.parquet` trains the tiny model. Prints accuracies on the held-out fifth
with 95% intervals over problems, and how long each command took. What is there is not made again; 80 minutes on two
cores.
"""

import csv
import json
import random
import re
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq

from scripts.studies.domains import run
from scripts.studies.shared import REPO, command_line, markdown
from verl_ext.evaluation.figures import evaluate, format_estimate
from verl_ext.evaluation.samples import find_samples, read_samples

PROBLEMS = 500
SAMPLES = {"mawps": 4, "sentences": 2}  # of each training problem
NAMES = "Ada Ben Cleo Dan Eva Finn Gita Hugo".split()
THINGS = "apples books cards coins eggs pens shells stamps".split()


def main() -> int:
    parser = command_line(__spec__, __doc__)
    parser.add_argument("--input", type=Path, required=True, help="folder of MAWPS's train.csv")
    parser.add_argument("--out", type=Path, default=REPO / "outputs" / "own", help="default: outputs/own")
    args = parser.parse_args()
    out = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    for name, problems in (("mawps", of_mawps(args.input / "train.csv")), ("sentences", of_sentences())):
        (out / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in problems))
    quickstart, small = ["bash", "scripts/quickstart.sh"], out / "small"
    minutes = timed([*quickstart, "--data", out / "mawps.jsonl", "--model", "small", "--out", small])
    rows = [["mawps", "135M", "-", *accuracies(small, "mawps"), minutes]]
    traces = [sys.executable, "-m", "verl_ext.traces"]
    for name, n in SAMPLES.items():
        problems, samples, kept, tiny = (out / f"{name}{end}" for end in (".jsonl", "-samples", ".parquet", "-tiny"))
        if not kept.exists():
            prepare = [sys.executable, "data/own/prepare.py", "--data", problems, "--out", out / f"{name}-data"]
            run(prepare)  # the tiny model's test problems are left out
            source = ["--model", small / "rl" / "merged", "--config", small / "rl" / "hydra" / "config.yaml"]
            source += ["--data", out / f"{name}-data" / "rl_train.parquet"]
            run([*traces, "sample", *source, "--n", n, "--out", samples])
            run([*traces, "check", samples, "--per-problem", n, "--out", kept])
        minutes = timed([*quickstart, "--data", problems, "--traces", kept, "--out", tiny])
        rows.append([name, "tiny", pq.read_metadata(kept).num_rows, *accuracies(tiny, name), minutes])
    print(markdown(["problems", "model", "sampled traces", "after SFT", "after RL", "minutes"], rows))
    return 0


def of_mawps(file: Path) -> list[dict[str, str]]:
    """Return PROBLEMS different problems with their answers, as a user would write them down."""
    found: dict[str, str] = {}
    with open(file, encoding="utf-8", newline="") as lines:
        for row in csv.DictReader(lines):
            numbers = [number.removesuffix(".0") for number in row["Numbers"].split()]
            text = re.sub(r"number(\d+)", lambda name, given=numbers: given[int(name[1])], row["Question"])
            found.setdefault(text, row["Answer"].removesuffix(".0"))
    rows = [{"problem": text, "answer": answer} for text, answer in found.items()]
    random.Random(0).shuffle(rows)
    return rows[:PROBLEMS]


def of_sentences() -> list[dict[str, str]]:
    """Return PROBLEMS different problems of four kinds."""
    rng, found = random.Random(0), dict[str, str]()
    while len(found) < PROBLEMS:
        name, things, a, b = rng.choice(NAMES), rng.choice(THINGS), rng.randint(11, 99), rng.randint(2, 10)
        text, answer = (
            (f"{name} has {a} {things} and buys {b} more. How many {things} does {name} have now?", a + b),
            (f"{name} had {a} {things} and gave {b} of them away. How many {things} are left?", a - b),
            (f"There are {a} boxes with {b} {things} in each box. How many {things} are there in all?", a * b),
            (f"{name} puts {a * b} {things} into boxes of {b}. How many boxes does {name} need?", a),
        )[rng.randrange(4)]
        found[text] = str(answer)
    return [{"problem": text, "answer": answer} for text, answer in found.items()]


def timed(command: list) -> str:
    started = time.perf_counter()
    run(command)
    return f"{(time.perf_counter() - started) / 60:.1f}"


def accuracies(folder: Path, name: str) -> list[str]:
    found = (evaluate(read_samples(find_samples(folder / "eval" / when)))[name] for when in ("before", "after"))
    return [format_estimate(of_set.metrics["acc/mean@k"]) for of_set in found]


if __name__ == "__main__":
    sys.exit(main())
