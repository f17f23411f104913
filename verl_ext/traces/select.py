"""What depends on several traces: agreement, duplicates, how many of a problem, balance over sources."""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verl_ext.datasets.text import shingles_of
from verl_ext.runs import jsonl
from verl_ext.traces.output import Spool
from verl_ext.traces.trace import LeftOut, Reason

NEAR = 0.8  # share of common shingles (of 30 letters) from which two traces of a problem count as one
CHOICES = ("shortest", "random", "varied")


@dataclass(frozen=True)
class Selection:
    """Which of the traces that passed by themselves are kept.

    Attributes:
        per_problem: at most so many traces of a problem; None: all.
        choose: which of them; see CHOICES.
        agree: samples that must reach the gold of a problem, or none of its traces is kept; 0: any.
        balance: keep as many traces of each source.
        seed: of what is drawn.
    """

    per_problem: int | None = None
    choose: str = "shortest"
    agree: int = 0
    balance: bool = False
    seed: int = 0


def select(spool: Spool, chosen: Selection) -> None:
    """Leave out traces that passed by themselves, with the traces of one problem in memory at a time."""
    for traces in spool.by_problem():
        for number, why in _left_of_problem(traces, spool, chosen):
            spool.drop(number, why)
    if chosen.balance:
        by_source = spool.kept_by_source()
        least = min(map(len, by_source.values()), default=0)
        for source, numbers in by_source.items():
            why = LeftOut(Reason.BALANCE, f"{len(numbers)} of {source}, {least} of the source with the fewest")
            for number in sorted(numbers, key=_drawn(chosen.seed))[least:]:
                spool.drop(number, why)


def disagreements(spool: Spool) -> Iterator[str]:
    """Yield a line for each problem to whose samples most give one answer that is not the gold."""
    for problem in spool.problems():
        answers = spool.answers(problem)
        total, first = sum(answer["count"] for answer in answers), answers[0]
        if not first["is_right"] and 2 * first["count"] > total:
            counts = {answer["said"]: answer["count"] for answer in answers}
            line = {"problem": first["question"], "ground_truth": first["gold"], "most": first["said"]}
            yield jsonl.dumps(line | {"answers": counts})


def _left_of_problem(
    traces: Sequence[Mapping[str, Any]], spool: Spool, chosen: Selection
) -> Iterator[tuple[int, LeftOut]]:
    if chosen.agree:
        right = sum(answer["count"] for answer in spool.answers(traces[0]["problem"]) if answer["is_right"])
        if right < chosen.agree:
            why = LeftOut(Reason.DISAGREEMENT, f"{right} samples reach the gold, fewer than {chosen.agree}")
            yield from ((trace["number"], why) for trace in traces)
            return
    left: list[Mapping[str, Any]] = []
    seen: dict[str, int] = {}
    shingles: list[set[str]] = []
    for trace in traces:
        said = trace["text"] + "\0" + "\0".join(trace["codes"])
        if said in seen:
            yield trace["number"], LeftOut(Reason.DUPLICATE, f"the same as trace {seen[said] + 1} of all")
            continue
        seen[said] = trace["number"]
        own = shingles_of(said) if len(traces) > 1 else set()
        if any(_common(own, other) >= NEAR for other in shingles):
            yield trace["number"], LeftOut(Reason.NEAR_DUPLICATE, "nearly the same as another trace of its problem")
            continue
        shingles.append(own)
        left.append(trace)
    if chosen.per_problem is not None and len(left) > chosen.per_problem:
        kept = {trace["number"] for trace in _chosen(left, chosen, chosen.per_problem)}
        why = LeftOut(Reason.TOO_MANY, f"{len(left)} of its problem, {chosen.per_problem} kept")
        yield from ((trace["number"], why) for trace in left if trace["number"] not in kept)


def _chosen(traces: Sequence[Mapping[str, Any]], chosen: Selection, count: int) -> list[Mapping[str, Any]]:
    drawn = _drawn(chosen.seed)
    if chosen.choose == "random":
        return sorted(traces, key=lambda trace: drawn(trace["number"]))[:count]
    by_length = sorted(traces, key=lambda trace: (len(trace["text"]), trace["number"]))
    if chosen.choose == "shortest":
        return by_length[:count]
    codes = {trace["number"]: shingles_of("\n".join(trace["codes"]), 5) for trace in by_length}
    kept = by_length[:1]
    while len(kept) < count:  # the one whose program is least like any that is kept
        rest = [trace for trace in by_length if trace not in kept]
        kept.append(
            min(rest, key=lambda one: max(_common(codes[one["number"]], codes[each["number"]]) for each in kept))
        )
    return kept


def _common(one: set[str], other: set[str]) -> float:
    """Return the share of their shingles that two texts have in common; 1 for two empty ones."""
    return len(one & other) / len(one | other) if one or other else 1.0


def _drawn(seed: int) -> Callable[[int], float]:
    return lambda number: random.Random(f"{seed}:{number}").random()
