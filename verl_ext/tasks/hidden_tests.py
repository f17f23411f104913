"""The tests of a fix as a scoring box gets them, with canaries among them, and what they must say.

`hidden_of` makes them, `expected_of` says from runs of both sides what they must say, and `archive_of` packs both
with the program that runs them (run_tests.py).
"""

import base64
import json
import random
import zlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from verl_ext.tasks import archive, canaries, git
from verl_ext.tasks.crossing import is_test, is_test_module
from verl_ext.tasks.git import Tree
from verl_ext.tasks.instance import Instance

RUNNER = Path(__file__).with_name("run_tests.py")
CANARIES = 3  # copies of tests in a test file


class Sides(NamedTuple):
    """The files of a repository: what the agent gets, and that with the fix, with the tests of the fix on no side."""

    base: Tree
    fixed: Tree
    tests: Tree  # all test files after the fix


def both_sides(instance: Instance, base: Tree) -> Sides:
    """Return what an instance's patches make of its base commit's files.

    Raises:
        GitError: a patch does not fit.
    """
    tested = git.apply(base, instance.test_patch)
    return Sides(base, git.apply(base, instance.patch), {path: each for path, each in tested.items() if is_test(path)})


@dataclass(frozen=True)
class Expected:
    """What the tests of the fix must say: pass (fixed, kept) or not (canaries), and how long they may take."""

    fixed: tuple[str, ...]
    kept: tuple[str, ...]
    canaries: tuple[str, ...]
    file_s: float = 60.0
    all_s: float = 600.0


class Hidden(NamedTuple):
    """The tests of a fix, and where a scoring box has what."""

    files: Tree  # all test files, with canaries
    base: Tree  # all other files before the fix
    modules: list[str]  # that run
    paths: list[str]  # folders of sys.path
    canaries: list[str]  # node ids, without parameters


def hidden_of(sides: Sides, seed: str, also: Collection[str] = ()) -> Hidden:
    """Return the tests of the fix with canaries among them, of which `seed` chooses which.

    As in SWE-bench, the modules are those that the fix changes, and those of `also`.
    """
    files, names, modules = dict(sides.tests), [], []
    for path, (content, mode) in sorted(sides.tests.items()):
        if not is_test_module(path) or (sides.base.get(path) == (content, mode) and path not in also):
            continue
        modules.append(path)
        try:
            text, added = canaries.with_canaries(content.decode(), random.Random(f"{seed}/{path}"), CANARIES)
        except (SyntaxError, UnicodeDecodeError):  # pytest will say so, on both sides
            continue
        files[path] = text.encode(), mode
        names += [f"{path}::{each}" for each in added]
    has_src = any(path.startswith("src/") and path.endswith(".py") for path in sides.base)
    base = {path: each for path, each in sides.base.items() if not is_test(path)}
    return Hidden(files, base, modules, ["/app/src"] * has_src + ["/app"], names)


def archive_of(hidden: Hidden, expected: Expected | None, *, file_s: float = 60.0, all_s: float = 600.0) -> bytes:
    """Return `/tests` of a scoring box as a tar.gz; without `expected` its program prints what each test says."""
    judged = {} if expected is None else {key: getattr(expected, key) for key in ("fixed", "kept", "canaries")}
    modules = hidden.modules
    if expected is not None:  # a module without a test that counts need not run
        counted = {name.partition("::")[0] for names in judged.values() for name in names}
        modules = [path for path in modules if path in counted]
        file_s, all_s = expected.file_s, expected.all_s
    spec = {"files": modules, "tests": sorted(hidden.files), "paths": hidden.paths}
    spec |= {"expected": judged, "file_s": file_s, "all_s": all_s}
    files: dict[str, Any] = {f"tests/files/{path}": each for path, each in hidden.files.items()}
    files |= {f"tests/base/{path}": each for path, each in hidden.base.items()}
    files |= {"tests/run.py": RUNNER.read_bytes(), "tests/spec.json": json.dumps(spec)}
    return archive.pack(files)


