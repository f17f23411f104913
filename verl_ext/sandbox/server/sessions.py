"""Sessions: programs that stay for later calls, which see their variables and files; what notebooks run in.

State makes an answer depend on what ran before, so a call can neither be repeated nor moved to another server: this is
for the caller to solve (environments/notebook.py). What bounds a session: the memory and files of its program are
limited, and so is each call's time; whoever made it renews its lease, and without that it ends after `idle_s`. Only
the id gives access to a session; the server tells none, and no program has its own.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from verl_ext.sandbox.server.connection import LostProgramError, SandboxError, Worker
from verl_ext.sandbox.server.pool import Pool, QueueTimeoutError

MAX_ENDED = 4096  # ids that are remembered


class SessionEndedError(Exception):
    """The session was ended before this call came; nothing ran."""


class SessionLimitError(Exception):
    """The server has as many sessions as it may have; nothing ran."""


@dataclass
class Session:
    worker: Worker | None = None
    calls: int = 0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)  # calls of one session run one after the other
    expiry: asyncio.TimerHandle | None = None


class Sessions:
    """The sessions of a pool; each has its own worker, and takes one of the pool's slots while a call runs.

    Args:
        max_sessions: at once. A session's process may have the address space that its first call's limit allows; its
            memory during a later call is also checked against that call's limit.
        idle_s: a session that gets no call and no renewal for this long is ended.
    """

    entry, noun, option = Session, "sessions", "--max-sessions"

    def __init__(self, pool: Pool, *, max_sessions: int, idle_s: float) -> None:
        self.pool, self.max_sessions, self.idle_s = pool, max_sessions, idle_s
        self._sessions: dict[str, Session] = {}
        # Ids that were given up before any call came. A client that gives up sends the end on another connection than
        # the call, which may arrive later, and would begin a session that nobody ends.
        self._ended: dict[str, None] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    async def run(
        self, session_id: str, request: dict[str, Any], *, queue_timeout_s: float
    ) -> tuple[dict[str, Any], float]:
        """Run a call in its session, which the call starts if it is new.

        Returns:
            (what `Pool.execute` returns, with `call`: the number of this call in its session, from 1; seconds waited).
        Raises:
            SessionLimitError, SessionEndedError, QueueTimeoutError: nothing ran.
            LostProgramError: the program was lost with its worker, while a control program ran well.
            SandboxError: see `Pool.execute`. After this and LostProgramError the session has ended.
        """
        async with self._turn(session_id, queue_timeout_s) as (session, queue_time):
            return await self._call(session, request), queue_time

    @asynccontextmanager
    async def _turn(
        self, session_id: str, queue_timeout_s: float, *, begin: bool = True
    ) -> AsyncIterator[tuple[Any, float]]:
        """Wait for the right to use a session, then for a slot; yield the session and the seconds waited.

        Args:
            begin: the session, if there is none.
        """
        arrived = time.monotonic()
        try:
            async with asyncio.timeout(queue_timeout_s):
                session = await self._acquire(session_id, begin)
        except TimeoutError:
            raise QueueTimeoutError(f"an earlier call of the session still runs after {queue_timeout_s:g} s") from None
        try:
            left_s = max(queue_timeout_s - (time.monotonic() - arrived), 0)
            async with self.pool.slot(left_s):
                yield session, time.monotonic() - arrived
        finally:
            if session.worker:
                self._start_clock(session_id, session)
            else:
                self._sessions.pop(session_id, None)
            session.lock.release()

    def renew(self, session_ids: Iterable[str]) -> int:
        """Have idle sessions begin their `idle_s` anew; return how many of the ids are sessions."""
        known = {session_id: self._sessions[session_id] for session_id in session_ids if session_id in self._sessions}
        for session_id, session in known.items():
            if not session.lock.locked():  # else it starts with the end of the call
                self._start_clock(session_id, session)
        return len(known)

    async def end(self, session_id: str, *, given_up: bool = False) -> bool:
        """End a session, after the call that may be running; return False if there is none.

        Args:
            given_up: a call may come later than this, which must begin none.
        """
        session, ending = self._sessions.get(session_id), None
        if session is None and not given_up:
            return False
        if session is None:
            self._ended[session_id] = None
            if len(self._ended) > MAX_ENDED:
                del self._ended[next(iter(self._ended))]
            return False
        async with session.lock:
            if self._sessions.get(session_id) is session:
                ending = self._end(session_id)
        if ending:
            await asyncio.wait([ending])  # which does not cancel it if the client hangs up
        return True

    def close(self) -> None:
        for session_id in list(self._sessions):
            self._end(session_id)

    async def _acquire(self, session_id: str, begin: bool) -> Session:
        """Return the session, new or not, with its lock held and its clock stopped."""
        while True:
            session = self._sessions.get(session_id)
            if session is None:
                if not begin:
                    raise SessionEndedError("there is none with this id, or it has ended")
                if session_id in self._ended:
                    raise SessionEndedError("this session was ended before it began: choose another id")
                if len(self._sessions) >= self.max_sessions:
                    raise SessionLimitError(f"there are {self.max_sessions} {self.noun} already ({self.option})")
                session = self._sessions[session_id] = self.entry()
            await session.lock.acquire()
            if self._sessions.get(session_id) is session:  # it has not ended meanwhile
                if session.expiry:
                    session.expiry.cancel()
                return session
            session.lock.release()

    async def _call(self, session: Session, request: dict[str, Any]) -> dict[str, Any]:
        spent = True
        try:
            session.worker = session.worker or await self.pool.workers.take(for_session=True)
            session.calls += 1
            result = await self._run(session.worker, request)
            spent = result.pop("spent")
            if not result["alive"] and not spent:
                self.pool.workers.end_session(session.worker)
                session.worker = None
            return result | {"call": session.calls}
        finally:
            if spent and session.worker:  # also when the client hung up: nobody knows how far its code got
                session.worker.close()
                session.worker = None

    async def _run(self, worker: Worker, request: dict[str, Any]) -> dict[str, Any]:
        try:
            return await self.pool.call(worker, request | {"session": True})
        except LostProgramError as exc:  # the caller may blame the program if it happens again, so this must be sure
            if why := await self.pool.control():
                raise SandboxError(f"{exc}; a control program failed, too: {why}") from exc
            raise

    def _start_clock(self, session_id: str, session: Session) -> None:
        if session.expiry:
            session.expiry.cancel()
        session.expiry = asyncio.get_running_loop().call_later(self.idle_s, self._end, session_id)

    def _end(self, session_id: str) -> asyncio.Task | None:
        session = self._sessions.pop(session_id)
        if session.expiry:
            session.expiry.cancel()
        worker, session.worker = session.worker, None
        return self._end_worker(worker) if worker else None

    def _end_worker(self, worker: Worker) -> asyncio.Task | None:
        return self.pool.workers.end_session(worker)
