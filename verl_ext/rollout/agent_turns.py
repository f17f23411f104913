"""The turns of an agent's episode, for the records: each turn of the model, its calls, and what was said next.

The gateway sees what an agent says to the model, not what it does between two requests. So a call is known if the model
made it by `tool_calls`, or the agent by the environment; and what came of it if the environment ran it, or if the
agent's next request has a message of a tool.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from verl_ext.episode import CallResult, Reply, ToolUse, Turn, TurnCall
from verl_ext.gateway.session import Leaf, Node


def turns_of(leaves: Sequence[Leaf], called: Sequence[TurnCall], use: ToolUse, tokenizer: Any) -> list[Turn]:
    """Return the turns in the order of their answers, and count in `use` the calls that the agent's own tools answered.

    Args:
        leaves: of the session, in the order of the episode's rows.
        called: calls of the environment's tools, in order. Each belongs to the newest turn that was there before it.
    """
    row_of = {node: row for row, leaf in enumerate(leaves) for node in leaf.trained}
    nodes = sorted(row_of, key=_answered_s)
    index = {node: i for i, node in enumerate(nodes)}
    following: dict[Node, Node] = {}  # the first turn of the same row that continues from this one
    for node in nodes:
        if (before := node.parent) is not None and row_of.get(before) == row_of[node]:
            following.setdefault(before, node)
    by_node = _called_by(nodes, called)
    turns = []
    for node in nodes:
        row, before = row_of[node], node.parent
        start = _start(node, leaves[row])
        turn = Turn(
            node.text + node.end,
            len(node.ids),
            start,
            node.sampled.server,
            node.started_s,
            node.generate_s,
            end=node.end,
            row=row,
            fork=node.place.fork,
        )
        parent = -1 if before is None else index.get(before, -1)
        turn.parent = None if parent == len(turns) - 1 else parent
        after = following.get(node)
        said = [text for role, text in after.place.said if role == "tool"] if after else []
        turn.calls = _calls(node, by_node.get(node, []), said, use)
        if after is not None and after.context:
            turn.reply = _reply(after, start + len(node.ids), tokenizer)
        if turn.calls and use.first_call_token is None and row == len(leaves) - 1:
            use.first_call_token = start + round(len(node.ids) * _call_start(turn) / max(len(turn.text), 1))
        turns.append(turn)
    return turns


def _answered_s(node: Node) -> float:
    return node.started_s + node.generate_s


def _start(node: Node, leaf: Leaf) -> int:
    """Return how many tokens of its row's response stand before a turn."""
    before = sum(len(each.context) + len(each.ids) for each in node.line()) - len(node.ids)
    return before - len(leaf.row.prompt_ids)


def _reply(after: Node, start: int, tokenizer: Any) -> Reply:
    said = after.place.said
    role = "user" if any(role == "user" for role, _ in said) else "tool"
    return Reply(tokenizer.decode(after.context), len(after.context), start, [text for _, text in said], role)


def _called_by(nodes: Sequence[Node], called: Sequence[TurnCall]) -> dict[Node, list[TurnCall]]:
    found: dict[Node, list[TurnCall]] = {}
    for call in called:
        before = [node for node in nodes if call.started_s is not None and _answered_s(node) <= call.started_s]
        found.setdefault(before[-1] if before else nodes[0], []).append(call)
    return found


def _calls(node: Node, called: Sequence[TurnCall], said: Sequence[str], use: ToolUse) -> list[TurnCall]:
    """Return the calls that the model made, then those that the agent made for it."""
    left, calls, answers = list(called), [], iter(said)
    for name, arguments in _told_calls(node.message):
        answer = next(answers, None)
        ran = next((call for call in left if (call.tool, call.arguments) == (name, arguments)), None)
        if ran is not None:
            left.remove(ran)
            calls.append(ran)
            continue
        calls.append(TurnCall(name, arguments, result=None if answer is None else CallResult(answer)))
        use.ok += answer is not None  # as far as the gateway knows
    return calls + left


def _call_start(turn: Turn) -> int:
    """Return at which character of a turn its first call begins: at an argument that stands there, or at its end."""
    texts = [text for text in turn.calls[0].arguments.values() if isinstance(text, str) and text]
    return min((at for text in texts if (at := turn.text.find(text)) >= 0), default=len(turn.text))


def _told_calls(message: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for call in message.get("tool_calls", ()):
        function = call["function"]
        yield function["name"], json.loads(function["arguments"])
