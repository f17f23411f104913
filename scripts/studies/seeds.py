"""Check that the quickstart learns, and not by chance: run it with several seeds, and with controls.

    python -m scripts.studies.seeds [--model tiny] [--seeds 0 1 2] [--out outputs/seeds] [--results FILE]

Each run is the quickstart in its own folder. The control repeats the RL of the first seed with random rewards, drawn at
the rate at which SFT was right (`reward.reward_kwargs.random_reward_p`). With --model small, the first seed also learns
the task without Python (`+tool=none`). Prints a table; docs/evidence/small-models.md has it. The
same command continues an interrupted one. A finished run is a line of FILE and is not repeated, so that another machine
can continue with FILE.
"""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts.studies.shared import REPO, Published, command_line, markdown, obey_signals, quickstart
from verl_ext.quickstart.rungs import RUNGS
from verl_ext.runs.metrics import read_metrics

# Title of a column, and its figure: before or after RL, and on which data source. The first is what SFT reached.
COLUMNS = {
    "tiny": [
        ("in distribution: SFT", "before", "tiny_tools"),
        ("after RL", "after", "tiny_tools"),
        ("larger numbers: after RL", "after", "tiny_tools_ood_large"),
        ("longer chains: after RL", "after", "tiny_tools_ood_chain"),
    ],
    "small": [
        ("word problems: SFT", "before", "word_problems"),
        ("after RL", "after", "word_problems"),
        ("SVAMP: SFT", "before", "svamp_ood"),
        ("after RL", "after", "svamp_ood"),
    ],
}
CONTROL, NO_TOOL = "control: random rewards", "without Python"
CURVES = (
    "train/acc",
    "tool/error_rate",
    "actor/entropy_loss",
    "response_length/mean",
    "filter_groups/filled_with_equal",
)


def summary_of(out: Path) -> dict:
    """Read what the quickstart's report says of a whole run."""
    return json.loads((out / "summary.json").read_text())


def figures_of(out: Path) -> dict[str, Any]:
    """Return what is published of a whole run: its evaluations, and CURVES, each as steps and values."""
    metrics = read_metrics(list((out / "rl").glob("metrics-*.jsonl")))
    curves = {key: metrics.curve(key) for key in CURVES}
    rounded = {key: [steps, [float(f"{value:.4g}") for value in values]] for key, (steps, values) in curves.items()}
    return {"evaluation": summary_of(out)["evaluation"], "curves": rounded}


def estimate(result: Mapping, when: str, source: str) -> dict[str, float]:
    """Return mean accuracy on a data source, as in the report."""
    return result["evaluation"][when][source]["metrics"]["acc/mean@k"]


def accuracy(result: Mapping, when: str, source: str) -> str:
    """Format mean accuracy with its 95% interval: `.32 [.28, .37]`."""
    figure = estimate(result, when, source)
    value, low, high = (f"{figure[key]:.2f}".removeprefix("0") for key in ("value", "low", "high"))
    return f"{value} [{low}, {high}]"


def table(model: str, results: Mapping[str, Mapping]) -> str:
    """Format a row per run, with a column per figure of COLUMNS, in Markdown."""
    titles, *figures = zip(*COLUMNS[model], strict=True)
    rows = [
        [name, *(accuracy(result, *each) for each in zip(*figures, strict=True))] for name, result in results.items()
    ]
    return markdown(["run", *titles], rows)


def main(argv: Sequence[str] | None = None) -> None:
    parser = command_line(__spec__, __doc__)
    parser.add_argument("--model", choices=COLUMNS, default="tiny", help="as the quickstart's (default: tiny)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    where = "default: outputs/seeds, with --model small outputs/seeds_small. All checkpoints stay there; once FILE has "
    where += "the result of a run, you may delete its rl/global_step_*"
    parser.add_argument("--out", type=Path, help=where)
    parser.add_argument("--results", type=Path, help="default: results.jsonl in --out")
    args = parser.parse_args(argv)
    out = args.out or REPO / "outputs" / ("seeds" if args.model == "tiny" else f"seeds_{args.model}")
    results = Published(args.results or out / "results.jsonl")
    model = ("--model", args.model)

    def settings(seed: int) -> dict[str, Any]:
        # Results of another task belong to another table. Those without a task are the tiny one's.
        of_task = {} if args.model == "tiny" else {"task": RUNGS[args.model].task_digest()}
        if args.model != "tiny" and (path := os.environ.get("MODEL_PATH")):
            of_task["model_path"] = path
        return {"model": args.model, "seed": seed, **of_task}

    def has(name: str) -> bool:
        """Return whether a run made for only one seed has a result, whichever seed: it may be another machine's."""
        made_with = results.rows.get(name, {}).get("settings", {})
        return results.has(name, settings(made_with.get("seed", args.seeds[0])))

    def run(name: str, folder: Path, seed: int, *arguments: str) -> None:
        if not results.has(name, settings(seed)):
            quickstart(folder, *arguments, "--seed", str(seed))
            results.add(name, figures_of(folder), settings(seed))

    try:  # before hours of runs
        for seed in args.seeds:
            results.has(f"seed {seed}", settings(seed))
        made = {name for name in (CONTROL, NO_TOOL) if has(name)}
    except ValueError as error:
        parser.error(str(error))
    for seed in args.seeds:
        run(f"seed {seed}", out / f"seed_{seed}", seed, *model)
    first = args.seeds[0]
    if CONTROL not in made:
        _, *figure = COLUMNS[args.model][0]
        rate = estimate(results.rows[f"seed {first}"], *figure)["value"]
        source = out / f"seed_{first}"  # the same data and SFT, which may have been made on another machine
        stages = [word for stage in ("data", "sft", "merge") for word in ("--stage", stage)]
        quickstart(source, *model, "--seed", str(first), *stages)
        overrides = ("--rl", f"+reward.reward_kwargs.random_reward_p={rate:.3f}")
        run(CONTROL, out / "control", first, "--from", str(source), *overrides)
    if args.model == "small" and NO_TOOL not in made:
        without = ("--prepare=--no-tool", "--sft=+tool=none_sft", "--rl=+tool=none")
        run(NO_TOOL, out / "no_tool", first, *model, *without)
    print(f"\n{table(args.model, results.rows)}")


if __name__ == "__main__":
    obey_signals()
    main()
