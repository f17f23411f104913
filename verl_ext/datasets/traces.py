"""Turn SFT traces, ReTool-SFT in either public form or your own, into verl's columns `messages` and `tools`.

Calls become objects (`tool_calls`), which verl_ext/protocols/trace.py turns into the text of either protocol; it also
has the last word on what is a trace. Traces with tools other than the Python interpreter are left out.
"""

import json
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import datasets

from verl_ext.datasets.problems import Report, shortened
from verl_ext.datasets.rows import DataError, field, read_rows, write_parquet
from verl_ext.datasets.text import PROMPTS, EvaluationProblems, bare_problem, has_no_words
from verl_ext.protocols.base import CODE_SCHEMA, CODE_TOOL
from verl_ext.protocols.code import CodeProtocol, split_call
from verl_ext.protocols.trace import PROMPT_ROLES, TOOL_ROLES, messages_of, split_outputs, split_trace, text_of

_FUNCTION = {"name": datasets.Value("string"), "arguments": {"code": datasets.Value("string")}}
FEATURES = datasets.Features(
    {
        "messages": [
            {
                "role": datasets.Value("string"),
                "content": datasets.Value("string"),
                "tool_calls": [{"type": datasets.Value("string"), "function": _FUNCTION}],
            }
        ],
        "tools": datasets.Value("string"),  # JSON, as in the published data
        "id": datasets.Value("string"),
    }
)
_ANSWER_TAGS = re.compile(r"</?answer>")


@dataclass
class Trace:
    """`messages` as in FEATURES, the last of the prompt at `prompt_length - 1`; `problem` without instructions."""

    problem: str
    messages: list[dict[str, Any]]
    prompt_length: int
    id: str


def read_traces(source: str, *, split: str = "train", protocol: str) -> Iterator[Trace | tuple[str, str]]:
    """Yield a trace for each row, or (id, reason) for a conversation that is not one.

    Args:
        protocol: key of PROMPTS, which replaces the instructions around the problem; as `retool.protocol` of the run.
    Raises:
        DataError: a row has no list `messages` (or JSON text of one) of objects with a role and a text; the message
            names the row and the column.
    """
    for where, row in read_rows(source, split=split):
        if isinstance(row.get("messages"), str):
            with suppress(ValueError):  # `field` reports what it found
                row["messages"] = messages_of(row["messages"])
        for number, message in enumerate(field(row, "messages", where, list)):
            field(row, f"messages.{number}.role", where)
            for call in range(len(message.get("tool_calls") or [])):
                field(row, f"messages.{number}.tool_calls.{call}.function", where, dict)
            if not message.get("tool_calls"):
                field(row, f"messages.{number}.content", where)
        name = str(row["id"]) if row.get("id") is not None else where.rpartition(", ")[2]
        try:
            yield _trace(row["messages"], row.get("tools"), name, protocol)
        except ValueError as error:  # MalformedCall among them
            yield name, str(error)


def clean_traces(
    traces: Iterable[Trace | tuple[str, str]], *, evaluation: EvaluationProblems
) -> tuple[list[Trace], Report]:
    """Drop conversations that are not traces, duplicates, and problems of the evaluation sets.

    Several traces of one problem stay.
    """
    report, kept, seen = Report(), [], set()
    for trace in traces:
        report.rows += 1
        if not isinstance(trace, Trace):
            report.drop("not a trace of the agent loop", f"{trace[0]}: {trace[1]}")
            continue
        digest = blake2b(json.dumps(trace.messages).encode(), digest_size=16).digest()
        text = f"{trace.id}: {shortened(trace.problem)}"
        if digest in seen:
            report.drop("the same trace occurs earlier", text)
        elif has_no_words(trace.problem):
            report.drop("the problem is empty or only a number", text)
        elif overlap := evaluation.find_overlap(trace.problem):
            report.drop("overlap with an evaluation set", f"{overlap[1]:.0%} of {overlap[0]} | {text}")
        else:
            kept.append(trace)
        seen.add(digest)
    report.distinct, report.kept = len(seen), len(kept)
    return kept, report


