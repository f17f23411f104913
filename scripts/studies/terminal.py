"""What RL does to the tiny model on terminal tasks.

    python -m scripts.studies.terminal [--out outputs/terminal]
    python -m scripts.studies.terminal --mixed --out outputs/terminal_mixed   # with word problems and a repository

A fresh tiny model learns from solved easy tasks (data/prepare_terminal.py), then RL starts in boxes of the sandbox.
Prints the share of held-out tasks that pass before and after, with 95% intervals over tasks: of the kinds that it was
trained on, and of a kind that it never saw. What is there is not made again; half an hour on two cores.
"""

import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from scripts.studies.domains import launch, run, shares
from scripts.studies.shared import REPO, command_line, markdown
from verl_ext.evaluation.checkpoint import merge_command
from verl_ext.evaluation.figures import compare, evaluate, format_estimate
from verl_ext.evaluation.samples import read_samples
from verl_ext.protocols.base import CODE_SCHEMA
from verl_ext.runs import parquet
from verl_ext.runs.folder import path_of
from verl_ext.sandbox.launch import running_server

DATA = REPO / "data"
KINDS, HELD_OUT = ("files", "text", "logs"), "logs"  # of so few kinds the tiny model learns to write commands
TRACES, PROBLEMS, TESTS = 6000, 600, 200
SUM_TRACES = 3000
STEPS = 40  # of RL
RUN = ["retool.protocol=hermes", "retool.environment=terminal"]
DOMAINS = ("sums", "terminal", "repository")


def mixed_settings(data: Path) -> list[str]:
    """Return the settings of a run with three domains: word problems, terminal tasks, a repository."""
    domains = {
        "sums": "weight:2,environment:python",
        "terminal": "weight:2,environment:terminal",
        "repository": f"weight:1,environment:{{name:repository,folder:{data}/parse/repos}}",
        "terminal_held_out": "weight:0,environment:terminal",
    }
    return [RUN[0], *(f"+retool.domains.{name}={{{of}}}" for name, of in domains.items())]


def main() -> int:
    parser = command_line(__spec__, __doc__)
    parser.add_argument("--out", type=Path, default=REPO / "outputs" / "terminal", help="default: outputs/terminal")
    parser.add_argument("--sft-steps", type=int, default=1200, help="of 64 traces (default: %(default)s)")
    parser.add_argument("--mixed", action="store_true", help="with word problems, and changes of the package parse")
    args = parser.parse_args()
    out = args.out.resolve()
    data, model, sft = out / "data", out / "model", out / "sft"
    settings = mixed_settings(data) if args.mixed else RUN
    if not (data / "sft_train.parquet").exists():
        make_data(data, mixed=args.mixed)
    if not (model / "config.json").exists():
        build = ["--data", data, "--out", model, "--protocol", "hermes", "--positions", 1024]
        run([sys.executable, DATA / "own" / "build_model.py", *build])
    measured = data / "overrides.json"
    if not measured.exists():
        lengths = ["--data", data, "--model", model, "--rl", "tiny_dapo", "--sft", "tiny_sft"]
        run([sys.executable, DATA / "own" / "lengths.py", *lengths, *settings])
    own = json.loads(measured.read_text())
    if not (sft / "merged" / "config.json").exists():
        steps = [f"trainer.{name}={args.sft_steps}" for name in ("total_training_steps", "save_freq", "test_freq")]
        env = {"DATA_DIR": data, "MODEL_PATH": model, "OUTPUT_DIR": sft, "DOCTOR": "0"}
        launch("sft", ["data.retool.protocol=hermes", *own["sft"], *steps, "trainer.total_epochs=50"], env, sft)
        run(merge_command(sft / f"global_step_{args.sft_steps}", sft / "merged"))
    with running_server() as sandbox:
        rl(out / "rl", data, sft / "merged", sandbox, [*settings, *own["rl"]])
    print(passed(out / "rl"))
    if args.mixed:
        print(f"\n{shares(out / 'rl', DOMAINS)}")
    return 0


def make_data(data: Path, *, mixed: bool) -> None:
    """Write the tasks and their traces; `mixed` adds word problems (data/tiny_tools) and changes of a repository."""
    kinds = ["--easy", "--kinds", *KINDS, "--held-out", HELD_OUT]
    sizes = ["--sft", TRACES, "--rl", PROBLEMS, "--test", TESTS]
    own = data / "terminal" if mixed else data
    run([sys.executable, DATA / "prepare_terminal.py", "--out", own, *kinds, *sizes])
    if not mixed:
        return
    sums = data / "tiny"
    sizes = ["--sft", 2 * SUM_TRACES, "--rl", PROBLEMS, "--test", TESTS]  # half of the traces are sums
    run([sys.executable, DATA / "tiny_tools" / "prepare_domains.py", "--out", sums, *sizes])
    parse = data / "parse"
    run([sys.executable, DATA / "prepare_repository.py", "from-sdists", "parse", "--last", 8, "--out", parse])
    tasks = {"rl_train": [*rows(sums / "sums_train"), *rows(parse / "rl_train")], "eval": rows(sums / "sums_test")}
    for name, others in tasks.items():
        parquet.write(data / f"{name}.parquet", pa.Table.from_pylist([*rows(own / name), *others]))
    for name in ("sft_val", "sft_train"):
        texts = [row["messages"] for row in rows(sums / name) if row["kind"] == "sums"]
        traces = [{"messages": json.dumps(text), "tools": json.dumps([CODE_SCHEMA]), "id": None} for text in texts]
        both = [*rows(own / name), *traces]
        random.Random(0).shuffle(both)
        parquet.write(data / f"{name}.parquet", pa.Table.from_pylist(both))


def rows(path: Path) -> list[dict]:
    return pq.read_table(path.with_suffix(".parquet")).to_pylist()


def rl(folder: Path, data: Path, model: Path, sandbox: str, settings: Sequence[str]) -> None:
    """Train, and test before and after."""
    if (folder / "done").exists():
        return
    own = ["trainer.val_before_train=true", f"trainer.test_freq={STEPS}", "trainer.save_freq=10"]
    own += [f"retool.{name}.enable=false" for name in ("adaptive_n", "validation_schedule", "light_validation")]
    env = {"DATA_DIR": data, "MODEL_PATH": model, "SANDBOX_URL": sandbox, "OUTPUT_DIR": folder, "DOCTOR": "0"}
    files = [f"data.val_files=[{data}/eval.parquet]"]
    launch("dapo", [*settings, *own, *files, f"trainer.total_training_steps={STEPS}"], env, folder)
    (folder / "done").touch()


def passed(folder: Path) -> str:
    """Tabulate the share of test tasks that pass before and after RL, and the difference, paired by task."""
    samples = [list(read_samples(path_of(folder, "trajectories", step, validate=True))) for step in (0, STEPS)]
    sides, differences = [*map(evaluate, samples)], compare(*samples)
    lines = []
    for source in sides[0]:
        estimates = [side[source].metrics["acc/mean@k"] for side in sides]
        difference = format_estimate(differences[source].metrics["acc/mean@k"], sign=True)
        lines.append([source, *map(format_estimate, estimates), difference, str(sides[1][source].num_problems)])
    return markdown(["tasks", "before RL", f"after {STEPS} steps", "difference", "number"], lines)


if __name__ == "__main__":
    sys.exit(main())
