"""Measure what a fault of chaos.py did to a run, from the run's own records."""

import asyncio
import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from scripts.studies.shared import metrics_of
from verl_ext.ledger.prompts import read_tally
from verl_ext.ledger.servers import read_servers
from verl_ext.outcome import INFRASTRUCTURE_FAILURES, Fault, PromptEnd
from verl_ext.records import store
from verl_ext.records.trajectories import cut
from verl_ext.reward.score import score_answer
from verl_ext.sandbox import SandboxClient

LIMITS = {"timeout_s": 5, "memory_limit_mb": 256}  # of a program, as in configs/shared/quickstart_rl.yaml
TOLERANCE = 1e-6
_ROLLOUT = ["uid", "session", "ground_truth", "turns", "calls", "end_reason", "score", "reward_parts"]
_SHAPING = ("reward_overlong", "reward_length", "reward_tool_bonus")  # depend only on lengths and calls
_COLUMNS = [*_ROLLOUT, "validate", "trained_step", "timings"]
_SIGNS = re.compile(r"\bWARNING\b|\bERROR\b|\bis dead\b|takes the place|cannot be written|Resume: ")
# Of any run of the tiny task; vLLM's, which has tracebacks.
_USUAL = re.compile(r"had unequal rewards|target_num_threads|\[\w+\.py:\d+\]")
_RAISED = re.compile(r"(?:\[\w+\]: )?[\w.]*(?:Error|Exception|Timeout)(?:\(\w+\))?: ")
_TIME = r"(?:\d{4}-)?\d\d-\d\d[ T]\d\d:[\d:,.]+:?"
_BAR = r"^Training Progress:[^\]]*\]"  # has no line end
_FRONT = re.compile(rf"\x1b\[[\d;]*m|\([\w.]+ pid=[^)]*\)|{_BAR}|^\s*(?:WARNING|ERROR|INFO)\b[:\s]*|{_TIME}\s*")
_VARIES = re.compile(r"\bb'.*|0x[0-9a-f]+|[0-9a-f]{8}-[0-9a-f-]{27}|'[^']*'|\d+(?:\.\d+)?")

Row = Mapping[str, Any]


class Stall(NamedTuple):
    """The longest time without progress beyond a usual step, and the duration of a usual step, in seconds."""

    stall_s: float
    step_s: float


def trained_rollouts(run: Path) -> list[Row]:
    rows = store.rows(run, columns=_COLUMNS)
    return [row for row in rows if not row["validate"] and row["trained_step"] is not None]


def failures_in_the_loss(rows: Iterable[Row]) -> list[str]:
    """List rollouts that were trained on although infrastructure failed them or one of their calls."""
    return [
        f"{_name(row)}: trained although it ended as {row['end_reason']}"
        for row in rows
        if row["end_reason"] in INFRASTRUCTURE_FAILURES
        or any(call["fault"] == Fault.INFRASTRUCTURE for call in row["calls"])
    ]


def wrong_scores(rows: Iterable[Row]) -> list[str]:
    """List rollouts whose reward is not that of their answer, which is scored again here."""
    found = []
    for row in rows:
        text = "\n".join(turn["text"] for turn in row["turns"] if turn["role"] == "model")
        acc, parts = score_answer(text, row["ground_truth"]).acc, json.loads(row["reward_parts"])
        expected = 2 * acc - 1 + sum(value for name, value in parts.items() if name in _SHAPING)
        if abs(expected - row["score"]) > TOLERANCE:
            found.append(f"{_name(row)}: trained with the reward {row['score']:g}, but its answer has {expected:g}")
    return found


def run_again(programs: Iterable[str], sandbox: str) -> dict[str, Any]:
    """Run each program in a healthy sandbox, and return the client's results by program."""
    programs = sorted(set(programs))

    async def run_all() -> list[Any]:
        client = SandboxClient([sandbox], max_concurrency=8)
        try:
            return await asyncio.gather(*(client.run(program, **LIMITS) for program in programs))
        finally:
            await client.aclose()

    return dict(zip(programs, asyncio.run(run_all()), strict=True))


def wrong_answers_of_tools(rows: Iterable[Row], sandbox: str) -> list[str]:
    """List rollouts that received output their program does not print: each is run again in a healthy sandbox.

    Args:
        sandbox: URL.
    """
    calls = [(row, call) for row in rows for call in row["calls"] if call["attempts"]]
    ran = [(row, call) for row, call in calls if call["fault"] != Fault.INFRASTRUCTURE]
    truth = run_again({call["code"] for _, call in ran}, sandbox)
    return [
        f"{_name(row)}: was told {call['stdout']!r} (exit code {call['exit_code']}), but the program prints "
        f"{said.stdout!r} ({said.return_code})"
        for row, call in ran
        if cut((said := truth[call["code"]]).stdout) != call["stdout"] or said.return_code != call["exit_code"]
    ]


