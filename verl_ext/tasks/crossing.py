"""What of an agent's repository goes to the scoring box: the sources that it changed, and nothing that sways tests."""

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath
from typing import NamedTuple

from verl_ext.tasks import archive
from verl_ext.tasks.git import Tree

CONFIGURATION = {"pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "tox.ini", "setup.cfg", "setup.py"}
CONFIGURATION |= {"pyproject.toml", "conftest.py", "sitecustomize.py", "usercustomize.py"}
_ENDINGS = (".pth", ".pyc", ".pyo", ".so", ".pyd", ".egg", ".egg-link")
_MACHINERY = (".egg-info", ".dist-info", ".data")  # folders, in which pytest looks for plugins
_MADE_BY_USE = {
    ".git",
    "__pycache__",
    ".pytest_cache",
    ".mypy_cache",
    ".ruff_cache",
    ".hypothesis",
    ".tox",
    ".coverage",
}
_OF_PYTEST = {"pytest", "_pytest", "py", "pluggy", "iniconfig", "packaging", "exceptiongroup", "pygments"}


def is_test_module(path: str) -> bool:
    """Return whether a file of a repository is a module of tests, by its name."""
    name = PurePosixPath(path).name
    is_one = name.endswith(".py") and (name.startswith("test_") or name.endswith("_test.py"))
    return is_one or name in ("test.py", "tests.py")


def is_test(path: str) -> bool:
    """Return whether a file of a repository belongs to its tests."""
    *folders, name = PurePosixPath(path).parts
    return is_test_module(path) or name == "conftest.py" or bool({"test", "tests"} & set(folders))


class Crossed(NamedTuple):
    """What of an agent's repository goes to the scoring box, and what does not because it could sway the tests."""

    files: Tree
    deleted: list[str]
    left_out: list[str]  # with the reason

    def entries(self) -> dict[str, archive.Entry]:
        """Return the files of a scoring box, relative to its root, as run_tests.py reads them."""
        files: dict[str, archive.Entry] = {f"app/{path}": archive.File(*each) for path, each in self.files.items()}
        return files | {"home/agent/deleted.json": archive.File(json.dumps(self.deleted).encode())}


def crossing(base: Tree, agents: Mapping[str, archive.Entry]) -> Crossed:
    """Return the sources that an agent changed.

    Tests, configuration of tests and of Python's start, compiled files, links and new modules with the name of one of
    Python's or pytest's own stay behind. What mere use makes, such as `.git` and `__pycache__`, is not named.

    Args:
        base: the repository's files as the agent got them.
        agents: path below the repository -> entry, as its box was at the end.
    """
    owned = {PurePosixPath(path).parts[0] for path in base}
    owned |= {PurePosixPath(path).parts[1] for path in base if path.startswith("src/") and path.count("/")}
    files, left_out = Tree(), []
    for path, entry in sorted(agents.items()):
        if isinstance(entry, archive.Folder) or _MADE_BY_USE & set(PurePosixPath(path).parts):
            continue
        if isinstance(entry, archive.File) and path in base and entry.data == base[path][0]:
            continue
        if isinstance(entry, archive.Link):
            left_out.append(f"link {path}")
        elif reason := _reason(path, owned):
            left_out.append(f"{reason} {path}")
        else:
            files[path] = entry.data, 0o755 if entry.mode & 0o100 else 0o644
    gone = [path for path in base if not isinstance(agents.get(path), archive.File)]
    left_out += [f"deleted {path}" for path in gone if _reason(path, owned)]
    return Crossed(files, [path for path in gone if not _reason(path, owned)], left_out)


def _reason(path: str, owned: Iterable[str]) -> str:
    """Return why a file stays behind; "" if it does not."""
    parts = PurePosixPath(path).parts
    if is_test(path):
        return "test"
    if parts[-1] in CONFIGURATION:
        return "configuration"
    if path.endswith(_ENDINGS) or any(part.endswith(_MACHINERY) for part in parts):
        return "machinery"
    first = parts[:2][-1] if parts[0] == "src" else parts[0]
    module = first.removesuffix(".py")
    if path.endswith(".py") and first not in owned and module in sys.stdlib_module_names | _OF_PYTEST:
        return "imposter"
    return ""
