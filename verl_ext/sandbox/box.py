"""A box on a sandbox server: its own files and processes, for an episode of a terminal task, or for the tests of one.

    box = Box(client, memory_mb=512, disk_mb=128)
    await box.open(archive)                                   # a tar.gz with paths relative to /, such as app/data.csv
    result = await box.run("ls", timeout_s=10)                # a new bash each time, in the folder where the last ended
    sealed = await box.seal(["/app/out"], max_bytes=1 << 20)  # kills all processes first
    await box.close()

Nothing of a box outlives its server or `close`, and a box that nobody renews ends: its client does so while it lives.
"""

import asyncio
import base64
import gzip
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from uuid import uuid4

from verl_ext.sandbox.client import InfrastructureFailure, SandboxClient, failed, parse
from verl_ext.sandbox.leases import Session
from verl_ext.sandbox.limits import ANSWER_GRACE_S, ARCHIVE_S
from verl_ext.sandbox.result import RunResult

EMPTY = gzip.compress(bytes(1024), mtime=0)  # an archive without a file


class BoxUnavailable(Exception):
    """The sandbox failed, and nothing that ran in the box is to blame; the message says what happened."""


@dataclass(frozen=True)
class Sealed:
    """What a box left when it was sealed. Paths are absolute.

    `archive`: a tar.gz of the declared paths, relative to /, with modes but no owners; what is unsafe or too large is
    not in it. `lost` says why the box has left nothing, by the doing of its own processes; else it is empty.
    """

    archive: bytes
    dropped: dict[str, str] = field(default_factory=dict)  # path: why it is not in the archive; at most about 100
    strays: tuple[str, ...] = ()  # under /tests, /logs and /solution, and not from the archive that the box began with
    lost: str = ""


