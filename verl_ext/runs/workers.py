"""Run several copies of a coroutine that take their work from one iterator."""

import asyncio
from collections.abc import Awaitable, Callable


async def run_together(work: Callable[[], Awaitable[None]], count: int) -> None:
    """Run `count` copies of `work` to their end. If one raises, all end before this raises."""
    workers = [asyncio.ensure_future(work()) for _ in range(count)]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
