"""Stress a dedicated sandbox server with many clients at once, and with many requests one after the other.

    python -m scripts.bench.stress_sandbox load [--clients 64] [--seconds 120]
    python -m scripts.bench.stress_sandbox soak [--requests 20000]
    python -m scripts.bench.stress_sandbox burst [--requests 45000]

load: every client sends `print` programs, each with its own nonce, one after the other: no answer may be lost, doubled
or another program's, and the 99th percentile of the latency must be within 5 times the median. soak: programs of every
kind (output, errors, time-outs, memory, files, signals, numpy); afterwards the server must have no more memory, files
and processes than after the first tenth. burst: the same with only numpy programs, as many as a step of rStar2-Agent
(arXiv:2508.20722) makes, within 3.5 minutes, or a share of them with fewer requests; it also reports the CPU time of a
call, client included. The exit code is 1 if any of this does not hold.
"""

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import psutil

from scripts.studies.shared import command_line, cpu_seconds
from verl_ext.sandbox import RunResult, SandboxClient, running_server
from verl_ext.sandbox.load import load as load_sandbox

MAX_RATIO = 5.0  # p99 / p50 of `print`
BURST, MAX_BURST_S = 45000, 210.0  # programs, and seconds for them on two cores
COUNTS = ("files", "processes", "temporary")  # counts of a server's state that must not grow
MAX_GROWTH_MB = 20.0  # unique memory of all processes; without a leak it varies by 15 with what ran last
PROGRAMS = {  # name: (code with its nonce, status, end of the output)
    "print": ("print({nonce})", "ok", "{nonce}\n"),
    "error": ("print({nonce})\n1 / 0", "code_error", "{nonce}\n"),
    "exit": ("import os\nprint({nonce}, flush=True)\nos.kill(os.getpid(), 9)", "code_error", "{nonce}\n"),
    "timeout": ("print({nonce}, flush=True)\nwhile True: pass", "timeout", "{nonce}\n"),
    "memory": ("print({nonce})\nbytearray(1 << 40)", "code_error", "{nonce}\n"),
    "output": ("print('x' * 3000000)\nprint({nonce})", "ok", " bytes]\n"),
    "file": ("open('f', 'w').write('{nonce}' * 1000)\nprint(open('f').read()[:len('{nonce}')])", "ok", "{nonce}\n"),
    "threads": (
        "import threading\nfor _ in range(5): threading.Thread(target=lambda: None).start()\nprint({nonce})",
        "ok",
        "{nonce}\n",
    ),
    "numpy": ("import numpy\nprint(numpy.full(3, {nonce}).max())", "ok", "{nonce}\n"),
}
WEIGHTS = [10, 3, 1, 0.1, 1, 0.3, 3, 1, 3]


@dataclass
class State:
    """The resources that a server holds."""

    memory_mb: float  # unique to each process, summed
    files: int  # open, in the server itself
    processes: int
    temporary: int  # entries of the server's temporary folder

    @classmethod
    def of(cls, server: psutil.Process) -> "State":
        processes = [server, *server.children(recursive=True)]
        (zygote,) = server.children()
        temporary = list(Path(json.loads(zygote.cmdline()[-1])["root"]).iterdir())
        memory = sum(process.memory_full_info().uss for process in processes)
        return cls(memory / 2**20, server.num_fds(), len(processes), len(temporary))


def main() -> None:
    parser = command_line(__spec__, __doc__)
    parser.add_argument("mode", choices=("load", "soak", "burst"))
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=120, help="of load")
    parser.add_argument("--requests", type=int, help="requests of soak (default: 20000) or burst (default: 45000)")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--isolation", default="auto", help="as the server's")
    args = parser.parse_args()
    before = set(psutil.Process().children())
    with running_server(workers=args.workers, options=("--isolation", args.isolation)) as url:
        (server,) = set(psutil.Process().children()) - before
        work = load(url, args) if args.mode == "load" else soak(url, args, server)
        faults = asyncio.run(work)
    for fault in faults:
        print(f"FAULT: {fault}")
    sys.exit(bool(faults))


