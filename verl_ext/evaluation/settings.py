"""The settings of an evaluation: a run's YAML, and which parts of it a sample depends on."""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_ext.evaluation.problems import fingerprint
from verl_ext.settings import CONFIGS, compose_run

_FINGERPRINT_BYTES = 2**20  # of each end of a file
_MODEL_SUFFIXES = (".safetensors", ".bin", ".json", ".jinja", ".txt", ".model")
# The keys of `retool` and of its sandbox that no sample depends on.
_OF_TRAINING = (
    *("recorder", "checkpoints", "repeatable", "fleet", "observers"),
    *("adaptive_n", "curriculum", "validation_schedule", "light_validation", "early_stop"),
)
_OF_TRAINED_DOMAIN = ("weight", "train", "val", "n", "max_staleness")
_OF_AGENTS_START = ("max_rows", "max_processes", "host")
_ADDRESSES = ("urls", "max_concurrency", "max_calls_per_s", "queue_timeout_s")


class ConfigError(ValueError):
    """There is no such YAML, it belongs to no run with tools, or it does not accept an override."""


def load_config(config: str, overrides: Sequence[str]) -> DictConfig:
    """Return a run's YAML, by name in configs/ or by path (a run's hydra/config.yaml), composed as by its launcher.

    Raises:
        ConfigError: see there.
    """
    file = Path(config).resolve() if config.endswith(".yaml") else CONFIGS / f"{config}.yaml"
    if not file.is_file():
        names = ", ".join(sorted(path.stem for path in CONFIGS.glob("*_dapo*.yaml")))
        raise ConfigError(f"{file} does not exist. Expected the path of a YAML, or one of {names}.")
    try:
        composed = compose_run(file.stem, overrides, folder=file.parent, beside=[CONFIGS])
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(f"{file}: {error}") from error
    if "retool" not in composed or "actor_rollout_ref" not in composed:
        raise ConfigError(
            f"{file} has no sections `retool` and `actor_rollout_ref`: it belongs to no RL run with tools."
        )
    return composed


def sample_settings(
    config: DictConfig,
    rows: Sequence[Mapping[str, Any]],
    *,
    seed: int,
    model: Mapping[str, Any],
    interface: str,
    chat_template: str,
    seeded: bool = True,
) -> dict[str, Any]:
    """Return what the samples depend on, as plain JSON: with other settings an evaluation does not continue.

    Args:
        rows: those of `problems.read_sets`.
        model: what distinguishes its weights from others.
        interface: the server's.
        chat_template: the tokenizer's.
        seeded: each sample has a separate seed, derived from `seed`.
    """
    rollout, retool = config.actor_rollout_ref.rollout, _plain(config, "retool")
    retool = {name: value for name, value in retool.items() if name not in _OF_TRAINING}
    for domain in (retool.get("domains") or {}).values():
        for name in _OF_TRAINED_DOMAIN:
            domain.pop(name, None)
    agent = retool.pop("agent", None) or {}
    if agent.get("run") is not None:  # else the settings are those of an evaluation before there were agents
        retool["agent"] = {name: value for name, value in agent.items() if name not in _OF_AGENTS_START}
    retool["sandbox"] = {name: value for name, value in retool["sandbox"].items() if name not in _ADDRESSES}
    sets: dict[str, list] = {}
    for row in rows:
        sets.setdefault(row["uid"].rpartition(":")[0], []).append(row)
    return {
        "model": dict(model),
        "interface": interface,
        "data": {name: {"problems": len(each), "sha256": fingerprint(each)} for name, each in sets.items()},
        "n": rollout.val_kwargs.n,  # samples per problem
        "seed": seed if seeded else None,
        **{name: rollout.val_kwargs[name] for name in ("temperature", "top_p", "top_k")},
        "max_prompt_length": rollout.prompt_length,  # tokens
        "max_response_length": rollout.response_length,  # tokens of all turns, tool output included
        "agent_loop": rollout.agent.default_agent_loop,
        "max_parallel_calls": rollout.multi_turn.max_parallel_calls,
        "tool_config_path": rollout.multi_turn.tool_config_path,
        "function_tool_path": rollout.multi_turn.function_tool_path,
        "chat_template": hashlib.sha256(chat_template.encode()).hexdigest(),
        "chat_template_kwargs": _plain(config.data, "apply_chat_template_kwargs") or {},
        "engine": {name: _plain(rollout, name) for name in ("dtype", "quantization", "engine_kwargs.vllm")},
        "verifiers": _plain(config.reward, "reward_kwargs.verifiers"),
        "retool": retool,
    }


def model_fingerprint(folder: Path) -> str:
    """Return the SHA-256 of names, sizes and both ends of a model's files: training changes all of the weights."""
    digest = hashlib.sha256()
    for file in sorted(path for path in folder.iterdir() if path.is_file() and path.suffix in _MODEL_SUFFIXES):
        size = file.stat().st_size
        digest.update(f"{file.name} {size} ".encode())
        with open(file, "rb") as content:
            digest.update(content.read(_FINGERPRINT_BYTES))
            content.seek(max(0, size - _FINGERPRINT_BYTES))
            digest.update(content.read())
    return digest.hexdigest()


def _plain(config: DictConfig, key: str) -> Any:
    value = OmegaConf.select(config, key)
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
