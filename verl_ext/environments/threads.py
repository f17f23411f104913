"""Calls of functions that are no coroutines, each in a thread, of which a process has THREADS at once.

A call begins when a thread is free, so that its time limit does not count how long it waited for the calls of other
episodes. A call that hangs keeps its thread, but neither the event loop nor the end of the process waits for it.
"""

import asyncio
import contextvars
import functools
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from verl_ext.environments.tool_errors import ToolUnavailable

THREADS = 32
FREE_S = 300.0  # within which one of them must become free


async def begin(function: Callable, *args: Any, **kwargs: Any) -> asyncio.Future:
    """Return what a function will return, once a thread runs it. A cancelled future does not stop it.

    Raises:
        ToolUnavailable: no thread is free within FREE_S, because calls hang.
    """
    loop = asyncio.get_running_loop()
    slots = _slots(loop)
    try:
        async with asyncio.timeout(FREE_S):
            await slots.acquire()
    except TimeoutError as error:
        raise ToolUnavailable(f"all {THREADS} threads for tools are taken by calls that do not end") from error
    context = contextvars.copy_context()
    return in_thread(functools.partial(context.run, function, *args, **kwargs), then=slots.release)


def in_thread(work: Callable[[], Any], then: Callable[[], None] = lambda: None) -> asyncio.Future:
    """Return what a function will return in a thread of its own, which a cancelled future does not stop.

    Args:
        then: called in the event loop when it has ended.
    """
    loop = asyncio.get_running_loop()
    running = loop.create_future()
    running.add_done_callback(lambda future: future.cancelled() or future.exception())  # perhaps nobody waits for it

    def end(tell: Callable[[Any], None], said: Any) -> None:
        then()
        if not running.done():
            tell(said)

    def run() -> None:
        try:
            outcome = running.set_result, work()
        except BaseException as error:  # of whoever wrote it
            outcome = running.set_exception, as_exception(error)
        with suppress(RuntimeError):  # the loop was closed meanwhile
            loop.call_soon_threadsafe(end, *outcome)

    threading.Thread(target=run, daemon=True).start()
    return running


def as_exception(error: BaseException) -> Exception:
    """Return what a function raised as an exception that ends no event loop: it may have called `exit`."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    told = RuntimeError(f"it raised {error!r}")
    told.__cause__ = error
    return told


@functools.lru_cache(maxsize=8)
def _slots(loop: asyncio.AbstractEventLoop) -> asyncio.Semaphore:
    return asyncio.Semaphore(THREADS)
