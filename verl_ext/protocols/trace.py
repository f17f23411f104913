"""Turn a conversation into the segments of a rollout: what the model wrote, and what stood between its turns.

Four forms are understood: `{role, content}` with the role `interpreter` (or `tool`) after code between `<code>` tags;
the same after calls between `<tool_call>` tags; the published ReTool-SFT, with tool calls as objects and the
interpreter as role `tool`; and its original form, with the interpreter's answers in the assistant's text. Each form can
be turned into either protocol. The text of a protocol stays as it was written, if that is the protocol in use.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from verl_ext.protocols.base import (
    CODE_TOOL,
    Call,
    MalformedCall,
    ToolProtocol,
    after_blanks,
    end_token,
    format_output,
    render,
    strip_fence,
)
from verl_ext.protocols.code import CODE_STOP, CodeProtocol, split_call
from verl_ext.protocols.hermes import CALL_START, HermesProtocol
from verl_ext.protocols.thinking import THINK_START, THINK_STOP, opens_thinking
from verl_ext.protocols.tool_schemas import plain, schemas_of, without_nulls

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PROMPT_ROLES = ("system", "user")
TOOL_ROLES = ("interpreter", "tool")
ANY_NUMBER = 1000  # of calls in a turn of a trace: only rollouts have a limit
ENDING_TOOL = "submit"  # ends an episode (CallResult.ends), so that no answer to it follows

# ReTool-SFT was made by a format string that nobody formatted: its prompts ask for \boxed{{...}}.
_DOUBLED = re.compile(r"\\boxed\{\{([^{}]*)\}\}")
_OUTPUT_START, _OUTPUT_STOP = re.compile(r"</code>(\s*<interpreter>)"), "</interpreter>"
_REASONING = ("reasoning_content", "reasoning", "thinking")  # keys in which servers put the thinking of a message


@dataclass
class TraceTurn:
    """One turn of the model, with the tools' answers to it."""

    content: str
    calls: list[Call] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    text: str | None = None  # content and calls as they stand in the trace, if they are the text of a protocol
    protocol: str | None = None  # name of that protocol
    users: list[str] = field(default_factory=list)  # what users say to a turn without a call


class Segment(NamedTuple):
    """A stretch of a conversation that is encoded by itself."""

    parts: list[str]  # for `SegmentEncoder`
    own: bool  # written by the model, and trained on


def split_trace(
    messages: Any,
    tools: Any,
    protocol: ToolProtocol,
    eos: str,
    *,
    render: Callable[[list[dict], list | None], str] | None = None,
) -> tuple[list[dict], list | None, list[Segment]]:
    """Split a conversation into prompt and response.

    Args:
        messages: system and user messages, then the assistant's, each with calls followed by the tools' answers, or
            without calls by a user's message; the last one without calls, or with one of ENDING_TOOL. A list, or JSON
            text.
        tools: schemas in OpenAI's form, as a list or as JSON text; None for the interpreter only.
        eos: text of the token that ends a turn; "" without a tokenizer.
        render: the text of the prompt's messages with their tools, by the chat template. If it opens `<think>`, a turn
            must not open it again, and must close it.
    Returns:
        The prompt's messages; the tools that go into its template; and the response.
    Raises:
        ValueError: it is no such conversation, or has a call that the agent loop would refuse; the message says why.
    """
    prompt, schemas, turns = conversation_of(messages, tools)
    prompt, last = protocol.prompt(prompt), turns[-1]
    shown = protocol.schemas(schemas)
    thinking = render is not None and opens_thinking(before := render(prompt, shown))
    segments: list[Segment] = []
    for turn in turns:
        as_written = turn.text if turn.protocol == protocol.name else None
        text = as_written if as_written is not None else protocol.write(turn.content, turn.calls)
        if thinking:
            text = _within_thinking(text, before)
        ended = turn is last or bool(turn.users) or protocol.call_ends_turn
        segments += [_own(text, eos), *[Segment([eos], True)] * ended]
        if turn.users or (turn is last and not turn.calls):
            _check_answer(text, schemas, protocol, thinking)
        else:
            _check_calls(text, turn.calls, schemas, protocol, thinking)
        if turn is not last:
            outputs = [format_output(output, "") for output in turn.outputs]
            reply = turn.users or outputs
            if eos:  # without a tokenizer there is no template
                reply = protocol.user_reply(reply) if turn.users else protocol.reply(reply, ended=ended)
            segments.append(Segment(reply, False))
            before = reply[-1]
            thinking = opens_thinking(before)
    return prompt, shown, segments


