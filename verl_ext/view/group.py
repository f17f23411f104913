"""The samples of a prompt: grouped by answer, and two of them as a diff."""

import difflib
import itertools
import json
import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any

from verl_ext.pages import text
from verl_ext.reward.votes import vote

Rollout = dict[str, Any]  # a row of verl_ext/records/schema.py: TRAJECTORIES
MAX_LINES = 2000  # of a response, in a diff
MAX_PAIRS = 200_000  # of equal lines; above it, frequent lines are not matched: two looping responses took 28 s
MAX_CHARACTERS = 80_000  # of code and outputs on a page; colours for so much code take .2 s


def answer(row: Rollout) -> str:
    """Return what was compared with the ground truth; "" if nothing was found in the response."""
    verdict = row["verdict"] or {}
    return verdict.get("normalised") or verdict.get("extracted") or ""


def clusters(rows: Sequence[Rollout]) -> list[tuple[str, list[Rollout]]]:
    """Return (answer, its samples, which are all right or all wrong), right ones first, then by number. Samples that
    were not judged have separate clusters, because their answers say nothing. Right answers are equal, however written;
    others are equal if they vote together (reward/votes.py)."""
    found: dict[tuple[float | None, Any], list[Rollout]] = {}
    for row in rows:
        same = row["acc"] in (None, 1) or vote(answer(row))
        found.setdefault((row["acc"], same), []).append(row)
    order = sorted(found.items(), key=lambda item: (item[0][0] is None, -(item[0][0] or 0), -len(item[1])))
    spelt = [" = ".join(dict.fromkeys(map(answer, members))) for _, members in order]
    return [
        ("not judged" if acc is None else name, members) for ((acc, _), members), name in zip(order, spelt, strict=True)
    ]


def spread(rows: Sequence[Rollout]) -> tuple[float, float] | None:
    """Return mean and sample standard deviation of the judged scores; None for fewer than two finite ones. A score
    beyond 1e100 does not count as finite, because its square is not."""
    scores = [row["score"] for row in rows if row["score"] is not None and abs(row["score"]) < 1e100]
    return (statistics.fmean(scores), statistics.stdev(scores)) if len(scores) > 1 else None


def most_shown(rows: Sequence[Rollout]) -> int:
    """Return how many characters of each text keep the code and outputs of all samples within MAX_CHARACTERS."""
    texts = [call[name] or "" for row in rows for call in row["calls"] or [] for name in ("code", "stdout", "stderr")]
    most = text.MAX_SHOWN
    while sum(min(len(each), most) for each in texts) > MAX_CHARACTERS:
        most //= 2
    return most


def rewards(row: Rollout) -> str:
    """Return the parts of the reward: `reward_*` of what the manager reports, or all of it if it has no such parts."""
    try:
        said = json.loads(row["reward_parts"] or "{}")
        parts = {name: value for name, value in said.items() if name.startswith("reward_")} or said
        return ", ".join(f"{name} {value}" for name, value in parts.items())
    except (ValueError, AttributeError):  # of a manager that is not ours
        return row["reward_parts"]


def agent(row: Rollout) -> str:
    """Return what an agent did with the gateway: the counts that are not 0."""
    counts = json.loads(row["agent"] or "{}")
    forks = ", ".join(f"{number} by {why}" for why, number in counts.pop("forks", {}).items())
    said = [f"{name} {value:g}" for name, value in counts.items() if value]
    return ", ".join(said) + (f"; forks: {forks}" if forks else "")


def diff(left: Rollout, right: Rollout) -> list[tuple[str, str | None, str | None]]:
    """Return ("same" | "changed", line of the left or None, of the right); ("far", None, None) for lines left out, and
    ("cut", None, None) at the end if lines beyond MAX_LINES, which are not compared, differ."""
    texts = ["".join(turn["text"] or "" for turn in row["turns"] or []).split("\n") for row in (left, right)]
    sides = [lines[:MAX_LINES] for lines in texts]
    rows: list[tuple[str, str | None, str | None]] = []
    counts = [Counter(lines) for lines in sides]
    repeats = sum(number * counts[1][line] for line, number in counts[0].items()) > MAX_PAIRS
    for group in difflib.SequenceMatcher(a=sides[0], b=sides[1], autojunk=repeats).get_grouped_opcodes(3):
        rows += [("far", None, None)] if rows else []
        for tag, i, i_end, j, j_end in group:
            pairs = itertools.zip_longest(sides[0][i:i_end], sides[1][j:j_end])
            rows += [("same" if tag == "equal" else "changed", *pair) for pair in pairs]
    return rows + [("cut", None, None)] * (texts[0][MAX_LINES:] != texts[1][MAX_LINES:])
