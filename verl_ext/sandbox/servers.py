"""Which of several servers a request goes to: the least busy one of those that answer."""

import random
import time
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager

MAX_REST_S = 10.0


def doubled(first_s: float, times: int, most_s: float) -> float:
    """Return `first_s`, doubled so many times, but at most `most_s`. No outage is too long for a float."""
    return min(first_s * 2 ** min(times, 60), most_s)


class Servers:
    """Knows servers by their numbers, from 0.

    Args:
        rest_s: for which one rests that refuses a request; doubles with each further refusal, up to MAX_REST_S.
        clock: in seconds.
    """

    def __init__(self, count: int, rest_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._rest_s, self._clock = rest_s, clock
        self._in_flight, self._refusals = [0] * count, [0] * count  # refusals in a row
        self._rests_until = [0.0] * count
        self.have_answered: set[int] = set()

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
            rest_s = doubled(self._rest_s, self._refusals[server], MAX_REST_S)
            self._rests_until[server] = self._clock() + rest_s + longer_s
            self._refusals[server] += 1
