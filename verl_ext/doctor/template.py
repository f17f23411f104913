"""Tokenizer, chat template and tools against the tool protocol.

The quick part makes the same checks with a `QuickTokenizer`, and takes the tools' schemas from their YAML, so that it
imports nothing from verl, transformers or torch.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from typing import TYPE_CHECKING, Any, cast

from omegaconf import OmegaConf

from verl_ext.doctor.finding import Finding, all_well, fail, warn
from verl_ext.doctor.run import ROLLOUT, Run
from verl_ext.doctor.tokens import QuickTokenizer
from verl_ext.protocols.base import CODE_SCHEMA, CODE_TOOL, Call, ToolProtocol, checked_kwargs, render
from verl_ext.protocols.by_name import make_protocol
from verl_ext.protocols.tool_schemas import schemas_of
from verl_ext.protocols.trace import ANY_NUMBER
from verl_ext.settings.domains import of_whole_run, read_domains

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

QUESTION, CODE, OUTPUT, ANSWER = "1+1?", "print(1+1)", "2", "\\boxed{2}"  # short, and within the tiny task's vocabulary
CALL = {"type": "function", "function": {"name": "code_interpreter", "arguments": {"code": CODE}}}
TRACE = [
    {"role": "user", "content": QUESTION},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": OUTPUT},
    {"role": "assistant", "content": ANSWER},
]
TAGS = {"code": "<code>", "hermes": "<tool_call>"}  # of a call, by protocol; the protocol text has none
CHAT_MODEL = "Use the tokenizer of a chat (Instruct) model."


def load_tokenizer(run: Run) -> "PreTrainedTokenizerBase":
    """Load the tokenizer as verl does. Raises OSError or ValueError if it cannot."""
    from verl_ext.rollout import standalone

    path = run.get(f"{run.model}.tokenizer_path") or run.model_path
    tokenizer = standalone.load_tokenizer(path, trust_remote_code=run.get(f"{run.model}.trust_remote_code", False))
    if template := run.get(f"{run.model}.custom_chat_template"):
        tokenizer.chat_template = template
    return tokenizer


def template_kwargs(run: Run) -> dict[str, Any]:
    return run.get("data.apply_chat_template_kwargs", {})


def protocol_of(run: Run, tokenizer: "PreTrainedTokenizerBase | QuickTokenizer") -> ToolProtocol:
    calls = run.get(f"{ROLLOUT}.multi_turn.max_parallel_calls", ANY_NUMBER)
    return make_protocol(run.protocol, tokenizer, template_kwargs(run), max_parallel_calls=calls)


def load_tools(run: Run) -> list[Any]:
    """Load the tools of an RL run; an SFT run has none. Raises what they raise."""
    from verl_ext.environments import toolbox

    with redirect_stdout(sys.stderr):  # verl prints each schema; the report may be JSON
        return toolbox.load_tools(run.get(f"{ROLLOUT}.multi_turn", {}), run.folder)


def tool_schemas(
    run: Run, tokenizer: "PreTrainedTokenizerBase | QuickTokenizer", *, of_files_only: bool = False
) -> dict[str, dict]:
    """Return name -> schema of a run's tools; with a `QuickTokenizer` from the tool YAML, whose code is not imported.

    Args:
        of_files_only: without the interpreter, if no file names it.
    Raises:
        Exception: whatever a file of tools, or a tool in it, raises.
    """
    if isinstance(tokenizer, QuickTokenizer):
        path = run.get(f"{ROLLOUT}.multi_turn.tool_config_path")
        tools = cast(dict, OmegaConf.to_container(OmegaConf.load(run.folder / path)))["tools"] if path else []
        named = [tool["tool_schema"] for tool in tools if tool.get("tool_schema")]
        of_files = schemas_of(named) if named else {}
    else:
        from verl_ext.environments import toolbox

        tools = load_tools(run)
        of_files = {name: each for name, each in toolbox.schemas_of(tools).items() if name in {t.name for t in tools}}
    return of_files if of_files_only else {CODE_TOOL: CODE_SCHEMA} | of_files


def shown(
    run: Run, tokenizer: "PreTrainedTokenizerBase | QuickTokenizer"
) -> dict[str | None, tuple[str, dict[str, dict]]]:
    """Return `environments.by_name.shown_tools`; with a `QuickTokenizer` only the interpreter and the tool YAML's."""
    if isinstance(tokenizer, QuickTokenizer):
        ways = {None: of_whole_run(run.config), **read_domains(run.config)}
        return {name: (way.protocol or run.protocol, tool_schemas(run, tokenizer)) for name, way in ways.items()}
    from verl_ext.environments import by_name

    return by_name.shown_tools(run.config, load_tools(run))


