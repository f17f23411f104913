"""The names that a setting can have, and the classes that a setting names.

verl.json has the names that verl and verl_ext register; modules that a setting names are read. Nothing is imported.
"""

import ast
import importlib.util
import re
import symtable
from collections.abc import Generator, Iterable, Iterator
from contextlib import suppress
from importlib.machinery import PathFinder
from itertools import chain
from pathlib import Path
from typing import Any, cast

import yaml
from omegaconf import OmegaConf

from verl_ext.doctor.finding import Finding, all_well, fail
from verl_ext.doctor.run import ACTOR, ROLLOUT, Run
from verl_ext.doctor.schema import TABLE, schema
from verl_ext.doctor.suggest import did_you_mean
from verl_ext.evaluation.store import flatten
from verl_ext.settings import named_file, registered_loops

NAMES: dict[str, list[str]] = TABLE["names"]
_LOOP, _ENGINE = f"{ROLLOUT}.agent.default_agent_loop", f"{ROLLOUT}.checkpoint_engine"

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
    yield from all_well(chain(_check_settings(run), _check_classes(run)), text)


def known_names(run: Run) -> dict[str, set[str]]:
    """Return setting -> the names that it can have in this run."""
    known = {key: set(names) for key, names in NAMES.items()}
    known[_LOOP] = set(agent_loops(run))
    module = run.get(f"{_ENGINE}.custom_backend_module")
    if module and (file := module_file(run, module)):
        registrations = r'^@CheckpointEngineRegistry\.register\("([^"]+)"\)'
        known[f"{_ENGINE}.backend"].update(re.findall(registrations, file.read_text(encoding="utf-8"), re.MULTILINE))
    if not str(run.get(f"{run.optim}._target_", "")).startswith("verl_ext."):
        known[f"{run.optim}.lr_scheduler_type"].discard("wsd")
    if run.get("reward.reward_manager.source") != "register":  # the name of a class
        del known["reward.reward_manager.name"]
    return known


def agent_loops(run: Run) -> dict[str, str | None]:
    """Return agent loops that a sample may name -> tool protocol; "" for the run's or the domain's, None for verl's
    loops, which have none of ours."""
    loops: dict[str, str | None] = dict.fromkeys(NAMES[_LOOP])
    with suppress(FileNotFoundError):  # which the check of classes reports
        loops |= {name: protocol or "" for name, protocol in registered_loops(run.config, run.folder).items()}
    return loops


def _check_settings(run: Run) -> Iterator[Finding]:
    defaults = flatten(schema(run.entry))
    for key, known in known_names(run).items():
        if run.get(key) != defaults.get(key):  # verl's own default is known
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
    agent = run.get("retool.agent.run")
    if isinstance(agent, str) and ":" in agent:
        module, _, name = agent.rpartition(":")
        module = str(Path(module).expanduser()) if module.endswith(".py") else module
        named.append((module, "retool.agent.run", name))
    for module, key, name in named:
        if not module or not name:
            continue
        if (file := module_file(run, module)) is None:
            yield fail(f"{key} is {name} of {module}, but there is no such module -> Correct the path.")
            continue
        try:
            known = _defined(file)
        except (SyntaxError, ValueError, OSError) as error:
            yield fail(f"{key} is {name} of {module}, which cannot be read as Python: {error} -> Correct the file.")
            continue
        if known and name not in known:
            public = {each for each in known if not each.startswith("_")}
            hint = did_you_mean(name, public, f"Choose one of {', '.join(sorted(public))}.")
            yield fail(f"{key} is {name!r}, expected a name that {module} defines -> {hint}")


def _entries(run: Run, key: str, section: str, class_key: str) -> Generator[Finding, None, list[tuple[str, str, str]]]:
    """Return (module, where it is named, class) of each entry of a YAML that a setting names."""
    if not (path := run.get(key)):
        return []
    if not (file := named_file(path, run.folder)).is_file():
        yield fail(f"{key} is {path}, but there is no such file (from {run.folder}) -> Correct the path.")
        return []
    try:
        tree = cast(Any, OmegaConf.to_container(OmegaConf.load(file)))  # as it comes, see below
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
