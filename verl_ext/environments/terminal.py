"""The environment `terminal`: an episode works in a box of the sandbox, and tests score what it leaves there.

    retool: {protocol: hermes, environment: terminal}

A row has its task in `extra_info.task` (verl_ext/tasks/task.py). The model has `bash`, `edit` and `submit`. When the
episode has ended, the box is sealed: its processes are killed, and then the task's artifacts are read. A second, clean
box gets the task's image, the artifacts and the tests; it runs the tests, and their exit code, or the file that they
write, is the score. Nothing else that the model left behind reaches that box; what it planted where tests, solution or
rewards belong is named in the score's `method`.

The environment `repository` derives from it; the hooks are `read`, `cross` and `verdict`.
"""

import asyncio
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

from verl_ext.environments.base import Environment, Opening, tool
from verl_ext.environments.shared_client import shared_client
from verl_ext.environments.tool_errors import ToolError, ToolUnavailable
from verl_ext.episode import MAX_EVIDENCE, CallResult, Episode, Score
from verl_ext.outcome import RolloutEnd
from verl_ext.protocols.base import format_output
from verl_ext.sandbox.box import Box, BoxUnavailable
from verl_ext.sandbox.result import RunResult
from verl_ext.tasks import archive
from verl_ext.tasks.archive import BadArchive, Entry, File, Folder
from verl_ext.tasks.task import REWARD_FILES, BoxTask, is_below, of_row

EDIT = Path(__file__).with_name("edit_program.py").read_text(encoding="utf-8")
REFUSED = 3  # exit code of EDIT: the arguments are wrong, and it printed why
EDIT_S = 20.0
SOLVE = "bash /solution/solve.sh"
LOGS = "logs/verifier"  # a folder of the scoring box, as in Harbor
GRACE_S = 30.0  # beyond the limits of the sandbox's client, which then says what happened
MAX_ARTIFACTS = 16 * 2**20  # bytes of the files that go over to the scoring box
MAX_FILES = archive.MAX_FILES // 2  # of them; a box has few more inodes than twice as many
MORE_MB = 64  # of disk in the scoring box, which no artifacts can fill
LOST = "because the box ended with a program of the model"
MAX_REWARD = 2**16  # bytes of a reward file
NAMED = 5  # of the paths that a score's `method` names
SAID_OF_BOX = 200  # of why no box takes the artifacts
SAID = 2000  # characters kept of what the tests printed


