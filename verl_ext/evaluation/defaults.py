"""The settings of an evaluation without --config: those of the model's run, else what model and machine imply."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import DictConfig

from verl_ext.evaluation.checkpoint import settings_of
from verl_ext.evaluation.settings import ConfigError, load_config

BASE = "qwen2-32b_dapo"  # the run that gives sampling and lengths for a model without a run
_ROLLOUT = "actor_rollout_ref.rollout"
_CALLS = {"hermes": "<tool_call>", "code": "<code>"}  # protocol -> how a call begins in a chat template that shows one


class Chosen(NamedTuple):
    """`config`: a name in configs/ or a path; `why`: where the settings come from, for a reader."""

    config: str
    overrides: list[str]
    why: str


def choose(folder: Path | None, given: Sequence[str], *, in_process: bool) -> Chosen:
    """Choose settings for a model.

    Args:
        folder: that of the model or its tokenizer; None if it is unknown, as for a server on another machine.
        given: the overrides of the command line, which win over what is chosen here.
        in_process: the model runs here, and not in a server that is already running.
    Raises:
        CheckpointError: the model's run has no settings for a rollout.
        ConfigError: nothing says which protocol the model was trained for, or BASE does not have an override's key.
    """
    if folder and (folder.resolve().parent / "hydra" / "config.yaml").is_file():
        config, overrides = settings_of(folder.resolve().parent)
        return Chosen(config, overrides, f"settings of the model's run, {folder.resolve().parent}")
    model = _json(folder / "config.json") if folder else {}
    overrides, why = _lengths(model, given), f"settings of configs/{BASE}.yaml"
    if in_process:
        overrides.append(f"{_ROLLOUT}.tensor_model_parallel_size={_gpus_for(model)}")
    if not any(each.lstrip("+").startswith("retool.protocol=") for each in given):
        protocol = _protocol(folder)
        overrides.append(f"retool.protocol={protocol}")
        why += f", protocol {protocol} as in the chat template"
    return Chosen(BASE, overrides, why)


def for_this_machine(config: str, overrides: Sequence[str]) -> tuple[DictConfig, list[str]]:
    """Return the config and its overrides, with `+hardware=cpu` added if this machine has no GPU."""
    overrides = list(overrides)
    composed = load_config(config, overrides)
    from verl_ext.cpu import is_cpu_only

    if is_cpu_only() and composed.trainer.device != "cpu":
        overrides.insert(0, "+hardware=cpu")
        composed = load_config(config, overrides)
    return composed, overrides


def _protocol(folder: Path | None) -> str:
    template = _chat_template(folder) if folder else ""
    if found := [name for name, start in _CALLS.items() if start in template]:
        return found[0]
    where = (
        f"{folder} is not in a run's folder, and its chat template shows no call"
        if folder
        else "the model's folder is not here"
    )
    raise ConfigError(
        f"The protocol that the model was trained for is unknown: {where}. Give --protocol code (<code> blocks, as in "
        "ReTool's paper) or --protocol hermes (<tool_call> with JSON), or --config with the YAML of its run."
    )


def _chat_template(folder: Path) -> str:
    """Return all chat templates of a model's folder: which file has one depends on the version of transformers."""
    files = [file for file in (folder / "chat_template.jinja", folder / "chat_template.json") if file.is_file()]
    noted = _json(folder / "tokenizer_config.json").get("chat_template") or ""
    return "".join([json.dumps(noted), *(file.read_text(encoding="utf-8", errors="replace") for file in files)])


def _lengths(model: dict[str, Any], given: Sequence[str]) -> list[str]:
    """Return overrides with the prompt and response lengths of BASE, or less if the model has too few positions."""
    most, data = model.get("max_position_embeddings"), load_config(BASE, given).data
    if not isinstance(most, int) or most >= data.max_prompt_length + data.max_response_length:
        return []
    prompt = min(data.max_prompt_length, most // 2)
    return [f"data.max_prompt_length={prompt}", f"data.max_response_length={most - prompt}"]


def _gpus_for(model: dict[str, Any]) -> int:
    """Return how many GPUs to spread a model over: as many as there are, in a power of two that divides its heads."""
    import torch

    devices, heads = torch.cuda.device_count(), model.get("num_attention_heads") or 1
    return max(2**i for i in range(max(1, devices).bit_length()) if 2**i <= max(1, devices) and heads % 2**i == 0)


def _json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # whoever loads the model says what is wrong with its files
        return {}
    return content if isinstance(content, dict) else {}
