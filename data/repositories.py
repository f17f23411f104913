"""Measure the tests of a change on both sides in boxes of the sandbox, and look there for what gives the fix away."""

import asyncio
import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from verl_ext.sandbox.box import Box
from verl_ext.sandbox.client import SandboxClient
from verl_ext.tasks import archive, find_leaks, git
from verl_ext.tasks.crossing import crossing, is_test
from verl_ext.tasks.git import GitError, Tree
from verl_ext.tasks.hidden_tests import (
    Expected,
    Hidden,
    Sides,
    archive_of,
    both_sides,
    expected_of,
    hidden_of,
    measured,
)
from verl_ext.tasks.instance import Instance, instance_of
from verl_ext.tasks.repository import COMMAND, NotCut, RepositoryTask, packages_of, write

RUNS = 3  # of each side
SLOWER = 4  # times the longest run that was measured: the time that tests of an agent's code may take
SPARE_S = 30.0
MEMORY_MB, DISK_MB = 1024, 128


@dataclass(frozen=True)
class Outcome:
    """What became of a change: a task, or why it is none; and its flaky tests."""

    instance: Instance
    task: RepositoryTask | None = None
    dropped: str = ""
    flaky: int = 0


class Dropped(ValueError):
    """A change is of no use: the message says why."""


def changes(repo: Path, name: str, limit: int | None) -> list[Instance]:
    """Return the commits that change sources in Python and tests, the oldest first.

    Args:
        limit: of commits looked at, the newest.
    """
    listed = git.git("rev-list", "--first-parent", "--no-merges", "--parents", "HEAD", cwd=repo).decode().splitlines()
    pairs = [line.split() for line in listed[:limit]]
    found = []
    for commit, base in (pair for pair in pairs if len(pair) == 2):
        paths = [path for path in git.changed_paths(repo, base, commit) if path.endswith(".py")]
        if any(map(is_test, paths)) and not all(map(is_test, paths)):
            found.append(instance_of(repo, name, base, commit))
    return found[::-1]