class Measured(NamedTuple):
    """What one run of all tests of one side said: node id -> passed, failed, skipped or error; and what was odd."""

    outcomes: dict[str, str]
    faults: list[str]
    said: str = ""  # the end of what pytest printed for the last module


class CannotRun(RuntimeError):
    """The sandbox cannot run tests: the message says why."""


def measured(stdout: str) -> Measured:
    """Read what the program of an archive without `expected` printed.

    Raises:
        CannotRun: see there.
        ValueError: it did not end.
    """
    try:
        said = json.loads(stdout.strip().splitlines()[-1])
        if "broken" in said:
            raise CannotRun(said["broken"])
        packed = said["measured"]
        return Measured(**json.loads(zlib.decompress(base64.b64decode(packed))))
    except (IndexError, KeyError, TypeError, ValueError, zlib.error) as error:
        raise ValueError(f"the run of the tests did not end: {stdout[-300:]!r}") from error


class Sorted(NamedTuple):
    """What the tests must say, or why they are of no use (`dropped`), and the tests that say now this and now that."""

    expected: Expected | None
    dropped: str
    flaky: list[str]


def expected_of(before: Sequence[Measured], after: Sequence[Measured], hidden: Hidden, wanted: Instance) -> Sorted:
    """Return what the tests must say, from runs of both sides.

    Args:
        wanted: of which FAIL_TO_PASS and PASS_TO_PASS, if it has them, limit the tests that count.
    """
    if odd := [fault for run in (*before, *after) for fault in run.faults]:
        return Sorted(None, f"disturbs its tests: {odd[0]}", [])
    if not any(run.outcomes for run in (*before, *after)):
        said = after[0].said.strip().splitlines()[-1:] or ["it says nothing"]
        return Sorted(None, f"pytest runs none of its tests, on no side: {said[0]}", [])
    is_copy = {name for run in after for name in run.outcomes if _without_parameters(name) in hidden.canaries}
    sides: dict[str, tuple[set[str], set[str]]] = {}
    for name in sorted({name for run in (*before, *after) for name in run.outcomes}):
        old, new = ({run.outcomes.get(name, "error") for run in runs} for runs in (before, after))
        sides[name] = old, new
    flaky = [
        name for name, (old, new) in sides.items() if any("passed" in each and len(each) > 1 for each in (old, new))
    ]
    ordinary = {name: each for name, each in sides.items() if name not in is_copy}
    passing = [name for name, (_, new) in ordinary.items() if new == {"passed"}]
    fixed = [name for name in passing if not {"passed", "skipped"} & sides[name][0]]
    kept = [name for name in passing if sides[name][0] == {"passed"}]
    if wanted.FAIL_TO_PASS:
        if missing := sorted(set(wanted.FAIL_TO_PASS) - set(fixed)):
            return Sorted(None, f"{missing[0]} of FAIL_TO_PASS does not fail before and pass after", flaky)
        fixed = list(wanted.FAIL_TO_PASS)
        kept = [name for name in kept if name in set(wanted.PASS_TO_PASS)]
    copies = [
        name for name in sides if name in is_copy and sides[name][1] == {"failed"} and "passed" not in sides[name][0]
    ]
    if not fixed:
        changing = [name for name in flaky if name in ordinary and sides[name][0] != {"passed"}]
        return Sorted(None, "flaky tests only" if changing else "no test fails before and passes after", flaky)
    if bare := {name.partition("::")[0] for name in fixed} - {name.partition("::")[0] for name in copies}:
        return Sorted(None, f"no copy of a test of {min(bare)} must fail", flaky)
    return Sorted(Expected(tuple(fixed), tuple(kept), tuple(copies)), "", flaky)


def _without_parameters(name: str) -> str:
    return name.partition("[")[0]
