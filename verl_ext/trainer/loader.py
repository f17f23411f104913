"""The prompts of a run with domains or a curriculum, one at a time, in place of verl's `train_dataloader`.

verl saves a loader's state in a checkpoint's `data.pt`. So the place in each domain's order, the quotas and the
curriculum are in the checkpoint as well, and need no file.
"""

import logging
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from verl_ext.trainer.curriculum import Curriculum
from verl_ext.trainer.domains import Domains

logger = logging.getLogger(__name__)
logger.setLevel(os.getenv("VERL_LOGGING_LEVEL", "INFO"))


class Order:
    """The rows of a domain without end: each epoch has all of them, shuffled anew or in their own order."""

    def __init__(self, size: int, seed: str | None):
        self.size, self._seed = size, seed
        self.epoch, self._at = 0, 0
        self._rows = self._shuffled()

    def _shuffled(self) -> Sequence[int]:
        if self._seed is None:
            return range(self.size)
        return random.Random(f"{self._seed}/{self.epoch}").sample(range(self.size), self.size)

    def __next__(self) -> int:
        if self._at == self.size:
            self.epoch, self._at = self.epoch + 1, 0
            self._rows = self._shuffled()
        self._at += 1
        return self._rows[self._at - 1]

    def state_dict(self) -> dict[str, int]:
        return {"size": self.size, "epoch": self.epoch, "at": self._at}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.epoch, self._at = state["epoch"], state["at"]
        self._rows = self._shuffled()


class DomainLoader:
    """Draws a domain, then the next row of its order that the curriculum does not leave out.

    Args:
        dataset: verl's; `dataset[i]` is a row as `collate` takes it.
        rows: domain -> numbers of its rows in the data set.
        choose: returns the domain of the next prompt (`DapoReplayBuffer.choose_domain`).
        seed: of the orders; None: rows in the order of the data set.
    """

    def __init__(
        self,
        dataset: Any,
        collate: Callable[[list[Any]], dict[str, Any]],
        rows: Mapping[str, Sequence[int]],
        *,
        domains: Domains,
        choose: Callable[[], str],
        seed: int | None,
        curriculum: Curriculum | None = None,
    ):
        self.dataset, self.batch_size = dataset, 1  # read like those of verl's loader (checkpoints/course.py)
        self._collate, self._rows = collate, rows
        self._domains, self._choose, self._curriculum = domains, choose, curriculum
        seeds = {name: None if seed is None else f"{seed}/{name}" for name in rows}
        self._orders = {name: Order(len(numbers), seeds[name]) for name, numbers in rows.items()}
        self._newest: tuple[str, int]  # domain, and number of the row among the domain's

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self

    def __next__(self) -> dict[str, Any]:
        name = self._choose()
        order = self._orders[name]
        for _ in range(order.size):  # a curriculum may leave out a whole epoch: then its last row is drawn
            number = next(order)
            if self._curriculum is None or self._curriculum.is_drawn(name, number, order.epoch):
                break
        self._newest = name, number
        return self._collate([self.dataset[self._rows[name][number]]])

    def name(self, uid: str) -> None:
        """Note the uid that verl gives to the newest prompt."""
        name, number = self._newest
        self._domains.add(uid, name)
        if self._curriculum is not None:
            self._curriculum.drawn(uid, name, number)

    def state_dict(self) -> dict[str, Any]:
        return {
            "orders": {name: order.state_dict() for name, order in self._orders.items()},
            "domains": self._domains.state_dict(),
            "curriculum": self._curriculum.state_dict() if self._curriculum else None,
        }

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Continue where a checkpoint was saved; a domain that is new, or has other rows, begins anew.

        None follows a state of a data set of another size (checkpoints/hooks.py), and changes nothing further.
        """
        if state is None:
            return
        if "orders" not in state:
            logger.warning(
                "The checkpoint is of a run without domains or curriculum: the order of prompts begins anew."
            )
            return
        same = {name for name, saved in state["orders"].items() if name in self._orders}
        for name in sorted(same):
            saved, order = state["orders"][name], self._orders[name]
            if saved["size"] == order.size:
                order.load_state_dict(saved)
            else:
                same.remove(name)
                logger.warning(
                    "domain %s has %d rows, but %d in the checkpoint: its order and its pass rates begin anew.",
                    *(name, order.size, saved["size"]),
                )
        self._domains.load_state_dict(state["domains"])
        if self._curriculum is not None and state["curriculum"] is not None:
            self._curriculum.load_state_dict(state["curriculum"], same)
