"""Write the tiny tool task: SFT traces, RL prompts and three held-out evaluation sets, as parquet in verl's columns.

    python data/tiny_tools/prepare.py --out outputs/quickstart/data

Deterministic in `--seed`; no network. See `task.py` for the problems and `build_model.py` for tokenizer and model.
"""

import argparse
import random
from collections import Counter
from pathlib import Path

import pyarrow as pa
from task import TRACE_MIX, Problem, make_problem, make_trace, without_tool

from verl_ext.runs import parquet

EVALUATION_SPLITS = {"test": "tiny_tools", "ood_large": "tiny_tools_ood_large", "ood_chain": "tiny_tools_ood_chain"}


def sft_row(rng: random.Random, *, no_tool: bool = False) -> dict:
    """Make a row of the SFT set: `messages` with the roles user, assistant, interpreter, assistant, ..."""
    kind = rng.choices(list(TRACE_MIX), list(TRACE_MIX.values()))[0]
    trace = make_trace(make_problem(rng, split="train"), kind, rng)
    return {"messages": without_tool(trace) if no_tool else trace, "kind": kind}


def rl_row(problem: Problem, index: int, split: str, data_source: str) -> dict:
    """Make a row in verl's RL format."""
    return {
        "data_source": data_source,
        "prompt": [{"role": "user", "content": problem.question}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": problem.answer},
        "extra_info": {"index": index, "split": split, "key": problem.key},
    }


def distinct_problems(rng: random.Random, split: str, count: int) -> list[Problem]:
    """Make `count` different problems of a split."""
    problems: dict[str, Problem] = {}
    while len(problems) < count:
        problem = make_problem(rng, split=split)
        problems.setdefault(problem.key, problem)
    return list(problems.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the parquet files")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sft", type=int, default=48_000, help="SFT traces (default: %(default)s)")
    parser.add_argument("--rl", type=int, default=4_096, help="RL prompts (default: %(default)s)")
    parser.add_argument(
        "--test", type=int, default=256, help="held-out problems in distribution (default: %(default)s)"
    )
    parser.add_argument(
        "--ood", type=int, default=64, help="problems of each out-of-distribution set (default: %(default)s)"
    )
    parser.add_argument(
        "--no-tool", action="store_true", help="traces of the same problems without calls, with the calculation as text"
    )
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)

    rng = random.Random(args.seed)
    sizes = {"sft_train": args.sft, "sft_val": 512}
    tables = {name: [sft_row(rng, no_tool=args.no_tool) for _ in range(size)] for name, size in sizes.items()}
    tables["rl_train"] = [
        rl_row(problem, i, "train", "tiny_tools") for i, problem in enumerate(distinct_problems(rng, "train", args.rl))
    ]
    # The evaluation problems do not depend on the seed: runs with different seeds are compared on the same ones.
    fixed = random.Random(2504_11536)
    tables["eval"] = [
        rl_row(problem, i, split, data_source)
        for split, data_source in EVALUATION_SPLITS.items()
        for i, problem in enumerate(distinct_problems(fixed, split, args.test if split == "test" else args.ood))
    ]
    for name, rows in tables.items():
        path = args.out / f"{name}.parquet"
        parquet.write(path, pa.Table.from_pylist(rows))
        counts = Counter(row.get("kind") or row["data_source"] for row in rows)
        print(f"{path}: {len(rows)} rows ({', '.join(f'{k} {v}' for k, v in sorted(counts.items()))})")
    example = max(tables["sft_train"][:100], key=lambda row: len(row["messages"]))
    print("one trace:")
    for message in example["messages"]:
        print(f"  {message['role']:>11}: {message['content']}")


if __name__ == "__main__":
    main()
