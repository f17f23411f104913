"""The names that a setting can have, and the classes that a setting names.

They are read from verl's sources and ours by patterns: registrations, lists and comparisons. Nothing is imported.
"""

import ast
import functools
import importlib.util
import re
import symtable
from collections.abc import Callable, Generator, Iterable, Iterator
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from verl_ext.doctor.finding import Finding, all_well, fail
from verl_ext.doctor.run import ACTOR, ROLLOUT, Run
from verl_ext.doctor.schema import schema
from verl_ext.doctor.suggest import did_you_mean
from verl_ext.evaluation.store import flatten
from verl_ext.settings import REPO, VERL

OWN = REPO / "verl_ext/trainer"  # our objectives, advantages and schedules
ALGOS = VERL / "trainer/ppo/core_algos.py"
TRAINERS = VERL / "trainer/ppo/v1"
ENGINES = VERL / "workers/engine"
CHECKPOINT_ENGINES = "CheckpointEngineRegistry.register"


# What the sources say -----------------------------------------------------------------------------------------------


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


def estimators_of_groups() -> frozenset[str]:
    """Return estimators that compare the samples of a prompt: those whose function takes their `index`."""
    verls = _quoted(ALGOS, r"^@register_adv_est\(([^)]*)\)[^\n]*\ndef \w+\((?:    [^\n]*|\n)*?\bindex:")
    return verls | listed(OWN, "ESTIMATORS")


def agent_loops(run: Run) -> dict[str, str | None]:
    """Return agent loops that a sample may name -> tool protocol; None for verl's loops, which have none of ours."""
    loops: dict[str, str | None] = dict.fromkeys(registered(VERL / "experimental/agent_loop", "register"))
    path = run.get(f"{ROLLOUT}.agent.agent_loop_config_path")
    if path and (run.folder / path).is_file():
        loops |= {loop.name: loop.get("protocol") or run.protocol for loop in OmegaConf.load(run.folder / path)}
    return loops


# Settings ------------------------------------------------------------------------------------------------------------


def reward_managers(_: Run) -> frozenset[str]:
    return registered(VERL / "experimental/reward_loop/reward_manager", "register(?:_manager)?")


def _schedules(run: Run) -> set[str]:
    ours = str(run.get(f"{run.optim}._target_", "")).startswith("verl_ext.")
    known = compared(ENGINES / "fsdp/transformer_impl.py", "lr_scheduler_type")
    return known | compared(OWN, "lr_scheduler_type") if ours else known


def _checkpoint_engines(run: Run) -> set[str]:
    module = run.get(f"{ROLLOUT}.checkpoint_engine.custom_backend_module")
    own = module_file(run, module) if module else None
    return {name for path in (VERL / "checkpoint_engine", own) if path for name in registered(path, CHECKPOINT_ENGINES)}


def _kl_penalties(_: Run) -> set[str]:
    known = compared(ALGOS, "kl_penalty")
    return known | {f"{name}+" for name in known}  # with a straight-through gradient


SETTINGS: dict[str, Callable[[Run], Iterable[str]]] = {
    "algorithm.adv_estimator": lambda _: registered(ALGOS, "register_adv_est") | listed(OWN, "ESTIMATORS"),
    "algorithm.kl_penalty": _kl_penalties,
    "algorithm.kl_ctrl.type": lambda _: compared(ALGOS, "kl_ctrl.type"),
    f"{ACTOR}.kl_loss_type": _kl_penalties,
    f"{ACTOR}.loss_agg_mode": lambda _: listed(VERL / "workers/config/actor.py", "valid_loss_agg_modes"),
    f"{ACTOR}.policy_loss.loss_mode": lambda _: registered(ALGOS, "register_policy_loss") | listed(OWN, "LOSS_MODES"),
    f"{ACTOR}.strategy": lambda _: registered(ENGINES, "EngineRegistry.register", "backend"),
    f"{ACTOR}.optim.lr_scheduler_type": _schedules,
    f"{ACTOR}.optim.lr_decay_type": lambda _: listed(OWN, "DECAY_TYPES"),
    f"{ROLLOUT}.name": lambda _: registered(VERL / "workers/rollout/replica.py", "RolloutReplicaRegistry.register"),
    f"{ROLLOUT}.agent.default_agent_loop": agent_loops,
    f"{ROLLOUT}.checkpoint_engine.backend": _checkpoint_engines,
    "reward.reward_manager.source": lambda _: compared(VERL / "workers/config/reward.py", "source"),
    "reward.reward_kwargs.overlong_counts": lambda _: compared(REPO / "verl_ext/reward/options.py", "overlong_counts"),
    "trainer.v1.trainer_mode": lambda _: registered(TRAINERS, "register_trainer"),
    "trainer.v1.sampler.max_off_policy_strategy": lambda _: compared(TRAINERS, "max_off_policy_strategy"),
    "trainer.logger": lambda _: listed(VERL / "utils/tracking.py", "supported_backend"),
    "trainer.device": lambda _: {"cpu", *registered(ENGINES, "EngineRegistry.register", "device")},
    "trainer.resume_mode": lambda _: compared(VERL / "utils/checkpoint/checkpoint_handler.py", "resume_mode"),
    # only of SFT
    "engine.strategy": lambda _: registered(ENGINES, "EngineRegistry.register", "backend"),
    "optim.lr_scheduler_type": _schedules,
    "optim.lr_decay_type": lambda _: listed(OWN, "DECAY_TYPES"),
}

