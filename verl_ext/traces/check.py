"""Check traces, whoever made them, and write those that SFT may learn from.

    retool traces check traces.parquet --config tiny_dapo --out kept.parquet
    retool traces check JoeYing/ReTool-SFT --model Qwen2.5-7B-Instruct --without-gold --out kept.parquet

A trace is kept if the run of --config could have written it: it parses and renders to itself, its answer is right, its
programs say what it has stored, and the model's context holds it. OUT.parquet has the kept traces, OUT.left_out.jsonl
each other one with its reason, and OUT.html shows both.
"""

import argparse
import asyncio
import json
import os
from collections.abc import Awaitable, Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_ext.datasets.problems import evaluation_problems
from verl_ext.datasets.rows import progress_bar
from verl_ext.evaluation.checkpoint import settings_of
from verl_ext.evaluation.defaults import choose
from verl_ext.evaluation.settings import ConfigError, load_config
from verl_ext.runs.folder import FOLDER, SETTINGS
from verl_ext.runs.machine import environment
from verl_ext.runs.workers import run_together
from verl_ext.sandbox.launch import running_server
from verl_ext.traces.select import CHOICES, Selection, disagreements, select
from verl_ext.traces.sources import read_traces
from verl_ext.traces.trace import Reason, Trace, Unread

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from verl_ext.traces.gate import Gate, Rules
    from verl_ext.traces.output import Spool

Found = Iterator[Trace | Unread]
Finish = Callable[["Gate", Any], Awaitable[Trace]]  # takes the kind of trace that it is made for
GIVE_UP_AFTER = 16  # traces in a row with programs that could not be run


class CannotCheck(RuntimeError):
    """The programs of GIVE_UP_AFTER traces in a row could not be run, because sandbox or tool failed."""


def add_options(parser: argparse.ArgumentParser) -> None:
    what = "parquet or JSONL file, folder of these, hub data set, or folder of a run with records"
    parser.add_argument("sources", nargs="+", metavar="SOURCE", help=what)
    parser.add_argument("--split", default="train", help="of a hub data set (default: train)")
    add_shared_options(parser)