def write_traces(traces: list[Trace], path: Path) -> None:
    """Write parquet in verl's SFT columns, and print figures of the calls and the first trace that has one.

    Raises:
        DataError: there are no traces.
    """
    if not traces:
        raise DataError(f"No trace is left to write to {path}. See above why they were dropped.")
    tools = json.dumps([CODE_SCHEMA])
    rows = ({"messages": trace.messages, "tools": tools, "id": trace.id} for trace in traces)
    count = write_parquet(rows, path, FEATURES)
    calls = [sum(len(message["tool_calls"] or []) for message in trace.messages) for trace in traces]
    unboxed = sum("\\boxed" not in trace.messages[-1]["content"] for trace in traces)
    print(f"{path}: {count:,} traces; {sum(map(bool, calls)):,} run code, {sum(calls) / count:.1f} times on average")
    if unboxed:
        print(f"  {unboxed:,} end without \\boxed{{}}: the model would learn responses that score as no answer")
    print("The first that runs code:" if any(calls) else "The first:")
    for message in traces[next((i for i, number in enumerate(calls) if number), 0)].messages:
        print(f"  [{message['role']}] {message['content']}")
        for call in message["tool_calls"] or []:
            print(f"  [{call['function']['name']}] {call['function']['arguments']['code']}")


def _trace(messages: list[dict[str, Any]], tools: Any, name: str, protocol: str) -> Trace:
    """Return the trace of a conversation; raise ValueError with the reason if it is not one."""
    length = next((i for i, m in enumerate(messages) if m["role"] not in PROMPT_ROLES), len(messages))
    if length == 0 or messages[length - 1]["role"] != "user":
        raise ValueError("expected the user's question before the assistant's first message")
    problem = bare_problem(messages[length - 1]["content"])
    prompt = [make_message(m["role"], m["content"]) for m in messages[: length - 1]]
    prompt.append(make_message("user", PROMPTS[protocol].format(problem=problem)))
    response: list[dict[str, Any]] = []
    for message in messages[length:]:
        if message["role"] in TOOL_ROLES:
            if response and not response[-1]["tool_calls"]:  # the interpreter, after code between tags
                response[-1] = _with_call(response[-1]["content"])
            response.append(make_message("tool", message["content"].strip()))
        elif message["role"] == "assistant" and message.get("tool_calls"):
            codes = [_code(call) for call in message["tool_calls"]]
            response.append(make_message("assistant", text_of(message, optional=True).strip(), codes))
        else:
            response += _inline(message["role"], text_of(message))
    if response and response[-1]["role"] == "assistant":
        response[-1]["content"] = _ANSWER_TAGS.sub("", response[-1]["content"]).strip()
    split_trace([*prompt, *response], tools, CodeProtocol(None), "")  # the loop's own rules; needs no tokenizer here
    return Trace(problem, [*prompt, *response], len(prompt), name)


def _inline(role: str, text: str) -> Iterator[dict[str, Any]]:
    """Yield the messages of one text of the assistant, in which the interpreter may have answered."""
    parts, rest = split_outputs(text)
    for content, output in parts:
        yield _with_call(content)
        yield make_message("tool", output.strip())
    yield make_message(role, rest)


def _with_call(text: str) -> dict[str, Any]:
    if not text.rstrip().endswith("</code>"):
        raise ValueError(f"the interpreter answers a message that does not end in </code>: {text[-100:]!r}")
    said, code = split_call(text.rstrip())
    return make_message("assistant", said.strip(), [code.strip("\n")])  # a protocol writes its own line ends


def _code(call: dict[str, Any]) -> str:
    function = call["function"]
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if isinstance(arguments, dict):  # a parquet column has every key in every row
        arguments = {key: value for key, value in arguments.items() if value is not None}
    if function.get("name") != CODE_TOOL or not isinstance(arguments, dict) or list(arguments) != ["code"]:
        raise ValueError(f"expected a call of {CODE_TOOL} with the argument code, but found {shortened(str(function))}")
    return arguments["code"]


def make_message(role: str, content: str, codes: list[str] | None = None) -> dict[str, Any]:
    """Return a message of FEATURES; an assistant's may have calls of the interpreter."""
    calls = [{"type": "function", "function": {"name": CODE_TOOL, "arguments": {"code": code}}} for code in codes or []]
    return {"role": role, "content": content, "tool_calls": calls or None}
