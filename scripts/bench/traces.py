"""Measure how many traces of the tiny task `retool traces check` checks a minute, and its memory.

    python -m scripts.bench.traces --traces 10000

Three in four of these traces have one or two programs, which run in a sandbox that the command starts; all have the
right answer. The CPU seconds of the command are its own; those of the sandbox are of all its processes. `without
programs` has only traces without a call.
"""

import random
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil
import pyarrow as pa

from scripts.studies.shared import command_line, cpu_seconds
from verl_ext.runs import parquet
from verl_ext.settings import REPO
from verl_ext.traces.__main__ import main as traces

EVERY_S = 0.2  # between two looks at the memory
KINDS = ("mental", "tool", "repair", "give_up")  # of task.TRACE_MIX, those that end with the right answer


def main(argv: Sequence[str] | None = None) -> None:
    parser = command_line(__spec__, __doc__)
    parser.add_argument("--traces", type=int, default=10_000, help="default: %(default)s")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        for name, kinds in {"warm-up": KINDS, "with programs": KINDS, "without programs": ("mental",)}.items():
            count = args.traces if name != "warm-up" else 100
            file = Path(folder) / f"{name}.parquet"
            write_traces(file, count, kinds)
            print(f"{name}: {measure(file, count)}", flush=True)


def write_traces(file: Path, count: int, kinds: Sequence[str]) -> None:
    """Write traces as data/tiny_tools/prepare.py makes them, as many of each kind, with the gold answer."""
    sys.path.insert(0, str(REPO / "data" / "tiny_tools"))
    from task import make_problem, make_trace

    rng, rows = random.Random(0), []
    for number in range(count):
        problem = make_problem(rng, split="train")
        messages = make_trace(problem, kinds[number % len(kinds)], rng)
        rows.append({"messages": messages, "answer": problem.answer, "source": "tiny"})
    parquet.write(file, pa.Table.from_pylist(rows))


def measure(file: Path, count: int) -> str:
    """Check a file, and say what it cost."""
    process, memory, cpu_s, over = psutil.Process(), list[float](), list[float](), threading.Event()

    def look() -> None:
        while not over.wait(EVERY_S):
            memory.append(process.memory_info().rss / 2**20)
            with suppress(psutil.NoSuchProcess):  # a program has ended since it was listed
                cpu_s.append(cpu_seconds(process))

    before, before_s, started = time.process_time(), cpu_seconds(process), time.monotonic()
    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        traces(["check", str(file), "--config", "tiny_dapo", "--out", f"{file}.kept.parquet"])
    finally:
        over.set()
        watcher.join()
    seconds, own = time.monotonic() - started, time.process_time() - before
    sandbox = max(cpu_s) - before_s - own
    quarters = [f"{memory[int(share * (len(memory) - 1))]:.0f}" for share in (0.25, 0.5, 0.75, 1)]
    return (
        f"{60 * count / seconds:,.0f} a minute ({seconds:.1f} s with the start of a sandbox), own CPU {own:.1f} s: "
        f"{60 * count / own:,.0f} a minute of one core, sandbox {sandbox:.1f} s; memory {', '.join(quarters)} MiB "
        "after each quarter"
    )


if __name__ == "__main__":
    main()
