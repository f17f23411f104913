"""Which server a request goes to: consistent hashing with bounded load, sticky per rollout. No Ray, no vLLM.

A slot is whatever has its own KV cache: a server, or one of its data-parallel ranks ("server/rank"), as in GLM-5's
DP-aware routing (arXiv:2602.15763). All turns of a rollout go to one slot, whose cache holds the turns so far. The
slot of a first turn is the next one with room on a ring of hashes.

Source: Mirrokni, Thorup, Zadimoghaddam: Consistent Hashing with Bounded Loads (SODA 2018, arXiv:1608.01350), c = 1.25.
Departures: the load counts running requests, so later turns may exceed the bound; a rollout keeps its slot when the
bound moves; and a slot that failed gets nothing for a while.
"""

import bisect
import hashlib
import math
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence

LOAD_FACTOR = 1.25  # c: first turns load a slot to at most this times the mean load
POINTS = 128  # of a slot on the ring; the shares of the slots differ by about 1 / sqrt(128) = 9%
HALF_LIFE_S = 30.0  # of a failure penalty
WELL = 0.5  # a slot with a higher penalty is avoided: for 30 s after one failure, for 90 s after four at once
MAX_ROLLOUTS = 100_000  # whose slots are remembered, the most recent ones: verl tells no router that a rollout ended
ROUTER_S = 10.0  # for a router to answer, which takes milliseconds, if it is asked again later
ROUTER_ONCE_S = 60.0  # the same, if it is not


class NoServerError(RuntimeError):
    """There is no server to route to: infrastructure failed. verl's client recognizes it by the message's words."""


def server_of(slot: str) -> str:
    """Return the server of a slot, which is the slot itself unless it is a rank."""
    return slot.split("/")[0]


class Router:
    """A ring of slots with bounded load; see the module's docstring. Not thread-safe.

    Args:
        slots: the initial ones.
        clock: seconds that only grow.
    """

    def __init__(self, slots: Sequence[str] = (), *, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._slots: dict[str, None] = {}  # in order of arrival
        self._ring: list[tuple[int, str]] = []
        self._load: Counter[str] = Counter()  # running requests, also of slots that have left
        self._penalties: dict[str, tuple[float, float]] = {}  # slot -> (value, when it was that)
        self._of_rollout: OrderedDict[str, str] = OrderedDict()  # the most recent one last
        for slot in slots:
            self.add(slot)

    @property
    def slots(self) -> tuple[str, ...]:
        return tuple(self._slots)

    @property
    def rollouts(self) -> tuple[str, ...]:
        """The rollouts whose slot is remembered, the most recent one last."""
        return tuple(self._of_rollout)

    def load(self, slot: str) -> int:
        """Return the number of a slot's running requests, even if it has left."""
        return self._load[slot]

    def acquire(self, rollout: str) -> str:
        """Return the slot for a rollout's next request: the last one's slot if it is present and well.

        Raises:
            NoServerError: there is no slot.
        """
        usable = self._usable()
        slot = self._of_rollout.pop(rollout, None)
        if slot not in usable:
            slot = self._place(rollout, usable)
        self._of_rollout[rollout] = slot
        if len(self._of_rollout) > MAX_ROLLOUTS:
            self._of_rollout.popitem(last=False)
        self._load[slot] += 1
        return slot

    def release(self, slot: str) -> None:
        """Note that a request ended or failed; the rollout keeps its slot."""
        if self._load[slot] > 1:
            self._load[slot] -= 1
        else:
            del self._load[slot]

    def forget_rollouts(self) -> None:
        """Place all rollouts anew with their next request."""
        self._of_rollout.clear()

    def add(self, slot: str) -> None:
        """Add a slot. It gets first turns at once; running rollouts stay where their turns are cached."""
        self._penalties.pop(slot, None)
        if slot in self._slots:
            return
        self._slots[slot] = None
        self._ring = sorted(self._ring + [(_position(f"{slot}#{point}"), slot) for point in range(POINTS)])

    def remove(self, slot: str) -> None:
        """Give a slot no further requests; its rollouts move elsewhere with their next one."""
        self._slots.pop(slot, None)
        self._penalties.pop(slot, None)
        self._ring = [point for point in self._ring if point[1] != slot]

    def failed(self, slot: str) -> None:
        """Note that a request failed at a slot. While others are better, even running rollouts avoid it.

        A dead server fails at once and is therefore the least loaded: by load only, it would attract requests.
        """
        if slot in self._slots:
            self._penalties[slot] = (self._penalty(slot) + 1, self._clock())

    def _penalty(self, slot: str) -> float:
        """Return the number of failures, each halved every HALF_LIFE_S seconds."""
        value, since = self._penalties.get(slot, (0.0, 0.0))
        return value * 0.5 ** ((self._clock() - since) / HALF_LIFE_S) if value else 0.0

    def _usable(self) -> set[str]:
        """Return the slots that are well, or if none is, those with at most twice the best slot's penalty."""
        if not self._slots:
            raise NoServerError(
                "No available servers in load balancer: all have left or died. See the log of the rollout servers."
            )
        penalties = {slot: self._penalty(slot) for slot in self._slots}
        limit = max(WELL, 2 * min(penalties.values()))
        return {slot for slot, penalty in penalties.items() if penalty <= limit}

    def _place(self, rollout: str, usable: set[str]) -> str:
        """Return the first usable slot with room after the rollout's hash; there is one because 1 < c."""
        total = sum(self._load[slot] for slot in usable) + 1
        room = math.ceil(LOAD_FACTOR * total / len(usable))
        start = bisect.bisect(self._ring, (_position(rollout), ""))
        for index in range(start, start + len(self._ring)):
            slot = self._ring[index % len(self._ring)][1]
            if slot in usable and self._load[slot] < room:
                return slot
        raise AssertionError(f"no slot has fewer than {room} of {total} requests: {self._load}")


def _position(text: str) -> int:
    """Return a text's position on the ring, the same in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