def add_shared_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that all commands share whose traces pass the check."""
    add = parser.add_argument
    add("--out", type=Path, required=True, metavar="OUT.parquet", help="the kept traces, for SFT")
    add("--config", help="YAML of configs/, or a run's hydra/config.yaml (default: that of the run or of --model)")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="Hydra override of the config; repeatable")
    add("--model", type=Path, metavar="DIR", help="whose tokenizer, chat template and context must hold a trace")
    add("--max-tokens", type=int, metavar="N", help="of prompt and response (default: lengths of --config, or --model)")
    add("--evaluation", nargs="*", default=[], metavar="FILE", help="problems to exclude besides AIME 2024 and 2025")
    add("--min-calls", type=int, default=0, metavar="N", help="calls of tools that a trace must have (default: 0)")
    add("--without-gold", action="store_true", help="keep traces whose problem has no known answer")
    add("--computed", action="store_true", help="leave out traces whose programs only print literals")
    add("--agree", type=int, default=0, metavar="M", help="keep problems whose gold M samples reach; lists the others")
    add("--per-problem", type=int, metavar="K", help="keep at most K traces of a problem")
    add("--choose", choices=CHOICES, default=CHOICES[0], help="which K: shortest (default), random, or varied by code")
    add("--balance", action="store_true", help="keep as many traces of each source")
    add("--seed", type=int, default=0, help="of what is drawn (default: 0)")
    add("--sandbox-url", help="separate several by commas (default: $SANDBOX_URL, or a sandbox of this command)")
    add("--concurrency", type=int, default=64, metavar="N", help="traces at a time (default: 64)")
    parser.set_defaults(check_options=check_shared)


def check_shared(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """End the command if an option makes no sense."""
    if args.out.suffix != ".parquet":
        parser.error(f"--out is {args.out}: expected a name that ends in .parquet")
    for name in ("concurrency", "per_problem", "max_tokens"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(args, name)}: expected at least 1")


def run(args: argparse.Namespace) -> None:
    """Check the traces of files and runs; without --config by the settings of the first run. Raises as `check`."""
    runs = [Path(source) for source in args.sources if (Path(source) / FOLDER).is_dir()]

    def all_sources() -> Found:
        for source in args.sources:
            yield from read_traces(source, split=args.split)

    check(all_sources(), args, run=runs[0] if runs else None)


def check(traces: Found, args: argparse.Namespace, run: Path | None = None, *, finish: Finish | None = None) -> None:
    """Check traces, write the files next to `args.out`, and print the table.

    Args:
        run: the run that they are from, whose settings are used unless --config names others.
        finish: makes a trace of one that lacks something yet, in the gate's environment; raises LeftOut or NotRun.
    Raises:
        ValueError: an option, the settings or a row is wrong, or no trace is kept.
        CannotCheck: see there; nothing is written.
        SystemExit: some traces could not be checked; the others are written.
    """
    from verl_ext.evaluation.take import set_environment
    from verl_ext.traces.output import spooled

    name, config = chosen_config(args, run)
    set_environment()
    urls = args.sandbox_url or os.environ.get("SANDBOX_URL")
    sandbox = config.retool.sandbox
    sandbox.max_concurrency = max(sandbox.max_concurrency, args.concurrency)
    with nullcontext(urls) if urls else running_server(workers=os.cpu_count() or 1) as urls, spooled(args.out) as spool:
        sandbox.urls = urls.split(",")
        rules, tokenizer = make_rules(args, config)
        asyncio.run(_check_all(traces, config, rules, tokenizer, spool, args.concurrency, finish))
        select(spool, Selection(args.per_problem, args.choose, args.agree, args.balance, args.seed))
        _write(spool, args, name)


def chosen_config(args: argparse.Namespace, run: Path | None) -> tuple[str, "DictConfig"]:
    """Return the name of the settings, and the composed config."""
    if args.config:
        return args.config, load_config(args.config, args.set)
    if run is not None and (run / SETTINGS).is_file():  # an evaluation
        made = json.loads((run / SETTINGS).read_text())
        name, overrides = made["config"], made["overrides"]
    elif run is not None:
        name, overrides = settings_of(run)
    elif args.model is not None:
        name, overrides, _ = choose(args.model, args.set, in_process=False)
    else:
        raise ConfigError("Give --config, the RL run whose protocol, environment and verifiers count, or --model.")
    return name, load_config(name, [*overrides, *args.set])


def make_rules(args: argparse.Namespace, config: "DictConfig") -> tuple["Rules", Any]:
    """Return what a trace must be, and the tokenizer of --model, or None."""
    from verl_ext.memory.shape import read_positions
    from verl_ext.rollout.standalone import load_tokenizer
    from verl_ext.traces.gate import Rules

    tokenizer, most = None, args.max_tokens
    if args.model is not None:
        of_model = config.actor_rollout_ref.model
        tokenizer = load_tokenizer(args.model, trust_remote_code=of_model.get("trust_remote_code", False))
        if of_model.get("custom_chat_template"):
            tokenizer.chat_template = of_model.custom_chat_template
        lengths = config.data.max_prompt_length + config.data.max_response_length
        most = most or min(lengths, read_positions(str(args.model)) or lengths)
    elif most:
        raise ValueError("--max-tokens needs the tokenizer of --model.")
    evaluation = evaluation_problems(args.evaluation)
    return Rules(args.min_calls, not args.without_gold, args.computed, most, evaluation), tokenizer


async def _check_all(
    traces: Found,
    config: "DictConfig",
    rules: "Rules",
    tokenizer: Any,
    spool: "Spool",
    concurrency: int,
    finish: Finish | None,
) -> None:
    from verl_ext.environments.shared_client import shared_client
    from verl_ext.traces.gate import Gate

    numbered = enumerate(traces)
    counts = {"passed": 0, "left out": 0}  # of those that pass, `select` leaves out more
    in_a_row: list[str] = []
    gate = Gate(config, rules, tokenizer)
    with progress_bar(desc="check", unit=" traces") as progress:

        async def work() -> None:
            for number, found in numbered:
                is_left = await _check_one(gate, number, found, spool, in_a_row, finish)
                counts["left out" if is_left else "passed"] += 1
                progress.set_postfix(counts, refresh=False)
                progress.update()

        try:
            await run_together(work, concurrency)
        finally:
            await shared_client(config.retool.sandbox).aclose()


async def _check_one(
    gate: "Gate", number: int, found: Any, spool: "Spool", in_a_row: list[str], finish: Finish | None
) -> bool:
    """Check one trace, note it, and return whether it is left out."""
    if not isinstance(found, Trace):
        spool.leave_out(number, *found)
        return True
    checked = await gate.check(found, finish)
    spool.add(number, checked)
    if checked.has_run:
        in_a_row.clear()
    elif checked.is_down and checked.left:
        in_a_row.append(checked.left.detail)
        if len(in_a_row) >= GIVE_UP_AFTER:
            raise CannotCheck(f"The programs of the last {GIVE_UP_AFTER} traces could not be run: {in_a_row[-1]}")
    return checked.left is not None


def _write(spool: "Spool", args: argparse.Namespace, config: str) -> None:
    from verl_ext.traces.output import as_text, beside, table, write_kept, write_lines
    from verl_ext.traces.page import write_page

    counts = spool.counts()
    options = {name: value for name, value in vars(args).items() if name not in ("sandbox_url", "check_options")}
    notes = {"options": options, "config": config, "counts": counts, "environment": environment()}
    write_lines(spool.left_out(), beside(args.out, "left_out.jsonl"))
    if args.agree:
        write_lines(disagreements(spool), beside(args.out, "disagree.jsonl"))
    rows = table(counts)
    write_page(spool, rows, beside(args.out, "html"), notes)
    print(as_text(rows))
    if not counts:
        raise ValueError(f"There is no trace in {' '.join(getattr(args, 'sources', [])) or 'the source'}.")
    if not any(each["kept"] for each in counts.values()):
        raise ValueError(f"No trace is kept. {beside(args.out, 'left_out.jsonl')} says why.")
    write_kept(spool.kept(), args.out, notes)
    print(args.out)
    if missing := sum(each[Reason.NOT_CHECKED] for each in counts.values()):
        raise SystemExit(f"traces: {missing} could not be checked; the same command tries them again")
