"""Tokenizer and chat template against the tool protocol, and SFT's tokens against the rollout's.

Imports verl, transformers and torch: not among the quick checks.
"""

import asyncio
from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from verl_ext.doctor.finding import Finding, Topic
from verl_ext.doctor.run import Run
from verl_ext.settings import CONFIGS, compose_run

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from verl_ext.protocols.base import ToolProtocol

topic = Topic("template")
QUESTION, CODE, OUTPUT, ANSWER = "1+1?", "print(1+1)", "2", "\\boxed{2}"  # short, and within the tiny task's vocabulary
TRACE = [
    {"role": "user", "content": QUESTION},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "code_interpreter", "arguments": {"code": CODE}}}],
    },
    {"role": "tool", "content": OUTPUT},
    {"role": "assistant", "content": ANSWER},
]


def load_tokenizer(run: Run) -> "PreTrainedTokenizerBase":
    """As verl loads it. Raises OSError or ValueError where it cannot."""
    from verl.utils import hf_tokenizer

    model = "actor_rollout_ref.model" if run.is_rl else "model"
    path = run.get(f"{model}.tokenizer_path") or run.model_path
    tokenizer = hf_tokenizer(str(path), trust_remote_code=run.get(f"{model}.trust_remote_code", False))
    if template := run.get(f"{model}.custom_chat_template"):
        tokenizer.chat_template = template
    return tokenizer


def template_kwargs(run: Run) -> dict[str, Any]:
    return run.get("data.apply_chat_template_kwargs", {})


def protocol_of(run: Run, tokenizer: "PreTrainedTokenizerBase") -> "ToolProtocol":
    from verl_ext.protocols.by_name import make_protocol

    calls = run.get("actor_rollout_ref.rollout.multi_turn.max_parallel_calls", 1) if run.is_rl else 1
    return make_protocol(run.protocol, tokenizer, template_kwargs(run), max_parallel_calls=calls)


def tool_schemas(run: Run) -> dict[str, dict]:
    """Name -> schema of the tools in the prompt: the interpreter, and those of the tool YAML."""
    from verl_ext.protocols.base import CODE_SCHEMA, CODE_TOOL

    schemas = {CODE_TOOL: CODE_SCHEMA}
    path = run.get("actor_rollout_ref.rollout.multi_turn.tool_config_path")
    if path:
        for tool in OmegaConf.to_container(OmegaConf.load(run.folder / path))["tools"]:
            if "tool_schema" in tool:
                schemas[tool["tool_schema"]["function"]["name"]] = tool["tool_schema"]
    return schemas


def check_tokenizer(run: Run, tokenizer: "PreTrainedTokenizerBase") -> Iterator[Finding]:
    """End tokens, tags, stop string and round trip; then the template's turns, without which no protocol can "
    "be made."""
    chat_model = "Take the tokenizer of a chat (Instruct) model."
    if tokenizer.eos_token is None or not tokenizer.chat_template:
        lacks = "end token" if tokenizer.eos_token is None else "chat template"
        yield topic.fail(f"the tokenizer of {run.model_path} has no {lacks}", chat_model)
        return
    protocol = protocol_of(run, tokenizer)
    try:
        replies = ["".join(protocol.reply([OUTPUT], ended=ended)) for ended in {True, not protocol.call_ends_turn}]
    except ValueError as error:
        yield topic.fail(str(error), chat_model)
        return
    problems = [*_check_tags(run, tokenizer, protocol, replies), *_check_ends(run, tokenizer)]
    problems += _check_tools_are_shown(run, tokenizer, protocol)
    yield from problems
    if not problems:
        stop = ""
        if protocol.stop:
            stop = (
                f"; it stops at {protocol.stop}, {len(tokenizer.encode(protocol.stop, add_special_tokens=False))} "
                "token(s)"
            )
        yield topic.ok(
            f"protocol {run.protocol}: tokenizer ({len(tokenizer):,} tokens) and chat template fit; a turn ends with "
            f"{tokenizer.eos_token}{stop}"
        )


def _check_tags(
    run: Run, tokenizer: "PreTrainedTokenizerBase", protocol: "ToolProtocol", replies: list[str]
) -> Iterator[Finding]:
    from verl_ext.protocols.base import CODE_TOOL, Call

    call = protocol.write("", [Call(CODE_TOOL, {"code": CODE}, 0)])
    for text in (call, *replies):
        back = tokenizer.decode(tokenizer.encode(text, add_special_tokens=False))
        if back != text:
            yield topic.fail(
                f"the tokenizer does not give back what the protocol writes: {text!r} comes back as {back!r}",
                "Take another protocol, or a tokenizer that keeps spaces and has these characters.",
            )
    tags = ("<code>", "</code>") if run.protocol == "code" else ("<tool_call>", "</tool_call>")
    if special := [tag for tag in tags if tag in tokenizer.all_special_tokens]:
        yield topic.fail(
            f"{', '.join(special)}: special tokens here, which end a turn for the agent loop, and which decoding drops",
            "Register them as ordinary added tokens (special=False).",
        )