class Terminal(Environment):
    """An episode in a box.

    Attributes:
        task: of the row, from `open` on.
        tests_said: the end of what the newest tests printed, for people.
    """

    task: BoxTask

    def __init__(self, config: Any):
        super().__init__(config)
        self.sandbox = shared_client(config.retool.sandbox)
        self.tests_said = ""
        self._box: Box | None = None
        self._left_s = 0.0  # of `agent_s`
        self._is_submitted = False
        self._void = ""  # why there is nothing to test, by the doing of the model's programs
        self._ended: tuple[dict[str, Entry], str] | None = None  # what crosses over, and a note on what does not

    @property
    def box(self) -> Box:
        """The box that the model works in."""
        assert self._box is not None  # since `open`
        return self._box

    # Hooks ------------------------------------------------------------------------------------------------------------

    def read(self, task: Mapping[str, Any]) -> BoxTask:
        """Return the task of a row. Raises ValueError if the row is wrong."""
        return of_row(task)

    def cross(self, files: dict[str, Entry]) -> tuple[dict[str, Entry], list[str]]:
        """Return what of the sealed artifacts goes over to the scoring box, and what was tampered with, in a few words
        each, such as "changed tests/conftest.py".

        Args:
            files: path -> entry, paths relative to the root.
        """
        return files, []

    def verdict_files(self) -> Sequence[str]:
        """Return the paths in the scoring box that `verdict` reads, at most MAX_REWARD bytes together."""
        return REWARD_FILES if self.task.result == "reward_file" else ()

    def verdict(self, result: RunResult, files: dict[str, Entry]) -> Score:
        """Return the score after the tests have run; never called for a failure of the sandbox.

        Args:
            result: of the task's `command`.
            files: those of `verdict_files` that exist.
        """
        if result.status == "timeout":
            return Score.graded(0.0, "", f"tests: no end within {self.task.verifier_s:g} s")
        if self.task.result == "reward_file":
            share = reward_of(files)
            return Score.graded(share or 0.0, "", "tests: reward file" if share is not None else "tests: no reward")
        return Score.graded(float(result.return_code == 0), "", f"tests: exit code {result.return_code}")

    # Life -------------------------------------------------------------------------------------------------------------

    async def open(self, task: Mapping[str, Any]) -> Opening:
        """Begin the episode in a box with the task's image; see `Environment.open`."""
        self._begin(self.read(task))
        await self._open(self.box, self.task.image)
        return await super().open(task)

    @tool
    async def bash(self, command: str) -> CallResult:
        """Run a command in bash. The working directory stays for the next command; variables do not.

        Args:
            command: such as "ls -l".
        """
        return await self._run(command, self.task.command_s)

    @tool
    async def edit(self, path: str, old: str, new: str) -> CallResult:
        """Replace the only occurrence of a text in a file. An empty `old` writes the whole file.

        Args:
            path: of the file.
            old: the text to replace.
            new: the text in its place.
        """
        arguments = json.dumps({"path": path, "old": old, "new": new})
        return await self._run(f"python3 -I -c '{EDIT}'", EDIT_S, arguments)

    @tool
    async def submit(self) -> CallResult:
        """End the task. Tests check the result."""
        self._is_submitted = True
        return CallResult("submitted", ends=self._end())

    async def score(self, episode: Episode) -> Score:
        """Seal the box, and score what goes over; see `Environment.score`."""
        if self._ended is None and not self._void:
            self._ended = await self._seal()
        if self._void or self._ended is None:
            return Score.graded(0.0, "", f"tests: not run, {self._void}")
        return await self._score(*self._ended)

    async def score_again(self, task: Mapping[str, Any], evidence: bytes) -> Score | None:
        """Run the tests of a row on the artifacts that a score kept."""
        self.task = self.read(task)
        return await self._score(archive.unpack(evidence))

    async def solve(self, task: Mapping[str, Any]) -> bool:
        """Make the calls of `gold_calls`, or run the task's solution; see `Environment.solve`."""
        if await super().solve(task):
            return True
        if not (row := self.read(task)).solution:
            return False
        self._begin(row)
        await self._open(self.box, archive.merge(row.image, row.solution))
        result = await self.box.run(SOLVE, timeout_s=row.agent_s)
        if result.status == "sandbox_failure":
            raise ToolUnavailable(result.message)
        self.tests_said = _end_of(result)
        return True

    async def close(self) -> None:
        if self._box is not None:
            await self._box.close()

    # Parts ------------------------------------------------------------------------------------------------------------

    def _begin(self, task: BoxTask) -> None:
        self.task, self._left_s = task, task.agent_s
        self.call_s = max(task.command_s, EDIT_S) + self.config.retool.sandbox.queue_timeout_s + GRACE_S
        self._box = self._new_box()

    def _new_box(self, more_mb: int = 0) -> Box:
        task = self.task
        return Box(self.sandbox, memory_mb=task.memory_mb, disk_mb=task.disk_mb + more_mb, workdir=task.workdir)

    async def _run(self, command: str, timeout_s: float, stdin: str = "") -> CallResult:
        """Run a command for the model, for as long as `agent_s` of all its commands allows."""
        if "\0" in command or (not command.isascii() and command.encode(errors="replace").decode() != command):
            raise ToolError("a command has neither null characters nor lone surrogates")
        if self._end():  # by an earlier call of this turn
            return CallResult("not run", ends=self._end())
        limit_s = min(timeout_s, self._left_s)
        result = await self.box.run(command, timeout_s=limit_s, stdin=stdin)
        if result.status == "sandbox_failure":
            return CallResult("", failure=result.message, attempts=result.attempts)
        self._left_s -= limit_s if result.status == "timeout" else result.run_s
        if result.session_ended:
            self._void = LOST
        stderr = result.error_text(limit_s)
        if stdin and result.return_code == REFUSED:
            raise ToolError(result.stdout.strip())
        return CallResult(
            format_output(result.stdout, stderr),
            error=None if result.status == "ok" else _kind(result),
            queue_s=result.queue_s,
            run_s=result.run_s,
            attempts=result.attempts,
            stdout=result.stdout,
            stderr=stderr,
            exit_code=result.return_code,
            ends=self._end(),
        )

    def _end(self) -> RolloutEnd | None:
        if self._is_submitted or self._void:
            return RolloutEnd.ANSWER
        return RolloutEnd.TIMEOUT if self._left_s <= 0 else None

    async def _seal(self) -> tuple[dict[str, Entry], str]:
        """End the model's box, and return what goes over to the scoring box, and a note on what does not; or set
        `_void`."""
        try:
            sealed = await self.box.seal(self.task.artifacts, max_bytes=MAX_ARTIFACTS)
        except BoxUnavailable as error:
            raise ToolUnavailable(str(error)) from error
        await self.box.close()  # so that episodes do not wait for each other's boxes
        try:
            found = await asyncio.to_thread(archive.unpack, sealed.archive, max_bytes=MAX_ARTIFACTS)
        except BadArchive as error:  # more files than it may have, by hard links
            self._void = f"because its artifacts are refused: {error}"
            return {}, ""
        if sealed.lost or len(found) > MAX_FILES:
            self._void = LOST if sealed.lost else f"because its artifacts are more than {MAX_FILES:,} files"
        files, tampered = self.cross(found)
        note = _note("tampering", [*(f"planted {path}" for path in sealed.strays), *tampered])
        return files, note + _note("left behind", [f"{path} ({why})" for path, why in sealed.dropped.items()])

    async def _score(self, files: dict[str, Entry], note: str = "") -> Score:
        """Run the tests on the artifacts in a box of their own."""
        packed, content = await asyncio.to_thread(self._pack, files)
        box = self._new_box(MORE_MB)
        try:
            if why := await self._why_refused(box, content):
                score = Score.graded(0.0, "", f"tests: not run, because its artifacts are refused: {why}")
            else:
                score = await self._tested(box)
        finally:
            await box.close()
        evidence = packed if len(packed) <= MAX_EVIDENCE else b""
        return replace(score, method=f"{score.method}{note}", evidence=evidence)

    async def _why_refused(self, box: Box, content: bytes) -> str:
        """Open the scoring box; return why it takes no such artifacts, "" if it does. Raises as `open` if task or
        server are to blame, which a box without the artifacts tells."""
        try:
            await self._open(box, content)
            return ""
        except ValueError as error:
            why = " ".join(str(error).split())[-SAID_OF_BOX:]
        control = self._new_box(MORE_MB)
        try:
            await self._open(control, self._pack({})[1])
        finally:
            await control.close()
        return why

    async def _tested(self, box: Box) -> Score:
        result = await box.run(self.task.command, timeout_s=self.task.verifier_s)
        if result.status == "sandbox_failure":
            raise ToolUnavailable(result.message)
        self.tests_said = _end_of(result)
        if result.session_ended:
            return Score.graded(0.0, "", "tests: their box ended with a program that they ran")
        return self.verdict(result, await self._files_of(box))

    def _pack(self, files: dict[str, Entry]) -> tuple[bytes, bytes]:
        """Return the artifacts, and all that the scoring box begins with: what of the image is no artifact, the
        artifacts, and the tests."""
        image = archive.unpack(self.task.image)
        above = {folder.as_posix() for path in files for folder in PurePosixPath(path).parents}
        kept: dict[str, Entry] = {LOGS: Folder()}
        for path, entry in image.items():
            is_covered = path in above and not isinstance(entry, Folder)  # the model made a folder of a file
            if not is_covered and not is_below(f"/{path}", self.task.artifacts):
                kept[path] = entry
        return archive.pack(files), archive.pack(kept | files | archive.unpack(self.task.tests))

    async def _open(self, box: Box, content: bytes) -> None:
        try:
            await box.open(content)
        except BoxUnavailable as error:
            raise ToolUnavailable(str(error)) from error

    async def _files_of(self, box: Box) -> dict[str, Entry]:
        if not (paths := self.verdict_files()):
            return {}
        try:
            sealed = await box.seal(paths, max_bytes=MAX_REWARD)
        except BoxUnavailable as error:
            raise ToolUnavailable(str(error)) from error
        return archive.unpack(sealed.archive, max_bytes=MAX_REWARD)


def reward_of(files: Mapping[str, Entry]) -> float | None:
    """Return the number in a reward file, of REWARD_FILES; None if there is none, or one out of [0, 1].

    Args:
        files: paths relative to the root.
    """
    for path in REWARD_FILES:
        entry = files.get(path.lstrip("/"))
        if not isinstance(entry, File):
            continue
        try:
            number = float(json.loads(entry.data)["reward"] if path.endswith(".json") else entry.data)
        except (ValueError, TypeError, KeyError, RecursionError):
            return None
        return number if math.isfinite(number) and 0.0 <= number <= 1.0 else None
    return None


def _kind(result: RunResult) -> str:
    killed = result.return_code is not None and result.return_code < 0
    return "timeout" if result.status == "timeout" else "killed" if killed else "exit_code"


def _end_of(result: RunResult) -> str:
    return f"{result.stdout}\n{result.stderr}".strip()[-SAID:]


def _note(what: str, found: Sequence[str]) -> str:
    if not found:
        return ""
    more = f" and {len(found) - NAMED} more" if len(found) > NAMED else ""
    named = ", ".join(each[:100].encode("ascii", "backslashreplace").decode() for each in found[:NAMED])
    return f"; {what}: {named}{more}"
