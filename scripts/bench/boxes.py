"""Measure what boxes cost, whether many work at once, and whether anything of them is left after episodes that abort.

    python -m scripts.bench.boxes                            # seconds; --at-once 200 --episodes 2000 for all

First CPU-ms (user and system, of the server and all its processes, but not the client's) to open a box, for a command,
and to seal; then of a scoring: a second box with the sealed files and tests, and the run of the tests, by as-agent and
without. Not counted are the processes that set up a worker and end before it works; and the kernel tells CPU time in
whole ticks of each process, so that what a box does once comes out too low. The milliseconds beside it, one after the
other on an idle machine, are an upper bound.

Then `--at-once` boxes are open at the same time, run commands, are sealed and scored; a wrong answer is a fault. Last,
`--episodes` run, of which many are cancelled, left without a word, or fork, fill and stop what they can. Afterwards the
server has no box, no process, no folder and no mount that it did not have before, and its memory is back.
"""

import asyncio
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx
import psutil

from scripts.studies.shared import command_line
from verl_ext.sandbox import Box, RunResult, SandboxClient, running_server
from verl_ext.tasks.archive import merge, pack

IDLE_S = 10.0  # after which the server ends a box that its client has left
CALLS = 20  # of a command in each box, so that its ticks add up
SETTLE_S = 60.0  # for a server to be as before
COMMANDS = [
    "echo $((6 * 7)) > out",
    "python3 -c 'print(6 * 7)' > out",
    "seq 1000 | sort -r | head -1; ls -la",
    "(while true; do echo x >> log; sleep 0.01; done) &",
    "setsid nohup sleep 600 > /dev/null 2>&1 &",
    "head -c 40000000 /dev/urandom > large; rm large",
    "for i in $(seq 300); do sleep 100 & done 2> /dev/null; kill -STOP -1",
    "mkdir -p a/b/c; ln -s /tests out2; mkfifo pipe; echo 1 > /logs/reward.txt",
]
TEST = 'test "$(as-agent cat /app/out)" = 42'


def main() -> None:
    """Print the figures; exit with 1 if an answer was wrong or something is left."""
    parser = command_line(__spec__, __doc__)
    parser.add_argument("--boxes", type=int, default=40, help="boxes over which a cost is averaged")
    parser.add_argument("--at-once", type=int, default=40, help="boxes that are open at the same time")
    parser.add_argument("--episodes", type=int, default=100, help="episodes with random aborts")
    parser.add_argument("--workers", type=int, default=16, help="as the server's; commands that sleep hold one, too")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    options = ("--preload", "", "--session-idle-s", str(IDLE_S), "--max-boxes", str(2 * args.at_once + 3 * args.boxes))
    with running_server(workers=args.workers, options=options) as url:
        faults = asyncio.run(measure(url, args.boxes, args.at_once, args.episodes, random.Random(args.seed)))
    for fault, count in Counter(faults).most_common():
        print(f"FAULT {count} x {fault}")
    sys.exit(bool(faults))


async def measure(url: str, boxes: int, at_once: int, episodes: int, rng: random.Random) -> list[str]:
    client = SandboxClient([url], queue_timeout_s=600, max_concurrency=256)
    async with Opened(client, 1):  # the zygote of boxes has begun
        pass
    for name, ms, wall_ms in await costs(client, boxes):
        print(f"{name:<28}{ms:>8.1f} CPU-ms {wall_ms:>8.1f} ms", flush=True)
    faults, before = [], State(url)
    started = time.monotonic()
    faults += await many(client, at_once)
    print(f"{at_once} boxes at once, scored in {at_once} others: {time.monotonic() - started:.1f} s", flush=True)
    started = time.monotonic()
    ends = await run_episodes(url, episodes, rng)
    print(f"{episodes} episodes: {time.monotonic() - started:.1f} s; {dict(ends)}", flush=True)
    await client.aclose()
    left = await before.settle()
    print(f"left: {left or 'nothing'}; memory of the server {State(url).mib - before.mib:+.0f} MiB")
    return faults + left


async def costs(client: SandboxClient, count: int) -> list[tuple[str, float, float]]:
    """Return (what, CPU-ms, ms) of one of each, one after the other."""
    found = []
    async with Opened(client, 0) as opened:

        async def each(what: str, call: Callable[[int], Awaitable[object]], times: int = 1) -> list:
            before, started = cpu_s(), time.monotonic()
            results = [await call(i) for i in range(count) for _ in range(times)]
            calls = count * times
            found.append((what, (cpu_s() - before) / calls * 1e3, (time.monotonic() - started) / calls * 1e3))
            return results

        archive = pack({"app/data.txt": b"1\n" * 500})
        boxes = await each("open a box", lambda _: opened.open(archive))
        await each("command: true", lambda i: boxes[i].run("true", timeout_s=30), CALLS)
        await each("command: ls | wc -l", lambda i: boxes[i].run("ls | wc -l > out", timeout_s=30), CALLS)
        await each("command: python3 -c", lambda i: boxes[i].run("python3 -c 'print(6 * 7)' > out", timeout_s=30))
        sealed = await each("seal", lambda i: boxes[i].seal(["/app"]))
        tests = pack({"tests/test.sh": TEST.replace("as-agent ", "").encode(), "tests/safe.sh": TEST.encode()})

        async def score(i: int, script: str) -> RunResult:
            box = await opened.open(merge(sealed[i].archive, tests))
            return await box.run(f"bash /tests/{script}", timeout_s=30)

        assert all(result.status == "ok" for result in await each("score", lambda i: score(i, "test.sh")))
        assert all(result.status == "ok" for result in await each("score by as-agent", lambda i: score(i, "safe.sh")))
    return found


