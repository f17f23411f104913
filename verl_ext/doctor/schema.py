"""A run's YAML against verl's own: keys that verl does not know, keys without effect, values of another type.

Hydra accepts an unknown key inside a YAML without a word, so a misspelt one would silently do nothing. verl's sources
are read, not imported: that takes 5 s.
"""

import ast
import functools
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "configs"
VERL = Path(importlib.util.find_spec("verl").submodule_search_locations[0])

# Sections whose keys verl's YAML does not list, and who refuses a wrong key instead.
OPEN_SECTIONS = {
    "retool": "ours: compared with the `retool` section of qwen2-32b_dapo",
    "data.retool": "ours: verl_ext/datasets/sft.py",
    "reward.reward_kwargs": "verl's `dapo` reward manager and ours read it; no YAML of verl lists it",
    "ray_kwargs.ray_init": "keyword arguments of ray.init, which refuses unknown ones",
    "hydra": "Hydra's own, checked by Hydra",
}

# Keys that compose but do nothing in verl 0.9.1's v1 trainer with our agent loop and sampler -> what to set instead.
KEYS_WITHOUT_EFFECT = {
    "custom_reward_function": "reward.reward_manager",
    "reward_model": "reward",
    "sandbox_fusion": "retool.sandbox",
    "reward.sandbox_fusion": "retool.sandbox",
    "reward.custom_reward_function": "the reward manager of verl_ext scores by itself",
    "data.return_raw_chat": "nothing: always on",
    "actor_rollout_ref.rollout.mode": "nothing: always async",
    "actor_rollout_ref.rollout.multi_turn.enable": "actor_rollout_ref.rollout.agent.default_agent_loop",
    "actor_rollout_ref.rollout.multi_turn.format": "retool.protocol",
    "actor_rollout_ref.rollout.multi_turn.max_assistant_turns": "retool.max_tool_calls",
    "actor_rollout_ref.rollout.multi_turn.max_user_turns": "retool.max_tool_calls",
    "actor_rollout_ref.rollout.multi_turn.max_tool_response_length": "retool.max_tool_response_tokens",
    "actor_rollout_ref.rollout.val_kwargs.do_sample": "actor_rollout_ref.rollout.val_kwargs.temperature",
    "actor_rollout_ref.actor.grad_clip": "actor_rollout_ref.actor.optim.clip_grad",
    "trainer.max_actor_ckpt_to_keep": "retool.checkpoints.keep_last; refused at the start",
    "trainer.max_critic_ckpt_to_keep": "the same",
    "trainer.max_ckpt_to_keep": "the same",
}


def compose_run(name: str, overrides: Sequence[str] = (), *, folder: Path = CONFIGS) -> DictConfig:
    """What Hydra makes of a run. verl's main brings verl's config folder into the search path; here it is named.

    Raises:
        hydra.errors.HydraException, omegaconf.errors.OmegaConfBaseException: there is no such YAML, or an override does
            not fit.
    """
    with initialize_config_dir(str(folder), version_base=None):
        return compose(name, overrides=[f"hydra.searchpath=[file://{VERL}/trainer/config]", *overrides])


@functools.cache
def lineage(path: str, folder: Path = CONFIGS) -> list[str]:
    """The YAMLs that one of ours is made of by `defaults:`, later ones on top; the first of a run is verl's own."""
    names, entries = [], list(OmegaConf.load(folder / f"{path}.yaml").get("defaults", []))
    for entry in entries if "_self_" in entries else [*entries, "_self_"]:
        name = entry if isinstance(entry, str) else "/".join(map(str, next(iter(entry.items()))))
        if name == "_self_":
            names.append(path)
            continue
        beside = str(Path(path).parent / name)  # the YAML of a group names its neighbours
        own = [found for found in (beside, name) if (folder / f"{found}.yaml").is_file()]
        names += lineage(own[0], folder) if own else [name]
    return names


@functools.cache
def own_yaml(path: str, folder: Path = CONFIGS) -> dict:
    """A YAML of ours, `path` without suffix, with all YAMLs of ours that its `defaults:` bring in, unresolved."""
    files = [folder / f"{name}.yaml" for name in lineage(path, folder)]
    tree = OmegaConf.to_container(OmegaConf.merge(*(OmegaConf.load(file) for file in files if file.is_file())))
    return {name: value for name, value in tree.items() if name != "defaults"}


@functools.cache
def schema(run: str, folder: Path = CONFIGS) -> dict:
    """All keys that verl's entry config of this run has, with verl's defaults."""
    with initialize_config_dir(f"{VERL}/trainer/config", version_base=None):
        return OmegaConf.to_container(compose(lineage(run, folder)[0]), resolve=False)


def leaves(tree: dict, prefix: str = "") -> dict[str, Any]:
    """Dotted key -> value; a list or an empty dict is a value."""
    flat = {}
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            flat.update(leaves(value, f"{prefix}{name}."))
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def is_within(key: str, section: str) -> bool:
    return key == section or key.startswith(f"{section}.")


def is_open(key: str) -> bool:
    return any(is_within(key, section) for section in OPEN_SECTIONS)


@functools.cache
def dataclass_fields(name: str) -> frozenset[str]:
    """Fields of a config dataclass of verl or ours, and its bases, from the source: what making it would accept."""
    folders = [VERL / folder for folder in ("workers/config", "trainer/config", "utils/profiler", "utils/skip")]
    for folder in [*folders, ROOT / "verl_ext" / "trainer"]:
        for path in sorted(folder.rglob("*.py")):
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.ClassDef) and node.name == name:
                    own = {item.target.id for item in node.body if isinstance(item, ast.AnnAssign)}
                    return frozenset(own).union(*(dataclass_fields(ast.unparse(base)) for base in node.bases))
    return frozenset()


def is_known(key: str, tree: Any) -> bool:
    """Whether `tree`, verl's composed config, has `key`, leaves its section open, or makes a dataclass with it."""
    for name in key.split("."):
        if tree == {}:
            return True
        if not isinstance(tree, dict):
            return False
        if name not in tree:
            return name in dataclass_fields(tree.get("_target_", "").rpartition(".")[2])
        tree = tree[name]
    return True


def is_field_of_own_class(key: str, config: DictConfig) -> bool:
    """Whether the section of `key` is made into a dataclass of ours, by its `_target_`, which has such a field."""
    section, _, name = key.rpartition(".")
    target = OmegaConf.select(config, f"{section}._target_", default="") if section else ""
    return target.startswith("verl_ext.") and name in dataclass_fields(target.rpartition(".")[2])


def has_type_of(value: Any, default: Any) -> bool:
    """Whether a value has the type of verl's default; anything goes where that is a text or null, or by reference."""
    if isinstance(default, str | None) or isinstance(value, str) and value.startswith(("${", "???")):
        return True
    kind = (int, float) if isinstance(default, int | float) and not isinstance(default, bool) else type(default)
    return isinstance(value, kind) and isinstance(value, bool) == isinstance(default, bool)


def own_keys(run: str, folder: Path = CONFIGS) -> dict[str, Any]:
    """Dotted key -> value, of the run's YAML and of all YAMLs of ours that its `defaults:` bring in."""
    return leaves(own_yaml(run, folder))


def required_keys(run: str, folder: Path = CONFIGS) -> frozenset[str]:
    """Keys that the run's YAMLs leave open by `???`. Composed they have verl's default: `???` does not replace it."""
    return frozenset(key for key, value in own_keys(run, folder).items() if value == "???")
