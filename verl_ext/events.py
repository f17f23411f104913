"""What happens in a step, as a stream of events, and the base class of those who listen to it.

A trainer (trainer/run_trainer.py) tells its observers of each event: `Drawn`, `Selected`, `Updated`, `Ended`, `Saved`,
`Validated`, `Finished`. Ledger, records, exclusions, adaptive n and early stop are observers. To add your own, name it
under `retool.observers`.
"""

import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from verl_ext.episode import EpisodeKey
from verl_ext.outcome import PromptEnd, RolloutEnd

# What a sampler reports -----------------------------------------------------------------------------------------------


@dataclass
class EndedCounts:
    """Counts of training rollouts that ended, by what became of them."""

    rollouts: int = 0  # of groups in which no rollout raised
    groups: int = 0
    excluded: Counter = field(default_factory=Counter)  # EXCLUSIONS -> rollouts; "raised" counts groups
    raised: set[str] = field(default_factory=set)  # uids of the groups in which one raised
    lost: Counter = field(default_factory=Counter)  # server -> requests that it was lost with

    def __iadd__(self, other: "EndedCounts") -> "EndedCounts":
        self.rollouts += other.rollouts
        self.groups += other.groups
        self.excluded.update(other.excluded)
        self.lost.update(other.lost)
        self.raised |= other.raised
        return self

    def out_of(self, cause: str) -> int:
        """Return what a cause's count is out of: groups for "raised", because such a rollout loses its group."""
        return self.groups if cause == RolloutEnd.RAISED else self.rollouts

    def share(self, cause: str) -> float:
        return self.excluded[cause] / max(self.out_of(cause), 1)


@dataclass(frozen=True)
class Selection:
    """What a batch has of the groups that it took. Of verl's own samplers: all of them, with nothing left out.

    Attributes:
        fillers: uids of groups that are not useful, and complete the batch; their advantages are set to 0.
        baseline_only: episodes and copies that are in the baseline of their group, but not in the loss.
        left_out: episode of these groups -> why it is not in the loss.
    """

    fillers: frozenset[str] = frozenset()
    baseline_only: frozenset[EpisodeKey] = frozenset()
    left_out: Mapping[EpisodeKey, str] = field(default_factory=dict)

    def trains(self, key: EpisodeKey) -> bool:
        """Tell whether a row of the batch is in the loss."""
        return key.uid not in self.fillers and key.episode not in self.baseline_only


# Events ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Started:
    """A run that trains begins or continues after `step`, 0 if it is new.

    Attributes:
        waiting: uid -> end, of the groups that had ended before and wait in the queue; OPEN if they are useful.
        decode: token ids -> text.
    """

    step: int
    waiting: Mapping[str, PromptEnd] = field(default_factory=dict)
    decode: Callable[[list[int]], str] = field(kw_only=True)


@dataclass(frozen=True)
class Drawn:
    """Prompts are handed to the agent loops.

    Attributes:
        prompts: uid -> problem.
        sizes: rollouts of each.
        domains: uid -> domain; empty if the run has no table of domains.
    """

    step: int
    prompts: Mapping[str, str]
    sizes: Sequence[int]
    domains: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Selected:
    """A batch has its advantages and is about to be trained on.

    Attributes:
        number: of the batch within the step, from 0.
        batch: verl's KVBatchMeta.
        selection: what it has of the groups that it took.
        keys: of its rows, as verl spells them.
        advantages: float[B, T], before any factor of the loss's mean. mask: [B, T], 1: a token trains.
        factors: what a row's advantages were then multiplied by, if not by 1.
    """

    step: int
    number: int
    batch: Any
    selection: Selection
    keys: Sequence[str] = ()
    advantages: Any = None
    mask: Any = None
    factors: Mapping[EpisodeKey, float] = field(default_factory=dict)

    @functools.cached_property
    def advantage(self) -> dict[EpisodeKey, float | None]:
        """Row -> its advantage if all its training tokens share one. A factor is not part of it, except 0."""
        is_out = ~self.mask.bool()
        least = self.advantages.masked_fill(is_out, float("inf")).amin(-1).tolist()
        most = self.advantages.masked_fill(is_out, float("-inf")).amax(-1).tolist()
        return {
            key: 0.0 if self.factors.get(key) == 0 else low if low == high else None
            for key, low, high in zip(map(EpisodeKey.parse, self.keys), least, most, strict=True)
        }


@dataclass(frozen=True)
class Updated:
    """The actor was updated on the batch of the `Selected` event before, in `updates` mini-batches."""

    step: int
    number: int
    batch: Any
    updates: int


@dataclass(frozen=True)
class Ended:
    """A step has made its updates; its checkpoint and its validation follow.

    Attributes:
        counts: of the rollouts that ended since the last step.
        prompts: uid -> what became of the prompts that were decided.
        fates: uid of a decided prompt -> `RolloutFate` with its reason -> number of rollouts. A prompt of which a
            rollout raised has none.
        seen: uids of the groups that ended and are still in the queue.
        in_queue: prompts in the queue, by the queue's own count.
        accs: uid of a group that ended -> `acc` of those of its rollouts that no infrastructure failure hit.
        metrics: of the step.
    """

    step: int
    counts: EndedCounts = field(default_factory=EndedCounts)
    prompts: Mapping[str, PromptEnd] = field(default_factory=dict)
    fates: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    seen: frozenset[str] = frozenset()
    in_queue: int = 0
    accs: Mapping[str, Sequence[float]] = field(default_factory=dict)
    metrics: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Saved:
    """The checkpoint of a step is complete."""

    step: int


@dataclass(frozen=True)
class Validated:
    """A validation has ended, also one before the first step.

    Attributes:
        uids: of its groups.
        is_light: whether it was a light one.
        is_void: whether too many of its samples failed, so that it has no figures.
    """

    step: int
    metrics: Mapping[str, float]
    uids: frozenset[str] = frozenset()
    is_light: bool = False
    is_void: bool = False


@dataclass(frozen=True)
class Finished:
    """A step has ended with its checkpoint and validation.

    Attributes:
        metrics: all of the step.
        intervals: verl's timers of the step: `what`, `start_s`, `end_s` (seconds since 1970) of each.
    """

    step: int
    metrics: Mapping[str, Any] = field(default_factory=dict)
    intervals: Sequence[Mapping[str, Any]] = ()


# Who listens ----------------------------------------------------------------------------------------------------------

Metrics = Mapping[str, float] | None  # what an observer adds to the step's metrics


class Observer:
    """Listens to a run; override what you need. An exception ends the run."""

    def on_started(self, event: Started) -> None: ...

    def on_drawn(self, event: Drawn) -> None: ...

    def on_selected(self, event: Selected) -> None: ...

    def on_updated(self, event: Updated) -> None: ...

    def on_ended(self, event: Ended) -> Metrics: ...

    def on_saved(self, event: Saved) -> None: ...

    def on_validated(self, event: Validated) -> Metrics: ...

    def on_finished(self, event: Finished) -> None: ...

    def close(self) -> None:
        """End; called once, also if the run raised."""


class Observers:
    """Passes each event to all, in their order."""

    def __init__(self, observers: Sequence[Observer] = ()):
        self._observers = list(observers)

    def add(self, observer: Observer) -> None:
        self._observers.append(observer)

    def tell(self, event: Any) -> dict[str, float]:
        """Pass on an event; return the metrics that observers add."""
        metrics: dict[str, float] = {}
        for observer in self._observers:
            metrics |= getattr(observer, f"on_{type(event).__name__.lower()}")(event) or {}
        return metrics

    def close(self) -> None:
        for observer in self._observers:
            observer.close()
