"""Which problems come again less often: those that the model has solved, and those that it never solves.

A problem's pool is decided by the pass rate of its newest group in this run: easy, hard, or middle. A problem that has
not been tried is in none of them.
"""

import random
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from verl_ext.events import Ended, Observer
from verl_ext.settings import Curriculum as Settings

POOLS = ("easy", "middle", "hard")


class Curriculum(Observer):
    """Decides on each problem whose turn it is, and learns from each group that ends.

    Args:
        settings: `retool.curriculum`.
        sizes: domain -> number of its problems.
        seed: with which the draws are made. They depend on nothing else but domain, problem and epoch.
    """

    def __init__(self, settings: Settings, sizes: Mapping[str, int], seed: int | None):
        self.settings, self._sizes, self._seed = settings, dict(sizes), seed
        self._rates: dict[str, dict[int, float]] = {name: {} for name in sizes}  # domain -> problem -> its pass rate
        self._in_flight: dict[str, tuple[str, int]] = {}  # uid -> domain and problem
        self._left_out = 0  # draws since the last step

    def pool(self, domain: str, number: int) -> str | None:
        """Return the pool of a problem; None if no group of it has ended."""
        rate = self._rates[domain].get(number)
        if rate is None:
            return None
        if rate >= self.settings.easy_above:
            return "easy"
        return "hard" if rate <= self.settings.hard_below else "middle"

    def is_drawn(self, domain: str, number: int, epoch: int) -> bool:
        """Tell whether a problem is drawn in this epoch of its domain."""
        shares = {"easy": self.settings.easy_share, "hard": self.settings.hard_share}
        share = 1.0 if (pool := self.pool(domain, number)) is None else shares.get(pool, 1.0)
        is_drawn = share == 1.0 or random.Random(f"{self._seed}/{domain}/{epoch}/{number}").random() < share
        self._left_out += not is_drawn
        return is_drawn

    def drawn(self, uid: str, domain: str, number: int) -> None:
        self._in_flight[uid] = domain, number

    def observe(self, uid: str, accs: Sequence[float]) -> None:
        """Learn how a group ended. `accs`: of its rollouts that no infrastructure failure hit; none teach nothing."""
        found = self._in_flight.pop(uid, None)
        if found is not None and len(accs):
            domain, number = found
            self._rates[domain][number] = sum(accs) / len(accs)

    def on_ended(self, event: Ended) -> dict[str, float]:
        """Learn from a step's groups; return the number of problems in each pool, and of draws that were left out."""
        for uid, accs in event.accs.items():
            self.observe(uid, accs)
        metrics = {"curriculum/left_out": float(self._left_out)}
        self._left_out = 0
        for domain, size in self._sizes.items():
            rates = self._rates[domain]
            counts = Counter(self.pool(domain, number) for number in rates)
            prefix = f"curriculum/{domain}/" if domain else "curriculum/"
            metrics |= {f"{prefix}{pool}": float(counts[pool]) for pool in POOLS}
            metrics[f"{prefix}untried"] = float(size - len(rates))
        return metrics

    def state_dict(self) -> dict[str, Any]:
        return {"rates": {name: dict(rates) for name, rates in self._rates.items()}, "in_flight": dict(self._in_flight)}

    def load_state_dict(self, state: Mapping[str, Any], domains: Collection[str]) -> None:
        """Restore what is known of these domains."""
        known = self._rates.keys() & state["rates"].keys() & set(domains)  # one of weight 0, now or then, has none
        self._rates |= {name: dict(state["rates"][name]) for name in known}
        self._in_flight = {uid: drawn for uid, drawn in state["in_flight"].items() if drawn[0] in known}
