"""The token lens: what the actor's update saw of each token of a response, with colours for any column."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from verl_ext.pages import text

COLUMNS = ("position", "id", "text", "mask", "turn", "version", "rollout_log_prob", "old_log_prob", "log_prob", "ratio",
           "advantage", "decision")  # fmt: skip
COLOURED = tuple(name for name in COLUMNS if name not in ("position", "id", "text"))
CATEGORIES = ("mask", "turn", "version", "decision")
NEUTRAL = {"ratio": 1.0, "advantage": 0.0}  # the middle of the scale; for other columns it is the median


def lens(rows: Sequence[dict[str, Any]], turns: Sequence[dict[str, Any]], chosen: str = "") -> dict[str, Any]:
    """Return what the page needs of a response's tokens and turns.

    Args:
        chosen: the row of the episode whose tokens are shown; if it has none of that name, the last one, which has the
            answer.
    """
    of_rows = {number: ([], _of_row(turns, number)) for number in sorted({row.get("row") or 0 for row in rows})}
    for row in rows:
        of_rows[row.get("row") or 0][0].append({name: row.get(name) for name in COLUMNS})
    number = next((number for number in of_rows if str(number) == chosen), max(of_rows, default=0))
    elsewhere = {other: foreign(*own) for other, own in of_rows.items() if other != number}
    rows, turns = of_rows.get(number, ([], []))
    return {
        "token_rows": [*of_rows],
        "token_row": number,
        "foreign_elsewhere": {other: places for other, places in elsewhere.items() if places},
        "tokens": rows,
        "data": {"columns": COLUMNS, "rows": [[text.cell(value) for value in row.values()] for row in rows]},
        "tool_turns": {number for number, turn in enumerate(turns) if turn["role"] != "model"},
        "foreign": dict.fromkeys(foreign(rows, turns)),  # a dict, because the page looks up each token in it
        "colours": partial(colours, rows=rows),
    }


def _of_row(turns: Sequence[dict[str, Any]], number: int) -> list[dict[str, Any]]:
    """Return the turns of a row of the episode, as its tokens count them."""
    own = [turn for turn in turns if (turn.get("row") or 0) == number]
    return own if len(own) == len(turns) else sorted(own, key=lambda turn: turn["start"] or 0)


def colours(column: str, rows: Sequence[dict[str, Any]]) -> tuple[list[str], list[tuple[str, str]]]:
    """Return the class of each token's colour ("" if the column is null), and the legend: (class, what it means).

    Categories have the classes k0 to k7, in order of appearance; if there are more, all from the eighth on share k7.
    Numbers have b0 to b6: seven equal steps around NEUTRAL, as far as the value farthest from it. Numbers that are not
    finite, or beyond 1e100, have `inf`.
    """
    values = [row[column] for row in rows]
    known = [value for value in values if value is not None]
    if column in CATEGORIES:
        kinds = {value: f"k{min(place, 7)}" for place, value in enumerate(dict.fromkeys(known))}
        means = {kind: str(value) for value, kind in kinds.items()}
        if len(kinds) > 8:
            means["k7"] = "others"
        return [kinds.get(value, "") for value in values], list(means.items())
    finite = sorted(value for value in known if abs(value) < 1e100)  # NaN is not
    middle = NEUTRAL.get(column, finite[len(finite) // 2] if finite else 0.0)
    reach = max((abs(value - middle) for value in finite), default=0.0) or 1.0
    steps = {value: f"b{min(6, int((value - middle + reach) / (2 * reach) * 7))}" for value in finite}
    edges = [f"{middle - reach + 2 * reach * step / 7:.3g}" for step in range(8)]
    legend = [(f"b{i}", f"{edges[i]} to {edges[i + 1]}") for i in range(7)] if finite else []
    legend += [("inf", "not finite")] * (len(finite) < len(known))
    return ["" if value is None else steps.get(value, "inf") for value in values], legend


def foreign(rows: Sequence[dict[str, Any]], turns: Sequence[dict[str, Any]]) -> list[int]:
    """Return the positions of tokens that train though the model did not write them: mask 1 outside the model's turns.

    A token is outside by the turn that it names, or by the trajectory's places of the model's turns. Without turns, as
    from another project's agent loop, the result is empty because nobody knows.
    """
    own = {number: turn for number, turn in enumerate(turns) if turn["role"] == "model"}
    spans = [(turn["start"], turn["tokens"]) for turn in own.values() if None not in (turn["start"], turn["tokens"])]
    last = max((row["position"] for row in rows if row["position"] is not None), default=-1)
    places = {place for start, tokens in spans for place in range(max(0, start), min(last + 1, start + tokens))}
    trained = [row for row in rows if row["mask"]] if turns else []
    return [row["position"] for row in trained if row["position"] not in places or row["turn"] not in own]
