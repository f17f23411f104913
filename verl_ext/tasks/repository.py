"""A repository task: an instance (instance.py), its archives next to the data, and its row.

The image is the repository before the fix, as one commit without a history. The tests are those of the fix
(hidden_tests.py). A row names both archives with their sha256: `write`, `to_row`, `of_row` and `load`.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from verl_ext.tasks import archive, git
from verl_ext.tasks.crossing import CONFIGURATION, is_test
from verl_ext.tasks.git import Tree
from verl_ext.tasks.hidden_tests import Sides
from verl_ext.tasks.instance import Instance
from verl_ext.tasks.task import BoxTask

SOURCE = "repository"  # `data_source` of rows
COMMAND = "python3 -I -B /tests/run.py"
_NO_PACKAGES = {"docs", "doc", "examples", "benchmarks", "scripts", "tasks", "noxfile", "fabfile", "build"}


@dataclass(frozen=True)
class RepositoryTask:
    """An instance, and what of it lies next to the data.

    Attributes:
        archives: "image" and "tests" -> name of the file and its sha256.
        package: names that the repository's code is imported by, which no Python of a sandbox may have.
        limits: fields of `BoxTask`, such as `memory_mb`.
    """

    instance: Instance
    archives: dict[str, tuple[str, str]]
    package: tuple[str, ...]
    limits: dict[str, Any] = field(default_factory=dict)


class NotCut(ValueError):
    """A repository for an agent would hold something of the fix."""


def write(folder: Path, instance: Instance, sides: Sides, tests: bytes) -> dict[str, tuple[str, str]]:
    """Write the two archives of an instance, and return "image" and "tests" -> file name and sha256.

    Raises:
        NotCut: the repository that the agent gets would hold something of the fix.
    """
    repository = git.without_history(sides.base)
    if remains := git.remains_of(repository, sides.base, [instance.patch, instance.test_patch]):
        raise NotCut(f"{instance.instance_id}: the repository would hold {remains[0]} of its fix.")
    image = archive.pack(repository, prefix="app")
    folder.mkdir(parents=True, exist_ok=True)
    written = {}
    for key, data in (("image", image), ("tests", tests)):
        name = f"{instance.instance_id}{'' if key == 'image' else '.tests'}.tar.gz"
        (folder / name).write_bytes(data)
        written[key] = name, hashlib.sha256(data).hexdigest()
    return written


def statement(instance: Instance) -> str:
    """Return what the model is told. The names of the tests would tell them from the copies that must fail."""
    return (
        "The git repository in /app needs this change:\n\n"
        f"{instance.problem_statement.strip()}\n\n"
        "Tests of it, which you do not have, fail now and must pass after it. "
        "Tests that pass now must still pass. Change only source files: your changes of tests and of configuration are "
        "not used. Call submit when you are done."
    )


def difficulty_of(instance: Instance) -> str:
    """Return easy, medium or hard, by the lines of Python that the fix adds and removes."""
    is_python, count = False, 0
    for line in instance.patch.splitlines():
        if line.startswith("diff --git "):
            is_python = line.endswith(".py")
        elif is_python and line.startswith(("+", "-")) and not line.startswith(("+++ ", "--- ")):
            count += 1
    return "easy" if count <= 10 else "medium" if count <= 50 else "hard"


def solution_of(instance: Instance) -> bytes:
    """Return `/solution` with a script that applies the fix."""
    script = "set -e\ncd /app\ngit apply --whitespace=nowarn /solution/fix.patch\n"
    patch = instance.patch.encode("utf-8", "surrogateescape")
    return archive.pack({"solution/solve.sh": (script, 0o755), "solution/fix.patch": patch})


def to_row(task: RepositoryTask, *, index: int, split: str, source: str = SOURCE) -> dict[str, Any]:
    """Return a row in verl's RL columns."""
    plain = asdict(task) | {"instance": task.instance.to_json()}
    return {
        "data_source": source,
        "prompt": [{"role": "user", "content": statement(task.instance)}],
        "ability": "repository",
        "reward_model": {"style": "rule", "ground_truth": task.instance.instance_id},
        "extra_info": {
            "index": index,
            "split": split,
            "id": task.instance.instance_id,
            "kind": task.instance.repo,
            "difficulty": difficulty_of(task.instance),
            "repository": json.dumps(plain),
        },
    }


def of_row(row: Mapping[str, Any]) -> RepositoryTask:
    """Return the task of a row.

    Raises:
        ValueError: the row has none, or it is wrong.
    """
    info = (row.get("extra_info") or {}).get("repository")
    if not info:
        raise ValueError("the row has no extra_info.repository. Write rows by data/prepare_repository.py.")
    try:
        plain = json.loads(info) if isinstance(info, str) else info
        archives = {key: tuple(plain["archives"][key]) for key in ("image", "tests")}
        instance = Instance.from_json(plain["instance"])
        return RepositoryTask(instance, archives, tuple(plain["package"]), dict(plain["limits"]))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"extra_info.repository is no repository task: {type(error).__name__}: {error}. Write rows by "
            "data/prepare_repository.py."
        ) from error


def load(task: RepositoryTask, folder: Path) -> BoxTask:
    """Return the task for a box.

    Args:
        folder: of the archives.
    Raises:
        ValueError: an archive is not there or another than when the row was written.
    """
    read = {}
    for key, (name, digest) in task.archives.items():
        path = folder / PurePosixPath(name).name
        if not path.is_file():
            raise ValueError(
                f"{path} does not exist, but {task.instance.instance_id} needs it. Set `folder` to the one that "
                "data/prepare_repository.py wrote."
            )
        read[key] = path.read_bytes()
        if hashlib.sha256(read[key]).hexdigest() != digest:
            raise ValueError(
                f"{path} is not the file that the data were made with. Run data/prepare_repository.py again."
            )
    return BoxTask(
        name=task.instance.instance_id,
        instruction=statement(task.instance),
        command=COMMAND,
        solution=solution_of(task.instance),
        kind=task.instance.repo,
        **read,
        **task.limits,
    )


def packages_of(base: Tree) -> tuple[str, ...]:
    """Return the names that a repository's code is imported by: packages and modules at its root or below `src`."""
    names = set()
    for path in base:
        parts = PurePosixPath(path).parts
        parts = parts[1:] if parts[0] == "src" else parts
        if is_test(path) or not path.endswith(".py") or not parts or parts[-1] in CONFIGURATION:
            continue
        if len(parts) == 1 or (len(parts) == 2 and parts[-1] == "__init__.py"):
            names.add(parts[0].removesuffix(".py"))
    return tuple(sorted(names - _NO_PACKAGES))
