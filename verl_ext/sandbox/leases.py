"""The sessions of one client: which server has each, and the renewal of their leases for as long as the client lives.

A server ends a session that nobody has called or renewed for `idle_s`: its client was killed. A model may write for
longer than that between two calls, and must lose nothing by it.
"""

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

RENEWALS = 4  # within `idle_s`


@dataclass
class Session:
    server: int | None = None  # the one that has it
    calls: int = 0  # answered ones
    is_cut: bool = False  # a call was cancelled
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)  # calls run one at a time, so that they can be counted


class Sessions(dict[str, Session]):
    """The sessions by their ids.

    Args:
        renew: tells a server, by its number, the ids to renew; raises nothing.
    """

    def __init__(self, renew: Callable[[int, list[str]], Awaitable[None]]) -> None:
        super().__init__()
        self._renew, self._every_s = renew, float("inf")
        self._renewal: asyncio.Task | None = None

    def renew_within(self, idle_s: float) -> None:
        """Renew all leases several times within `idle_s`, from now until the last session is dropped."""
        is_slow = idle_s / RENEWALS < self._every_s  # it sleeps for longer than this session can wait
        self._every_s = min(self._every_s, idle_s / RENEWALS)
        if is_slow:
            self.stop()
        if self._renewal is None or self._renewal.done():
            self._renewal = asyncio.create_task(self._renew_all())

    def drop(self, session_id: str) -> Session | None:
        """Forget a session, and return it if there was one."""
        session = self.pop(session_id, None)
        if not self:
            self.stop()
        return session

    def stop(self) -> None:
        """Renew no lease until the next call of a session."""
        if self._renewal:
            self._renewal.cancel()
            self._renewal = None

    async def _renew_all(self) -> None:
        while True:
            await asyncio.sleep(self._every_s)
            ids = defaultdict(list)
            for session_id, session in self.items():
                if session.server is not None:
                    ids[session.server].append(session_id)
            await asyncio.gather(*(self._renew(server, own) for server, own in ids.items()))
