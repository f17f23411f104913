"""Tokenizer and chat template against the tool protocol, and SFT's tokens against the rollout's.

Imports verl, transformers and torch: not among the quick checks.
"""

import asyncio
import os
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from typing import Any

from transformers import GenerationConfig, PreTrainedTokenizerBase
from verl.tools.base_tool import BaseTool
from verl.utils import hf_tokenizer

from verl_ext.datasets.sft import tokens_of
from verl_ext.doctor.finding import Finding, all_well, fail, ok, warn
from verl_ext.doctor.run import ROLLOUT, Run
from verl_ext.environments import toolbox
from verl_ext.protocols.base import (
    CODE_SCHEMA,
    CODE_TOOL,
    Call,
    SegmentEncoder,
    ToolProtocol,
    checked_kwargs,
    render,
)
from verl_ext.protocols.by_name import make_protocol
from verl_ext.protocols.thinking import opens_thinking
from verl_ext.protocols.trace import rendered_trace
from verl_ext.rollout.scripted import Tokens, roll_out
from verl_ext.settings import CONFIGS, compose_run

QUESTION, CODE, OUTPUT, ANSWER = "1+1?", "print(1+1)", "2", "\\boxed{2}"  # short, and within the tiny task's vocabulary
CALL = {"type": "function", "function": {"name": "code_interpreter", "arguments": {"code": CODE}}}
TRACE = [
    {"role": "user", "content": QUESTION},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": OUTPUT},
    {"role": "assistant", "content": ANSWER},
]

THOUGHT = {"reasoning_content": QUESTION}  # of the model, behind a chat template that opens <think>
CHAT_MODEL = "Take the tokenizer of a chat (Instruct) model."


def load_tokenizer(run: Run) -> PreTrainedTokenizerBase:
    """As verl loads it. Raises OSError or ValueError where it cannot."""
    path = run.get(f"{run.model}.tokenizer_path") or run.model_path
    tokenizer = hf_tokenizer(str(path), trust_remote_code=run.get(f"{run.model}.trust_remote_code", False))
    if template := run.get(f"{run.model}.custom_chat_template"):
        tokenizer.chat_template = template
    return tokenizer


def template_kwargs(run: Run) -> dict[str, Any]:
    return run.get("data.apply_chat_template_kwargs", {})


def protocol_of(run: Run, tokenizer: PreTrainedTokenizerBase) -> ToolProtocol:
    calls = run.get(f"{ROLLOUT}.multi_turn.max_parallel_calls", 1)
    return make_protocol(run.protocol, tokenizer, template_kwargs(run), max_parallel_calls=calls)


def load_tools(run: Run) -> list[BaseTool]:
    """Those of an RL run; none of an SFT run. Raises what they raise."""
    with redirect_stdout(sys.stderr):  # verl prints each schema; the report may be JSON
        return toolbox.load_tools(run.get(f"{ROLLOUT}.multi_turn", {}), run.folder)


def tool_schemas(run: Run) -> dict[str, dict]:
    return toolbox.schemas_of(load_tools(run))


def check_tokenizer(run: Run, tokenizer: PreTrainedTokenizerBase) -> Iterator[Finding]:
    """The template's turns, without which no protocol can be made; then tags, end tokens, stop string, tools."""
    if tokenizer.eos_token is None or not tokenizer.chat_template:
        lacks = "end token" if tokenizer.eos_token is None else "chat template"
        yield fail(f"the tokenizer of {run.model_path} has no {lacks} -> {CHAT_MODEL}")
        return
    protocol = protocol_of(run, tokenizer)
    try:
        checked_kwargs(tokenizer, template_kwargs(run))
        replies = ["".join(protocol.reply([OUTPUT], ended=ended)) for ended in {True, not protocol.call_ends_turn}]
    except ValueError as error:
        yield fail(f"{error} -> {CHAT_MODEL}")
        return
    tokens = tokenizer.encode(protocol.stop, add_special_tokens=False) if protocol.stop else []
    stop = f"; it stops at {protocol.stop}, {len(tokens)} token(s)" * bool(protocol.stop)
    text = f"""protocol {run.protocol}: tokenizer ({len(tokenizer):,} tokens) and chat template fit; a turn ends with
        {tokenizer.eos_token}{stop}"""
    yield from all_well(_problems(run, tokenizer, protocol, replies), text)


