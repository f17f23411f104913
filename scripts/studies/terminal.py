"""What RL does to the tiny model on terminal tasks.

    python -m scripts.studies.terminal [--out outputs/terminal]

A fresh tiny model learns from solved easy tasks (data/prepare_terminal.py), then RL starts in boxes of the sandbox.
Prints the share of held-out tasks that pass before and after, with 95% intervals over tasks: of the kinds that it was
trained on, and of a kind that it never saw. What is there is not made again.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from scripts.studies.domains import launch, run
from scripts.studies.shared import REPO, command_line, markdown
from verl_ext.evaluation.checkpoint import merge_command
from verl_ext.evaluation.figures import evaluate, format_estimate
from verl_ext.evaluation.samples import read_samples
from verl_ext.runs.folder import path_of
from verl_ext.sandbox.launch import running_server

DATA = REPO / "data"
KINDS, HELD_OUT = ("files", "text", "logs"), "logs"  # of so few kinds the tiny model learns to write commands
TRACES, PROBLEMS, TESTS = 6000, 600, 200
STEPS = 40  # of RL
RUN = ["retool.protocol=hermes", "retool.environment=terminal"]


def main() -> int:
    parser = command_line(__spec__, __doc__)
    parser.add_argument("--out", type=Path, default=REPO / "outputs" / "terminal", help="default: outputs/terminal")
    parser.add_argument("--sft-steps", type=int, default=300, help="of 64 traces (default: %(default)s)")
    args = parser.parse_args()
    out = args.out.resolve()
    data, model, sft = out / "data", out / "model", out / "sft"
    if not (data / "sft_train.parquet").exists():
        kinds = ["--easy", "--kinds", *KINDS, "--held-out", HELD_OUT]
        sizes = ["--sft", TRACES, "--rl", PROBLEMS, "--test", TESTS]
        run([sys.executable, DATA / "prepare_terminal.py", "--out", data, *kinds, *sizes])
    if not (model / "config.json").exists():
        build = ["--data", data, "--out", model, "--protocol", "hermes", "--positions", 1024]
        run([sys.executable, DATA / "own" / "build_model.py", *build])
    measured = data / "overrides.json"
    if not measured.exists():
        lengths = ["--data", data, "--model", model, "--rl", "tiny_dapo", "--sft", "tiny_sft"]
        run([sys.executable, DATA / "own" / "lengths.py", *lengths, *RUN])
    settings = json.loads(measured.read_text())
    if not (sft / "merged" / "config.json").exists():
        steps = [f"trainer.{name}={args.sft_steps}" for name in ("total_training_steps", "save_freq", "test_freq")]
        env = {"DATA_DIR": data, "MODEL_PATH": model, "OUTPUT_DIR": sft, "DOCTOR": "0"}
        launch("sft", ["data.retool.protocol=hermes", *settings["sft"], *steps, "trainer.total_epochs=50"], env, sft)
        run(merge_command(sft / f"global_step_{args.sft_steps}", sft / "merged"))
    with running_server() as sandbox:
        rl(out / "rl", data, sft / "merged", sandbox, settings["rl"])
    print(passed(out / "rl"))
    return 0


def rl(folder: Path, data: Path, model: Path, sandbox: str, settings: Sequence[str]) -> None:
    """Train on the terminal tasks, and test before and after."""
    if (folder / "done").exists():
        return
    own = ["trainer.val_before_train=true", f"trainer.test_freq={STEPS}", "trainer.save_freq=10"]
    own += [f"retool.{name}.enable=false" for name in ("adaptive_n", "validation_schedule", "light_validation")]
    env = {"DATA_DIR": data, "MODEL_PATH": model, "SANDBOX_URL": sandbox, "OUTPUT_DIR": folder, "DOCTOR": "0"}
    files = [f"data.val_files=[{data}/eval.parquet]"]
    launch("dapo", [*RUN, *settings, *own, *files, f"trainer.total_training_steps={STEPS}"], env, folder)
    (folder / "done").touch()


def passed(folder: Path) -> str:
    """Tabulate the share of test tasks that pass before and after RL."""
    sides = [evaluate(read_samples(path_of(folder, "trajectories", step, validate=True))) for step in (0, STEPS)]
    rows = []
    for source in sides[0]:
        figures = [format_estimate(side[source].metrics["acc/mean@k"]) for side in sides]
        rows.append([source, *figures, str(sides[1][source].num_problems)])
    return markdown(["tasks", "before RL", f"after {STEPS} steps", "number"], rows)


if __name__ == "__main__":
    sys.exit(main())