def check_tokenizer(run: Run, tokenizer: "PreTrainedTokenizerBase | QuickTokenizer") -> Iterator[Finding]:
    """Check the template's turns, without which no protocol can be made; then tags, end tokens, stop string, tools."""
    if tokenizer.eos_token is None or not tokenizer.chat_template:
        lacks = "end token" if tokenizer.eos_token is None else "chat template"
        yield fail(f"the tokenizer of {run.model_path} has no {lacks} -> {CHAT_MODEL}")
        return
    protocol = protocol_of(run, tokenizer)
    ends = {True, not protocol.call_ends_turn} if run.protocol in TAGS else ()  # of a turn with a call
    try:
        checked_kwargs(tokenizer, template_kwargs(run))
        replies = ["".join(protocol.reply([OUTPUT], ended=ended)) for ended in ends]
    except ValueError as error:
        yield fail(f"{error} -> {CHAT_MODEL}")
        return
    tokens = tokenizer.encode(protocol.stop, add_special_tokens=False) if protocol.stop else []
    stop = f", and generation stops at {protocol.stop} ({len(tokens)} token(s))" * bool(protocol.stop)
    text = f"""tokenizer ({len(tokenizer):,} tokens) and chat template fit the protocol {run.protocol}: a turn ends with
        {tokenizer.eos_token}{stop}"""
    yield from all_well(_problems(run, tokenizer, protocol, replies), text)


def _problems(
    run: Run, tokenizer: "PreTrainedTokenizerBase | QuickTokenizer", protocol: ToolProtocol, replies: list[str]
) -> Iterator[Finding]:
    calls = [Call(CODE_TOOL, {"code": CODE}, 0)] if run.protocol in TAGS else []
    for text in (protocol.write("", calls), *replies):
        back = tokenizer.decode(tokenizer.encode(text, add_special_tokens=False))
        if back != text:
            yield fail(f"""the tokenizer does not reproduce what the protocol writes: it turns {text!r} into {back!r}
                -> Use another protocol, or a tokenizer that keeps spaces and has these characters.""")
    tags = [tag for tag in (TAGS.get(run.protocol), TAGS.get(run.protocol, "").replace("<", "</")) if tag]
    if special := [tag for tag in tags if tag in tokenizer.all_special_tokens]:
        yield fail(f"""{", ".join(special)}: special tokens in this tokenizer, which end a turn for the agent loop and
            are dropped when decoding -> Register them as ordinary added tokens (special=False).""")
    ids = _end_ids(run, tokenizer)
    known = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special} | {*tokenizer.all_special_ids}
    if unseen := [tokenizer.decode([i]) for i in ids if i not in known]:  # the loop knows Llama 3's <|eom_id|>
        yield fail(f"""vLLM stops at {unseen} (generation_config.json), which are not special tokens: the agent loop
            would treat such turns as cut off -> Correct eos_token_id there, or mark the tokens as special.""")
    if run.shape and len(tokenizer) > run.shape.vocabulary:
        yield fail(f"""the tokenizer has {len(tokenizer)} tokens, but the model's embedding {run.shape.vocabulary} rows
            -> Use the model's own tokenizer, or resize its embedding.""")
    try:
        schemas = tool_schemas(run, tokenizer)
    except Exception as error:  # from whatever a tool's author wrote
        yield fail(f"""the tools cannot be loaded: {type(error).__name__}: {error}
            -> Correct the files that multi_turn.tool_config_path and function_tool_path name.""")
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
            -> Use a model whose template shows tools, set model.custom_chat_template, or explain it in the data.""")


def _end_ids(run: Run, tokenizer: "PreTrainedTokenizerBase | QuickTokenizer") -> list[int]:
    """Return the tokens at which vLLM stops, from generation_config.json, or the tokenizer's without that file."""
    file = run.folder / str(run.model_path) / "generation_config.json"
    try:
        if file.is_file() or isinstance(tokenizer, QuickTokenizer):
            ids = json.loads(file.read_text()).get("eos_token_id")
        else:  # on the hub
            from transformers import GenerationConfig

            ids = GenerationConfig.from_pretrained(run.model_path).eos_token_id
    except (OSError, ValueError):
        ids = None
    return [ids] if isinstance(ids, int) else ids or []