# (key of the module, key of the class in it)
CLASSES = (
    ("reward.reward_manager.module.path", "reward.reward_manager.name"),
    ("trainer.v1.sampler.custom_sampler.path", "trainer.v1.sampler.custom_sampler.name"),
    ("data.custom_cls.path", "data.custom_cls.name"),
    (f"{ACTOR}.optim.optimizer_impl", f"{ACTOR}.optim.optimizer"),
    ("optim.optimizer_impl", "optim.optimizer"),
)
_MADE = (f"{ACTOR}.optim", f"{ACTOR}.policy_loss", "optim")  # made into the dataclass that `_target_` names
DOTTED = (f"{ROLLOUT}.agent.agent_loop_manager_class", *(f"{section}._target_" for section in _MADE))
# (key of a YAML, key of its list or "" if it is one, key of the classes in it)
FILES = (
    (f"{ROLLOUT}.agent.agent_loop_config_path", "", "_target_"),
    (f"{ROLLOUT}.multi_turn.tool_config_path", "tools", "class_name"),
)


def check_names(run: Run) -> Iterator[Finding]:
    text = "every name in the settings is registered, and every class that they name exists"
    yield from all_well([*_check_settings(run), *_check_classes(run)], text)


def _check_settings(run: Run) -> Iterator[Finding]:
    settings = dict(SETTINGS)
    if run.get("reward.reward_manager.source") == "register":
        settings["reward.reward_manager.name"] = reward_managers
    defaults = flatten(schema(run.entry))
    for key, names in settings.items():
        if run.get(key) != defaults.get(key):  # verl's own default is known
            known = set(names(run))
            for name in run.listed(key) or ([None] if key in defaults else []):  # null, but verl has a name
                if name not in known:
                    yield _not_among(f"{key} is {name!r}", name, known)
    for problem in run.own_problems("name"):
        yield _not_among(problem.message, run.get(problem.key), problem.known)


def _not_among(message: str, name: Any, known: Iterable[str]) -> Finding:
    among = f"{did_you_mean(str(name), known)} Choose one of {', '.join(sorted(known))}."
    return fail(f"{message}, expected a registered name -> {among}")


def _check_classes(run: Run) -> Iterator[Finding]:
    named = [(run.get(module), key, run.get(key)) for module, key in CLASSES]
    if run.get("reward.reward_manager.source") == "register":  # by a name, not a class
        named.pop(0)
    named += [(value.rpartition(".")[0], key, value.rpartition(".")[2]) for key in DOTTED if (value := run.get(key))]
    for key, section, class_key in FILES:
        found = yield from _entries(run, key, section, class_key)
        named += found
    yield from _check_functions(run)
    for module, key, name in named:
        if not module or not name:
            continue
        if (file := module_file(run, module)) is None:
            yield fail(f"{key} is {name} of {module}, but there is no such module -> Correct the path.")
        elif (known := _defined(file)) and name not in known:
            public = {each for each in known if not each.startswith("_")}
            hint = did_you_mean(name, public, f"Choose one of {', '.join(sorted(public))}.")
            yield fail(f"{key} is {name!r}, expected a name that {module} defines -> {hint}")


def _entries(run: Run, key: str, section: str, class_key: str) -> Generator[Finding, None, list[tuple[str, str, str]]]:
    """Return (module, where it is named, class) of each entry of a YAML that a setting names."""
    if not (path := run.get(key)):
        return []
    if not (run.folder / path).is_file():
        yield fail(f"{key} is {path}, but there is no such file (from {run.folder}) -> Correct the path.")
        return []
    try:
        tree = OmegaConf.to_container(OmegaConf.load(run.folder / path))
        names = [entry[class_key].rpartition(".") for entry in (tree[section] if section else tree)]
    except (OSError, ValueError, yaml.YAMLError, KeyError, TypeError, AttributeError) as error:
        form = f"a list{f' {section!r}' * bool(section)} whose entries have {class_key!r}"
        yield fail(f"""{key} is {path}, expected {form}: {type(error).__name__} {error}
            -> Write it as in {"configs/tools/" if section else "verl_ext/rollout/agent_loops.yaml"}.""")
        return []
    return [(module, f"{path}: {class_key}", name) for module, _, name in names]


def _check_functions(run: Run) -> Iterator[Finding]:
    """Check the file of functions that are tools."""
    key = f"{ROLLOUT}.multi_turn.function_tool_path"
    if not (path := run.get(key)):
        return
    try:
        ast.parse((run.folder / path).read_text(encoding="utf-8"))
    except OSError as error:
        yield fail(f"""{key} is {path}, but this file cannot be read (from {run.folder}): {error.strerror}
            -> Correct the path.""")
    except (SyntaxError, ValueError) as error:
        yield fail(f"{key} is {path}, expected Python: {error} -> Correct the file.")


def module_file(run: Run, path: str) -> Path | None:
    """Return the file of `pkg://a.b`, `a.b` or a path, as verl's `load_extern_object` takes them; None without one."""
    if path.endswith(".py"):
        file = run.folder / path.removeprefix("file://")
        return file if file.is_file() else None
    package, *rest = path.removeprefix("pkg://").replace("/", ".").split(".")
    try:
        spec = importlib.util.find_spec(package)
    except ValueError:
        return None
    for name in rest:  # not find_spec(a.b), which imports a
        spec = spec and PathFinder.find_spec(name, spec.submodule_search_locations or [])
    return Path(spec.origin) if spec and spec.origin else None


def _defined(file: Path) -> set[str]:
    """Return names that a module binds at its top level; none if it may bind more than its text shows."""
    text = file.read_text(encoding="utf-8")
    top = symtable.symtable(text, str(file), "exec").get_symbols()
    names = {symbol.get_name() for symbol in top if symbol.is_assigned() or symbol.is_imported()}
    return set() if "__getattr__" in names or " import *" in text else names