def conversation_of(messages: Any, tools: Any) -> tuple[list[dict], dict[str, dict], list[TraceTurn]]:
    """Return the prompt's messages, the schemas of the tools by name, and the model's turns; see `split_trace`.

    Raises:
        ValueError: it is no such conversation; calls are not checked.
    """
    messages, keep_nulls = messages_of(messages), isinstance(messages, str)
    schemas = schemas_of(tools)
    length = next((i for i, m in enumerate(messages) if m.get("role") not in PROMPT_ROLES), len(messages))
    if length == 0:
        raise ValueError(f"expected a {' or '.join(PROMPT_ROLES)} message first")
    prompt = [{"role": m["role"], "content": _DOUBLED.sub(r"\\boxed{\1}", _text(m))} for m in messages[:length]]
    turns = list(_turns(messages[length:], schemas, keep_nulls))
    last = turns[-1]
    if last.outputs or last.users:
        raise ValueError("the last message must be the assistant's answer, without a call")
    last.content = _DOUBLED.sub(r"\\boxed{\1}", last.content)
    return prompt, schemas, turns


def rendered_trace(
    messages: Any,
    tools: Any,
    protocol: ToolProtocol,
    tokenizer: PreTrainedTokenizerBase,
    template_kwargs: Mapping[str, Any],
) -> list[Segment]:
    """Return a conversation as the rollout would have it: the prompt by the chat template, and the response.

    Raises:
        ValueError: as `split_trace`; or the chat template refuses the prompt's messages.
    """
    texts: list[str] = []

    def shown(prompt: list[dict], schemas: list | None) -> str:
        texts.append(render(tokenizer, prompt, template_kwargs, tools=schemas))
        return texts[0]

    _, _, response = split_trace(messages, tools, protocol, end_token(tokenizer), render=shown)
    return [Segment(texts, False), *response]


def messages_of(value: Any) -> list[dict]:
    """Return the messages of a row as dicts, also if they are JSON text.

    Raises:
        ValueError: there is no list of messages.
    """
    messages = plain(_json(value, "messages") if isinstance(value, str) else value)
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise ValueError(f"expected a list of messages, each with a role and a content, but found {str(value)[:200]}")
    return messages


def explicit(messages: Any, tools: Any) -> list[dict]:
    """Return the messages of a row so that they mean the same as JSON text: without the nulls of a Parquet column."""
    if isinstance(messages, str):
        return messages_of(messages)
    schemas, found = schemas_of(tools), []
    for message in messages_of(messages):
        calls = [_call(call, schemas, False) for call in message.get("tool_calls") or []]
        message = {key: value for key, value in message.items() if value is not None}
        functions = [{"name": call.tool, "arguments": call.arguments} for call in calls]
        made = [{"type": "function", "function": function} for function in functions]
        found.append(message | ({"tool_calls": made} if made else {}))
    return found


def text_of(message: Mapping[str, Any], *, optional: bool = False) -> str:
    """Return what the assistant wrote: the thinking, if it stands in a separate key, and then the content."""
    content = _text(message, optional=optional)
    reasoning = next((message[key] for key in _REASONING if message.get(key)), "")
    if not isinstance(reasoning, str):
        raise ValueError(f"expected the thinking as text, but found {reasoning!r:.200}")
    if reasoning.strip() in content:
        return content
    return f"{THINK_START}\n{reasoning.strip()}\n{THINK_STOP}\n" + f"\n{content.lstrip()}" * bool(content.strip())