async def load(url: str, args: argparse.Namespace) -> list[str]:
    client = SandboxClient([url], max_concurrency=args.clients)
    latencies: list[float] = []
    started = time.monotonic()

    async def show() -> None:
        while True:
            await asyncio.sleep(min(10, args.seconds / 4))
            rate = len(latencies) / (time.monotonic() - started)
            print(f"{time.monotonic() - started:5.0f} s  {len(latencies)} answers, {rate:.0f} per second", flush=True)

    shown = asyncio.create_task(show())
    code, _, _ = PROGRAMS["print"]
    seen = await load_sandbox(client, clients=args.clients, seconds=args.seconds, code=code, latencies=latencies)
    shown.cancel()
    await client.aclose()
    ratio = seen.p99 / seen.p50
    print(
        f"{args.clients} clients, {len(latencies)} answers in {args.seconds:g} s: p50 {seen.p50 * 1e3:.0f} ms, "
        f"p99 {seen.p99 * 1e3:.0f} ms ({ratio:.1f}x), longest {max(latencies) * 1e3:.0f} ms, {len(seen.faults)} wrong"
    )
    return seen.faults + [f"p99 is {ratio:.1f} times p50, expected at most {MAX_RATIO:g}"] * (ratio > MAX_RATIO)


async def soak(url: str, args: argparse.Namespace, server: psutil.Process) -> list[str]:
    client = SandboxClient([url], max_concurrency=args.clients)
    draw = random.Random(0)
    weights = WEIGHTS if args.mode == "soak" else [name == "numpy" for name in PROGRAMS]
    num_requests = args.requests or (20000 if args.mode == "soak" else BURST)
    faults: list[str] = []
    counts: Counter[str] = Counter()
    states: list[State] = []
    numbers = iter(range(num_requests))
    started, cpu_s = time.monotonic(), cpu_time_s(server)

    async def send() -> None:
        for number in numbers:
            name = draw.choices(list(PROGRAMS), weights)[0]
            counts[name] += 1
            fault = await check(client, name, number)
            faults.extend([fault] if fault else [])

    tenth = max(1, num_requests // 10)
    for end in range(tenth, num_requests + 1, tenth):
        numbers = iter(range(end - tenth, end))
        await asyncio.gather(*(send() for _ in range(args.clients)))
        states.append(await settled(server, states[0] if states else None))
        print(f"{end} requests: {states[-1]}", flush=True)
    seconds, cpu_s = time.monotonic() - started, cpu_time_s(server) - cpu_s
    await client.aclose()
    print(f"{dict(counts)}, {len(faults)} wrong")
    print(f"{seconds:.0f} s; {cpu_s / num_requests * 1e3:.1f} CPU-ms per call: {cpu_s / 2:.0f} s of two cores")
    most_s = MAX_BURST_S * num_requests / BURST
    if args.mode == "burst" and seconds > most_s:
        faults.append(f"it took {seconds:.0f} s; expected at most {most_s:.0f}")
    first, last = states[0], states[-1]
    if last.memory_mb > first.memory_mb + MAX_GROWTH_MB:
        faults.append(f"memory grew from {first.memory_mb:.1f} to {last.memory_mb:.1f} MB")
    for name in COUNTS:
        if getattr(last, name) > getattr(first, name):
            faults.append(f"{name} grew from {getattr(first, name)} to {getattr(last, name)}")
    return faults


async def settled(server: psutil.Process, first: State | None) -> State:
    """Return the state; anything beyond the first state has two seconds to end."""
    deadline = time.monotonic() + 2
    while True:
        try:
            state = State.of(server)
        except psutil.NoSuchProcess:  # it ended during the look-up
            if time.monotonic() > deadline:
                raise
        else:
            more = first and [name for name in COUNTS if getattr(state, name) > getattr(first, name)]
            if not more or time.monotonic() > deadline:
                return state
        await asyncio.sleep(0.1)


def cpu_time_s(server: psutil.Process) -> float:
    """Return the CPU time of the server with all processes below it, and of this process, its client."""
    return time.process_time() + cpu_seconds(server)


async def check(client: SandboxClient, name: str, nonce: int) -> str | None:
    """Run a program; return None if the answer is right, else what was wrong."""
    code, status, end = PROGRAMS[name]
    timeout_s = 0.5 if name == "timeout" else 30.0
    result: RunResult = await client.run(code.format(nonce=nonce), timeout_s=timeout_s)
    if result.status == status and result.stdout.endswith(end.format(nonce=nonce)):
        return None
    return f"{name} {nonce}: {result.status} {result.stdout[-100:]!r} {result.stderr[-100:]!r} {result.message}"


if __name__ == "__main__":
    main()