def lost_and_doubled(run: Path, rows: Iterable[Row], problems: int) -> tuple[list[str], list[str]]:
    """Describe lost and doubled prompts, from the ledger and from the records, in a sentence each.

    Args:
        problems: of an epoch.
    """
    tally = read_tally(run)
    epochs = math.ceil(tally.problems.total() / problems)
    recorded = Counter((row["uid"], row["session"]) for row in rows)
    trained = {uid for uid, end in tally.ends.items() if end is PromptEnd.TRAINED}
    lost = [f"{uid} was open at a checkpoint and is gone" for uid in tally.lost]
    missing = trained - {uid for uid, _ in recorded}
    lost += [f"{uid} trained, but the records have no rollout of it" for uid in sorted(missing)]
    doubled = [f"{uid} was drawn twice" for uid in tally.drawn_twice]
    doubled += [f"{uid} ended twice" for uid in tally.wrong_ends]
    doubled += [f"{uid}_{session} is in the records {n} times" for (uid, session), n in recorded.items() if n > 1]
    doubled += [f"the problem {problem} was drawn {n} times" for problem, n in tally.problems.items() if n > epochs]
    if not (lost or doubled):
        lost += tally.faults()
    return lost, doubled


def stall(run: Path) -> Stall:
    """Find the longest time without progress. Progress is a rollout that ended and is in the records, or a part of a
    step that the trainer ended. Work after the checkpoint that a run resumed from is no progress: it is done again.
    """
    rows = store.rows(run, columns=["validate", "timings"])
    events = [row["timings"]["ended_s"] for row in rows if not row["validate"]]
    events += [row["end_s"] for row in store.rows(run, "timeline")]
    return longest_gap(run, [event for event in events if event is not None])


def longest_gap(run: Path, events: Iterable[float]) -> Stall:
    """Return the longest time between two events, minus a usual step of the run's metrics."""
    metrics = metrics_of(run)
    times = {step: data["timing_s/step"] for step, data in metrics.steps.items() if "timing_s/step" in data}
    usual = median([took for step, took in times.items() if step not in metrics.cold] or times.values())
    events = sorted(events)
    longest = max((after - before for before, after in itertools.pairwise(events)), default=0.0)
    return Stall(max(0.0, longest - usual), usual)


def excluded(run: Path) -> Counter:
    """Count the rollouts that infrastructure failed, by their end."""
    rows = store.rows(run, columns=["validate", "end_reason"])
    return Counter(r["end_reason"] for r in rows if not r["validate"] and r["end_reason"] in INFRASTRUCTURE_FAILURES)


def told(before: str, after: str, most: int = 4) -> list[str]:
    """Return lines of a log with a warning or an error that it did not have before the fault; each kind once, with the
    last exception at the end."""
    known = {_kind(_clean(line)) for line in before.splitlines()}
    lines: dict[str, str] = {}
    for line in after.splitlines():
        said = _clean(line)
        is_sign = _RAISED.match(said) or (_SIGNS.search(line) and not _USUAL.search(line))
        if is_sign and _kind(said) not in known:
            lines.setdefault(_kind(said), said)
    found = list(lines.values())
    ends = [line for line in found if _RAISED.match(line)]
    return [line for line in found if line not in ends][: most - len(ends[-1:])] + ends[-1:]


def figures(run: Path, sandbox: str, log: Path, fault_at: int, problems: int) -> dict[str, Any]:
    """Compute the figures of one run that has ended.

    Args:
        sandbox: URL of a healthy one.
        fault_at: size of the log in bytes when the fault came.
        problems: of an epoch.
    """
    rows = trained_rollouts(run)
    wrong = [*failures_in_the_loss(rows), *wrong_scores(rows), *wrong_answers_of_tools(rows, sandbox)]
    lost, doubled = lost_and_doubled(run, rows, problems)
    servers = read_servers(run)
    out = {"excluded": dict(excluded(run)), "servers": servers.line() if servers else None}
    return out | summary(len(rows), wrong, lost, doubled, stall(run), log, fault_at)


def summary(
    trained: int, wrong: list[str], lost: list[str], doubled: list[str], stall: Stall, log: Path, fault_at: int
) -> dict[str, Any]:
    """Summarise what all sides report. A line of `wrong` begins with the rollout's name and a colon."""
    text = log.read_bytes()
    return {
        "trained": trained,
        "wrong": len({line.partition(":")[0] for line in wrong}),
        "lost": len(lost),
        "doubled": len(doubled),
        **{name: round(seconds, 1) for name, seconds in stall._asdict().items()},
        "told": told(*(part.decode(errors="replace") for part in (text[:fault_at], text[fault_at:]))),
        "found": [*wrong, *lost, *doubled][:10],
    }


def _name(row: Row) -> str:
    return f"{row['uid']}_{row['session']}"


def _clean(line: str, width: int = 220) -> str:
    while (cleaned := _FRONT.sub("", line).strip()) != line:
        line = cleaned
    return line[:width]


def _kind(line: str) -> str:
    return _VARIES.sub("#", line)
