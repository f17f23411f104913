"""Which server a request goes to: consistent hashing with bounded load, sticky per rollout. No Ray, no vLLM.

A slot is what has a KV cache of its own: a server, or one data-parallel rank of it ("server/rank"), as GLM-5's
DP-aware routing has it (arXiv:2602.15763). All turns of a rollout go to one slot, whose cache has those so far. The
slot of a first turn is the next one on a ring of hashes that has room.

Source: Mirrokni, Thorup, Zadimoghaddam: Consistent Hashing with Bounded Loads (SODA 2018, arXiv:1608.01350), c = 1.25.
Departures: the load is that of requests under way, so that later turns may exceed the bound; what has a slot stays
there when the bound moves; and a slot that failed gets nothing for a while.
"""

import bisect
import hashlib
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence

LOAD_FACTOR = 1.25  # c: first turns take a slot to this times the mean load at the most
POINTS = 128  # of a slot on the ring; the shares of the slots differ by about 1 / sqrt(128) = 9%
HALF_LIFE_S = 30.0  # of a failure penalty
WELL = 0.5  # a slot with a higher penalty is avoided: for 30 s after one failure, for 90 s after four at once


class NoServerError(RuntimeError):
    """There is no server to route to: infrastructure failed. verl's client knows it by the words in the message."""


class Router:
    """See the module's docstring. For one thread.

    Args:
        slots: those at the start.
        clock: seconds that only grow.
    """

    def __init__(self, slots: Sequence[str] = (), *, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._slots: dict[str, None] = {}  # in the order in which they came
        self._ring: list[tuple[int, str]] = []
        self._load: Counter[str] = Counter()  # requests under way; of slots that have left, too
        self._penalties: dict[str, tuple[float, float]] = {}  # slot -> (value, when it was that)
        self._of_rollout: dict[str, str] = {}
        for slot in slots:
            self.add(slot)

    @property
    def slots(self) -> tuple[str, ...]:
        return tuple(self._slots)

    def load(self, slot: str) -> int:
        """Requests of a slot that are under way, also when it has left."""
        return self._load[slot]

    def acquire(self, rollout: str) -> str:
        """The slot for a rollout's next request: that of its last one, if it is there and well.

        Raises:
            NoServerError: there is no slot.
        """
        usable = self._usable()
        slot = self._of_rollout.get(rollout)
        if slot not in usable:
            slot = self._of_rollout[rollout] = self._place(rollout, usable)
        self._load[slot] += 1
        return slot

    def release(self, rollout: str, slot: str) -> None:
        """The request ended, whether it failed or not; the rollout stays where it is."""
        if self._load[slot] > 1:
            self._load[slot] -= 1
        else:
            del self._load[slot]

    def end(self, rollout: str) -> None:
        """The rollout ended. If it goes on nevertheless, it is placed as a new one, mostly where it was."""
        self._of_rollout.pop(rollout, None)

    def add(self, slot: str) -> None:
        """A new slot. It gets first turns at once; running rollouts stay where their turns are cached."""
        self._penalties.pop(slot, None)
        if slot in self._slots:
            return
        self._slots[slot] = None
        self._ring = sorted(self._ring + [(_position(f"{slot}#{point}"), slot) for point in range(POINTS)])

    def remove(self, slot: str) -> None:
        """It gets no further request: its rollouts go elsewhere at their next one."""
        self._slots.pop(slot, None)
        self._penalties.pop(slot, None)
        self._ring = [point for point in self._ring if point[1] != slot]

    def failed(self, slot: str) -> None:
        """A request failed there. While others are better, the slot is avoided, by running rollouts, too.

        A dead server fails at once and is therefore the least loaded of all: by load alone it would attract requests.
        """
        if slot in self._slots:
            self._penalties[slot] = (self._penalty(slot) + 1, self._clock())

    def _penalty(self, slot: str) -> float:
        """Failures, each counted the less the longer ago it was."""
        value, since = self._penalties.get(slot, (0.0, 0.0))
        return value * 0.5 ** ((self._clock() - since) / HALF_LIFE_S) if value else 0.0

    def _usable(self) -> set[str]:
        """The slots that are well; where none is, those that fail at most twice as much as the best."""
        if not self._slots:
            raise NoServerError(
                "No available servers in load balancer: all have left or died. See the log of the rollout servers."
            )
        penalties = {slot: self._penalty(slot) for slot in self._slots}
        limit = max(WELL, 2 * min(penalties.values()))
        return {slot for slot, penalty in penalties.items() if penalty <= limit}

    def _place(self, rollout: str, usable: set[str]) -> str:
        """The first usable slot after the rollout's hash that has room; there is one, as 1 < c."""
        total = sum(self._load[slot] for slot in usable) + 1
        room = math.ceil(LOAD_FACTOR * total / len(usable))
        start = bisect.bisect(self._ring, (_position(rollout), ""))
        for index in range(start, start + len(self._ring)):
            slot = self._ring[index % len(self._ring)][1]
            if slot in usable and self._load[slot] < room:
                return slot
        raise AssertionError(f"no slot has less than {room} of {total} requests: {self._load}")


def _position(text: str) -> int:
    """On the ring, the same in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
