"""The page of a check: how many traces are kept and left out, and some of each, with programs and outputs."""

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, dropwhile, islice, repeat
from pathlib import Path
from typing import Any

from verl_ext.pages.page import environment, render
from verl_ext.protocols.base import CODE_TOOL
from verl_ext.protocols.trace import PROMPT_ROLES, TraceTurn, conversation_of
from verl_ext.runs import durable
from verl_ext.traces.output import Spool
from verl_ext.traces.trace import Reason

SHOWN = 5  # traces of a kind


def write_page(spool: Spool, counts: Sequence[Sequence[str]], path: Path, notes: Mapping[str, Any]) -> None:
    """Write a page that is one file.

    Args:
        counts: of `output.table`.
        notes: of the file of kept traces.
    """
    template = environment(Path(__file__).parent).get_template("traces.html")
    groups = {reason: list(_samples(spool, reason)) for reason in (None, *Reason)}
    groups = {reason: samples for reason, samples in groups.items() if samples}
    settings = {name: value for name, value in notes["options"].items() if value not in (None, False, 0, [])}
    html = render(template, counts=counts, groups=groups, most=SHOWN, name=path.stem, settings=settings)
    durable.write_text(path, html)


def _samples(spool: Spool, reason: Reason | None) -> Iterator[dict[str, Any]]:
    """Yield the first traces that were left out for a reason, or that are kept: {id, source, detail, problem, row}."""
    if reason is not None:
        for line in islice(spool.left_out(reason), SHOWN):
            found = json.loads(line)
            yield found | {"row": transcript_row(found["messages"] or [], None)}
        return
    for row in islice(spool.kept(), SHOWN):
        tools = row["tools"] and json.loads(row["tools"])
        yield row | {"detail": "", "row": transcript_row(json.loads(row["messages"]), tools)}


def transcript_row(messages: list[dict[str, Any]], tools: Any) -> dict[str, Any]:
    """Return `turns` and `calls` of a conversation in the form of the records, as far as pages show them; what is no
    trace is shown message by message."""
    try:
        _, _, found = conversation_of(json.dumps(messages), tools)
    except ValueError:
        response = dropwhile(lambda message: message.get("role") in PROMPT_ROLES, messages)
        return {"turns": [_turn(_role(message), _said(message)) for message in response], "calls": []}
    turns: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    for turn in found:
        calls += _calls(turn, len(turns))
        turns.append(_turn("model", turn.content if turn.text is None else turn.text))
        turns += [_turn("user", said) for said in turn.users]
    return {"turns": turns, "calls": calls}


def _calls(turn: TraceTurn, number: int) -> Iterator[dict[str, Any]]:
    for call, output in zip(turn.calls, chain(turn.outputs, repeat("")), strict=False):  # nothing answers a `submit`
        is_code = call.tool == CODE_TOOL and isinstance(call.arguments.get("code"), str)
        code = call.arguments["code"] if is_code else json.dumps({call.tool: call.arguments}, ensure_ascii=False)
        yield {"turn": number, "code": code, "stdout": output, "stderr": "", "status": "ok", "fault": None}


def _turn(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "text": text, "tokens": None, "start": None}


def _role(message: Mapping[str, Any]) -> str:
    return "model" if message.get("role") == "assistant" else "user" if message.get("role") == "user" else "tool"


def _said(message: Mapping[str, Any]) -> str:
    rest = {key: value for key, value in message.items() if key not in ("role", "content") and value}
    content = message.get("content")
    text = content if isinstance(content, str) else json.dumps(content)
    return "\n".join([text] * bool(content) + [json.dumps(rest, ensure_ascii=False, default=str)] * bool(rest))
