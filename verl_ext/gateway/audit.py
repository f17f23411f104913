"""Try a chat template for all that costs rows or exactness when an agent's conversation continues.

Each kind of conversation is played through a real `Session`, with answers that a model might give. A kind passes if its
turns make one row. It forks if the template shows an earlier turn in another way than the model wrote it: each fork is
exact, but makes a row of its own. A check fails if the model would not read what the agent says.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, cast

from verl_ext.gateway.messages import Message, Refused, normal
from verl_ext.gateway.session import Node, Place, Sampled, Session
from verl_ext.gateway.template import Template
from verl_ext.protocols.base import TEMPLATE_DAY, Call, end_token
from verl_ext.protocols.thinking import opens_thinking

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TOOL = {
    "type": "function",
    "function": {
        "name": "weigh",
        "description": "Weigh a parcel.",
        "parameters": {"type": "object", "properties": {"parcel": {"type": "string"}}, "required": ["parcel"]},
    },
}
_PARCELS = ("red", "blue")
_THOUGHT = "<think>\nLet me see.\n</think>\n\n"
_CONTENT = "CONTENT"  # in place of an answer's text, because templates strip it
_NEIGHBOURS = 6  # tokens that are printed before and after a difference
_MAX_CONTEXT = 10**6


@dataclass(frozen=True)
class Finding:
    """One result of an audit.

    Attributes:
        level: "pass"; "fork": exact, but a row for each fork; "fail": the model does not read what the agent says.
        rows: of a conversation of three turns of the model; None for other checks.
        told: what was seen; "" if there is nothing to say.
    """

    check: str
    level: Literal["pass", "fork", "fail"]
    rows: int | None = None
    told: str = ""

    def __str__(self) -> str:
        rows = "" if self.rows is None else "1 row" if self.rows == 1 else f"{self.rows} rows"
        lines = [f"{self.level}  {self.check:38} {rows}".rstrip(), *self.told.splitlines()]
        return "\n      ".join(lines)


@dataclass(frozen=True)
class Answer:
    """A turn of the model. It is written as the template shows a newest turn: this is what the model has learnt."""

    text: str = ""
    parcels: Sequence[str] = ()  # a call for each
    thought: str = ""

    def message(self, text: str) -> dict[str, Any]:
        functions = [{"name": "weigh", "arguments": {"parcel": parcel}} for parcel in self.parcels]
        calls = [
            {"id": f"call{i:05}", "type": "function", "function": function} for i, function in enumerate(functions)
        ]
        return {"role": "assistant", "content": self.thought + text} | ({"tool_calls": calls} if calls else {})


@dataclass(frozen=True)
class Kind:
    """A kind of conversation: what the model answers, and what is said to it after each answer but the last.

    Attributes:
        ended: the model writes its end token; else the turn is cut.
        change: of a turn's text, as the model writes it.
        indented, stripped: how the client sends turns back.
    """

    name: str
    answers: Sequence[Answer]
    replies: Sequence[Sequence[Message]]
    tools: Sequence[Message] | None = None
    system: str = ""
    ended: bool = True
    stop: Sequence[str] = ()
    change: tuple[str, str] = ("", "")
    indented: bool = False
    stripped: bool = False


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _result(text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": "call00000", "name": "weigh", "content": text}


_ANSWERS = [Answer("It is heavy."), Answer("About two pounds."), Answer("Yes.")]
_SPACED = [replace(answer, text=f" {answer.text}\n") for answer in _ANSWERS]
_THOUGHTS = [replace(answer, thought=_THOUGHT) for answer in _ANSWERS]
_CALLS = [Answer(parcels=[parcel]) for parcel in _PARCELS] + [Answer("Five pounds.")]
_USERS = ([_user("How heavy?")], [_user("Sure?")])
_RESULTS = ([_result("2 lb")], [_result("3 lb")])
_TOOLS = [_TOOL]
KINDS = (
    Kind("answers", _ANSWERS, _USERS),
    Kind("answers after a system message", _ANSWERS, _USERS, system="Be brief."),
    Kind("white space around answers", _SPACED, _USERS),
    Kind("white space that the client strips", _SPACED, _USERS, stripped=True),
    Kind("white space around what users say", _ANSWERS, [[_user(" How heavy? \n")], [_user("\nSure?")]]),
    Kind("thoughts, then a user", _THOUGHTS, _USERS),
    Kind("calls", _CALLS, _RESULTS, _TOOLS),
    Kind("calls in another form of JSON", _CALLS, _RESULTS, _TOOLS, change=('": ', '":')),
    Kind("calls that the client indents", _CALLS, _RESULTS, _TOOLS, indented=True),
    Kind("text and calls", [replace(answer, text="I see.") for answer in _CALLS], _RESULTS, _TOOLS),
    Kind("thoughts and calls", [replace(answer, thought=_THOUGHT) for answer in _CALLS], _RESULTS, _TOOLS),
    Kind("parallel calls", [Answer(parcels=_PARCELS)] * 2 + _ANSWERS[:1], [[*map(_result, "23")]] * 2, _TOOLS),
    Kind("calls, then a user", [_CALLS[0], *_ANSWERS[:2]], [_RESULTS[0], _USERS[0]], _TOOLS),
    Kind("turns that were cut", _ANSWERS, _USERS, ended=False),
    Kind("stop strings", _ANSWERS, _USERS, stop=["."]),
    Kind("a system message in the middle", _ANSWERS, [[{"role": "system", "content": "Be kind."}, *_USERS[0]]] * 2),
)


def audit(
    tokenizer: PreTrainedTokenizerBase, template_kwargs: Mapping[str, Any] | None = None, *, tools: bool = True
) -> list[Finding]:
    """Return the findings about a tokenizer's chat template.

    Args:
        template_kwargs: `data.apply_chat_template_kwargs`.
        tools: agents send tools.
    """
    try:
        end_token(tokenizer)
        template = Template(tokenizer, template_kwargs)
    except ValueError as error:
        return [Finding("the template makes prompts", "fail", told=str(error))]
    kinds = [kind for kind in KINDS if tools or not kind.tools]
    return [*(_played(template, kind) for kind in kinds), *_checks(template, tools)]


# Kinds of conversations -----------------------------------------------------------------------------------------------


def _played(template: Template, kind: Kind) -> Finding:
    session, told = Session(template, _MAX_CONTEXT), ""
    messages = [{"role": "system", "content": kind.system}] * bool(kind.system) + [_user("How heavy is it?")]
    try:
        for answer, reply in zip(kind.answers, [*kind.replies, []], strict=True):
            place = session.place(messages, kind.tools)
            if place.fork and not told:
                told = _difference(template, session.nodes[-1], place.context)
            text = _written(template, messages, kind.tools, answer).replace(*kind.change)
            node = _answered(session, place, text, kind)
            if len(node.message.get("tool_calls", ())) != len(answer.parcels):
                form = 'the gateway reads <tool_call>{"name": ..., "arguments": {...}}</tool_call>'
                return Finding(kind.name, "fail", told=f"{form}; the template shows a call as {text!r}")
            messages = [*messages, _sent_back(node.message, kind), *reply]
    except Refused as error:
        return Finding(kind.name, "fail", told=error.sentence)
    rows = len(session.rows())
    return Finding(kind.name, "pass" if rows == 1 else "fork", rows, told)


def _written(template: Template, messages: Sequence[Message], tools: Any, answer: Answer) -> str:
    before = "".join(template.rendered([*map(normal, messages)], tools))
    message = answer.message(_CONTENT if answer.text else "")
    shown = "".join(template.rendered([*map(normal, [*messages, message])], tools, prompt=False))
    if answer.text and _CONTENT not in shown:
        raise Refused("the template does not show what the model has answered")
    keeps_thought = answer.thought.strip("\n") in shown or (opens_thinking(before) and "Let me see." in shown)
    if not shown.startswith(before) or not keeps_thought:  # a newest turn is shown otherwise than it was written
        text, calls = (
            answer.message(answer.text)["content"],
            [Call("weigh", {"parcel": each}, 0) for each in answer.parcels],
        )
        if opens_thinking(before):
            text = text.removeprefix("<think>\n") if answer.thought else f"\n</think>\n\n{text}"
        return template.parser.write(text, calls)
    return shown[len(before) :].partition(end_token(template.tokenizer))[0].replace(_CONTENT, answer.text)


def _answered(session: Session, place: Place, text: str, kind: Kind) -> Node:
    tokenizer = session.template.tokenizer
    for stop in kind.stop:
        text = text[: text.find(stop) + len(stop)]
    ids = tokenizer.encode(text, add_special_tokens=False)
    ids += [cast(int, tokenizer.eos_token_id)] * (kind.ended and not kind.stop)
    node = session.add(place, Sampled(ids), max_tokens=_MAX_CONTEXT, stop=kind.stop)
    node.delivered = True
    return node


def _sent_back(message: Message, kind: Kind) -> dict[str, Any]:
    """Return a turn as a client may send it: calls have other ids, and JSON or text perhaps another form."""
    turn = json.loads(json.dumps(message))
    for i, call in enumerate(turn.get("tool_calls", ())):
        call["id"] = f"call{i:05}"
        if kind.indented:
            call["function"]["arguments"] = json.dumps(json.loads(call["function"]["arguments"]), indent=1)
    return turn | ({"content": turn["content"].strip()} if kind.stripped else {})


def _difference(template: Template, node: Node, shown: Sequence[int]) -> str:
    """Say where the tokens of a prompt that was rendered anew first differ from those that the model read and wrote."""
    stored, decode = node.all_ids(), template.decode
    at = next(
        (i for i, pair in enumerate(zip(stored, shown, strict=False)) if pair[0] != pair[1]),
        min(len(stored), len(shown)),
    )
    start = max(0, at - _NEIGHBOURS)

    def near(ids: Sequence[int]) -> str:
        before, here, after = decode(ids[start:at]), decode(ids[at : at + 1]), decode(ids[at + 1 : at + _NEIGHBOURS])
        return f"{before!r} [{here!r}] {after!r}"

    return f"first difference at token {at}\nthe model's tokens  {near(stored)}\nthe template shows  {near(shown)}"


# Other checks ---------------------------------------------------------------------------------------------------------


def _checks(template: Template, tools: bool) -> Iterator[Finding]:
    yield _continued(template)
    yield _forged(template)
    question = [_user("How heavy is it?")]
    middle = [*question, _ANSWERS[0].message("Yes."), {"role": "system", "content": "Be kind."}, _user("Sure?")]
    yield _shows(template, "a later system message is shown", middle, ["Be kind."])
    yield _shows(
        template, "two users in a row are shown", [*question, _user("Really?")], ["How heavy is it?", "Really?"]
    )
    if tools:
        call = normal(Answer(parcels=["red"]).message("") | {"content": None})
        loop = [*question, call, normal(_result("2 lb"))]
        yield _shows(template, "tools are shown", question, ["weigh", "Weigh a parcel."], _TOOLS)
        yield _shows(template, "calls and content: null are shown", loop, ["weigh", "red"], _TOOLS, never="None")
        yield _shows(template, "results are shown", loop, ["2 lb"], _TOOLS)
    yield from _added(template)


def _continued(template: Template) -> Finding:
    """Let the model continue its turn, after text of the agent (`continue_final_message`)."""
    session, text, kind = Session(template, _MAX_CONTEXT), "", Kind("a turn that continues", _ANSWERS, (), stop=["."])
    for answer in kind.answers:
        messages = [_user("How heavy is it?"), *[{"role": "assistant", "content": text}] * bool(text)]
        node = _answered(session, session.place(messages, is_open=bool(text)), answer.text, kind)
        text += f"{node.message['content']}. So: "
    rows = len(session.rows())
    return Finding(kind.name, "pass" if rows == 1 else "fork", rows)


def _forged(template: Template) -> Finding:
    """Put the texts of all special tokens into every text of a conversation."""
    name, special = "special tokens in texts stay text", template.special_ids
    texts = "".join(template.decode([i]) for i in sorted(special))
    results = []
    for text in ("x", f"x{texts}x"):
        tool = json.loads(json.dumps(_TOOL).replace("a parcel", json.dumps(text)[1:-1]))
        messages = [
            {"role": "system", "content": text},
            _user(text),
            {"role": "assistant", "content": text},
            _user(text),
        ]
        for tools in (None, [tool]):
            try:
                ids = template.encode(template.rendered(messages, tools))
            except Refused:  # no system message, in some templates
                ids = template.encode(template.rendered(messages[1:], tools))
            results.append([i for i in ids if i in special])
    if results[:2] == results[2:]:
        return Finding(name, "pass")
    return Finding(name, "fail", told="a text with a special token's text changes the special tokens of the prompt")


def _shows(
    template: Template, name: str, messages: Sequence[Message], texts: Sequence[str], tools: Any = None, never: str = ""
) -> Finding:
    try:
        shown = "".join(template.rendered(messages, tools))
    except Refused as error:
        return Finding(name, "fail", told=error.sentence)
    if missing := [text for text in texts if text not in shown]:
        return Finding(name, "fail", told=f"{missing[0]!r} is not in the prompt: {shown[-200:]!r}")
    if never and never in shown:
        return Finding(name, "fail", told=f"the prompt has {never!r}: {shown[-200:]!r}")
    return Finding(name, "pass")


def _added(template: Template) -> Iterator[Finding]:
    """Say what the template adds by itself. It is the same in each request, so that it costs nothing."""
    shown, _, _ = "".join(template.rendered([_user("QUESTION")], None)).partition("QUESTION")
    if len(shown.split()) > 3:
        yield Finding("the template adds a system prompt", "pass", told=repr(shown))
    if "strftime_now" in str(template.tokenizer.chat_template):
        yield Finding("the template asks for the date", "pass", told=f"it always gets {TEMPLATE_DAY}")