def _check_tools_are_shown(
    run: Run, tokenizer: "PreTrainedTokenizerBase", protocol: "ToolProtocol"
) -> Iterator[Finding]:
    schemas = tool_schemas(run)
    shown = protocol.schemas(schemas)
    prompt = tokenizer.apply_chat_template(TRACE[:1], tools=shown, tokenize=False, **template_kwargs(run))
    if missing := [name for name in schemas if shown is not None and name not in prompt]:
        yield topic.warn(
            f"the chat template leaves out the tools ({', '.join(missing)}): nothing in the prompt says how to call "
            "them",
            "Take a model whose template has tools, set model.custom_chat_template, or say it in the data.",
        )


def _check_ends(run: Run, tokenizer: "PreTrainedTokenizerBase") -> Iterator[Finding]:
    from transformers import GenerationConfig

    try:
        ids = GenerationConfig.from_pretrained(run.model_path).eos_token_id
    except (OSError, ValueError):  # without that file vLLM takes the tokenizer's
        ids = None
    ids = [ids] if isinstance(ids, int) else ids or []
    if unseen := [i for i in ids if i not in tokenizer.all_special_ids]:
        yield topic.fail(
            f"vLLM stops at {[tokenizer.decode([i]) for i in unseen]} (generation_config.json), which are no special "
            "tokens: the agent loop would take such turns for cut off",
            "Correct eos_token_id there, or mark the tokens as special.",
        )
    try:
        rows = run.shape.vocabulary if run.shape else None
    except (ValueError, KeyError):
        rows = None
    if rows is not None and len(tokenizer) > rows:
        yield topic.fail(
            f"the tokenizer has {len(tokenizer)} tokens, the model's embedding {rows} rows",
            "Take the model's own tokenizer, or resize its embedding.",
        )


def check_agreement(run: Run, tokenizer: "PreTrainedTokenizerBase") -> Iterator[Finding]:
    """Whether SFT and rollout make the same tokens and masks of one trace, and whether both YAMLs name one protocol.

    The rollout is the real agent loop between a scripted server, which samples what the trace has, and a scripted
    sandbox.
    """
    rl, sft = _partners(run)
    if rl is None:
        return
    for setting, own, other in (
        ("protocol", rl.protocol, sft.protocol if sft else None),
        ("data.apply_chat_template_kwargs", template_kwargs(rl), template_kwargs(sft) if sft else None),
    ):
        if sft is not None and own != other:
            yield topic.warn(
                f"{setting} is {own!r} in {rl.name} and {other!r} in {sft.name}",
                f"Train the SFT model with the same, e.g. data.retool.protocol={rl.protocol}; unless it is no "
                f"SFT model of ours.",
            )
    ids, mask, schemas = sft_tokens(run, tokenizer)
    rollout = asyncio.run(_roll_out(rl, run, tokenizer, ids, mask))
    difference = first_difference(tokenizer, (ids, mask), rollout)
    if difference:
        yield topic.fail(
            f"SFT and rollout make different tokens of the same trace: {difference}",
            "Compare data.apply_chat_template_kwargs and the tool YAML (schemas) of both.",
        )
        return
    yield topic.ok(
        f"SFT and rollout make the same {len(ids)} tokens of a trace with a call, {sum(mask)} of them trained on"
    )
    if run.protocol == "hermes":
        whole = tokenizer.apply_chat_template(TRACE, tools=schemas, tokenize=False, **template_kwargs(run))
        if not whole.startswith(text := tokenizer.decode(ids)):
            at = next(
                (i for i, (a, b) in enumerate(zip(whole, text, strict=False)) if a != b), min(len(whole), len(text))
            )
            yield topic.warn(
                f"the chat template renders the finished conversation otherwise, from {whole[at : at + 40]!r} where "
                f"the rollout has {text[at : at + 40]!r}",
                "Servers that render the whole conversation at every turn show the model another text than RL does.",
            )


