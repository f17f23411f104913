"""Process a large request or answer without stopping the event loop for all other requests."""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

Result = TypeVar("Result")

LARGE_BYTES = 1 << 21  # smaller work is done at once, because it stops the event loop only for a moment

_thread = ThreadPoolExecutor(1, thread_name_prefix="large")
_rests_until = 0.0


async def in_turn(size: int, function: Callable[..., Result], *args: Any) -> Result:
    """Call a function at once for up to LARGE_BYTES, and otherwise in a thread, one call after the other.

    A step such as `json.loads` holds the interpreter's lock for as long as it takes. So the thread rests after each
    call for as long as the call took, which leaves the event loop to other requests.
    """
    if size <= LARGE_BYTES:
        return function(*args)
    return await asyncio.get_running_loop().run_in_executor(_thread, _call, function, args)


def _call(function: Callable[..., Result], args: tuple[Any, ...]) -> Result:
    global _rests_until  # only the one thread runs this
    time.sleep(max(_rests_until - time.monotonic(), 0.0))
    started = time.monotonic()
    try:
        return function(*args)
    finally:
        ended = time.monotonic()
        _rests_until = ended + (ended - started)
