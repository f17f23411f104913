"""A response as a page shows it: its turns, with each call where the model wrote it."""

from typing import Any


def transcript(row: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the turns of a row of the records, each with `parts`: ("text", passage) or ("code", call).

    A call whose code does not occur verbatim in the turn (JSON escapes it) comes after the text.
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
        turns.append(turn | {"parts": [part for part in [*parts, ("text", rest)] if part[1]]})
    return turns
