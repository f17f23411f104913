"""One sandbox client for each process: its bound on concurrent calls must hold over all rollouts that the process runs.

A rate limit, for a sandbox service that has one, must hold over all processes: its schedule is in a Ray actor.
"""

import asyncio
import time
from collections.abc import Mapping
from functools import cache
from typing import Any

import ray

from verl_ext.sandbox.client import SandboxClient

SETTINGS = ("urls", "max_concurrency", "queue_timeout_s", "max_calls_per_s")
ACTOR_NAME = "sandbox_rate_limit"


def shared_client(settings: Mapping[str, Any]) -> SandboxClient:
    """Return the process's client for `retool.sandbox` of a run, or for the `config` of a tool.

    Args:
        settings: `urls`; optional `max_concurrency` (calls in flight per process), `queue_timeout_s`,
            `max_calls_per_s` (of all processes of the Ray cluster together). Other keys are ignored.
    """
    chosen = {name: settings[name] for name in SETTINGS if settings.get(name) is not None}
    return _client(tuple(chosen.pop("urls")), **chosen)


@cache
def _client(urls: tuple[str, ...], max_calls_per_s: float | None = None, **options: Any) -> SandboxClient:
    acquire = None if max_calls_per_s is None else RateLimit(max_calls_per_s).acquire
    return SandboxClient(urls, acquire=acquire, **options)


class RateLimit:
    """The limit as one process sees it; the schedule is in a Ray actor that the first process makes.

    Args:
        per_s: requests per second of all processes together.
    """

    def __init__(self, per_s: float) -> None:
        # num_cpus=0: it only adds numbers, and must not wait for a CPU that the trainer holds
        options = {"name": ACTOR_NAME, "get_if_exists": True, "num_cpus": 0, "max_restarts": -1, "max_task_retries": -1}
        self._schedule = ray.remote(Schedule).options(**options).remote(per_s, burst=max(int(per_s), 1))

    async def acquire(self) -> None:
        """Return when a request may go."""
        reservation = self._schedule.reserve.remote()  # made even if nobody waits for it any more
        try:
            await asyncio.sleep(await reservation)
        except asyncio.CancelledError:
            self._schedule.give_back.remote()
            raise


class Schedule:
    """Times at which requests may go: evenly spaced, with a burst of up to `burst` after a quiet time.

    This is the generic cell rate algorithm (ATM Forum, Traffic Management 4.0, section 4.4.2).

    Args:
        per_s: requests per second, > 0.
        burst: requests that may go at once, >= 1.
    """

    def __init__(self, per_s: float, burst: int) -> None:
        if per_s <= 0 or burst < 1:
            raise ValueError(f"expected per_s > 0 and burst >= 1, got {per_s=}, {burst=}")
        self._interval_s, self._burst = 1 / per_s, burst
        self._next_s = 0.0  # when the next request would go if there were no bursts

    def reserve(self, now_s: float | None = None) -> float:
        """Return the seconds from now (default: this process's clock) until one more request may go."""
        now_s = time.monotonic() if now_s is None else now_s
        self._next_s = max(self._next_s, now_s) + self._interval_s
        return max(self._next_s - self._burst * self._interval_s - now_s, 0.0)

    def give_back(self) -> None:
        """Take back the reservation of a request that does not go; otherwise it would delay all later ones."""
        self._next_s -= self._interval_s
