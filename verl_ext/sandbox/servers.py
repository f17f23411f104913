"""Which of several servers a request goes to: the least busy one of those that answer."""

import random
import time
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager

MAX_BACKOFF_S = 10.0


class Servers:
    """Knows servers by their numbers, from 0.

    One that refuses requests rests for as long as a call pauses; one that hangs rests longer.

    Args:
        backoff_s: the pause after a first failure.
        clock: in seconds.
    """

    def __init__(self, count: int, backoff_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._backoff_s, self._clock = backoff_s, clock
        self._in_flight, self._refusals = [0] * count, [0] * count  # refusals in a row
        self._rests_until = [0.0] * count
        self.have_answered: set[int] = set()

    def pause_s(self, failures: int) -> float:
        """Return the pause after the last of so many failures in a row: it doubles each time, up to MAX_BACKOFF_S."""
        return min(self._backoff_s * 2 ** (failures - 1), MAX_BACKOFF_S)

    def least_busy(self, failed: Set[int]) -> int:
        """Return a server with the fewest requests in flight, at random among equals; failed or resting ones come last.

        A dead server fails fast, so by requests in flight only it would get most of them. If all servers that do not
        rest have failed a call, one that has refused none gets it again.
        """
        servers = set(range(len(self._in_flight)))
        awake = {server for server in servers if self._rests_until[server] <= self._clock()}
        open_ = {server for server in servers if not self._refusals[server]}
        candidates = (awake - failed) or open_ or (servers - failed) or servers
        fewest = min(self._in_flight[server] for server in candidates)
        return random.choice([server for server in candidates if self._in_flight[server] == fewest])

    @contextmanager
    def request(self, server: int) -> Iterator[None]:
        """Count a request as in flight for the length of the block."""
        self._in_flight[server] += 1
        try:
            yield
        finally:
            self._in_flight[server] -= 1

    def answers(self, server: int) -> None:
        """Note that a server is well."""
        self._refusals[server], self._rests_until[server] = 0, 0.0
        self.have_answered.add(server)

    def refuses(self, server: int, longer_s: float = 0.0) -> None:
        """Let a server rest that is not well, unless it rests already."""
        if self._clock() >= self._rests_until[server]:
            self._refusals[server] += 1
            self._rests_until[server] = self._clock() + self.pause_s(self._refusals[server]) + longer_s
