"""The environment `repository`: an episode changes a repository, and hidden tests of the fix score its sources.

    retool: {protocol: hermes, environment: {name: repository, folder: outputs/repository/repos}}

It is `terminal` with the tasks of data/prepare_repository.py. The scoring box has the repository as it was, the sources
that the agent changed (tasks/crossing.py), and the tests of the fix, with copies among them that must fail
(tasks/run_tests.py). It scores 1 if all tests pass that failed before the fix and that passed on both sides, else 0.
"""

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl_ext.environments.base import Opening
from verl_ext.environments.terminal import Terminal
from verl_ext.environments.tool_errors import ToolUnavailable
from verl_ext.episode import Score
from verl_ext.sandbox.result import RunResult
from verl_ext.tasks import archive
from verl_ext.tasks.archive import Entry, File
from verl_ext.tasks.crossing import crossing
from verl_ext.tasks.repository import load, of_row
from verl_ext.tasks.task import BoxTask

INSTALLED = "import importlib.util as u, sys; print(*filter(u.find_spec, sys.argv[1:]))"
INSTALLED_S = 20.0
NAMED = 3  # of the tests and files that a score's `method` names

_absent: set[str] = set()  # packages that no sandbox of this process has


class Repository(Terminal):
    """An episode in a box with a repository in /app.

    Args:
        folder: of the archives that the rows name.
    Raises:
        ValueError: there is no such folder.
    """

    def __init__(self, config: Any, folder: str):
        super().__init__(config)
        self._folder, self._packages = Path(folder), set[str]()
        if not self._folder.is_dir():
            raise ValueError(f"retool.environment: folder is {folder!r}, which is none. Expected `repos` of the data.")

    def read(self, task: Mapping[str, Any]) -> BoxTask:
        repository = of_row(task)
        self._packages = set(repository.package)
        return load(repository, self._folder)

    async def open(self, task: Mapping[str, Any]) -> Opening:
        """Begin the episode; see `Terminal.open`.

        Raises:
            ValueError: also if the sandbox's Python has the package, in which the agent could read the fix.
        """
        opening = await super().open(task)
        if unknown := self._packages - _absent:
            command = f"python3 -I -c {shlex.quote(INSTALLED)} {shlex.join(sorted(unknown))}"
            result = await self.box.run(command, timeout_s=INSTALLED_S)
            if result.status != "ok":
                raise ToolUnavailable(
                    f"the search for {sorted(unknown)} in the sandbox: {result.message or result.stderr}"
                )
            if found := result.stdout.split():
                raise ValueError(
                    f"The sandbox's Python has {', '.join(found)} installed, and {self.task.name} is a task of it: the "
                    "agent could read the fix there. Start the sandbox from an environment without it, or leave out "
                    "such rows."
                )
            _absent.update(unknown)
        return opening

    def cross(self, files: dict[str, Entry]) -> tuple[dict[str, Entry], list[str]]:
        """Return the sources that the agent changed, and what it changed that could sway the tests."""
        base = {
            path.removeprefix("app/"): (entry.data, entry.mode)
            for path, entry in archive.unpack(self.task.image).items()
            if isinstance(entry, File) and not path.startswith("app/.git/")
        }
        agents = {path.removeprefix("app/"): entry for path, entry in files.items() if path.startswith("app/")}
        crossed = crossing(base, agents)
        return crossed.entries(), crossed.left_out

    def verdict(self, result: RunResult, files: dict[str, Entry]) -> Score:
        """Return 1 if the tests are as expected, else 0; `method` counts them, and names what does not fit."""
        if result.status == "timeout":
            return super().verdict(result, files)
        try:
            said = json.loads(result.stdout.strip().splitlines()[-1])
            if "broken" in said:  # before anything of the agent ran
                raise ToolUnavailable(f"the tests of {self.task.name} could not begin: {said['broken']}")
            counts = [f"{said[key][0]} of {said[key][1]} {key}" for key in ("fixed", "kept")]
            unmet = [name for key in ("fixed", "kept") for name in said["unmet"][key]]
            faults = list(said["faults"])
        except (IndexError, KeyError, TypeError, ValueError):
            return Score.graded(0.0, "", f"tests: their run did not end, exit code {result.return_code}")
        method = f"tests: {', '.join(counts)}"
        for what, names in (("not passed", unmet), ("tampering", faults)):
            if names:
                method += f"; {what}: {', '.join(names[:NAMED])}"
        return Score.graded(float(result.return_code == 0), "", method)
