"""A teacher solves problems in the agent loop of the run that will train: same protocol, tools and limits.

    # a model folder, by vLLM in this process; a checkpoint of a run; or any chat endpoint
    retool traces sample --model TEACHER --config qwen3-4b_dapo --data problems.parquet --n 4 --out samples
    retool traces sample --chat https://api.example.org/v1 --served-model NAME --api-key-env KEY \\
        --tokenizer STUDENT --config qwen3-4b_dapo --data problems.parquet --n 4 --concurrency 16 --out samples
    # then
    retool traces check samples --out traces.parquet

Samples are kept one by one, each when it ends; the same command continues after a kill, and asks nothing twice but what
was in flight. A budget begins no further sample once it is spent.
"""

import argparse
from pathlib import Path

from verl_ext.evaluation.meter import Meter
from verl_ext.evaluation.options import add_sampling, check_sampling
from verl_ext.evaluation.samples import find_samples, read_samples
from verl_ext.evaluation.take import take_samples


def add_options(parser: argparse.ArgumentParser) -> None:
    add_sampling(parser)
    parser.add_argument("--out", type=Path, metavar="DIR", required=True, help="folder for the samples")
    add = parser.add_argument_group("limits, which hold for all starts together").add_argument
    add("--budget-tokens", type=int, metavar="N", help="of prompts and responses, as an endpoint counts them")
    add("--budget-requests", type=int, metavar="N", help="a response takes one for each of its turns")
    what = "show the cost: price of a million tokens of prompt, and of response, in any currency"
    add("--price", type=float, nargs=2, metavar="X", help=what)
    parser.set_defaults(check_options=check_sampling)


def run(args: argparse.Namespace) -> None:
    """Take the samples that are missing, and say what came of all.

    Raises:
        SystemExit: a setting is wrong, the model or the sandbox is down, or samples are missing.
    """
    if not args.data:
        raise ValueError("Give --data FILE, the problems: parquet or JSONL in verl's columns.")
    meter = Meter(args.budget_tokens, args.budget_requests, tuple(args.price) if args.price else None)
    folder = take_samples(args, meter)
    samples = read_samples(find_samples(folder))
    judged = [sample for sample in samples if sample.failure is None]
    right = [sample for sample in judged if sample.acc == 1.0]
    problems = len({sample.problem_key() for sample in samples})
    solved = len({sample.problem_key() for sample in right})
    print(f"{folder}: {len(right):,} of {len(judged):,} samples are right; {solved:,} of {problems:,} problems solved")
    print(f"  {meter.summary()}")
    print(f"Next: retool traces check {folder} --out traces.parquet")
    if meter.is_spent:
        raise SystemExit("sample: the budget is spent; the same command with a larger one continues from here")
    if len(judged) < len(samples):
        raise SystemExit(
            f"sample: {len(samples) - len(judged):,} samples are not judged; the same command tries them again"
        )
