"""An agent with a plain OpenAI client against the built-in loop: both learn the quickstart's task from one SFT model.

    bash scripts/quickstart.sh   # once
    python -m scripts.studies.agents [--out outputs/agents]

Trains docs/own_agent/code_agent.py through the gateway, and the built-in loop, with the same settings and the same
number of responses. Prints the accuracy on held-out problems before and after, with 95% intervals over problems, the
rows of an episode, and what a step takes. A run that is there is not made again; twelve minutes on two cores.
"""

import sys
from pathlib import Path

from scripts.studies.domains import launch
from scripts.studies.shared import REPO, command_line, markdown, metrics_of
from verl_ext.evaluation.figures import evaluate, format_estimate
from verl_ext.evaluation.samples import read_samples
from verl_ext.runs.folder import path_of
from verl_ext.sandbox.launch import running_server

STEPS, SOURCE = 12, "tiny_tools"
RUNS = {"built-in loop": [], "openai client": ["retool.agent.run=docs/own_agent/code_agent.py:solve"]}


def main() -> int:
    parser = command_line(__spec__, __doc__)
    parser.add_argument("--out", type=Path, default=REPO / "outputs" / "agents", help="default: outputs/agents")
    parser.add_argument(
        "--quickstart",
        type=Path,
        default=REPO / "outputs" / "quickstart",
        help="folder of a quickstart, for its data and SFT model (default: outputs/quickstart)",
    )
    args = parser.parse_args()
    out, quickstart = args.out.resolve(), args.quickstart.resolve()
    model = quickstart / "sft" / "merged"
    if not (model / "config.json").exists():
        raise SystemExit(f"{model} has no model. Make it: bash scripts/quickstart.sh, or give --quickstart FOLDER.")
    rows = []
    with running_server(options=("--preload=",)) as sandbox:
        for name, overrides in RUNS.items():
            folder = out / name.replace(" ", "_")
            if not (folder / "done").exists():
                env = {"DATA_DIR": quickstart / "data", "MODEL_PATH": model, "SANDBOX_URL": sandbox}
                own = [f"trainer.total_training_steps={STEPS}", f"trainer.test_freq={STEPS}", "trainer.save_freq=-1"]
                own += [f"retool.{each}.enable=false" for each in ("validation_schedule", "light_validation")]
                own += ["trainer.val_before_train=true", *overrides]
                launch("dapo", own, env | {"OUTPUT_DIR": folder, "DOCTOR": "0"}, folder)
                (folder / "done").touch()
            rows.append([name, *figures(folder)])
    print(
        markdown(["who plays", "before RL", f"after {STEPS} steps", "problems", "rows of an episode", "a step"], rows)
    )
    return 0


def figures(folder: Path) -> list[str]:
    """Return what the table says of a run."""
    sides = [evaluate(read_samples(path_of(folder, "trajectories", step, validate=True))) for step in (0, STEPS)]
    metrics = metrics_of(folder)
    per_episode = metrics.curve("agent/rows")[1] or [1.0]
    seconds = sorted(metrics.curve("timing_s/step")[1])
    accuracies = [format_estimate(side[SOURCE].metrics["acc/mean@k"]) for side in sides]
    rows = f"{sum(per_episode) / len(per_episode):.2f}"
    return [*accuracies, str(sides[1][SOURCE].num_problems), rows, f"{seconds[len(seconds) // 2]:.1f} s"]


if __name__ == "__main__":
    sys.exit(main())
