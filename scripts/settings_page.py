#!/usr/bin/env python3
"""Write docs/reference/settings.md: every key below `retool` with its type, range, default and meaning.

Types and ranges are those of verl_ext/settings; defaults and meanings those of configs/shared/*.yaml and tiny_sft.yaml,
where each key has a comment; those of a table's rows are in verl_ext/settings. A test compares
the page with what this script prints.
"""

import argparse
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_type_hints

import yaml

from verl_ext.settings import CONFIGS, REPO, Retool, SftData
from verl_ext.settings.checks import Option

PAGE = REPO / "docs" / "reference" / "settings.md"
YAMLS = {"retool": ("shared/every_run.yaml", "shared/retool.yaml"), "data.retool": ("shared/sft.yaml",)}
WORDS = {int: "whole number", float: "number", bool: "true, false", str: "text", list: "list", dict: "section"}
HEAD = """\
# Settings

Keys below `retool` in a run's YAML, and below `data.retool` of SFT; [reward](../guides/reward.md) has its own. Set one
like any Hydra key:

```bash
bash recipe/retool/run_tiny_dapo.sh retool.max_tool_calls=4
```

A misspelt key or a value out of range stops the run at its start, and the doctor names the key that was meant.
verl's own keys are in its documentation; `--cfg job --resolve` prints all keys of a run.

`python scripts/settings_page.py` wrote these tables. A default is that of `configs/shared/`; a run's YAML may differ.
"""


def comments(path: Path) -> dict[str, str]:
    """Dotted key -> the comment on its line, or on the line of the key itself."""
    found, above = {}, []
    for line in path.read_text(encoding="utf-8").splitlines():
        match = re.match(r"( *)([\w-]+):(?:[^#]|#(?! ))*(?:# (.*))?$", line)
        if not match:
            continue
        above = [each for each in above if each[0] < len(match[1])] + [(len(match[1]), match[2])]
        note = re.sub(r"\s*\[[SOW]\]|\s*\((?=\))", "", match[3] or "")
        found[".".join(name for _, name in above)] = note.strip(" ;,")
    return found


def rows(schema: type, name: str, values: Mapping[str, Any], notes: Mapping[str, str]) -> Iterator[str]:
    """A row per key of a section, those of its sections after its own."""
    hints = get_type_hints(schema)
    if issubclass(schema, Option):
        yield row(f"{name}.enable", "true, false", values.get("enable"), notes)
    below = []
    for each in fields(schema):
        hint = hints[each.name]
        kinds = get_args(hint) if isinstance(hint, UnionType) else (hint,)
        value = values.get(each.name, None if each.default is MISSING else each.default)
        if is_dataclass(kinds[0]):
            below.append((kinds[0], f"{name}.{each.name}", value if isinstance(value, Mapping) else {}))
            continue
        path, among, within = f"{name}.{each.name}", each.metadata.get("among"), each.metadata.get("within")
        words = [f"`{one}`" for one in among] if among else [WORDS[one] for one in kinds if one in WORDS]
        kind = ", ".join(words) + (f" in {within}" if within else "")
        yield row(path, kind + (" or null" if NoneType in kinds else ""), value, notes)
        if table := each.metadata.get("table_of"):
            texts = {f"{path}.NAME.{one.name}": one.metadata["about"] for one in fields(table)}
            below.append((table, f"{path}.NAME", {}, texts))
    for section in below:
        yield from rows(*section, **({} if len(section) == 4 else {"notes": notes}))


def row(name: str, kind: str, default: Any, notes: Mapping[str, str]) -> str:
    shown = "null" if default is None else str(default).lower() if isinstance(default, bool) else default
    note = (notes.get(name) or "").replace("|", "\\|").replace("<", "\\<")
    return f"| `{name}` | {kind} | `{shown}` | {note} |"


def page() -> str:
    parts = [HEAD]
    for name, schema in (("retool", Retool), ("data.retool", SftData)):
        values: dict[str, Any] = {}
        notes: dict[str, str] = {}
        for file in YAMLS[name]:
            tree = yaml.safe_load((CONFIGS / file).read_text(encoding="utf-8"))
            for key in name.split("."):
                tree = tree[key]
            values = merged(values, tree)
            notes |= comments(CONFIGS / file)
        parts += [f"\n## `{name}`\n\n| Key | Values | Default | Meaning |\n|---|---|---|---|\n"]
        parts += [f"{line}\n" for line in rows(schema, name, values, notes)]
    return "".join(parts)


def merged(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    both = {
        key: merged(first[key], second[key]) for key in first.keys() & second.keys() if isinstance(first[key], dict)
    }
    return {**first, **second, **both}


def main() -> int:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE.relative_to(REPO)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
