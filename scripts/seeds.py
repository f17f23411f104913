"""Does the main job learn, and not by chance? The quickstart for several seeds, and a control with random rewards.

    .venv/bin/python scripts/seeds.py [--seeds 0 1 2] [--out outputs/seeds]

Each run is the quickstart in its own folder; the control repeats the RL of the first seed with rewards that carry no
information (drawn at the rate that SFT was right, `reward.reward_kwargs.random_reward_p`). Prints the table of
docs/results.md. Resumable: the same command goes on where it was broken off.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
HEADER = (
    "| run | in distribution: SFT | after RL | larger numbers: after RL | longer chains: after RL |\n"
    "|---|---|---|---|---|"
)


def run(out: Path, *arguments: str) -> dict:
    """Run the quickstart into `out`; returns its summary."""
    print(f"== {out}", flush=True)
    subprocess.run([sys.executable, "-m", "verl_ext.quickstart", "--out", str(out), *arguments], cwd=REPO, check=True)
    return json.loads((out / "summary.json").read_text())


def accuracy(summary: dict, when: str, source: str) -> str:
    """Mean accuracy with its 95% interval, as the report has it: `.32 [.28, .37]`."""
    figure = summary["evaluation"][when][source]["metrics"]["acc/mean@k"]
    value, low, high = (f"{figure[key]:.2f}".removeprefix("0") for key in ("value", "low", "high"))
    return f"{value} [{low}, {high}]"


def row(name: str, summary: dict) -> str:
    """A line of the table under HEADER."""
    columns = [("before", "tiny_tools"), ("after", "tiny_tools")]
    columns += [("after", "tiny_tools_ood_large"), ("after", "tiny_tools_ood_chain")]
    return " | ".join([f"| {name}", *(accuracy(summary, *column) for column in columns)]) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=REPO / "outputs" / "seeds")
    args = parser.parse_args()

    summaries = {f"seed {seed}": run(args.out / f"seed_{seed}", "--seed", str(seed)) for seed in args.seeds}
    first = f"seed {args.seeds[0]}"
    rate = summaries[first]["evaluation"]["before"]["tiny_tools"]["metrics"]["acc/mean@k"]["value"]
    summaries["control: random rewards"] = run(  # the same data and SFT
        args.out / "control",
        *("--from", str(args.out / f"seed_{args.seeds[0]}"), "--seed", str(args.seeds[0])),
        *("--rl", f"+reward.reward_kwargs.random_reward_p={rate:.3f}"),
    )

    print(f"\n{HEADER}")
    for name, summary in summaries.items():
        print(row(name, summary))


if __name__ == "__main__":
    main()
