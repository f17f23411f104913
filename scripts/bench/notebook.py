"""Measure what notebooks cost the sandbox server: CPU time of calls and of idle sessions, memory of idle sessions.

    python -m scripts.bench.notebook [--calls 200] [--sessions 100 1000]

CPU-ms of all processes of the server, client excluded, per call or per episode. They are those of a cgroup, because a
worker that has ended takes its CPU time with it: the script needs root and a cgroup file system that it may write to.
Memory is what MemAvailable loses, so run nothing else meanwhile. Exits with 1 if an episode of four calls costs more in
a notebook than in four stateless calls.
"""

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager, suppress
from pathlib import Path
from uuid import uuid4

import psutil

from scripts.studies.shared import command_line
from verl_ext.sandbox import SandboxClient, running_server

PROGRAMS = {
    "print": "print(6 * 7)",
    "numpy": "import numpy as np\nprint(np.linalg.inv(2 * np.eye(50)).sum())",
    "sympy": "import sympy\nx = sympy.symbols('x')\nprint(sympy.factor(x**4 - 1))",
}
CALLS_OF_EPISODE = 4
IDLE_S = 10.0
CGROUPS = (("/sys/fs/cgroup/cpuacct", "cpuacct.usage"), ("/sys/fs/cgroup", "cpu.stat"))  # version 1, version 2


def main() -> None:
    """Print two tables, of calls and of idle sessions."""
    parser = command_line(__spec__, __doc__)
    parser.add_argument("--calls", type=int, default=200, help="calls or episodes per number (default: %(default)s)")
    parser.add_argument("--sessions", type=int, nargs="+", default=[100, 1000], help="idle at once")
    args = parser.parse_args()
    options = ("--max-sessions", str(max(args.sessions)))
    with running_server(workers=1, options=options) as url, server_group() as cpu_s:
        is_dearer = asyncio.run(calls(url, cpu_s, args.calls))
    for count in args.sessions:
        with running_server(workers=2, options=options) as url, server_group() as cpu_s:
            asyncio.run(idle(url, cpu_s, count))
    sys.exit(is_dearer)


async def calls(url: str, cpu_s: Callable[[], float], count: int) -> bool:
    """Print CPU-ms; return whether an episode in a notebook is dearer than its calls without one."""
    is_dearer = False
    print(
        f"{'server CPU-ms':<13}{'stateless':>12}{'open+call+end':>16}{'later call':>12}"
        f"{'4 stateless':>13}{'episode':>10}"
    )
    async with aclosing(SandboxClient([url])) as client:

        async def episode(code: str, calls: int) -> None:
            name = uuid4().hex
            for _ in range(calls):
                await client.run(code, session_id=name)
            await client.end_session(name)

        for name, code in PROGRAMS.items():
            stateless = await cost(lambda code=code: client.run(code), cpu_s, count)
            short = await cost(lambda code=code: episode(code, 1), cpu_s, count)
            whole = await cost(lambda code=code: episode(code, CALLS_OF_EPISODE), cpu_s, count)
            later = (whole - short) / (CALLS_OF_EPISODE - 1)
            is_dearer |= whole > CALLS_OF_EPISODE * stateless
            print(
                f"{name:<13}{stateless:>12.1f}{short:>16.1f}{later:>12.1f}{4 * stateless:>13.1f}{whole:>10.1f}",
                flush=True,
            )
    return is_dearer


async def cost(act: Callable[[], Awaitable], cpu_s: Callable[[], float], count: int) -> float:
    """Return CPU-ms of `act`, the mean over `count` after two that are not counted."""
    for _ in range(2):
        await act()
    before = cpu_s()
    for _ in range(count):
        await act()
    return (cpu_s() - before) / count * 1000


async def idle(url: str, cpu_s: Callable[[], float], count: int) -> None:
    """Open sessions, let them idle, and end them; print what that took."""
    async with aclosing(SandboxClient([url], max_concurrency=8, queue_timeout_s=600)) as client:
        await client.run(PROGRAMS["print"])
        before, started, used_s = psutil.virtual_memory().available, time.monotonic(), cpu_s()
        names = [uuid4().hex for _ in range(count)]
        results = await asyncio.gather(*(client.run("x = 1", session_id=name) for name in names))
        assert all(result.status == "ok" for result in results), next(r.message for r in results if r.message)
        opened_s, used_s = time.monotonic() - started, cpu_s() - used_s
        await asyncio.sleep(1)
        mib = (before - psutil.virtual_memory().available) / count / 2**20
        idle_s = cpu_s()
        await asyncio.sleep(IDLE_S)
        share = (cpu_s() - idle_s) / IDLE_S
        results = await asyncio.gather(*(client.run("print(x)", session_id=name) for name in names))
        assert all(result.stdout == "1\n" for result in results)
        await asyncio.gather(*(client.end_session(name) for name in names))
    print(
        f"{count} sessions: opened in {opened_s:.1f} s with {used_s / count * 1000:.1f} CPU-ms each; "
        f"idle {mib:.1f} MiB each, {mib * count / 1024:.1f} GiB, and {share:.3f} of a core for all",
        flush=True,
    )


@contextmanager
def server_group() -> Iterator[Callable[[], float]]:
    """Move the server, which is this process's child, into a cgroup; yield a function that returns its CPU seconds."""
    for root, name in CGROUPS:
        with suppress(OSError):
            group = Path(root, f"bench-notebook-{uuid4().hex[:8]}")
            group.mkdir()
            if (usage := group / name).exists():
                break
            group.rmdir()
    else:
        sys.exit(
            "CPU time is that of a cgroup, and none can be made in /sys/fs/cgroup. Run this as root of the machine."
        )
    for child in psutil.Process().children():
        for process in (child, *child.children(recursive=True)):
            (group / "cgroup.procs").write_text(str(process.pid))
    try:
        yield lambda: _seconds(usage)
    finally:
        for pid in (group / "cgroup.procs").read_text().split():
            with suppress(OSError):  # it has ended
                (group.parent / "cgroup.procs").write_text(pid)
        while (group / "cgroup.procs").read_text():  # a worker that ends
            time.sleep(0.1)
        group.rmdir()


def _seconds(usage: Path) -> float:
    text = usage.read_text()
    return int(text.split()[1]) / 1e6 if text.startswith("usage_usec") else int(text) / 1e9


if __name__ == "__main__":
    main()
