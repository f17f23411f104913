"""The agent's own seconds: those in which it waits neither for the model nor for a tool of the run."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """Runs while no request is open; requests that overlap stop it once. It starts when it is made."""

    def __init__(self) -> None:
        self._own_s, self._since, self._open = 0.0, time.monotonic(), 0
        self._is_stopped = False
        self._runs = asyncio.Event()
        self._runs.set()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Stop the clock within the block."""
        if self._open == 0:
            self._own_s = self.seconds()
            self._runs.clear()
        self._open += 1
        try:
            yield
        finally:
            self._open -= 1
            if self._open == 0:
                self._since = time.monotonic()
                self._runs.set()

    def stop(self) -> None:
        """Stop it for good."""
        self._own_s, self._is_stopped = self.seconds(), True

    def seconds(self) -> float:
        is_running = self._open == 0 and not self._is_stopped
        return self._own_s + (time.monotonic() - self._since if is_running else 0.0)

    async def reach(self, seconds: float) -> None:
        """Wait until the agent has used that many seconds itself."""
        while (left := seconds - self.seconds()) > 0:
            await self._runs.wait()
            await asyncio.sleep(left)
