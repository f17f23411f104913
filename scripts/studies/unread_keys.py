"""Find the keys of verl's YAMLs that no code of a run reads, and write them to verl_ext/doctor/unread_keys.json.

    python -m scripts.studies.unread_keys [--check]

Hydra silently accepts such a key, and the doctor warns if one is set. The script looks at the modules that verl's entry
point imports, wherever an import stands, and at those of verl_ext. In their syntax trees a name is read as an attribute
or in a string (`config["name"]`, `config.get("name")`). A value kept in `self.name` counts as read if the module reads
it there. A name that two sections share counts as read if one of them is, so the list may miss keys.
"""

import ast
import functools
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from scripts.studies.shared import REPO, command_line
from verl_ext.doctor.schema import is_within, schema
from verl_ext.evaluation.store import flatten
from verl_ext.settings import VERL
from verl_ext.versions import VERL as VERSIONS

TARGET = REPO / "verl_ext" / "doctor" / "unread_keys.json"
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


def main() -> None:
    parser = command_line(__spec__, __doc__)
    parser.add_argument("--check", action="store_true", help="exit status 1 if the file is not up to date")
    check = parser.parse_args().check
    found = {**VERSIONS, **{entry: unread_keys(entry) for entry in ENTRIES}}
    text = json.dumps(found, indent=1) + "\n"
    if check:
        sys.exit(TARGET.read_text() != text)
    TARGET.write_text(text)
    print(f"{TARGET}: " + ", ".join(f"{len(found[entry])} keys of {entry}" for entry in ENTRIES))


if __name__ == "__main__":
    main()