def _problems(
    run: Run, tokenizer: PreTrainedTokenizerBase, protocol: ToolProtocol, replies: list[str]
) -> Iterator[Finding]:
    for text in (protocol.write("", [Call(CODE_TOOL, {"code": CODE}, 0)]), *replies):
        back = tokenizer.decode(tokenizer.encode(text, add_special_tokens=False))
        if back != text:
            yield fail(f"""the tokenizer does not give back what the protocol writes: {text!r} comes back as {back!r}
                -> Take another protocol, or a tokenizer that keeps spaces and has these characters.""")
    tags = ("<code>", "</code>") if run.protocol == "code" else ("<tool_call>", "</tool_call>")
    if special := [tag for tag in tags if tag in tokenizer.all_special_tokens]:
        yield fail(f"""{", ".join(special)}: special tokens here, which end a turn for the agent loop, and which
            decoding drops -> Register them as ordinary added tokens (special=False).""")
    try:
        ids = GenerationConfig.from_pretrained(run.model_path).eos_token_id
    except (OSError, ValueError):  # without that file vLLM takes the tokenizer's
        ids = None
    ids = [ids] if isinstance(ids, int) else ids or []
    known = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special} | {*tokenizer.all_special_ids}
    if unseen := [tokenizer.decode([i]) for i in ids if i not in known]:  # the loop knows Llama 3's <|eom_id|>
        yield fail(f"""vLLM stops at {unseen} (generation_config.json), which are no special tokens: the agent loop
            would take such turns for cut off -> Correct eos_token_id there, or mark the tokens as special.""")
    if run.shape and len(tokenizer) > run.shape.vocabulary:
        yield fail(f"""the tokenizer has {len(tokenizer)} tokens, the model's embedding {run.shape.vocabulary} rows
            -> Take the model's own tokenizer, or resize its embedding.""")
    try:
        schemas = tool_schemas(run)
    except Exception as error:  # of whatever a tool's author wrote
        yield fail(f"""the tools cannot be loaded: {type(error).__name__}: {error}
            -> Correct the files of multi_turn.tool_config_path and function_tool_path.""")
        return
    shown = protocol.schemas(schemas)
    try:
        prompt = render(tokenizer, TRACE[:1], template_kwargs(run), tools=shown)
    except ValueError as error:
        yield fail(f"{error} (with the tools {', '.join(schemas)}) -> Set model.custom_chat_template.")
        return
    if missing := [name for name in schemas if shown is not None and name not in prompt]:
        yield warn(f"""the chat template leaves out the tools ({", ".join(missing)}): nothing in the prompt says how to
            call them
            -> Take a model whose template has tools, set model.custom_chat_template, or say it in the data.""")


def check_agreement(run: Run, tokenizer: PreTrainedTokenizerBase) -> Iterator[Finding]:
    """Whether SFT and rollout make the same tokens and masks of one trace, and whether both YAMLs name one protocol.

    The rollout is the real agent loop between a scripted server, which samples what the trace has, and a scripted
    sandbox.
    """
    stem = run.name.partition("_dapo")[0].removesuffix("_sft")
    other = f"{stem}_sft" if run.is_rl else f"{stem}_dapo"  # the YAML of the same model's other stage
    partner = Run(other, compose_run(other), folder=run.folder) if (CONFIGS / f"{other}.yaml").is_file() else None
    rl, sft = (run, partner) if run.is_rl else (partner, run)
    if rl is None:
        return
    for setting, of in (("protocol", lambda each: each.protocol), ("data.apply_chat_template_kwargs", template_kwargs)):
        if sft is not None and of(rl) != of(sft):
            yield warn(f"""{setting} is {of(rl)!r} in {rl.name} and {of(sft)!r} in {sft.name} -> Train the SFT model
                with the same, e.g. data.retool.protocol={rl.protocol}; unless it is no SFT model of ours.""")
    of_model = {"tokenizer": tokenizer, "protocol": run.protocol, "model_path": str(run.model_path)}
    try:
        tokens, schemas = sft_tokens(run, tokenizer)
        rollout = asyncio.run(roll_out(rl.config, QUESTION, OUTPUT, tokens, tools=load_tools(rl), **of_model))
        is_shown = run.protocol == "hermes"  # the other protocol has no turns of tools
        whole = render(tokenizer, TRACE, template_kwargs(run), tools=schemas) if is_shown else None
    except ValueError as error:
        yield fail(f"SFT or rollout refuses a trace with a call: {error} -> {CHAT_MODEL}")
        return
    ids, mask = tokens
    if difference := first_difference(tokenizer, tokens, rollout):
        yield fail(f"""SFT and rollout make different tokens of the same trace: {difference}
            -> Compare data.apply_chat_template_kwargs and the tool YAML (schemas) of both.""")
        return
    yield ok(f"SFT and rollout make the same {len(ids)} tokens of a trace with a call, {sum(mask)} of them trained on")
    text = tokenizer.decode(ids)
    if whole is not None and not whole.startswith(text):
        at = len(os.path.commonprefix([whole, text]))
        yield warn(f"""the chat template renders the finished conversation otherwise, from {whole[at : at + 40]!r} where
            the rollout has {text[at : at + 40]!r}
            -> Servers that render the whole conversation at every turn show the model another text than RL does.""")


def sft_tokens(run: Run, tokenizer: PreTrainedTokenizerBase) -> tuple[Tokens, list | None]:
    """TRACE as RetoolSFTDataset makes it, and the tools in its prompt. Raises ValueError where that refuses it."""
    tools, protocol = list(tool_schemas(run).values()) if run.is_rl else None, protocol_of(run, tokenizer)
    schemas = protocol.schemas(tool_schemas(run)) if run.is_rl else protocol.schemas({CODE_TOOL: CODE_SCHEMA})
    trace = TRACE
    if opens_thinking(render(tokenizer, TRACE[:1], template_kwargs(run), tools=schemas)):
        trace = [each | THOUGHT if each["role"] == "assistant" else each for each in TRACE]
    segments = rendered_trace(trace, tools, protocol, tokenizer, template_kwargs(run))
    return tokens_of(segments, SegmentEncoder(tokenizer)), schemas


def first_difference(tokenizer: PreTrainedTokenizerBase, sft: Tokens, rollout: Tokens) -> str | None:
    """Where the two differ first, in words; None where they are equal."""
    pairs = list(zip(*sft, strict=True)), list(zip(*rollout, strict=True))
    if pairs[0] == pairs[1]:
        return None
    at = len(os.path.commonprefix(pairs))
    texts = [repr(tokenizer.decode([i for i, _ in each[at : at + 8]])) for each in pairs]
    masks = ["".join(str(own) for _, own in each[at : at + 8]) for each in pairs]
    return f"at token {at} SFT has {texts[0]} (mask {masks[0]}), the rollout {texts[1]} (mask {masks[1]})"