class Box:
    """One box; its methods are called one after the other, `open` first.

    Args:
        memory_mb: of all its processes together.
        disk_mb: of all its files, which the server holds in memory as well.
        workdir: in which the first command begins; made if it is not there.
    """

    def __init__(
        self, client: SandboxClient, *, memory_mb: int = 1024, disk_mb: int = 128, workdir: str = "/app"
    ) -> None:
        self._client = client
        self._options = {"memory_limit_MB": memory_mb, "disk_limit_MB": disk_mb, "workdir": workdir}
        self._id, self._server = "", 0
        self._gone = "the box is not open"  # why no call can be made; empty while one can
        self._lost = ""  # the box is gone, by the doing of its processes

    async def open(self, archive: bytes = b"") -> None:
        """Begin with the files of a tar.gz, below /app, /tests, /logs, /solution, /tmp or /home/agent; else empty.

        Raises:
            ValueError: the server allows no boxes or cannot isolate them, or refuses the archive; the message says why.
            BoxUnavailable: see there.
        """
        body = self._options | {"archive": base64.b64encode(archive).decode()}
        failed_servers: set[int] = set()

        async def attempt(left_s: float) -> dict[str, Any]:
            self._server, self._id = self._client.servers.least_busy(failed_servers), uuid4().hex
            try:
                limit_s = left_s + ANSWER_GRACE_S + ARCHIVE_S
                return _answer(await self._post("", body | {"queue_timeout": left_s}, limit_s))
            except BaseException as exc:
                failed_servers.add(self._server)
                if not isinstance(exc, InfrastructureFailure) or exc.may_have_run:
                    # Shielded, because a box that was opened after all must end even if this is cancelled.
                    ending = self._client.delete(self._server, f"/v1/boxes/{self._id}?given_up")
                    await asyncio.shield(asyncio.ensure_future(ending))
                raise

        answer = await self._attempts(attempt, may_repeat=True)
        self._gone = self._lost = ""
        self._client.sessions[self._id] = Session(server=self._server)
        self._client.sessions.renew_within(answer["idle_s"])

    async def run(self, command: str, *, timeout_s: float, stdin: str = "") -> RunResult:
        """Run `bash -c command`; return within timeout_s plus the client's queue_timeout_s, whatever happens.

        A timeout, or too much memory, costs the box its processes, not its files. If its processes take the box with
        them, the result is theirs (`session_ended`), as is that of each later call. If the sandbox fails, it is a
        `sandbox_failure`; the box is then gone if `session_ended`.
        """
        if self._lost:
            return replace(failed(""), status="code_error", stderr=self._lost, return_code=-9, session_ended=True)
        if self._gone:
            return replace(failed(self._gone), session_ended=True)
        body = {"command": command, "run_timeout": timeout_s, "stdin": stdin}
        started, attempts = time.monotonic(), 0

        async def attempt(left_s: float) -> RunResult:
            nonlocal attempts
            attempts += 1
            waited_s = time.monotonic() - started
            limit_s = left_s + timeout_s + ANSWER_GRACE_S
            content = await self._post("/run", body | {"queue_timeout": left_s}, limit_s)
            result, there = parse("the box's server", content, waited_s, attempts)
            if not there["alive"]:
                self._end(lost=f"The box is gone: its processes ended it. {result.stderr}".strip())
                result = replace(result, session_ended=True)
            return result

        try:
            return await self._attempts(attempt, may_repeat=False)
        except BoxUnavailable as exc:
            return replace(failed(str(exc), attempts), session_ended=bool(self._gone))

    async def seal(self, paths: Sequence[str], *, max_bytes: int = 32 << 20) -> Sealed:
        """Kill all processes, then read the declared paths; afterwards the box can only be closed.

        Args:
            paths: absolute; a folder with all that is below.
            max_bytes: of all contents; a file that would exceed it is dropped.
        Raises:
            ValueError: a path is not in the box's folders.
            BoxUnavailable: see there.
        """
        if self._lost:
            return Sealed(EMPTY, lost=self._lost)
        if self._gone:
            raise BoxUnavailable(self._gone)
        body = {"paths": list(paths), "max_bytes": max_bytes}

        async def attempt(left_s: float) -> Sealed:
            limit_s = left_s + ARCHIVE_S + ANSWER_GRACE_S
            answer = _answer(await self._post("/seal", body | {"queue_timeout": left_s}, limit_s))
            self._gone = "the box is sealed"
            if answer["lost"]:
                self._end(lost=answer["lost"])
            archive = base64.b64decode(answer["archive"]) or EMPTY
            return Sealed(archive, answer["dropped"], tuple(answer["strays"]), answer["lost"])

        return await self._attempts(attempt, may_repeat=False)

    async def close(self) -> None:
        """End the box; a failure is ignored, because the server ends it by itself. It may be called again."""
        if self._id:
            box_id, self._id = self._id, ""
            self._end()
            await self._client.delete(self._server, f"/v1/boxes/{box_id}?given_up")

    def _end(self, *, lost: str = "") -> None:
        self._gone, self._lost = self._gone or "the box is closed", lost or self._lost
        self._client.sessions.drop(self._id)

    async def _attempts(self, attempt: Any, *, may_repeat: bool) -> Any:
        """Return what an attempt gives; try again while the server is busy, or if nothing can have happened.

        Args:
            attempt: called with the seconds that it may wait for a worker.
            may_repeat: another attempt may follow one that perhaps did its work.
        Raises:
            BoxUnavailable: see there; also when an attempt failed that may not be repeated, and the box with it.
        """
        client, attempts = self._client, 0
        deadline = time.monotonic() + client.queue_timeout_s
        while True:
            attempts += 1
            try:
                async with client.turn(deadline):
                    answer = await attempt(max(deadline - time.monotonic(), 0.01))
                    client.servers.answers(self._server)
                    return answer
            except TimeoutError as exc:  # no turn
                raise BoxUnavailable(str(exc)) from exc
            except InfrastructureFailure as exc:
                failure = exc
            except asyncio.CancelledError:  # nobody knows how far this got
                self._gone = self._gone or "a call was cancelled"
                raise
            if not failure.may_have_run:
                client.servers.refuses(self._server)
            if failure.may_have_run and not may_repeat:
                self._end()
                self._gone = f"the box is gone: {failure}"
                raise BoxUnavailable(self._gone) from failure
            pause_s = client.pause_s(attempts, failure)
            is_over = time.monotonic() + pause_s >= deadline
            may_return = may_repeat and not failure.may_have_run and client.servers.have_answered  # an open box may not
            if is_over or (attempts >= client.max_attempts and not (failure.is_busy or may_return)):
                raise BoxUnavailable(f"no box after {attempts} attempt(s): {failure}") from failure
            await asyncio.sleep(pause_s)

    async def _post(self, path: str, body: dict[str, Any], timeout_s: float) -> bytes:
        _, content = await self._client.post(self._server, f"/v1/boxes/{self._id}{path}", body, timeout_s)
        return content


def _answer(content: bytes) -> dict[str, Any]:
    try:
        answer = json.loads(content)
        if answer["status"] == "SandboxError":
            raise InfrastructureFailure(f"SandboxError: {answer['message']}")
    except (ValueError, KeyError, TypeError) as exc:
        raise InfrastructureFailure(f"expected an answer about a box, got {content[:200]!r}") from exc
    return answer
