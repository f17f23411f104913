"""No rollout begins with a truncated prompt: a run with prompts above its limit does not start.

verl 0.9.1 cuts off the beginning of a prompt that is too long, the system prompt and the tools' schemas first, with a
warning in a worker's log (experimental/agent_loop/agent_loop.py:437). Its filter (`data.filter_overlong_prompts`) may
be off, and it does not count the interpreter's schema.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from verl_ext.datasets.prompts import PromptLengths
from verl_ext.environments.by_name import shown_tools
from verl_ext.environments.toolbox import load_tools, schemas_of
from verl_ext.settings import registered_loops

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

COLUMNS = ("agent_name", "data_source", "extra_info")  # these say how a row's prompt is rendered


def check_prompts(config: DictConfig, tokenizer: "PreTrainedTokenizerBase", datasets: Mapping[str, Any]) -> None:
    """Check the prompts that verl's filter has left.

    Args:
        datasets: `train` and `val` -> verl's data set; a custom class without `dataframe` is not checked.
    Raises:
        ValueError: a prompt is longer than `data.max_prompt_length` (the message has their number and the longest), or
            the chat template refuses one (the message has its row).
    """
    data, key = config.data, config.data.get("prompt_key", "prompt")
    lengths = _lengths(config, tokenizer)
    for split, dataset in datasets.items():
        if (frame := getattr(dataset, "dataframe", None)) is None or key not in frame.column_names:
            continue
        rows = frame.select_columns([key, *(name for name in COLUMNS if name in frame.column_names)])
        counted = []
        for number, row in enumerate(rows):
            try:
                counted.append(lengths(row[key], row) if _is_text(row[key]) else 0)
            except ValueError as error:
                raise ValueError(
                    f"data.{split}_files: row {number} of the {len(rows)} that passed verl's filter cannot be "
                    f"rendered: {error}. Remove such rows, or join their messages."
                ) from error
        if long := [length for length in counted if length > data.max_prompt_length]:
            raise ValueError(
                f"data.{split}_files: {len(long)} of {len(rows)} prompts are longer than data.max_prompt_length="
                f"{data.max_prompt_length} (the longest has {max(long)} tokens, tools included). "
                "Raise data.max_prompt_length, or filter them: data.filter_overlong_prompts=true, "
                "with actor_rollout_ref.rollout.multi_turn.tool_config_path=configs/tools/code_interpreter.yaml if the "
                "protocol is hermes, so that verl counts the interpreter's schema."
            )


def _lengths(config: DictConfig, tokenizer: "PreTrainedTokenizerBase") -> PromptLengths:
    rollout = config.actor_rollout_ref.rollout
    loops = {name: protocol or "" for name, protocol in registered_loops(config, Path.cwd()).items()}
    tools = load_tools(rollout.multi_turn, Path.cwd())
    of_files = {tool.name: schemas_of(tools)[tool.name] for tool in tools}
    kwargs = dict(config.data.get("apply_chat_template_kwargs") or {})
    shown, limit = shown_tools(config, tools), config.data.max_prompt_length
    return PromptLengths(tokenizer, loops, rollout.agent.default_agent_loop, shown, of_files, kwargs, limit)


def _is_text(messages: Any) -> bool:
    """Tell whether messages are all text; verl itself refuses images and videos whose prompt is too long."""
    return isinstance(messages, list) and all(
        isinstance(each, dict) and isinstance(each.get("content"), str) for each in messages
    )
