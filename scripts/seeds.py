"""Does the main job learn, and not by chance? The quickstart for several seeds, and runs to compare with.

    .venv/bin/python scripts/seeds.py [--model tiny] [--seeds 0 1 2] [--out outputs/seeds]

Each run is the quickstart in its own folder. The control repeats the RL of the first seed with rewards that carry no
information (drawn at the rate that SFT was right, `reward.reward_kwargs.random_reward_p`). The small model also learns
the task without Python (`data/small/prepare.py --no-tool`), with the first seed. Prints the table of docs/results.md,
or of docs/small.md. Resumable: the same command goes on where it was broken off.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
# Title of a column, whose figure: before or after RL, and on which data source. The first is what SFT reached.
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


def quickstart(out: Path, *arguments: str) -> None:
    """Run the quickstart into `out`, or what of it is not there yet. Raises CalledProcessError where it fails."""
    print(f"== {out}", flush=True)
    subprocess.run([sys.executable, "-m", "verl_ext.quickstart", "--out", str(out), *arguments], cwd=REPO, check=True)


def summary_of(out: Path) -> dict:
    """What the quickstart's report says of a whole run."""
    return json.loads((out / "summary.json").read_text())


def run(out: Path, *arguments: str) -> dict:
    """Run the quickstart into `out`; returns its summary."""
    quickstart(out, *arguments)
    return summary_of(out)


def estimate(summary: dict, when: str, source: str) -> dict[str, float]:
    """Mean accuracy on a data source, as the report has it."""
    return summary["evaluation"][when][source]["metrics"]["acc/mean@k"]


def accuracy(summary: dict, when: str, source: str) -> str:
    """Mean accuracy with its 95% interval: `.32 [.28, .37]`."""
    figure = estimate(summary, when, source)
    value, low, high = (f"{figure[key]:.2f}".removeprefix("0") for key in ("value", "low", "high"))
    return f"{value} [{low}, {high}]"


def table(model: str, summaries: dict[str, dict]) -> str:
    """A row per run, a column per figure of COLUMNS, in Markdown."""
    columns = COLUMNS[model]
    lines = [" | ".join(["| run", *(title for title, _, _ in columns)]) + " |", "|---" * (len(columns) + 1) + "|"]
    for name, summary in summaries.items():
        lines.append(" | ".join([f"| {name}", *(accuracy(summary, *column[1:]) for column in columns)]) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=COLUMNS, default="tiny", help="as the quickstart's (default: tiny)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, help="default: outputs/seeds, with --model small: outputs/seeds_small")
    args = parser.parse_args()
    out = args.out or REPO / "outputs" / ("seeds" if args.model == "tiny" else f"seeds_{args.model}")
    model = ("--model", args.model)

    summaries = {f"seed {seed}": run(out / f"seed_{seed}", *model, "--seed", str(seed)) for seed in args.seeds}
    first = args.seeds[0]
    _, *figure = COLUMNS[args.model][0]
    rate = estimate(summaries[f"seed {first}"], *figure)["value"]
    summaries["control: random rewards"] = run(  # the same data and SFT
        out / "control",
        *("--from", str(out / f"seed_{first}"), "--seed", str(first)),
        *("--rl", f"+reward.reward_kwargs.random_reward_p={rate:.3f}"),
    )
    if args.model == "small":
        summaries["without Python"] = run(out / "no_tool", *model, "--seed", str(first), "--data=--no-tool")
    print(f"\n{table(args.model, summaries)}")


if __name__ == "__main__":
    main()
