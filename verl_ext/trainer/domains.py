"""How a run's prompts and its trained batches are divided among domains: quotas, the choice of each prompt, pauses.

A domain is a `data_source` with a row in `retool.domains`. A run without that table has one domain, and every function
here then gives the answer of a run that knows no domains. This module knows nothing of verl or of the queue.
"""

import contextlib
import logging
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

logger = logging.getLogger(__name__)
logger.setLevel(os.getenv("VERL_LOGGING_LEVEL", "INFO"))

ONLY = ""  # the name of the domain of a run without `retool.domains`
MIN_KEEP_RATE = 0.1  # never expect less than one useful group in ten, or one bad step would flood the next
KEEP_RATE_DECAY = 0.5  # weight of the newest batch in the expected share of useful groups
MAX_DEBT = 2  # batches: a domain that cannot deliver is owed no more, so that it does not displace the others for ever
PAUSE_AFTER = 4  # groups of a domain that infrastructure failed, in a row
PROBE_EVERY_S = 30.0  # between two prompts of a paused domain, unless a step begins


class Quotas:
    """How many groups of each batch are each domain's, by weight. What rounding or lending takes away is carried over.

    Batches of 10 with weights 2 and 1 have 7 + 3, 6 + 4, 7 + 3 groups, and so on.

    Args:
        weights: domain -> its weight; one with weight 0 has no quota.
    """

    def __init__(self, weights: Mapping[str, float]):
        self._weights = {name: weight for name, weight in weights.items() if weight > 0}
        self._credits = dict.fromkeys(self._weights, 0.0)  # groups that a domain is owed, or owes (below 0)

    def shares(self, paused: Collection[str] = ()) -> dict[str, float]:
        """Return the share of each domain that is not paused; they sum to 1."""
        weights = {name: weight for name, weight in self._weights.items() if name not in paused}
        total = sum(weights.values())
        return {name: weight / total for name, weight in weights.items()}

    def wanted(self, size: int, paused: Collection[str] = ()) -> dict[str, int]:
        """Return how many of the next `size` groups are each domain's, by largest remainders; ties in table order."""
        shares = self.shares(paused)
        due = {name: max(self._credits[name] + share * size, 0.0) for name, share in shares.items()}
        total = sum(due.values())
        due = {name: due[name] * size / total if total else share * size for name, share in shares.items()}
        whole = {name: math.floor(number + 1e-9) for name, number in due.items()}
        by_remainder = sorted(due, key=lambda name: round(whole[name] - due[name], 9))
        for name in by_remainder[: size - sum(whole.values())]:
            whole[name] += 1
        return whole

    def settle(self, taken: Mapping[str, int], paused: Collection[str] = ()) -> None:
        """Credit each domain its share of a batch, and debit the groups of it that the batch took."""
        size = sum(taken.values())
        for name, share in self.shares(paused).items():
            most = MAX_DEBT * share * size + 1  # at least one group, whatever the weight
            self._credits[name] += share * size - taken.get(name, 0)
            self._credits[name] = min(max(self._credits[name], -most), most)

    def credit(self, name: str) -> float:
        """Return how many groups a domain is owed; below 0 if it owes them."""
        return self._credits[name]

    def forgive(self, name: str) -> None:
        """Let a domain neither owe nor be owed anything."""
        self._credits[name] = 0.0

    def state_dict(self) -> dict[str, float]:
        return dict(self._credits)

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore the credits of the domains that the table still has."""
        self._credits |= {name: state[name] for name in self._credits.keys() & state.keys()}


class Domains:
    """What a run knows of its domains while it trains. The sampler reports to it, and the loader asks it.

    Args:
        weights: domain -> its weight, in the order of the table.
        batch_size: prompts of a step.
        max_staleness: domain -> its own limit in versions, in place of the sampler's; see `SamplerSettings`.
        clock: seconds.
    """

    def __init__(
        self,
        weights: Mapping[str, float],
        batch_size: int = 1,
        max_staleness: Mapping[str, int] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.weights, self.batch_size, self.max_staleness = dict(weights), batch_size, dict(max_staleness or {})
        self.quotas = Quotas(weights)
        self.keep_rates = dict.fromkeys(weights, 1.0)  # expected share of useful groups
        self.paused: dict[str, str] = {}  # domain -> why
        self.in_queue: dict[str, str] = {}  # uid -> domain, of the prompts that no batch has taken
        self.spent: set[str] = set()  # domains that have replaced all that the next batch allows: what ends is taken
        self.submitted: Counter[str] = Counter()  # prompts since the metrics of the newest step
        self.taken: Counter[str] = Counter()  # groups of all batches of the run
        self._failed_in_row: Counter[str] = Counter()
        self._probed: dict[str, tuple[int, float]] = {}  # paused domain -> step and time of the newest prompt
        self._next: str | None = None
        self._clock = clock

    @property
    def are_several(self) -> bool:
        return [*self.weights] != [ONLY]

    def of(self, uid: str) -> str:
        return self.in_queue.get(uid, ONLY)

    def count(self, uids: Iterable[str]) -> Counter[str]:
        return Counter(map(self.of, uids))

    def wanted(self, size: int) -> Counter[str]:
        """Return how many groups of the next batch are each domain's; 0 for a paused one."""
        return Counter(self.quotas.wanted(size, self.paused))

    def settle(self, taken: Mapping[str, int]) -> None:
        """Book a batch. `taken`: its groups of each domain."""
        self.quotas.settle(taken, self.paused)
        self.taken.update(taken)

    def add(self, uid: str, name: str) -> None:
        """Note a prompt that is about to be submitted."""
        self.in_queue[uid] = name
        self.submitted[name] += 1

    def forget(self, uids: Iterable[str]) -> None:
        for uid in uids:
            self.in_queue.pop(uid, None)

    def learn(self, name: str, keep_rate: float) -> None:
        """Take the share of useful groups in a batch into the expected one."""
        before = self.keep_rates.setdefault(name, 1.0)
        self.keep_rates[name] = before + KEEP_RATE_DECAY * (max(keep_rate, MIN_KEEP_RATE) - before)

    # Which domain the next prompt comes from -------------------------------------------------------------------------

    @contextlib.contextmanager
    def only(self, name: str) -> Iterator[None]:
        """Let all prompts that are submitted in the block come from one domain."""
        self._next = name
        try:
            yield
        finally:
            self._next = None

    def choose(self, ready: Mapping[str, int], step: int) -> str:
        """Return the domain of the next prompt.

        It is the one that has the smallest part of the groups that it should have in the queue. These are its quota of
        all groups there, which includes what it is owed. Groups that are not ready count by the domain's keep rate, so
        a domain with few useful groups gets more prompts, and so does a slow one, whose credit grows. Those that are
        owed groups leave room for a batch of the others: otherwise prompts that never end could fill the queue.

        Args:
            ready: domain -> groups in the queue that ended and can be taken.
        """
        if self._next is not None:
            return self._next
        in_flight = Counter(self.in_queue.values())
        in_flight.subtract(ready)
        for name, (probed_step, probed_s) in self._probed.items():
            is_due = step != probed_step or self._clock() - probed_s >= PROBE_EVERY_S
            if is_due and not in_flight[name]:
                self._probed[name] = step, self._clock()
                return name
        ahead = max(len(self.in_queue) + 1, self.batch_size)
        wanted, now = self.quotas.wanted(ahead, self.paused), self.quotas.wanted(self.batch_size, self.paused)

        def part(name: str) -> float:
            is_spent = name in self.spent  # then whatever ends is taken; more than the batch's quota would be replaced
            rate, due = (1.0, now[name]) if is_spent else (self.keep_rates[name], wanted[name])
            return (ready.get(name, 0) + rate * (in_flight[name] + 1)) / max(due, 0.1)

        owed = [name for name in wanted if self.quotas.credit(name) >= 1]
        has_room = sum(in_flight[name] for name in owed) < ahead - self.batch_size
        return min(wanted if has_room else [name for name in wanted if name not in owed] or owed, key=part)

    # Pauses -----------------------------------------------------------------------------------------------------------

    def ended(self, name: str, failed: bool, why: str, step: int) -> None:
        """Count a group that ended, and pause or resume its domain. The last domain that is not paused stays so.

        Args:
            failed: whether infrastructure failed the group.
            why: the failures, in words.
        """
        if not failed:
            self._failed_in_row[name] = 0
            if self.paused.pop(name, None) is not None:
                del self._probed[name]
                logger.warning("step %d: domain %s works again and continues.", step, name)
            return
        self._failed_in_row[name] += 1
        active = self.quotas.shares(self.paused)
        if self._failed_in_row[name] >= PAUSE_AFTER and name in active and len(active) > 1:
            self.paused[name] = why
            self.quotas.forgive(name)
            self._probed[name] = step, self._clock()
            logger.warning(
                "step %d: domain %s is paused because %d of its prompt groups in a row failed for reasons outside the "
                "model (%s). The others continue. It gets one prompt from time to time, and resumes when one succeeds.",
                *(step, name, self._failed_in_row[name], why),
            )

    # Checkpoints ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return quotas, keep rates and sums. A domain is not paused in a resumed run: it may have been repaired."""
        return {"quotas": self.quotas.state_dict(), "keep_rates": dict(self.keep_rates), "taken": dict(self.taken)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.quotas.load_state_dict(state["quotas"])
        self.keep_rates |= {name: rate for name, rate in state["keep_rates"].items() if name in self.keep_rates}
        self.taken = Counter(state["taken"])
