"""An issue and its fix, in SWE-bench's fields, and how a commit becomes one."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from verl_ext.tasks import git
from verl_ext.tasks.crossing import is_test

_LISTS = ("FAIL_TO_PASS", "PASS_TO_PASS")


@dataclass(frozen=True)
class Instance:
    """An issue and its fix, in SWE-bench's fields; `patch` changes sources and `test_patch` tests, as `git diff` says.

    FAIL_TO_PASS and PASS_TO_PASS are node ids of pytest: what fails before the fix and passes after it, and what passes
    on both sides, each with the tests of the fix.
    """

    instance_id: str
    repo: str
    base_commit: str
    patch: str
    test_patch: str
    problem_statement: str
    FAIL_TO_PASS: tuple[str, ...] = ()
    PASS_TO_PASS: tuple[str, ...] = ()
    version: str = ""
    created_at: str = ""
    hints_text: str = ""
    environment_setup_commit: str = ""

    def to_json(self) -> dict[str, str]:
        """Return the fields as SWE-bench has them: the lists are JSON in a text."""
        return {key: json.dumps(value) if key in _LISTS else value for key, value in asdict(self).items()}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Instance":
        """Read SWE-bench's fields; others are ignored, and the lists may be lists or JSON in a text.

        Raises:
            ValueError: a field is missing or no text.
        """
        given = {each.name: values[each.name] for each in fields(cls) if values.get(each.name) is not None}
        where = f"instance {given.get('instance_id', '?')!r}"
        for key in _LISTS:
            try:
                names = json.loads(given[key]) if isinstance(given.get(key), str) else list(given.get(key, ()))
            except ValueError as error:
                raise ValueError(f"{where}: {key} is no JSON: {error}.") from error
            given[key] = tuple(names)
        required = ("instance_id", "repo", "base_commit", "patch", "test_patch", "problem_statement")
        if missing := [key for key in required if not isinstance(given.get(key), str)]:
            raise ValueError(f"{where} has no text {missing[0]!r}. Expected SWE-bench's fields {', '.join(required)}.")
        if not all(isinstance(name, str) for key in _LISTS for name in given[key]):
            raise ValueError(f"{where}: FAIL_TO_PASS and PASS_TO_PASS must be lists of names of tests.")
        return cls(**given)


def instance_of(repo: Path, name: str, base: str, commit: str, problem: str = "") -> Instance:
    """Return the change between two commits as an instance; its tests are not measured yet.

    Args:
        problem: the problem statement; "": the message of the commit.
    Raises:
        GitError: a commit is not there.
    """
    changed = git.changed_paths(repo, base, commit)
    tests = [path for path in changed if is_test(path)]
    said = git.git("show", "--no-patch", "--format=%H%n%cI%n%B", commit, cwd=repo).decode(errors="replace")
    full, created, message = said.split("\n", 2)
    base = git.git("rev-parse", base, cwd=repo).decode().strip()
    return Instance(
        instance_id=f"{name}-{full[:12]}",
        repo=name,
        base_commit=base,
        patch=git.diff(repo, base, commit, sorted(set(changed) - set(tests))),
        test_patch=git.diff(repo, base, commit, tests),
        problem_statement=problem or message.strip(),
        created_at=created,
        environment_setup_commit=base,
    )