def split_outputs(text: str) -> tuple[list[tuple[str, str]], str]:
    """Split an assistant's text in which the interpreter has answered: (text up to `</code>`, output) of each call, and
    what follows the last output.

    An output may have its own closing tag in it: it ends at the last one before the next output begins.
    """
    parts, position, starts = [], 0, [*_OUTPUT_START.finditer(text)]
    for start, following in zip(starts, [*starts[1:], None], strict=False):
        stop = text.rfind(_OUTPUT_STOP, start.end(), following.start() if following else len(text))
        if stop < 0:
            raise ValueError(f"an output is not closed by {_OUTPUT_STOP}: {text[start.start() :][:100]!r}")
        parts.append((text[position : start.start(1)], text[start.end() : stop]))
        position = after_blanks(text, stop + len(_OUTPUT_STOP))
    return parts, text[position:]


def _within_thinking(text: str, before: str) -> str:
    """Return the turn as the model continues a prompt that opens `<think>`: without a second opening tag."""
    if text.lstrip().startswith(THINK_START):
        text = text.lstrip().removeprefix(THINK_START)
        text = text.removeprefix("\n") if before.endswith("\n") else text
    if THINK_STOP not in text:
        raise ValueError(
            f"the chat template opens {THINK_START}, but the turn has no {THINK_STOP}: a rollout would take all of it "
            f"for thinking: {text[-200:]!r}. Use traces with their thinking, or a template without it "
            "(data.apply_chat_template_kwargs.enable_thinking=false, if the template supports it)"
        )
    return text


def _check_answer(text: str, schemas: dict, protocol: ToolProtocol, thinking: bool) -> None:
    if protocol.call_end(text, thinking=thinking) is not None:
        raise ValueError(f"the answer has {protocol.stop}, where a rollout would have run code")
    if protocol.parse(text, schemas, ended=True, thinking=thinking):
        raise ValueError(f"the answer has what the agent loop would take for a call: {text[-200:]!r}")


def _check_calls(text: str, calls: list[Call], schemas: dict, protocol: ToolProtocol, thinking: bool) -> None:
    end = protocol.call_end(text, thinking=thinking)
    if end is not None and end < len(text):
        raise ValueError(
            f"text after the first {protocol.stop} of a turn, where a rollout would have stopped; a program can write "
            "the tag as '</' + 'code>'"
        )
    parsed = protocol.parse(text, schemas, ended=protocol.call_ends_turn, thinking=thinking)
    if refused := [call for call in parsed if isinstance(call, MalformedCall)]:
        raise ValueError(f"the agent loop would reject the call {text[-200:]!r}: {'; '.join(map(str, refused))}")
    if [_essence(call) for call in parsed if isinstance(call, Call)] != [_essence(call) for call in calls]:
        raise ValueError(f"the agent loop would read other calls than the trace has: {text[-200:]!r}")


def _essence(call: Call) -> tuple[str, dict[str, Any]]:
    """Return what is run: code without the fence and the line ends that a protocol removes or adds."""
    if call.tool != CODE_TOOL:
        return call.tool, call.arguments
    return call.tool, call.arguments | {"code": strip_fence(str(call.arguments.get("code"))).strip("\n")}


def _own(text: str, eos: str) -> Segment:
    """Return what the model wrote of a turn, before its end token."""
    if eos and eos in text:
        raise ValueError(f"the end token {eos} within a turn, where a rollout would have ended: {text[-200:]!r}")
    return Segment([text], True)


