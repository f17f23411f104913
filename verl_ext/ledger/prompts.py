"""The prompts of a run: the ledger that it writes while it trains, and the ledger's sums.

A step's record is on disk before the step's checkpoint. What a run did after the checkpoint that it resumes from is
forgotten, as the weights and the data loader forget it: those prompts are drawn again, under other names.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl_ext.events import Drawn, Ended, Observer
from verl_ext.outcome import PromptEnd, RolloutEnd, RolloutFate
from verl_ext.runs import jsonl
from verl_ext.runs.journal import StepJournal

FILE = "prompts.jsonl"
_RAISED = f"{RolloutFate.FAILED}/{RolloutEnd.RAISED}"
# The possible ends of a group that was kept for the next step: it ages, and with fewer rollouts it is judged again.
_AFTER_SURPLUS = (PromptEnd.TRAINED, PromptEnd.SURPLUS, PromptEnd.STALE, PromptEnd.EQUAL, PromptEnd.VOID)


@dataclass
class Tally:
    """The prompts of a run, from its records.

    Attributes:
        ends: uid -> end; OPEN if none is known.
        drawn_twice, wrong_ends, lost: uids for which the ledger does not sum, see `faults`.
        gaps: (first, last) of steps without a record, between others.
        seen: uids of ended groups that waited in the queue at the newest record. They may have an end, such as an equal
            group that may become a filler.
        in_queue: prompts in the queue by its own count at the newest record.
        problems: problem -> times drawn.
        sizes: uid -> rollouts that were submitted for it; only for prompts whose number is known.
        domains: uid -> domain, of the prompts of a run with a table of domains.
        fates: uid -> `outcome.RolloutFate`, with why -> rollouts, of prompts that ended.
        retries: server -> requests that were lost with it and continued elsewhere; only of rollouts that ended and did
            not raise.
    """

    ends: dict[str, PromptEnd] = field(default_factory=dict)
    drawn_twice: list[str] = field(default_factory=list)
    wrong_ends: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    gaps: list[tuple[int, int]] = field(default_factory=list)
    seen: set[str] = field(default_factory=set)
    in_queue: int = 0
    step: int = 0
    problems: Counter = field(default_factory=Counter)
    sizes: dict[str, int] = field(default_factory=dict)
    domains: dict[str, str] = field(default_factory=dict)
    fates: dict[str, Mapping[str, int]] = field(default_factory=dict)
    retries: Counter = field(default_factory=Counter)

    @property
    def open(self) -> set[str]:
        return {uid for uid, end in self.ends.items() if end is PromptEnd.OPEN}

    def add(self, record: Mapping[str, Any]) -> None:
        for uid, problem in record["drawn"].items():
            if uid in self.ends:
                self.drawn_twice.append(uid)
            self.ends.setdefault(uid, PromptEnd.OPEN)
            self.problems[problem] += 1
        self.sizes |= {uid: int(size) for size, uids in record.get("sizes", {}).items() for uid in uids}
        self.domains |= {uid: name for name, uids in record.get("domains", {}).items() for uid in uids}
        for uid, name in record["ends"].items():
            end, before = PromptEnd(name), self.ends.get(uid)
            if before is not PromptEnd.OPEN and not (before is PromptEnd.SURPLUS and end in _AFTER_SURPLUS):
                self.wrong_ends.append(uid)
            self.ends[uid] = end
        for uid in record.get("lost", ()):
            del self.ends[uid]
            self.lost.append(uid)
        self.fates |= record.get("fates", {})
        self.fates |= {uid: {_RAISED: self.sizes.get(uid, 1)} for uid in record.get("raised", ())}
        self.retries.update(record.get("retries", {}))
        if self.step and record["step"] > self.step + 1:
            self.gaps.append((self.step + 1, record["step"] - 1))
        self.step, self.seen, self.in_queue = record["step"], set(record["seen"]), record["in_queue"]

    def faults(self) -> list[str]:
        """Return what does not sum, a sentence each."""
        faults = [
            f"{len(uids)} {what}: {', '.join(uids[:3])}{' ...' * (len(uids) > 3)}."
            for uids, what in (
                (self.drawn_twice, "prompts were drawn twice under one name"),
                (self.wrong_ends, "prompts ended twice, or ended and were never drawn"),
                (self.lost, "prompts were open at a checkpoint but not in the queue of the run that resumed from it"),
                (self._unequal(), "prompts ended with more or fewer rollouts than were submitted"),
                (self._untrue(), "prompts trained without a rollout, or did not train although a rollout did"),
            )
            if uids
        ]
        faults += [
            f"There is no record of steps {first} to {last}: the run resumed an older checkpoint, and then one that "
            "it had left behind."
            for first, last in self.gaps
        ]
        if (expected := len(self.open | self.seen)) != self.in_queue:
            faults.append(f"{expected} prompts are open or wait with an end, but the queue held {self.in_queue}.")
        return faults

    def _unequal(self) -> list[str]:
        ended = self.ends.keys() - self.open
        counts = {uid: sum(self.fates.get(uid, {}).values()) for uid in ended & self.sizes.keys()}
        return sorted(uid for uid, count in counts.items() if count != self.sizes[uid])

    def _untrue(self) -> list[str]:
        return [
            uid
            for uid, fates in self.fates.items()
            if (RolloutFate.TRAINED in fates) != (self.ends.get(uid) is PromptEnd.TRAINED)
        ]

    def ends_by_domain(self) -> dict[str, Counter[str]]:
        """Return domain -> `outcome.PromptEnd` -> prompts; empty for a run without a table of domains."""
        counts: dict[str, Counter[str]] = {}
        for uid, name in self.domains.items():
            counts.setdefault(name, Counter())[self.ends.get(uid, "lost")] += 1
        return counts

    def rollouts(self) -> Counter[str]:
        """Return `outcome.RolloutFate`, with why -> rollouts; and under OPEN the rollouts of open prompts."""
        counts = Counter({str(PromptEnd.OPEN): sum(self.sizes.get(uid, 0) for uid in self.open)})
        for fates in self.fates.values():
            counts.update(fates)
        return +counts

    def table(self) -> str:
        counts = Counter(self.ends.values())
        rows = [("drawn", len(self.ends) + len(self.lost)), *((end.value, counts[end]) for end in PromptEnd)]
        rows += [("lost", len(self.lost))] * bool(self.lost)
        times = ", ".join(f"{n} drawn {times}x" for times, n in sorted(Counter(self.problems.values()).items()))
        lines = [f"{name:<10}{number:>10,}" for name, number in rows]
        lines += [f"problems: {times or 'none'}"]
        lines += [f"{name}: {_listed(counts)}" for name, counts in self.ends_by_domain().items()]
        lines += [f"rollouts: {_listed(self.rollouts())}"] * bool(self.fates)
        lines += [f"requests that lost their server: {_listed(self.retries)}"] * bool(self.retries)
        return "\n".join([f"prompts up to step {self.step}", *lines])


def _listed(counts: Counter) -> str:
    return ", ".join(f"{number:,} {name}" for name, number in counts.most_common())


class PromptLedger(Observer):
    """Writes the records. Draws and ends belong to the step that is under way when they are reported."""

    def __init__(self, folder: Path):
        self._journal = StepJournal(folder / FILE)
        self._drawn: dict[str, str] = {}
        self._sizes: dict[int, list[str]] = {}
        self._domains: dict[str, list[str]] = {}

    def resume(self, step: int, in_queue: set[str]) -> dict[str, PromptEnd]:
        """Forget what came after `step`, and compare what is open with the queue that the checkpoint restored.

        Args:
            in_queue: uids of the prompts in the queue. One that the ledger does not know (the run began in another
                folder, or without a ledger) counts as drawn at this resume.
        Returns:
            uid -> end of the groups that had ended and were counted before the checkpoint, and waited in the
            queue then; OPEN if they were useful. In the mode `sync` the queue has ended with the run.
        """
        tally = Tally()
        for record in self._journal.resume(step):
            tally.add(record)
        unknown, lost = sorted(in_queue - tally.ends.keys()), sorted(tally.open - in_queue)
        if unknown or lost:
            drawn, seen = dict(zip(unknown, unknown, strict=True)), sorted(tally.seen & in_queue)
            self._journal.append(step, drawn=drawn, ends={}, lost=lost, seen=seen, in_queue=len(in_queue))
        return {uid: end for uid, end in tally.ends.items() if uid in tally.seen}

    def on_drawn(self, event: Drawn) -> None:
        self._drawn |= event.prompts
        for uid, size in zip(event.prompts, event.sizes, strict=True):
            self._sizes.setdefault(size, []).append(uid)
        for uid, name in event.domains.items():
            self._domains.setdefault(name, []).append(uid)

    def on_ended(self, event: Ended) -> None:
        self._journal.append(
            event.step,
            drawn=self._drawn,
            sizes=self._sizes,
            ends=dict(event.prompts),
            seen=sorted(event.seen),
            in_queue=event.in_queue,
            fates=dict(event.fates),
            retries=dict(event.counts.lost),
            raised=sorted(event.counts.raised),
            **({"domains": self._domains} if self._domains else {}),
        )
        self._drawn, self._sizes, self._domains = {}, {}, {}


def read_tally(folder: Path) -> Tally:
    """Return the newest state of a run.

    Raises:
        FileNotFoundError: the folder has no ledger.
        ValueError: a line of the ledger is malformed.
    """
    tally = Tally()
    for _ in jsonl.read(folder / FILE, tally.add, "an object with `step`, `drawn` and `ends`"):
        pass
    return tally
