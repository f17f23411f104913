"""A response as a page shows it: its turns, with each call where the model wrote it."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


def transcript(row: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the turns of a row of the records, each with `parts`: ("text", passage) or ("code", call).

    A call whose code does not occur verbatim in the turn (JSON escapes it) comes after the text. Turns of several rows
    (verl_ext/gateway) come row by row, each after the one that it branches from: see `Branch`.
    """
    turns = []
    for number, turn in enumerate(row["turns"] or []):
        parts, rest = [], turn["text"] or ""
        for call in row["calls"] or []:
            if call["turn"] == number and turn["role"] == "model":
                start = max(rest.rfind("<code>"), rest.find("<tool_call>"), 0)  # prose before it may have the same text
                before, _, after = rest[start:].partition(call["code"] or "\0")
                parts += [("text", rest[:start] + before), ("code", call)]
                rest = after
        shown = [part for part in [*parts, ("text", rest)] if part[1]]
        turns.append(turn | {"parts": shown, "number": number, "branch": None, "depth": 0})
    return _by_branch(turns) if any(turn.get("row") for turn in turns) else turns


@dataclass
class Branch:
    """A row of an episode, whose turns follow.

    Attributes:
        parent: number of the turn that it continues from; None: it begins with a prompt of its own.
        why: that prompt was rendered anew, if it was.
    """

    row: int
    parent: int | None
    why: str


_WHY = {
    "history": "earlier messages were changed",
    "tools": "the tools were changed",
    "template": "the chat template shows the earlier turns otherwise",
}


def _by_branch(turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return turns row by row, with a `Branch` at the first one of each row, and `depth`, the rows from which that one
    branches."""
    rows: dict[int, list[dict[str, Any]]] = {}
    for turn in turns:
        rows.setdefault(turn.get("row") or 0, []).append(turn)
    parents = {number: _parent(own[0], turns) for number, own in rows.items()}
    after: dict[int | None, list[int]] = {}  # row -> those that branch from it; None: those that begin anew
    for number, parent in parents.items():
        of = None if parent is None else turns[parent].get("row") or 0
        after.setdefault(of if of in rows and of != number else None, []).append(number)

    def walk(number: int, depth: int) -> Iterator[dict[str, Any]]:
        own = [turn | {"depth": depth} for turn in rows[number]]
        yield own[0] | {"branch": Branch(number, parents[number], _WHY.get(str(own[0].get("fork")), ""))}
        yield from own[1:]
        for branch in after.pop(number, ()):
            yield from walk(branch, depth + 1)

    return [turn for number in after.pop(None, ()) for turn in walk(number, 0)]


def _parent(first: dict[str, Any], turns: list[dict[str, Any]]) -> int | None:
    """Return the number of the turn that the first turn of a row continues from, if one does."""
    parent = first.get("parent")
    if parent is None:  # the model's turn before it
        before = [turn["number"] for turn in turns[: first["number"]] if turn["role"] == "model"]
        parent = before[-1] if before else -1
    return parent if 0 <= parent < first["number"] else None
