"""The timeline of a step: who did what when, and what the trainer waited for."""

import heapq
import itertools
from collections.abc import Sequence
from typing import Any

from verl_ext.view.data import Run, is_validation, step_of

WHATS = ("generate", "tool_queue", "tool", "score", "log_probs", "update", "weight_sync", "wait", "save", "validate")
# Holds for an interval whose times are known: no null, no NaN, not beyond the year 2286.
_KNOWN = "start_s BETWEEN 0 AND 1e10 AND end_s BETWEEN 0 AND 1e10"
LONGEST = 10  # intervals of a lane that are listed: the drawing's rectangles cannot be reached by keyboard
LATER = 8  # steps whose records are searched for rollouts that ran in a step, and were decided later
# lane ("trainer", a server, "tool", "score"), what, start_s, end_s, uid, session, own: the step decided its fate
Interval = dict[str, Any]
_OF_ROLLOUTS = f""", near AS (SELECT uid, session, timings, key = $key AS own,
        list_transform(turns, lambda t: {{server: t.server, started_s: t.started_s, generate_s: t.generate_s}})
            AS turns,
        list_transform(calls, lambda c: {{started_s: c.started_s, queue_s: c.queue_s, run_s: c.run_s}}) AS calls
    FROM records WHERE key = $key OR (timings.started_s < $end AND timings.ended_s > $start))
    SELECT * FROM (SELECT coalesce(server, 'servers') AS lane, 'generate' AS what, started_s AS start_s,
        started_s + generate_s AS end_s, uid, session, own
        FROM (SELECT uid, session, own, unnest(turns, recursive := true) FROM near)
    UNION ALL SELECT 'tool', 'tool_queue', started_s, started_s + queue_s, uid, session, own
        FROM (SELECT uid, session, own, unnest(calls, recursive := true) FROM near) WHERE queue_s > 0
    UNION ALL SELECT 'tool', 'tool', started_s + queue_s, started_s + queue_s + run_s, uid, session, own
        FROM (SELECT uid, session, own, unnest(calls, recursive := true) FROM near)
    UNION ALL SELECT 'score', 'score', timings.ended_s - timings.score_s, timings.ended_s, uid, session, own
        FROM near) WHERE {_KNOWN}"""


def intervals(run: Run, key: str) -> list[Interval]:
    """Return the intervals of the trainer in a step, and of rollouts whose fate the step decided, or which ran in the
    trainer's time: those of validations, and those that one of the next LATER steps decided."""
    none = {"lane": "trainer", "uid": None, "session": None, "own": True}
    of_trainer = [none | row for row in run.ask(f"SELECT * FROM records WHERE {_KNOWN}", kind="timeline", keys=[key])]
    start = min((row["start_s"] for row in of_trainer), default=0.0)
    end = max((row["end_s"] for row in of_trainer), default=0.0)
    keys, step = [key], step_of(key)
    if of_trainer:
        keys = [each for each in run.files() if step - is_validation(each) <= step_of(each) <= step + LATER]
    return of_trainer + run.ask(_OF_ROLLOUTS, {"key": key, "start": start, "end": end}, keys=keys)


def prompts(run: Run, key: str) -> dict[str, str]:
    """Return uid -> prompt of the groups whose fate the step decided."""
    rows = run.ask("SELECT uid, any_value(prompt) AS prompt FROM records GROUP BY uid", keys=[key])
    return {row["uid"]: row["prompt"] for row in rows if row["prompt"]}


def clip(rows: Sequence[Interval]) -> tuple[list[Interval], int]:
    """Return what lies in the trainer's time, cut at its start and end, and how many intervals are not wholly inside.
    A rollout that began hours earlier would leave no room for the step. Without trainer intervals, all is inside."""
    own = [row for row in rows if row["lane"] == "trainer"] or rows
    start, end = min((row["start_s"] for row in own), default=0.0), max((row["end_s"] for row in own), default=0.0)
    cut = [row | {"start_s": max(start, row["start_s"]), "end_s": min(end, row["end_s"])} for row in rows]
    outside = sum(row["start_s"] < start or end < row["end_s"] for row in rows)
    return [row for row in cut if row["start_s"] <= row["end_s"]], outside


def lanes(rows: Sequence[Interval]) -> list[dict[str, Any]]:
    """Return lanes, the trainer's first: `name`, `rows` of disjoint intervals, `seconds` by what is done, `longest`.

    An interval has x and width in thousandths of the step.
    """
    if not rows:
        return []
    start, end = min(row["start_s"] for row in rows), max(row["end_s"] for row in rows)
    scale = 1000 / ((end - start) or 1)
    found: dict[str, dict[str, Any]] = {}
    ends: dict[str, list[tuple[float, int]]] = {}  # lane -> heap of its rows' ends, the earliest on top
    for row in sorted(rows, key=lambda row: (row["lane"] != "trainer", row["lane"], row["start_s"])):
        lane = found.setdefault(row["lane"], {"name": row["lane"], "rows": [], "seconds": {}})
        seconds = row["end_s"] - row["start_s"]
        lane["seconds"][row["what"]] = lane["seconds"].get(row["what"], 0.0) + seconds
        free = ends.setdefault(row["lane"], [])
        if free and free[0][0] <= row["start_s"]:
            number = heapq.heapreplace(free, (row["end_s"], free[0][1]))[1]
        else:
            number = len(lane["rows"])
            lane["rows"].append([])
            heapq.heappush(free, (row["end_s"], number))
        kind = WHATS.index(row["what"]) if row["what"] in WHATS else len(WHATS) - 1
        shape = {"x": (row["start_s"] - start) * scale, "width": max(0.5, seconds * scale)}
        lane["rows"][number].append(row | shape | {"kind": kind, "s": seconds})
    for lane in found.values():
        everything = itertools.chain.from_iterable(lane["rows"])
        lane["longest"] = heapq.nlargest(LONGEST, everything, key=lambda each: each["s"])
    return list(found.values())


def waits(rows: Sequence[Interval]) -> list[dict[str, Any]]:
    """Return what each wait of the trainer was for: `s` its seconds, `last` the interval of the step's rollouts that
    ended last in it, and `alone_s`, how long that one continued after all others had ended."""
    others = sorted((row for row in rows if row["lane"] != "trainer" and row["own"]), key=lambda row: row["end_s"])
    found = []
    for wait in (row for row in rows if row["lane"] == "trainer" and row["what"] == "wait"):
        inside = [row for row in others if wait["start_s"] < row["end_s"] <= wait["end_s"] + 1e-6]
        last = inside[-1] if inside else None
        before = [row["end_s"] for row in inside if last and any(row[key] != last[key] for key in ("uid", "session"))]
        alone = last["end_s"] - max(wait["start_s"], before[-1] if before else 0.0) if last else 0.0
        found.append({"s": wait["end_s"] - wait["start_s"], "last": last, "alone_s": alone})
    return sorted(found, key=lambda wait: -wait["s"])
