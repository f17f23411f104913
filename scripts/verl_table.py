"""Write verl_ext/doctor/verl.json: what the doctor knows of the pinned verl and of verl_ext, and so need not import.

    python scripts/verl_table.py [--check]

- `names`: the names that a setting can have, by patterns of the sources: registrations, lists and comparisons.
- `of_groups`: the advantage estimators that compare the samples of a prompt.
- `fields`: what the dataclasses accept that a YAML of verl or of ours names.
- `unread`: the keys of verl's YAMLs that no code of a run reads. Hydra accepts such a key, and the doctor warns if one
  is set.

For `unread` the script looks at the modules that verl's entry point imports, wherever an import stands, and at those of
verl_ext. In their syntax trees a name is read as an attribute or in a string (`config["name"]`, `config.get("name")`).
A value kept in `self.name` counts as read if the module reads it there. A name that two sections share counts as read
if one of them is, so the list may miss keys.
"""

import argparse
import ast
import functools
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from verl_ext.doctor.schema import is_within, schema
from verl_ext.evaluation.store import flatten
from verl_ext.settings import CONFIGS, REPO, VERL
from verl_ext.versions import VERL as VERSIONS

TARGET = REPO / "verl_ext/doctor/verl.json"
OWN = REPO / "verl_ext/trainer"  # our objectives, advantages and schedules
REWARD = REPO / "verl_ext/reward/options.py"
ALGOS = VERL / "trainer/ppo/core_algos.py"
TRAINERS = VERL / "trainer/ppo/v1"
ENGINES = VERL / "workers/engine"
MANAGERS = VERL / "experimental/reward_loop/reward_manager"
CHECKPOINT_ENGINES = "CheckpointEngineRegistry.register"
ENTRIES = {"ppo_trainer": "verl.trainer.main_ppo", "sft_trainer_engine": "verl.trainer.sft_trainer"}
# Packages of verl_ext that only look at runs: the keys they read do nothing in a run.
LOOKERS = ("doctor", "evaluation", "memory", "pages", "quickstart", "report", "view")
NOT_OF = {"ppo_trainer": (*LOOKERS, "datasets"), "sft_trainer_engine": LOOKERS}
# Sections that are passed as a whole to another package or to Hydra.
HANDED_ON = ("transfer_queue", "global_profiler.global_tool_config", "ray_kwargs.ray_init", "model_engine")
# Modules of verl, or classes in them, that no run of configs/ reaches -> what replaces them.
REPLACED = {
    "verl.trainer.main_ppo_v0": "verl's v1 trainer",
    "verl.trainer.ppo.ray_trainer:RayPPOTrainer": "verl's v1 trainer",
    "verl.experimental.agent_loop.tool_agent_loop": "verl_ext.rollout.loop",
    "verl.experimental.agent_loop.tool_parser": "verl_ext.protocols",
    "verl.utils.dataset.multiturn_sft_dataset": "verl_ext.datasets.sft",
    "verl.workers.rollout.schemas": "agent loops: nothing makes its requests",
    "verl.utils.skip": "nothing: it replays old rollouts for tests of speed",
}