def _partners(run: Run) -> tuple[Run | None, Run | None]:
    """(RL run, SFT run) of one model: the run itself and the YAML beside it, where there is one."""
    stem = run.name.partition("_dapo")[0].removesuffix("_sft")
    other = f"{stem}_sft" if run.is_rl else f"{stem}_dapo"
    partner = Run(other, compose_run(other), folder=run.folder) if (CONFIGS / f"{other}.yaml").is_file() else None
    return (run, partner) if run.is_rl else (partner, run)


def sft_tokens(run: Run, tokenizer: "PreTrainedTokenizerBase") -> tuple[list[int], list[int], list | None]:
    """(ids, loss mask) of TRACE as RetoolSFTDataset makes them, and the tools in its prompt."""
    from verl_ext.protocols.base import SegmentEncoder
    from verl_ext.protocols.trace import Segment, split_trace

    tools = list(tool_schemas(run).values()) if run.is_rl else None
    prompt, schemas, response = split_trace(TRACE, tools, protocol_of(run, tokenizer), tokenizer.eos_token)
    text = tokenizer.apply_chat_template(
        prompt, tools=schemas, add_generation_prompt=True, tokenize=False, **template_kwargs(run)
    )
    ids, mask = [], []
    encoder = SegmentEncoder(tokenizer)
    for segment in [Segment([text], False), *response]:
        encoded = encoder.encode(segment.parts)
        ids += encoded
        mask += [int(segment.own)] * len(encoded)
    return ids, mask, schemas


async def _roll_out(
    rl: Run, run: Run, tokenizer: "PreTrainedTokenizerBase", ids: list[int], mask: list[int]
) -> tuple[list[int], list[int]]:
    """(ids, mask) of the real agent loop with the settings of `rl`, on the model and protocol of `run`.

    Its server samples the parts of `ids` that are the model's.
    """
    from verl.workers.rollout.replica import TokenOutput

    from verl_ext.rollout.loop import RetoolAgentLoop
    from verl_ext.sandbox.client import RunResult

    turns = iter([[i for i, _ in group] for own, group in groupby(zip(ids, mask, strict=True), lambda x: x[1]) if own])

    async def generate(**_: Any) -> TokenOutput:
        return TokenOutput(token_ids=next(turns, [tokenizer.eos_token_id]), stop_reason="completed")

    async def run_code(*_: Any, **__: Any) -> RunResult:
        return RunResult("ok", OUTPUT, "", 0, queue_s=0.0, run_s=0.0, attempts=1, message="")

    long = {"prompt_length": len(ids), "response_length": 2 * len(ids)}  # check_rows looks at lengths
    config = OmegaConf.merge(
        rl.config, {"retool": {"trajectory_log": {"enable": False}}, "actor_rollout_ref": {"rollout": long}}
    )
    loop = RetoolAgentLoop(
        trainer_config=SimpleNamespace(config=config),
        server_manager=SimpleNamespace(generate=generate),
        tokenizer=tokenizer,
        processor=None,
        dataset_cls=None,
        data_config=SimpleNamespace(config=config.data),
        hf_model_type=_model_type(run),
        tools=SimpleNamespace(tools=[]),
        protocol=run.protocol,
    )
    loop.tools.sandbox = SimpleNamespace(run=run_code)
    loop.tools.schemas = tool_schemas(rl)
    row: Mapping[str, Any] = {"uid": "doctor", "raw_prompt": [{"role": "user", "content": QUESTION}]}
    output = await loop.run({"temperature": 1.0, "logprobs": False}, **row)
    return (
        output.prompt_ids + output.response_ids,
        [0] * len(output.prompt_ids) + list(output.response_mask),
    )


def _model_type(run: Run) -> str | None:
    import json

    path = Path(str(run.model_path)).expanduser() / "config.json"
    return json.loads(path.read_text()).get("model_type") if path.is_file() else None


def first_difference(
    tokenizer: "PreTrainedTokenizerBase", sft: tuple[list[int], list[int]], rollout: tuple[list[int], list[int]]
) -> str | None:
    """Where two (ids, mask) differ first, in words; None where they are equal."""
    pairs = list(zip(*sft, strict=True)), list(zip(*rollout, strict=True))
    if pairs[0] == pairs[1]:
        return None
    at = next((i for i, (a, b) in enumerate(zip(*pairs, strict=False)) if a != b), min(map(len, pairs)))
    texts = [repr(tokenizer.decode([i for i, _ in each[at : at + 8]])) for each in pairs]
    masks = ["".join(str(own) for _, own in each[at : at + 8]) for each in pairs]
    return f"at token {at} SFT has {texts[0]} (mask {masks[0]}), the rollout {texts[1]} (mask {masks[1]})"
