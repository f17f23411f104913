"""Write terminal tasks of twelve kinds for the environment `terminal`: for RL, for tests, and solved ones for SFT.

    python data/prepare_terminal.py --out outputs/terminal/data
    python data/prepare_terminal.py --out outputs/terminal/data --sft 2000   # runs each solution in a box of a sandbox
    python data/prepare_terminal.py --out outputs/terminal/data --easy --sft 6000 --rl 600 --test 200

    retool: {protocol: hermes, environment: terminal}

A template (data/terminal/) draws names and numbers, so that it makes any number of tasks. Tests have other tasks than
training: `terminal` of the same templates, `terminal_held_out` of kinds that training never has. --easy has only the
templates that one short command solves. Deterministic in --seed, on which tests do not depend; no network.
"""

import argparse
import asyncio
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from itertools import islice
from pathlib import Path

import pyarrow as pa
from terminal.template import KINDS, Instance, Template, instances, load

from verl_ext.runs import parquet
from verl_ext.sandbox.launch import running_server
from verl_ext.tasks import harbor
from verl_ext.tasks.task import row

SOURCE, HELD_OUT = "terminal", "terminal_held_out"
TOOLS = ["bash", "submit"]  # of --easy, for a model for which `edit` would be one tool too many
VALIDATION_SHARE, MOST_VALIDATION = 0.05, 64  # of the traces


def draw(templates: Sequence[Template], counts: Sequence[int], seed: int, *, test: bool) -> list[list[Instance]]:
    """Return as many instances as `counts` say, all different, equally many of each template; each list is shuffled.

    Raises:
        ValueError: a template has too few.
    """
    lists: list[list[Instance]] = [[] for _ in counts]
    for number, template in enumerate(random.Random(seed).sample(templates, len(templates))):
        own: Iterator[Instance] = (one for one in instances(template, seed) if one.is_test == test)
        for found, count in zip(lists, counts, strict=True):
            found += islice(own, count // len(templates) + (number < count % len(templates)))
    for number, found in enumerate(lists):
        random.Random(f"{seed}/{number}").shuffle(found)
    return lists


def rl_rows(found: Sequence[Instance], source: str, split: str, easy: bool) -> list[dict]:
    """Return instances as rows in verl's RL columns."""
    return [
        row(
            one.task(),
            source=source,
            index=index,
            split=split,
            gold_calls=one.calls(),
            kind=one.template.kind,
            template=one.template.name,
            difficulty=one.template.difficulty,
            **({"tool_selection": TOOLS} if easy else {}),
        )
        for index, one in enumerate(found)
    ]


def write(path: Path, rows: list[dict], schema: pa.Schema | None = None) -> None:
    count = parquet.write(path, pa.Table.from_pylist(rows, schema))
    print(f"{path}: {count:,} rows")


def write_traces(out: Path, found: Sequence[Instance], url: str, easy: bool) -> None:
    """Run the solutions of instances in boxes of a sandbox, and write the traces of those that score 1.

    Raises:
        SystemExit: most fail.
    """
    from terminal.traces import SCHEMA, run_all  # which imports Ray, for several seconds

    rows = rl_rows(found, SOURCE, "train", easy)
    traces, failed = asyncio.run(run_all(rows, url))
    for name, why in failed[:5]:
        print(f"  left out: {name}: {why}")
    if len(failed) > len(traces):
        raise SystemExit(f"{len(failed)} of {len(found)} solutions did not score 1; see above. Is the sandbox well?")
    count = min(MOST_VALIDATION, max(1, round(VALIDATION_SHARE * len(traces))))
    write(out / "sft_val.parquet", traces[:count], SCHEMA)
    write(out / "sft_train.parquet", traces[count:], SCHEMA)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the parquet files")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rl", type=int, default=1200, help="tasks for RL (default: %(default)s)")
    parser.add_argument("--test", type=int, default=240, help="tasks of each source of tests (default: %(default)s)")
    parser.add_argument(
        "--sft", type=int, default=0, help="traces for SFT, for which a sandbox is needed (default: none)"
    )
    parser.add_argument(
        "--held-out", nargs="*", choices=KINDS, default=["sqlite", "schedules"], metavar="KIND",
        help="kinds that only tests have (default: sqlite schedules)",
    )  # fmt: skip
    parser.add_argument(
        "--kinds",
        nargs="+",
        choices=KINDS,
        metavar="KIND",
        help=f"only these kinds, held-out ones among them: {' '.join(KINDS)}",
    )
    parser.add_argument("--easy", action="store_true", help="only tasks that one short command solves")
    parser.add_argument("--harbor", type=Path, metavar="FOLDER", help="write the tasks as folders of Harbor, too")
    parser.add_argument("--sandbox", metavar="URL", help="of a running sandbox (default: start one for the traces)")
    args = parser.parse_args()

    templates = [
        template
        for template in load()
        if (not args.easy or template.difficulty == "easy") and (not args.kinds or template.kind in args.kinds)
    ]
    known = [template for template in templates if template.kind not in args.held_out]
    others = [template for template in templates if template.kind in args.held_out]
    if not known:
        raise SystemExit("--held-out leaves no kind for training.")
    try:
        sft, rl = draw(known, (args.sft, args.rl), args.seed, test=False)
        (test,) = draw(known, (args.test,), 0, test=True)
        (held_out,) = draw(others, (args.test,), 0, test=True) if others else ([],)
    except ValueError as error:
        raise SystemExit(str(error)) from None
    write(args.out / "rl_train.parquet", rl_rows(rl, SOURCE, "train", args.easy))
    tests = rl_rows(test, SOURCE, "test", args.easy) + rl_rows(held_out, HELD_OUT, "test", args.easy)
    write(
        args.out / "eval.parquet",
        [one | {"extra_info": one["extra_info"] | {"index": n}} for n, one in enumerate(tests)],
    )
    counts = Counter((one.template.kind, one.template.difficulty) for one in rl + test + held_out)
    for kind in dict.fromkeys(template.kind for template in templates):
        told = ", ".join(
            f"{counts[kind, level]} {level}" for level in ("easy", "medium", "hard") if counts[kind, level]
        )
        print(f"  {kind:12} {told}{' (held out)' if kind in args.held_out else ''}")
    print(f"  such as: {rl[0].instruction}\n    {rl[0].made.steps}")
    if args.harbor:
        for one in rl + test + held_out:
            task = one.task()
            harbor.write(task, args.harbor / task.name)
        print(f"{args.harbor}: {len(rl + test + held_out):,} folders")
    if args.sft:
        with nullcontext(args.sandbox) if args.sandbox else running_server() as url:
            write_traces(args.out, sft, url, args.easy)


if __name__ == "__main__":
    main()