@functools.cache
def _quoted(source: Path, pattern: str) -> frozenset[str]:
    """Return texts in what the pattern's group matches in a file or a folder's files; the value of an enum's member."""
    found: set[str] = set()
    for path in [source] if source.is_file() else sorted(source.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        for inside in re.findall(pattern, text, re.DOTALL | re.MULTILINE):
            found.update(re.findall(r'"([^"]+)"', inside))
            for member in re.findall(r"[A-Z]\w+\.([A-Z_]+)", inside):
                found.update(re.findall(rf'^    {member} = "(\w+)"', text, re.MULTILINE))
    return frozenset(found)


def registered(source: Path, function: str, keyword: str = "") -> frozenset[str]:
    """Return names that a module-level call or decorator receives: its arguments, or the one called `keyword`."""
    arguments = rf"[^)]*?{keyword}=(\[.*?\]|\".*?\")" if keyword else r"(.*?)\)"
    return _quoted(source, rf"^@?{function}\({arguments}")


def compared(source: Path, name: str) -> frozenset[str]:
    """Return the texts with which the variable or attribute `name` is compared."""
    return _quoted(source, rf"\b{re.escape(name)} (?:==|!=|in|not in) (\".*?\"|[(\[].*?[)\]])")


def listed(source: Path, name: str) -> frozenset[str]:
    """Return the texts of the list or tuple that is assigned to `name`."""
    return _quoted(source, rf"\b{name} = [(\[](.*?)[)\]]")


def names() -> dict[str, frozenset[str]]:
    """Return setting -> the names that it can have, verl's and ours."""
    penalties = compared(ALGOS, "kl_penalty")
    penalties |= {f"{name}+" for name in penalties}  # with a straight-through gradient
    schedules = compared(ENGINES / "fsdp/transformer_impl.py", "lr_scheduler_type")
    schedules |= compared(OWN, "lr_scheduler_type")
    backends, decays = registered(ENGINES, "EngineRegistry.register", "backend"), listed(OWN, "DECAY_TYPES")
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    return {
        "algorithm.adv_estimator": registered(ALGOS, "register_adv_est") | listed(OWN, "ESTIMATORS"),
        "algorithm.kl_penalty": penalties,
        "algorithm.kl_ctrl.type": compared(ALGOS, "kl_ctrl.type"),
        f"{actor}.kl_loss_type": penalties,
        f"{actor}.loss_agg_mode": listed(VERL / "workers/config/actor.py", "valid_loss_agg_modes"),
        f"{actor}.policy_loss.loss_mode": registered(ALGOS, "register_policy_loss") | listed(OWN, "LOSS_MODES"),
        f"{actor}.strategy": backends,
        f"{actor}.optim.lr_scheduler_type": schedules,
        f"{actor}.optim.lr_decay_type": decays,
        f"{rollout}.name": registered(VERL / "workers/rollout/replica.py", "RolloutReplicaRegistry.register"),
        f"{rollout}.agent.default_agent_loop": registered(VERL / "experimental/agent_loop", "register"),
        f"{rollout}.checkpoint_engine.backend": registered(VERL / "checkpoint_engine", CHECKPOINT_ENGINES),
        "reward.reward_manager.name": registered(MANAGERS, "register(?:_manager)?"),
        "reward.reward_manager.source": compared(VERL / "workers/config/reward.py", "source"),
        "reward.reward_kwargs.overlong_counts": compared(REWARD, "overlong_counts"),
        "trainer.v1.trainer_mode": registered(TRAINERS, "register_trainer"),
        "trainer.v1.sampler.max_off_policy_strategy": compared(TRAINERS, "max_off_policy_strategy"),
        "trainer.logger": listed(VERL / "utils/tracking.py", "supported_backend"),
        "trainer.device": {"cpu"} | registered(ENGINES, "EngineRegistry.register", "device"),
        "trainer.resume_mode": compared(VERL / "utils/checkpoint/checkpoint_handler.py", "resume_mode"),
        # only of SFT
        "engine.strategy": backends,
        "optim.lr_scheduler_type": schedules,
        "optim.lr_decay_type": decays,
    }


def estimators_of_groups() -> frozenset[str]:
    """Return estimators that compare the samples of a prompt: those whose function takes their `index`."""
    verls = _quoted(ALGOS, r"^@register_adv_est\(([^)]*)\)[^\n]*\ndef \w+\((?:    [^\n]*|\n)*?\bindex:")
    return verls | listed(OWN, "ESTIMATORS")


def fields() -> dict[str, list[str]]:
    """Return class -> what it accepts, for those that a YAML names as `_target_`, and for that of `reward_kwargs`."""
    trees = [schema(entry) for entry in ENTRIES]
    trees += [OmegaConf.to_container(OmegaConf.load(path)) for path in CONFIGS.rglob("*.yaml")]
    targets = {value for tree in trees for key, value in flatten(tree).items() if key.split(".")[-1] == "_target_"}
    known = {name: own_fields(name) for name in {target.rpartition(".")[2] for target in targets} | {"RewardOptions"}}
    return {name: sorted(found) for name, found in sorted(known.items()) if found}


@functools.cache
def own_fields(name: str) -> frozenset[str]:
    """Return the fields of a dataclass of verl or of ours, and of its bases; none for any other class."""
    folders = [VERL / folder for folder in ("workers/config", "trainer/config", "utils/profiler", "utils/skip")]
    for path in [REWARD, *(path for folder in [*folders, OWN] for path in sorted(folder.rglob("*.py")))]:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and node.name == name:
                own = {item.target.id for item in node.body if isinstance(item, ast.AnnAssign)}
                return frozenset(own).union(*(own_fields(ast.unparse(base)) for base in node.bases))
    return frozenset()


def module_file(name: str) -> Path | None:
    """Return the file of a verl module; None if it is not a module."""
    path = VERL.parent / name.replace(".", "/")
    return next((each for each in (path.with_suffix(".py"), path / "__init__.py") if each.is_file()), None)


@functools.cache
def look_at(name: str, file: Path) -> tuple[frozenset[str], frozenset[str]]:
    """Return the modules that a module names, and the names that it reads, without its replaced classes."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    tree.body = [node for node in tree.body if f"{name}:{getattr(node, 'name', '')}" not in REPLACED]
    return frozenset(imported(name, tree, file.name == "__init__.py")), frozenset(
        read_names(tree, is_ours=name.startswith("verl_ext."))
    )


def imported(name: str, tree: ast.Module, is_package: bool) -> Iterator[str]:
    """Yield the modules that a module names: in its imports, and in strings, as registries and `_target_` do."""
    parts = name.split(".")
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = parts[: len(parts) - node.level + is_package] if node.level else []
            source = ".".join([*base, *filter(None, [node.module])])
            yield source
            yield from (f"{source}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("verl."):
            yield node.value
            yield node.value.rpartition(".")[0]


def reachable(entry: str) -> dict[str, frozenset[str]]:
    """Return module -> names that it reads, for verl from an entry point and from verl_ext, and for verl_ext itself."""
    seen: dict[str, frozenset[str]] = {}
    waiting = {ENTRIES[entry]}
    for file in sorted((REPO / "verl_ext").rglob("*.py")):
        if file.relative_to(REPO / "verl_ext").parts[0] not in NOT_OF[entry]:
            name = ".".join(file.relative_to(REPO).with_suffix("").parts)
            found, seen[name] = look_at(name, file)
            waiting |= found
    while waiting:
        name = waiting.pop()
        is_left_out = any(name == each or name.startswith(f"{each}.") for each in REPLACED)
        if name not in seen and not is_left_out and name.startswith("verl.") and (file := module_file(name)):
            found, seen[name] = look_at(name, file)
            waiting |= found | {name.rpartition(".")[0]}
    return seen


def read_names(tree: ast.Module, *, is_ours: bool) -> set[str]:
    """Return the names that a module reads; in ours, a lone word may be prose and counts only as argument or item."""
    attributes, texts, kept = Counter(), Counter(), Counter()
    documents = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    asked = {id(each) for node in ast.walk(tree) if isinstance(node, ast.Call) for each in node.args}
    asked |= {id(node.slice) for node in ast.walk(tree) if isinstance(node, ast.Subscript)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            attributes[node.attr] += 1
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documents:
            is_name = re.fullmatch(r"[\w.]+", node.value) and (not is_ours or "." in node.value or id(node) in asked)
            texts.update(node.value.split(".") if is_name else ())
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name):
                    inside = [*ast.walk(node.value)]
                    own = sum(isinstance(each, ast.Attribute) and each.attr == target.attr for each in inside)
                    text = sum(isinstance(each, ast.Constant) and each.value == target.attr for each in inside)
                    kept[target.attr] += own + text
    return {name for name, number in (attributes + texts).items() if number > kept[name]}


def unread_keys(entry: str) -> list[str]:
    """Return dotted keys of verl's YAML with a path component that no code names, and that no read key refers to."""
    names = frozenset().union(*reachable(entry).values())
    keys = flatten(schema(entry))
    unread = {key for key in keys if not names.issuperset(set(key.split(".")) - {"_target_"})}
    unread = {key for key in unread if not any(is_within(key, section) for section in HANDED_ON)}
    while True:  # a key that a read key takes its value from is also read
        referred = {name for key, value in keys.items() if key not in unread for name in references(value)}
        still = {key for key in unread if key not in referred}
        if still == unread:
            return sorted(unread)
        unread = still


def references(value: object) -> list[str]:
    """Return the keys that `${...}` and `${oc.select:...}` name in a value."""
    return re.findall(r"\$\{(?:oc\.select:)?([\w.]+)", value) if isinstance(value, str) else []


def table() -> dict[str, Any]:
    """Return what the file has to hold."""
    known = {key: sorted(found) for key, found in names().items()}
    unread = {entry: unread_keys(entry) for entry in ENTRIES}
    groups = sorted(estimators_of_groups())
    return {**VERSIONS, "names": known, "of_groups": groups, "fields": fields(), "unread": unread}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="exit status 1 if the file is not up to date")
    check = parser.parse_args().check
    text = json.dumps(table(), indent=1) + "\n"
    if check:
        sys.exit(TARGET.read_text() != text)
    TARGET.write_text(text)


if __name__ == "__main__":
    main()
