"""Whether a server is alive, by its heartbeats and by its own word. No Ray, no engine: what happened is told, the clock
is passed in.

There are two heartbeats. The engine's own error state says at once that its process is gone. An answer that came all
the way through the engine's core is the only sign by which one that was stopped, or hangs, differs from one that works.
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
MAX_LOOK_S = 10.0  # what counts of the time between two looks at a pulse: all of this process may have stood still


class State(StrEnum):
    STARTING = "starting"  # young: it may compile at its first requests, and gets them
    WELL = "well"
    SUSPECTED = "suspected"  # silent: no new requests until it answers
    DEAD = "dead"  # for good


class Health:
    """Of one server. It is silent since its last answer, as long as this process was there to hear one.

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
        """Its first requests come, for which it may compile: it is young again."""
        self._born = self._clock()
        if self.state is State.WELL:
            self.state = State.STARTING

    def answered(self) -> None:
        """The engine's core answered."""
        self._silent_s, self._looked = 0.0, self._clock()
        if self.state is State.SUSPECTED:
            self.state = State.WELL

    def failed(self, why: str) -> None:
        """Its process is gone, or says that its engine is."""
        if self.state is not State.DEAD:
            self.state, self.why = State.DEAD, why

    def look(self, updating: bool = False, waited_s: float = 0.0) -> State:
        """Judge it now; called every `every_s` seconds or so.

        Args:
            updating: its weights change. Its core does not answer while it loads them.
            waited_s: in which this process waited for something else since the last look, and would have heard it.
        """
        now, limits = self._clock(), self._limits
        # This process may have stood still, too: of such a time no more counts than of a look that was in time.
        passed_s, self._looked = min(now - self._looked, 2 * limits.every_s + waited_s), now
        if updating != self._was_updating:
            self._silent_s, self._was_updating = 0.0, updating
        self._silent_s += passed_s
        is_young = now - self._born < limits.start_s
        limit_s = limits.update_s if updating else max(limits.dead_s, limits.start_s if is_young else 0)
        if self._silent_s > limit_s:
            during = ", while its weights change" * updating or ", in its first time" * is_young
            self.failed(
                f"its engine did not answer for {self._silent_s:.1f} s, expected within {limit_s:g} s{during} ({KEY})"
            )
        elif self.state is not State.DEAD:
            if self._silent_s > limits.suspect_s and not (is_young or updating):
                self.state = State.SUSPECTED
            elif self.state is State.STARTING and not is_young:
                self.state = State.WELL
        return self.state


class Pulse:
    """Of a thread that counts its rounds; others look whether it still does.

    Args:
        clock: seconds, as `time.monotonic`.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock, self._looked, self._seen, self._silent_s = clock, clock(), 0, 0.0
        self.rounds = 0

    def silent_s(self) -> float:
        """How long it has ended no round, as far as somebody looked."""
        now = self._clock()
        passed_s, self._looked = min(now - self._looked, MAX_LOOK_S), now
        self._silent_s = self._silent_s + passed_s if self._seen == self.rounds else 0.0
        self._seen = self.rounds
        return self._silent_s


def refusals(get: Callable[..., Any]) -> Iterator[str]:
    """Why the servers of a run cannot be watched: `what is wrong -> what to do`, each; see `weight_update.refusals`."""
    if not get(f"{KEY}.enable"):
        return
    yield from needs_servers_of_their_own(f"{KEY}.enable is true", f"{KEY}.enable=false", get)
    yield from needs_servers_that_may_change(f"{KEY}.enable is true", f"{KEY}.enable=false", get)
    yield from needs_loops_that_ask_for_servers(f"{KEY}.enable is true", f"{KEY}.enable=false", get)
