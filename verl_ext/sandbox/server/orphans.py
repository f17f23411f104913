"""Kill a program's forks if its worker or the zygote is killed and no process namespace ends with it.

A fork clears PR_SET_PDEATHSIG, so a program's children outlive its worker; they are then children of the zygote. The
zygote's other children are workers, which are in its session, unlike any program.
"""

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable

from verl_ext.sandbox.server.disk import children_of, tree_of

ORPHANS_S = 2.0  # for killed processes to be gone; after that they are stuck in the kernel, and left to die


def kill_orphans(zygote: int | None, worker: int) -> None:
    """Wait for the end of a worker, then kill all processes below the zygote that are outside its session.

    Args:
        zygote: process id; None if it has ended, because its children are then no longer below it.
        worker: pidfd of a worker that was killed.
    """
    poller = select.poll()
    poller.register(worker, select.POLLIN)
    poller.poll(ORPHANS_S * 1000)
    if zygote is None:
        return
    with contextlib.suppress(ProcessLookupError):  # the zygote has ended
        session = os.getsid(zygote)
        _kill(lambda: [pid for child in children_of(zygote) if _session(child) != session for pid in tree_of(child)])


def kill_below(zygote: int) -> None:
    """Kill the workers of a zygote, and all their descendants."""
    _kill(lambda: tree_of(zygote)[1:])


def _kill(find: Callable[[], list[int]]) -> None:
    deadline = time.monotonic() + ORPHANS_S
    while (pids := find()) and time.monotonic() < deadline:
        stopped: set[int] = set()
        while not stopped.issuperset(pids) and time.monotonic() < deadline:  # a stopped process does not fork
            _signal(pids, signal.SIGSTOP)
            stopped.update(pids)
            pids = find()
        _signal(pids, signal.SIGKILL)
        time.sleep(0.01)


def _signal(pids: list[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except ProcessLookupError:  # it has ended
        return None
