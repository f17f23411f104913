"""Decide whether a server is alive, by its heartbeats and its own reports. No Ray, no engine: events and the clock are
passed in.

There are two heartbeats. The engine's own error state shows at once that its process is gone. Only an answer that came
all the way through the engine's core distinguishes a working engine from a suspended or hanging one.
"""

import time
from collections.abc import Callable, Iterator
from enum import StrEnum
from typing import Any

from verl_ext.fleet.modes import (
    needs_loops_that_ask_for_servers,
    needs_servers_of_their_own,
    needs_servers_that_may_change,
)
from verl_ext.settings import HealthSettings

KEY = "retool.fleet.health"
MAX_LOOK_S = 10.0  # at most this much counts between two looks at a pulse: this whole process may have stood still


class State(StrEnum):
    STARTING = "starting"  # young: it may compile at its first requests, and gets them
    WELL = "well"
    SUSPECTED = "suspected"  # silent: no new requests until it answers
    DEAD = "dead"  # for good


class Health:
    """The health of one server. Its silence since the last answer counts only while this process could hear one.

    Args:
        clock: seconds, as `time.monotonic`.
    """

    def __init__(self, limits: HealthSettings, clock: Callable[[], float] = time.monotonic):
        self._limits, self._clock = limits, clock
        self._born = self._looked = clock()
        self._silent_s, self._was_updating = 0.0, False
        self.state, self.why = State.STARTING, ""

    @property
    def takes_requests(self) -> bool:
        return self.state in (State.STARTING, State.WELL)

    def begins(self) -> None:
        """Note that its first requests come, for which it may compile: it is young again."""
        self._born = self._clock()
        if self.state is State.WELL:
            self.state = State.STARTING

    def answered(self) -> None:
        """Note an answer of the engine's core."""
        self._silent_s, self._looked = 0.0, self._clock()
        if self.state is State.SUSPECTED:
            self.state = State.WELL

    def failed(self, why: str) -> None:
        """Note that its process is gone, or reports that its engine is."""
        if self.state is not State.DEAD:
            self.state, self.why = State.DEAD, why

    def look(self, updating: bool = False, waited_s: float = 0.0) -> State:
        """Return its state now; call this about every `every_s` seconds.

        Args:
            updating: its weights change. Its core does not answer while it loads them.
            waited_s: seconds since the last look in which this process waited but would have heard an answer.
        """
        now, limits = self._clock(), self._limits
        # This process may have stood still as well: of that time, no more counts than for a look that was in time.
        passed_s, self._looked = min(now - self._looked, 2 * limits.every_s + waited_s), now
        if updating != self._was_updating:
            self._silent_s, self._was_updating = 0.0, updating
        self._silent_s += passed_s
        is_young = now - self._born < limits.start_s
        limit_s = limits.update_s if updating else max(limits.dead_s, limits.start_s if is_young else 0)
        if self._silent_s > limit_s:
            during = " while its weights change" * updating or " after its start" * is_young
            self.failed(
                f"its engine did not answer for {self._silent_s:.1f} s; the limit is {limit_s:g} s{during} ({KEY})"
            )
        elif self.state is not State.DEAD:
            if self._silent_s > limits.suspect_s and not (is_young or updating):
                self.state = State.SUSPECTED
            elif self.state is State.STARTING and not is_young:
                self.state = State.WELL
        return self.state


class Pulse:
    """The pulse of a thread that counts its rounds; other threads check that it still does.

    Args:
        clock: seconds, as `time.monotonic`.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock, self._looked, self._seen, self._silent_s = clock, clock(), 0, 0.0
        self.rounds = 0

    def silent_s(self) -> float:
        """Return the seconds without a finished round, as far as somebody looked."""
        now = self._clock()
        passed_s, self._looked = min(now - self._looked, MAX_LOOK_S), now
        self._silent_s = self._silent_s + passed_s if self._seen == self.rounds else 0.0
        self._seen = self.rounds
        return self._silent_s


def refusals(get: Callable[..., Any]) -> Iterator[str]:
    """Yield why a run's servers cannot be watched, `what is wrong -> what to do` each, as `weight_update.refusals`."""
    if not get(f"{KEY}.enable"):
        return
    yield from needs_servers_of_their_own(f"{KEY}.enable is true", f"{KEY}.enable=false", get)
    yield from needs_servers_that_may_change(f"{KEY}.enable is true", f"{KEY}.enable=false", get)
    yield from needs_loops_that_ask_for_servers(f"{KEY}.enable is true", f"{KEY}.enable=false", get)