async def many(client: SandboxClient, count: int) -> list[str]:
    """Have boxes open at the same time; return what went wrong."""
    async with Opened(client, count) as opened:
        faults: list[str] = []
        print(f"{count} idle boxes: {sum(map(uss, server_processes())) / count / 2**20:.1f} MiB each", flush=True)

        async def episode(i: int) -> None:
            box = opened.boxes[i]
            for command in (f"echo {i} > own", "sleep 0.1; cat own", "echo 42 > out; sleep 99 &"):
                result = await box.run(command, timeout_s=120)
                if result.status != "ok" or result.stdout not in ("", f"{i}\n"):
                    faults.append(f"{result.status} {result.stderr or result.message or result.stdout}"[:200])
            sealed = await box.seal(["/app"])
            other = await opened.open(merge(sealed.archive, pack({"tests/test.sh": TEST.encode()})))
            result = await other.run(f'bash /tests/test.sh && test "$(cat /app/own)" = {i}', timeout_s=120)
            if result.status != "ok":
                faults.append(f"scored {result.status} {result.stderr or result.message}"[:200])

        await asyncio.gather(*(episode(i) for i in range(count)))
    return faults


async def run_episodes(url: str, count: int, rng: random.Random) -> Counter[str]:
    """Run episodes, 32 at once; return how they ended."""
    ends: Counter[str] = Counter()
    slots = asyncio.Semaphore(32)

    async def one(seed: int) -> None:
        async with slots:
            own, client = random.Random(seed), SandboxClient([url], queue_timeout_s=600)
            end = own.choices(["closed", "cancelled", "left"], [6, 3, 1])[0]
            task = asyncio.create_task(episode(client, own, closes=end != "left"))
            await asyncio.wait([task], timeout=own.uniform(0.01, 2.0) if end == "cancelled" else None)
            task.cancel()
            ends[end if not task.done() or task.cancelled() or not task.exception() else repr(task.exception())] += 1
            await asyncio.wait([task])
            await client.aclose()

    await asyncio.gather(*(one(rng.getrandbits(32)) for _ in range(count)))
    return ends


async def episode(client: SandboxClient, rng: random.Random, *, closes: bool) -> None:
    box = Box(client, memory_mb=300, disk_mb=64)
    try:
        await box.open(pack({"app/data.txt": b"1\n"}))
        for _ in range(rng.randint(1, 4)):
            await box.run(rng.choice(COMMANDS), timeout_s=rng.choice([0.2, 1.0]))
        await box.seal(["/app", "/logs/x"], max_bytes=1 << 20)
    finally:
        if closes:
            await box.close()


class Opened:
    """Boxes of a client, closed at the end of the block."""

    def __init__(self, client: SandboxClient, count: int) -> None:
        self.client, self.count, self.boxes = client, count, []

    async def __aenter__(self) -> "Opened":
        await asyncio.gather(*(self.open(b"") for _ in range(self.count)))
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.gather(*(box.close() for box in self.boxes))

    async def open(self, archive: bytes) -> Box:
        box = Box(self.client, memory_mb=512, disk_mb=64)
        self.boxes.append(box)
        await (box.open(archive) if archive else box.open())
        return box


class State:
    """What the machine has of a server: boxes, sessions, processes, mounts, folders; and its memory in MiB."""

    def __init__(self, url: str) -> None:
        self.url, processes = url, server_processes()
        self.mib = sum(map(uss, processes)) / 2**20
        metrics = httpx.get(f"{url}/metrics", trust_env=False).text.splitlines()
        kept = ("sandbox_boxes ", "sandbox_sessions ", "sandbox_requests_running ", "sandbox_requests_waiting ")
        self.counts = {line.split()[0]: float(line.split()[1]) for line in metrics if line.startswith(kept)}
        self.counts["processes"] = len(processes)
        self.counts["mounts"] = len(Path("/proc/self/mountinfo").read_text().splitlines())
        self.counts["folders"] = sum(1 for _ in Path(tempfile.gettempdir()).glob("verl-sandbox-*/*"))
        self.counts["shared memory, in 64 MiB"] = psutil.virtual_memory().shared >> 26

    async def settle(self) -> list[str]:
        """Wait until there is no more than this; return what there is more."""
        deadline = time.monotonic() + SETTLE_S
        while True:
            now = State(self.url)
            more = [
                f"{now.counts[name] - count:g} {name}"
                for name, count in self.counts.items()
                if now.counts[name] > count
            ]
            if not more or time.monotonic() > deadline:
                return more
            await asyncio.sleep(0.5)


def server_processes() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def cpu_s() -> float:
    """Return the CPU time of all processes below this one, and of those that they have reaped."""
    total = 0.0
    for process in server_processes():
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system + times.children_user + times.children_system
    return total


def uss(process: psutil.Process) -> int:
    try:
        return process.memory_full_info().uss
    except psutil.NoSuchProcess:
        return 0


if __name__ == "__main__":
    main()
