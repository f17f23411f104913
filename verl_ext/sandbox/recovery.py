"""Wait until something that is away is back, with one check for all who need it."""

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable

logger = logging.getLogger(__name__)
logger.setLevel(os.getenv("VERL_LOGGING_LEVEL", "INFO"))

EVERY_S = 1.0


class Recovery:
    """Checks once every EVERY_S while anybody waits, however many do.

    Args:
        is_back: checks once.
    """

    def __init__(self, is_back: Callable[[], Awaitable[bool]]):
        self._is_back = is_back
        self._watch: asyncio.Task | None = None
        self._waiting = 0

    async def wait(self, deadline: float) -> bool:
        """Wait, and return whether it is back by `deadline` (time.monotonic)."""
        if self._watch is None or self._watch.done():
            self._watch = asyncio.create_task(self._look())
        watch = self._watch
        self._waiting += 1
        try:
            await asyncio.wait([watch], timeout=max(0.0, deadline - time.monotonic()))
            return watch.done() and watch.result()
        finally:
            self._waiting -= 1
            if not self._waiting:
                self._watch.cancel()  # not `watch`: it may have ended, and another begun whose waiters are also gone
                self._watch = None

    async def _look(self) -> bool:
        began, is_told = time.monotonic(), False
        while not await self._is_back():
            if not is_told:
                is_told = True
                logger.warning("No sandbox answers any more. Calls wait for one, and fail when their time runs out.")
            await asyncio.sleep(EVERY_S)
        if is_told:
            logger.warning("A sandbox answers again after %.0f s.", time.monotonic() - began)
        return True
