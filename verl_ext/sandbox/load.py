"""A load test: many clients send programs, and each answer is checked to be the program's own.

Used by the doctor and by scripts/bench/stress_sandbox.py.
"""

import asyncio
import statistics
import time
from dataclasses import dataclass

from verl_ext.sandbox.client import SandboxClient

LOAD_CODE = "import sympy\nprint(sympy.factor(sympy.Symbol('x')**2 - 1))\nprint({nonce})"


@dataclass(frozen=True)
class Load:
    """The result of a load test; latencies in seconds."""

    seconds: float
    latencies: list[float]  # one per answer
    faults: list[str]  # answers that were not the program's own

    @property
    def rate(self) -> float:
        """Answers per second."""
        return len(self.latencies) / self.seconds

    @property
    def p50(self) -> float:
        return statistics.median(self.latencies)

    @property
    def p99(self) -> float:
        return statistics.quantiles(self.latencies, n=100)[98] if len(self.latencies) > 1 else self.latencies[0]


async def load(
    client: SandboxClient,
    *,
    clients: int,
    seconds: float,
    code: str = LOAD_CODE,
    timeout_s: float = 30,
    memory_limit_mb: int = 1024,
    latencies: list[float] | None = None,
) -> Load:
    """Have `clients` each send one program after another: no answer may be lost, doubled or another program's.

    Args:
        code: prints `{nonce}` last, a number that no other program has.
        latencies: a list that receives each answer's latency, for a caller that watches it.
    """
    latencies = [] if latencies is None else latencies
    faults: list[str] = []
    started = time.monotonic()

    async def send(number: int) -> None:
        count = 0
        while time.monotonic() - started < seconds:
            nonce, sent = number * 10**9 + count, time.monotonic()
            program = code.format(nonce=nonce)
            result = await client.run(program, timeout_s=timeout_s, memory_limit_mb=memory_limit_mb)
            latencies.append(time.monotonic() - sent)
            if result.status != "ok" or result.stdout.splitlines()[-1:] != [str(nonce)]:
                faults.append(f"{result.status} {(result.message or result.stderr or result.stdout)[-200:]!r}")
            count += 1

    await asyncio.gather(*(send(number) for number in range(1, clients + 1)))
    return Load(time.monotonic() - started, latencies, faults)