class Measure:
    """Makes tasks of changes.

    Args:
        folder: for their archives.
        memory_mb: of a box.
        all_s: seconds that all tests of a side may take.
    """

    def __init__(self, client: SandboxClient, folder: Path, *, memory_mb: int = MEMORY_MB, all_s: float = 300.0):
        self._client, self._folder, self._memory_mb, self._all_s = client, folder, memory_mb, all_s
        self._slots = asyncio.Semaphore(os.cpu_count() or 1)

    async def task(self, repo: Path, instance: Instance) -> Outcome:
        """Return the task of a change, or why it is none. Raises RuntimeError if the sandbox failed."""
        try:
            return await self._task(repo, instance)
        except (Dropped, GitError, NotCut) as error:
            return Outcome(instance, dropped=str(error))

    async def _task(self, repo: Path, instance: Instance) -> Outcome:
        base = git.read_tree(repo, instance.base_commit)
        sides = await asyncio.to_thread(both_sides, instance, base)
        listed = {name.partition("::")[0] for name in (*instance.FAIL_TO_PASS, *instance.PASS_TO_PASS)}
        hidden = hidden_of(sides, instance.instance_id, listed)
        package = packages_of(base)
        await self._refuse_leaks(package, instance, base)
        before, after = await self._measure(sides, hidden)
        found = expected_of([run for run, _ in before], [run for run, _ in after], hidden, instance)
        if found.expected is None:
            return Outcome(instance, dropped=found.dropped, flaky=len(found.flaky))
        longest_s = max(seconds for _, seconds in (*before, *after))
        file_s = SPARE_S * math.ceil((SLOWER * longest_s + SPARE_S / 2) / SPARE_S)  # seldom another in another run
        expected = replace(found.expected, file_s=file_s, all_s=file_s + SPARE_S)
        instance = replace(instance, FAIL_TO_PASS=expected.fixed, PASS_TO_PASS=expected.kept)
        tests = archive_of(hidden, expected)
        archives = await asyncio.to_thread(write, self._folder, instance, sides, tests)
        limits = {"verifier_s": expected.all_s + SPARE_S, "memory_mb": self._memory_mb, "disk_mb": DISK_MB}
        await self._check(sides, tests, expected)
        return Outcome(instance, RepositoryTask(instance, archives, package, limits), flaky=len(found.flaky))

    async def _measure(self, sides: Sides, hidden: Hidden) -> tuple[list, list]:
        """Return what RUNS runs of each side said, and how long each took, as pairs."""
        tests = archive_of(hidden, None, all_s=self._all_s)
        runs = (self._run(sides, tree, tests) for _ in range(RUNS) for tree in (sides.base, sides.fixed))
        try:
            said = [(measured(stdout), seconds) for stdout, _, seconds in await asyncio.gather(*runs)]
        except ValueError as error:
            raise Dropped(str(error)) from error
        return said[::2], said[1::2]

    async def _check(self, sides: Sides, tests: bytes, expected: Expected) -> None:
        """Require of the finished tests that they fail before the fix and pass after it."""
        for tree, code in ((sides.base, 1), (sides.fixed, 0)):
            stdout, said, _ = await self._run(sides, tree, tests)
            if said != code:
                raise Dropped(f"its tests ended with {said} in place of {code}: {stdout[-300:]}")

    async def _run(self, sides: Sides, tree: Tree, tests: bytes) -> tuple[str, int | None, float]:
        """Run tests on a tree as if an agent had left it; returns stdout, exit code and seconds."""
        agents = {path: archive.File(*each) for path, each in tree.items()}
        content = archive.merge(archive.pack(crossing(sides.base, agents).entries()), tests)
        return await self._in_box(content, COMMAND, self._all_s + SPARE_S)

    async def _in_box(self, content: bytes, command: str, timeout_s: float) -> tuple[str, int | None, float]:
        async with self._slots:
            box = Box(self._client, memory_mb=self._memory_mb, disk_mb=DISK_MB, workdir="/app")
            try:
                await box.open(content)
                result = await box.run(command, timeout_s=timeout_s)
            finally:
                await box.close()
        if result.status == "sandbox_failure":
            raise RuntimeError(f"The sandbox failed: {result.message}")
        if result.status == "timeout" or result.session_ended:
            raise Dropped(f"its tests do not end within {timeout_s:g} s and {self._memory_mb} MB")
        return result.stdout or result.stderr, result.return_code, result.run_s

    async def _refuse_leaks(self, package: Iterable[str], instance: Instance, base: Tree) -> None:
        wanted = {"packages": sorted(package), "files": own_lines_by_file(instance, base, package)}
        program = Path(find_leaks.__file__).read_bytes()
        content = archive.pack(
            {"tmp/find_leaks.py": program, "tmp/leaks.json": json.dumps(wanted), "app": archive.Folder()}
        )
        stdout, code, _ = await self._in_box(content, "python3 -I -B /tmp/find_leaks.py", self._all_s)
        if code:
            raise RuntimeError(f"The search for leaks ended with {code}: {stdout[-300:]}")
        if found := json.loads(stdout):
            raise Dropped(f"the sandbox has {found[0]}, in which an agent could read the fix")


def own_lines_by_file(instance: Instance, base: Tree, package: Iterable[str]) -> Mapping[str, list[str]]:
    """Return the changed modules, as sys.path has them -> lines that the fix adds and the base has nowhere."""
    fixed = git.apply(base, instance.patch)
    added = {line.decode(errors="replace") for line in git.own_lines(instance.patch, base)}
    found = {}
    for path, (content, _) in fixed.items():
        lines = {line.strip() for line in content.decode(errors="replace").splitlines()} & added
        module = path.removeprefix("src/")
        if path.endswith(".py") and lines and module.partition("/")[0].removesuffix(".py") in package:
            found[module] = sorted(lines)
    return found
