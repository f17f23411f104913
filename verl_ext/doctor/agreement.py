"""Whether SFT makes the same tokens as a rollout. Imports verl, transformers and torch."""

import asyncio
import os
from collections.abc import Iterator, Mapping
from typing import Any

from transformers import PreTrainedTokenizerBase

from verl_ext.datasets.sft import tokens_of
from verl_ext.doctor.finding import Finding, fail, ok, warn
from verl_ext.doctor.run import Run
from verl_ext.doctor.template import (
    CHAT_MODEL,
    OUTPUT,
    QUESTION,
    TRACE,
    load_tools,
    shown,
    template_kwargs,
)
from verl_ext.protocols.base import CODE_TOOL, SegmentEncoder, decoded, render
from verl_ext.protocols.by_name import make_protocol
from verl_ext.protocols.thinking import opens_thinking
from verl_ext.protocols.tool_schemas import schemas_of
from verl_ext.protocols.trace import ANY_NUMBER, rendered_trace
from verl_ext.rollout.scripted import Tokens, roll_out
from verl_ext.settings import CONFIGS, compose_run

THOUGHT = {"reasoning_content": QUESTION}  # of the model, after a chat template that opens <think>


def check_agreement(run: Run, tokenizer: PreTrainedTokenizerBase) -> Iterator[Finding]:
    """Check that SFT and rollout make the same tokens and masks of a trace, and that both YAMLs name one protocol.

    The rollout is the real agent loop between a scripted server, which samples the text of the trace, and a scripted
    sandbox.
    """
    stem = run.name.partition("_dapo")[0].removesuffix("_sft")
    other = f"{stem}_sft" if run.is_rl else f"{stem}_dapo"  # YAML of the same model's other stage
    without = ["+tool=none_sft" if run.is_rl else "+tool=none"] if run.protocol == "text" else []
    is_there = (CONFIGS / f"{other}.yaml").is_file()
    partner = Run(other, compose_run(other, without), folder=run.folder) if is_there else None
    rl, sft = (run, partner) if run.is_rl else (partner, run)
    if rl is None:
        return
    for setting, of in (("protocol", lambda each: each.protocol), ("data.apply_chat_template_kwargs", template_kwargs)):
        if sft is not None and of(rl) != of(sft):
            yield warn(f"""{setting} is {of(rl)!r} in {rl.name} and {of(sft)!r} in {sft.name} -> Train the SFT model
                with the same value, unless RL starts from another model.""")
    ways = shown(run, tokenizer) if run.is_rl else {None: (run.protocol, {} if without else schemas_of(None))}
    seen = []
    for source, (protocol, tools) in ways.items():
        if (protocol, tools) not in seen:  # many domains are alike
            seen.append((protocol, tools))
            yield from _check_way(run, rl, tokenizer, protocol, tools, source)


def _check_way(
    run: Run,
    rl: Run,
    tokenizer: PreTrainedTokenizerBase,
    protocol: str,
    tools: Mapping[str, dict],
    source: str | None,
) -> Iterator[Finding]:
    """Compare the tokens of a trace that calls one of these tools; `source`: the domain that has them."""
    where, call = f" of domain {source}" if source else "", " with a call" * bool(tools)
    try:
        trace = trace_for(tools)
        tokens, schemas = sft_tokens(run, tokenizer, protocol, tools, trace)
        of_model = {"tokenizer": tokenizer, "protocol": protocol, "model_path": str(run.model_path)}
        of_model |= {"tools": load_tools(rl), "data_source": source or ""}
        rollout = asyncio.run(roll_out(rl.config, QUESTION, OUTPUT, tokens, **of_model))
        is_shown = protocol == "hermes"  # the other protocol has no turns of tools
        whole = render(tokenizer, trace, template_kwargs(run), tools=schemas) if is_shown else None
    except ValueError as error:
        advice = CHAT_MODEL if "template" in str(error) else "Correct the setting or the model."
        yield fail(f"SFT or rollout refuses a trace{where}{call}: {error} -> {advice}")
        return
    ids, mask = tokens
    if difference := first_difference(tokenizer, tokens, rollout):
        yield fail(f"""SFT and rollout encode the same trace{where} differently: {difference}
            -> Compare data.apply_chat_template_kwargs and the tool YAML (schemas) of both.""")
        return
    yield ok(f"""SFT and rollout encode a trace{where}{call} as the same {len(ids)} tokens, and train on
        {sum(mask)}""")
    text = decoded(tokenizer, ids)
    if whole is not None and not whole.startswith(text):
        at = len(os.path.commonprefix([whole, text]))
        yield warn(f"""the chat template renders the finished conversation differently, as {whole[at : at + 40]!r}
            instead of {text[at : at + 40]!r}
            -> Expect servers that render the whole conversation at every turn to show the model a different text
            than RL does.""")


def trace_for(tools: Mapping[str, dict]) -> list[dict]:
    """Return TRACE; with a call of the first tool if none is the interpreter, without a call if there is none."""
    if CODE_TOOL in tools:
        return TRACE
    calls = []
    for name, schema in list(tools.items())[:1]:
        parameters = schema["function"].get("parameters") or {}
        known = parameters.get("properties") or {}
        arguments = {each: _value_of(known.get(each) or {}) for each in parameters.get("required") or known}
        calls.append({"type": "function", "function": {"name": name, "arguments": arguments}})
    called = [TRACE[1] | {"tool_calls": calls}, TRACE[2]] if calls else []
    return [TRACE[0], *called, TRACE[-1]]


def _value_of(schema: Mapping[str, Any]) -> Any:
    if schema.get("enum"):
        return schema["enum"][0]
    kind = schema.get("type")
    kind = kind[0] if isinstance(kind, list) else kind
    return {"integer": 1, "number": 1.5, "boolean": True, "array": [], "object": {}}.get(str(kind), "1")


def sft_tokens(
    run: Run, tokenizer: PreTrainedTokenizerBase, name: str, tools: Mapping[str, dict], trace: list[dict]
) -> tuple[Tokens, list | None]:
    """Return a trace as RetoolSFTDataset makes it, and the tools in its prompt. Raises ValueError if that refuses it.

    Args:
        name: of the protocol.
    """
    kwargs = template_kwargs(run)
    protocol = make_protocol(name, tokenizer, kwargs, max_parallel_calls=ANY_NUMBER)
    schemas = protocol.schemas(schemas_of(list(tools.values())))
    if opens_thinking(render(tokenizer, trace[:1], kwargs, tools=schemas)):
        trace = [each | THOUGHT if each["role"] == "assistant" else each for each in trace]
    segments = rendered_trace(trace, list(tools.values()), protocol, tokenizer, kwargs)
    return tokens_of(segments, SegmentEncoder(tokenizer)), schemas


def first_difference(tokenizer: PreTrainedTokenizerBase, sft: Tokens, rollout: Tokens) -> str | None:
    """Return in words where the two differ first; None if they are equal."""
    pairs = list(zip(*sft, strict=True)), list(zip(*rollout, strict=True))
    if pairs[0] == pairs[1]:
        return None
    at = len(os.path.commonprefix(pairs))
    texts = [repr(tokenizer.decode([i for i, _ in each[at : at + 8]])) for each in pairs]
    masks = ["".join(str(own) for _, own in each[at : at + 8]) for each in pairs]
    return f"at token {at} SFT has {texts[0]} (mask {masks[0]}), the rollout {texts[1]} (mask {masks[1]})"
