"""A run's YAML against verl's own: keys that verl does not know, keys without effect, values of another type.

Hydra silently accepts an unknown key inside a YAML, so a misspelt one would do nothing. verl.json replaces an import of
verl, which takes 5 s: scripts/verl_table.py makes it of the sources of the pinned verl.
"""

import functools
import json
from pathlib import Path
from typing import Any, cast

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from verl_ext.evaluation.store import flatten
from verl_ext.settings import CONFIGS, VERL, search_path

TABLE = json.loads(Path(__file__).with_name("verl.json").read_text(encoding="utf-8"))

# Sections whose keys verl's YAML does not list, and who refuses a wrong key instead.
OPEN_SECTIONS = {
    "retool": "ours: verl_ext/settings/__init__.py",
    "data.retool": "ours: verl_ext/settings/__init__.py",
    "reward.reward_kwargs": "verl's `dapo` reward manager and ours read it; no YAML of verl lists it",
    "actor_rollout_ref.actor.optim.override_optimizer_config": "arguments of the optimizer, which refuses unknown ones",
    "optim.override_optimizer_config": "the same, of SFT",
    "ray_kwargs.ray_init": "keyword arguments of ray.init, which refuses unknown ones",
    "hydra": "Hydra's own, checked by Hydra",
}

# Keys that compose but do nothing in verl 0.9.1's v1 trainer with our agent loop and sampler -> what to do instead.
KEYS_WITHOUT_EFFECT = {
    "custom_reward_function": "Set reward.reward_manager instead.",
    "reward_model": "Set the key under reward instead.",
    "sandbox_fusion": "Set retool.sandbox instead.",
    "reward.sandbox_fusion": "Set retool.sandbox instead.",
    "reward.custom_reward_function": "Set reward.reward_manager instead: that of verl_ext calls no such function.",
    "data.return_raw_chat": "Remove it: it is always on.",
    "data.gen_batch_size": "Remove it: prompts are fetched one by one, so that any number can be replaced.",
    "algorithm.filter_groups.max_inflight_gen_batches": "Set algorithm.filter_groups.max_num_gen_batches instead.",
    "actor_rollout_ref.rollout.mode": "Remove it: it is always async.",
    "actor_rollout_ref.rollout.multi_turn.enable": "Set actor_rollout_ref.rollout.agent.default_agent_loop instead.",
    "actor_rollout_ref.rollout.multi_turn.format": "Set retool.protocol instead.",
    "actor_rollout_ref.rollout.multi_turn.max_assistant_turns": "Set retool.max_tool_calls instead.",
    "actor_rollout_ref.rollout.multi_turn.max_user_turns": "Set retool.max_tool_calls instead.",
    "actor_rollout_ref.rollout.multi_turn.max_tool_response_length": "Set retool.max_tool_response_tokens instead.",
    "actor_rollout_ref.rollout.do_sample": "Set actor_rollout_ref.rollout.temperature instead.",
    "actor_rollout_ref.rollout.val_kwargs.do_sample": "Set actor_rollout_ref.rollout.val_kwargs.temperature instead.",
    "actor_rollout_ref.rollout.repetition_penalty": "Remove it: verl's agent loops ask for 1.0.",
    "actor_rollout_ref.actor.grad_clip": "Set actor_rollout_ref.actor.optim.clip_grad instead.",
    "trainer.max_actor_ckpt_to_keep": "Set retool.checkpoints.keep_last instead; the start of a run refuses this key.",
    "trainer.max_critic_ckpt_to_keep": "Set retool.checkpoints.keep_last instead; the start of a run refuses this key.",
    "trainer.max_ckpt_to_keep": "Set retool.checkpoints.keep_last instead; the start of a run refuses this key.",
}


@functools.cache
def own_yaml(path: str, folder: Path = CONFIGS) -> dict:
    """Return a YAML of ours as written, without what its `defaults:` bring in; `path` has no suffix."""
    tree = cast(dict, OmegaConf.to_container(OmegaConf.load(folder / f"{path}.yaml")))
    return {name: value for name, value in tree.items() if name != "defaults"}


@functools.cache
def own_parts(run: str, folder: Path = CONFIGS) -> dict[str, str]:
    """Return our YAMLs that a run is composed of -> their package, in the order in which Hydra merges them: the last
    one counts."""
    with initialize_config_dir(str(folder), version_base=None):
        loader = GlobalHydra.instance().config_loader()
        parts = loader.compute_defaults_list(run, [search_path()], RunMode.RUN).defaults
    own = (part for part in parts if part.config_path and (folder / f"{part.config_path}.yaml").is_file())
    return {part.config_path: part.package or "" for part in own}


@functools.cache
def schema(entry: str) -> dict:
    """Return all keys of verl's YAML that a run begins with, with verl's defaults."""
    with initialize_config_dir(f"{VERL}/trainer/config", version_base=None):
        return cast(dict, OmegaConf.to_container(compose(entry), resolve=False))


def unread_keys(entry: str) -> frozenset[str]:
    """Return the keys of verl's YAML that no code of a run reads."""
    return frozenset(TABLE["unread"][entry])


def fields_of(target: str) -> list[str]:
    """Return what the dataclass that a `_target_` names accepts; [] if it is neither verl's nor ours."""
    return TABLE["fields"].get(target.rpartition(".")[2], [])


def is_within(key: str, section: str) -> bool:
    return key == section or key.startswith(f"{section}.")


def is_open(key: str) -> bool:
    return any(is_within(key, section) for section in OPEN_SECTIONS)


def reward_keys() -> set[str]:
    """Return the keys under `reward.reward_kwargs` that RewardOptions takes."""
    keys = {*fields_of("RewardOptions"), "overlong_buffer_cfg"} - {"overlong_buffer", "overlong_factor"}
    return keys | {f"overlong_buffer_cfg.{key}" for key in ("enable", "len", "penalty_factor", "log")}


def is_known(key: str, tree: Any) -> bool:
    """Tell whether `tree`, verl's composed config, has `key`, leaves its section open, or makes a dataclass with it."""
    for name in key.split("."):
        if tree == {}:
            return True
        if not isinstance(tree, dict):
            return False
        if name not in tree:
            return name in fields_of(tree.get("_target_", ""))
        tree = tree[name]
    return True


def is_field_of_own_class(key: str, config: DictConfig) -> bool:
    """Tell whether the section of `key` becomes a dataclass of ours, by its `_target_`, that has this field."""
    section, _, name = key.rpartition(".")
    target = OmegaConf.select(config, f"{section}._target_", default="") if section else ""
    return target.startswith("verl_ext.") and name in fields_of(target)


def has_type_of(value: Any, default: Any) -> bool:
    """Tell whether a value has the type of verl's default; any does if that is a text or null, or for a reference."""
    if isinstance(default, str | None) or (isinstance(value, str) and value.startswith(("${", "???"))):
        return True
    kind = (int, float) if isinstance(default, int | float) and not isinstance(default, bool) else type(default)
    return isinstance(value, kind) and isinstance(value, bool) == isinstance(default, bool)


def own_keys(run: str, folder: Path = CONFIGS) -> dict[str, Any]:
    """Return dotted key -> value, from all our YAMLs that a run is composed of."""
    keys: dict[str, Any] = {}
    for path, package in own_parts(run, folder).items():
        keys |= flatten(own_yaml(path, folder), f"{package}." * bool(package))
    return keys


def required_keys(run: str, folder: Path = CONFIGS) -> frozenset[str]:
    """Return the keys that the run's YAMLs leave open with `???`; when composed they have verl's default."""
    return frozenset(key for key, value in own_keys(run, folder).items() if value == "???")