def _turns(messages: list[dict], schemas: dict, keep_nulls: bool) -> Iterator[TraceTurn]:
    """Yield the turns of the model; raise ValueError if roles do not alternate."""
    roles = [message.get("role") for message in messages]
    wrong = ValueError(f"expected roles assistant, {' or '.join(TOOL_ROLES)}, ..., assistant, but found {roles}")
    i = 0
    while i < max(len(messages), 1):
        if roles[i : i + 1] != ["assistant"]:
            raise wrong
        calls = [_call(call, schemas, keep_nulls) for call in messages[i].get("tool_calls") or []]
        text = text_of(messages[i], optional=bool(calls))
        turns = [TraceTurn(text, calls)] if calls else list(_inline_turns(text))
        i += 1
        while i < len(messages) and roles[i] in TOOL_ROLES:
            turns[-1].outputs.append(_text(messages[i]))
            i += 1
        if turns[-1].outputs and not turns[-1].calls:
            turns[-1] = _with_calls(turns[-1].content, turns[-1].outputs, schemas)
        ends = i == len(messages) and [call.tool for call in calls] == [ENDING_TOOL]
        if len(turns[-1].outputs) != len(turns[-1].calls) and not (ends and not turns[-1].outputs):
            raise ValueError(f"{len(turns[-1].calls)} calls with {len(turns[-1].outputs)} answers; roles are {roles}")
        while i < len(messages) and roles[i] == "user" and not turns[-1].calls:
            turns[-1].users.append(_text(messages[i]))
            i += 1
        yield from turns
        if i < len(messages) and not turns[-1].calls and not turns[-1].users:
            raise wrong


def _inline_turns(text: str) -> Iterator[TraceTurn]:
    """Yield the turns of one text of the assistant, in which the interpreter may have answered."""
    parts, rest = split_outputs(text)
    for content, output in parts:
        yield _with_call(content, [output])
    if 0 <= rest.find("<interpreter>") < rest.rfind(_OUTPUT_STOP):
        raise ValueError(f"the interpreter answers a message that does not end in {CODE_STOP}: {rest[:100]!r}")
    yield TraceTurn(rest)


def _with_calls(content: str, outputs: list[str], schemas: dict) -> TraceTurn:
    """Return a turn whose calls stand in its text: calls between tags in JSON, or code that ends it."""
    if CALL_START not in content or content.rstrip().endswith(CODE_STOP):
        return _with_call(content, outputs)
    hermes = HermesProtocol(None, max_parallel_calls=ANY_NUMBER)
    parsed = hermes.parse(content, schemas, ended=True)
    calls = [call for call in parsed if isinstance(call, Call)]
    if not calls or len(calls) < len(parsed):
        why = "; ".join(str(each) for each in parsed if isinstance(each, MalformedCall)) or "it has none"
        raise ValueError(f"a tool answers a message without a call that could be run: {why}: {content[-200:]!r}")
    return TraceTurn(content[: calls[0].start].rstrip(), calls, outputs, content, hermes.name)


def _with_call(content: str, outputs: list[str]) -> TraceTurn:
    """Return a turn that ends in code between tags."""
    text = content.rstrip()
    if not text.endswith(CODE_STOP):
        raise ValueError(f"the interpreter answers a message that does not end in {CODE_STOP}: {content[-100:]!r}")
    said, code = split_call(text)
    return TraceTurn(said.rstrip(), [Call(CODE_TOOL, {"code": code.strip("\n")}, 0)], outputs, text, CodeProtocol.name)


def _call(call: Any, schemas: dict, keep_nulls: bool) -> Call:
    """Return a call of a trace.

    Args:
        keep_nulls: keep a null as a value. Otherwise it is dropped, unless the tool requires the argument: in a Parquet
            column every object has every key of the column, and most of them are null.
    """
    function = call.get("function") or call if isinstance(call, dict) else {}
    name, arguments = function.get("name"), function.get("arguments")
    if isinstance(arguments, str):
        arguments, keep_nulls = _json(arguments, f"arguments of {name!r}"), True
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise ValueError(f"expected a tool call with name and arguments, but found {call}")
    if not keep_nulls:
        required = (schemas.get(name, {}).get("function", {}).get("parameters") or {}).get("required") or ()
        kept = {key: item for key, item in arguments.items() if item is not None or key in required}
        arguments = {key: without_nulls(item) for key, item in kept.items()}
    return Call(name, arguments, 0)


def _json(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the {what} are no JSON: {error}") from None


def _text(message: Mapping[str, Any], *, optional: bool = False) -> str:
    content = message.get("content")
    if content is None and optional:
        return ""
    if not isinstance(content, str):
        raise ValueError(f"expected text from the {message.get('role')}, but found {content!r}")
    return content
