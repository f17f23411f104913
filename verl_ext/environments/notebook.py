"""The notebook: an interpreter that remembers. What an episode's calls define stays for its later ones.

It is a session of the sandbox. A call with state cannot simply be sent again: another session is empty, and the model
would be told that its variables do not exist. So if a session is lost with its server, all calls so far are replayed in
a new one, and only if each ends as it did the first time does the call follow; otherwise the infrastructure has failed,
and the notebook is dead. What the model's own code can cause never ends like that: a program that dies, by its time,
memory or own doing, starts the notebook anew, and the model is told.
"""

import asyncio
import logging
import os
import signal
import time
from dataclasses import replace
from typing import Any, NamedTuple
from uuid import uuid4

from verl_ext.environments.interpreter import Interpreter, error_kind, require_setup
from verl_ext.episode import CallResult
from verl_ext.protocols.base import Call
from verl_ext.sandbox.result import RunResult

logger = logging.getLogger(__name__)
logger.setLevel(os.getenv("VERL_LOGGING_LEVEL", "WARN"))

MOST_REPLAYS = 1  # for one call and each of two causes: the server was lost, and the program with its worker
KILLED = "Killed: the process that ran this program died with it"


class Cell(NamedTuple):
    """A call that the session remembers, and how it ended."""

    code: str
    status: str
    error: str
    stdout: str

    @classmethod
    def of(cls, code: str, result: RunResult) -> "Cell":
        return cls(code, result.status, error_kind(result), result.stdout)


class Notebook(Interpreter):
    """The interpreter of one episode: variables, imports and files last, and the last expression of a call is shown.

    `retool.sandbox` bounds each call: its time, its output, and the memory, which is that of all calls together as it
    is one process. Its files are bounded by the server. How many calls there are is bounded by `max_tool_calls` and the
    length of the response. The session begins with the first call and ends with `close`, or, if this process is killed,
    `--session-idle-s` later. A server with too many sessions has a call wait for `queue_timeout_s`.

    Args:
        settings: `retool` of the run.
    """

    def __init__(self, settings: Any):
        super().__init__(settings)
        self.options["echo_last_expression"] = True
        self.replays = 0  # so far
        self._session_id = uuid4().hex  # whoever knows it can use the session
        self._cells: list[Cell] = []  # of the session, in order
        self._one_by_one = asyncio.Lock()
        self._failure: str | None = None  # why no call can run any more
        self._running: asyncio.Task | None = None

    async def run(self, call: Call, setup: str = "") -> CallResult:
        """Run one call after those that came before it; `queue_s` includes the wait for them.

        After a call that failed because of the infrastructure, or was cancelled, all others fail for the same reason.
        """
        arrived = time.monotonic()
        async with self._one_by_one:
            waited_s, replays = time.monotonic() - arrived, self.replays
            if self._failure:
                return CallResult("", failure=self._failure, queue_s=waited_s, attempts=0)
            self._running = asyncio.create_task(super().run(call, setup))
            try:
                result = await self._running
            except asyncio.CancelledError:
                if self._failure is None or ((task := asyncio.current_task()) and task.cancelling()):
                    self._failure = self._failure or "an earlier call of the notebook was cancelled"
                    raise
                result = CallResult("", failure=self._failure)
            finally:
                self._running = None
            self._failure = self._failure or result.failure
            if replays := self.replays - replays:
                waited_s = time.monotonic() - arrived - result.queue_s - result.run_s
            return replace(result, queue_s=result.queue_s + waited_s, replays=replays)

    async def close(self) -> None:
        """End the session, also while a call runs in it; takes END_TIMEOUT_S of the client at most."""
        self._failure = self._failure or "the notebook is closed"
        if self._running:
            self._running.cancel()  # the server ends a session whose client hangs up
        self._cells.clear()
        await self.sandbox.end_session(self._session_id)

    async def check(self, setup: str) -> None:
        """Leave it to the first call, which would have to run it again."""

    async def _execute(self, code: str, setup: str) -> RunResult:
        if setup and not self._cells:  # also after a restart
            begun = await self._run_next(setup)
            if begun.status == "sandbox_failure":
                return begun
            require_setup(begun)
        return await self._run_next(code)

    async def _run_next(self, code: str) -> RunResult:
        """Run a cell; if its session is lost, replay it once and run the cell again.

        A program that was lost with its worker, while the sandbox was well, may have done it itself. So what follows is
        its own fault, unless the replay and the second run are good.
        """
        result = await self._run_cell(code)
        attempts, losses, failures = result.attempts, 0, 0
        while result.status == "sandbox_failure":
            losses, failures = losses + result.program_lost, failures + (not result.program_lost)
            if max(losses, failures) > MOST_REPLAYS:
                break
            logger.warning("a notebook is replayed: %s", result.message)
            result = await self._replay() or await self._run_cell(code)
            attempts += result.attempts
        if result.status == "sandbox_failure" and losses:
            result = RunResult("code_error", "", KILLED, -signal.SIGKILL, 0.0, 0.0, attempts, "", session_ended=True)
            await self._begin_another()
        if result.session_ended:
            self._cells.clear()
        elif result.status != "sandbox_failure":
            self._cells.append(Cell.of(code, result))
        return replace(result, attempts=attempts)

    async def _replay(self) -> RunResult | None:
        """Run all cells in a new session; return the failure if that is impossible or one does not end as before."""
        await self._begin_another()
        self.replays += bool(self._cells)
        for number, cell in enumerate(self._cells, 1):
            result = await self._run_cell(cell.code)
            if result.status == "sandbox_failure":
                return result
            if result.session_ended or Cell.of(cell.code, result) != cell:
                why = f"in a replay of the notebook, call {number} of {len(self._cells)} did not end as it had before"
                return RunResult("sandbox_failure", "", "", None, 0.0, 0.0, 0, f"{why}: {cell.status}, {result.status}")
        return None

    async def _begin_another(self) -> None:
        await self.sandbox.end_session(self._session_id)  # the client has ended a lost one, but none of a replay
        self._session_id = uuid4().hex

    async def _run_cell(self, code: str) -> RunResult:
        return await self.sandbox.run(code, session_id=self._session_id, **self.options)
