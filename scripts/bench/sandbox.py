"""Compare the CPU time of a sandbox request with that of a new `python -c` per request, on one machine in one run.

    python -m scripts.bench.sandbox [--requests 100] [--isolation none]

CPU-ms per request, unlike wall time, hardly depend on what else the machine does. The script counts user and system
time of all processes that serve a request. For our sandbox these are the server with its HTTP, the zygote, workers and
programs, but not the client. For `python -c` these are the child, and this process while it starts and awaits the
child. The child runs with -S, which gives a lower bound for the baseline: start-up hooks of installed packages (.pth
files) may cost more than Python itself.

Then follows what a session costs: to open it with a first call (except the process that sets up its worker and ends), a
later call, and the memory that it holds while idle (private pages of its processes, which only root can see). The last
line is the client's side with 64 calls in flight: our client compared with httpx, which it does not use because of this
cost.
"""

import asyncio
import http.client
import json
import os
import resource
import subprocess
import sys
import sysconfig
import time
from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

import httpx
import psutil

from scripts.studies.shared import command_line, cpu_seconds
from verl_ext.sandbox import SandboxClient, running_server
from verl_ext.sandbox.server.pool import PRELOAD

# (name, program, target): ours / baseline at most
PROGRAMS = [
    ("print", "print(6 * 7)", 1.3),
    ("sympy", "import sympy\nx = sympy.symbols('x')\nprint(sympy.factor(x**4 - 1))", 1 / 12),
    ("numpy", "import numpy as np\nprint(np.linalg.inv(2 * np.eye(50)).sum())", 1 / 6),
]


def main() -> None:
    """Print a table with one line per program; exit with 1 if a target is missed."""
    parser = command_line(__spec__, __doc__)
    parser.add_argument("--requests", type=int, default=100, help="requests to the sandbox per program")
    parser.add_argument("--baseline-requests", type=int, default=20, help="runs of python -c per program")
    parser.add_argument("--sessions", type=int, default=40, help="sessions that are open at once")
    parser.add_argument("--isolation", default="auto", help="as the server's")
    parser.add_argument("--preload", default=",".join(PRELOAD), help="as the server's (default: %(default)s)")
    args = parser.parse_args()
    missed = False
    options = ("--isolation", args.isolation, "--preload", args.preload, "--max-sessions", str(args.sessions))
    with running_server(workers=1, options=options) as url:
        connection = http.client.HTTPConnection(urlsplit(url).netloc)
        print(f"layers: {', '.join(get_layers(connection))}")
        print(f"{'CPU-ms per request':<20}{'python -c':>12}{'sandbox':>12}{'ratio':>10}{'target':>10}")
        for name, code, target in PROGRAMS:
            assert run_in_sandbox(connection, code) == run_in_python(code), name
            ours = cpu_ms(server_cpu_s, lambda code=code: run_in_sandbox(connection, code), args.requests)
            baseline = cpu_ms(own_cpu_s, lambda code=code: run_in_python(code), args.baseline_requests)
            missed |= ours > target * baseline
            mark = "" if ours <= target * baseline else "  missed"
            print(f"{name:<20}{baseline:>12.1f}{ours:>12.1f}{ours / baseline:>10.3f}{target:>10.3f}{mark}", flush=True)
        opened, later, mib = asyncio.run(session_cost(url, args.sessions))
        print(f"session: {opened:.1f} CPU-ms to open and print, {later:.1f} for a later print; idle {mib:.1f} MiB")
        with_httpx, with_ours = asyncio.run(client_cpu_ms(url, args.requests * 10))
        print(f"client: httpx {with_httpx:.2f}, ours {with_ours:.2f} CPU-ms per call")
    sys.exit(missed)


async def session_cost(url: str, count: int) -> tuple[float, float, float]:
    """Return CPU-ms of the server to open a session, and of a later call; and MiB of an idle session."""
    client = SandboxClient([url])
    before = {process.pid for process in server_processes()}
    costs = []
    for _ in range(2):
        started = server_cpu_s()
        for number in range(count):
            await client.run("print(6 * 7)", session_id=str(number))
        costs.append((server_cpu_s() - started) / count * 1000)
    own = [process for process in server_processes() if process.pid not in before]
    mib = sum(process.memory_full_info().uss for process in own) / count / 2**20
    for number in range(count):
        await client.end_session(str(number))
    await client.aclose()
    return costs[0], costs[1], mib


async def client_cpu_ms(url: str, count: int) -> tuple[float, float]:
    """Measure CPU-ms of this process per call, by httpx and by SandboxClient."""
    body = {"code": "print(6 * 7)", "language": "python", "queue_timeout": 60}
    client = SandboxClient([url], max_concurrency=64)
    limits = httpx.Limits(max_connections=64)
    async with httpx.AsyncClient(timeout=60, limits=limits, trust_env=False) as http:  # through no proxy
        by_httpx = await cpu_ms_of_many(lambda: http.post(f"{url}/run_code", json=body), count)
    ours = await cpu_ms_of_many(lambda: client.run(body["code"]), count)
    await client.aclose()
    return by_httpx, ours


async def cpu_ms_of_many(call: Callable[[], Awaitable], count: int) -> float:
    await asyncio.gather(*(call() for _ in range(64)))
    before, rounds = time.process_time(), max(1, count // 64)
    for _ in range(rounds):
        await asyncio.gather(*(call() for _ in range(64)))
    return (time.process_time() - before) / (rounds * 64) * 1000


def cpu_ms(cpu_s: Callable[[], float], request: Callable[[], object], count: int) -> float:
    """Return the mean over `count` requests, after one that is not counted."""
    request()
    before = cpu_s()
    for _ in range(count):
        request()
    return (cpu_s() - before) / count * 1000


def server_cpu_s() -> float:
    """Return the CPU time of the server and all processes below it; an ended program's time counts to its worker."""
    return sum(map(cpu_seconds, psutil.Process().children()))


def server_processes() -> list[psutil.Process]:
    return [process for child in psutil.Process().children() for process in (child, *child.children(recursive=True))]


def own_cpu_s() -> float:
    """Return the CPU time of this process and of the children it has waited for."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def get_layers(connection: http.client.HTTPConnection) -> list[str]:
    connection.request("GET", "/v1/ping")
    return json.loads(connection.getresponse().read())["layers"]


def run_in_sandbox(connection: http.client.HTTPConnection, code: str) -> str:
    body = json.dumps({"code": code, "language": "python", "memory_limit_MB": 1024})
    connection.request("POST", "/run_code", body)
    return json.loads(connection.getresponse().read())["run_result"]["stdout"]


def run_in_python(code: str) -> str:
    # One BLAS thread, as in the sandbox.
    environment = os.environ | {"PYTHONPATH": sysconfig.get_path("purelib"), "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-S", "-c", code]
    return subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True, env=environment).stdout


if __name__ == "__main__":
    main()
