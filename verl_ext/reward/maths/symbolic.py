"""Compare expressions by computer algebra, in worker processes that can be killed.

math-verify's own time-out is SIGALRM, which works only in a main thread, while rewards are computed in threads and Ray
actors; and a short answer can cost sympy unlimited time or memory. So each comparison runs in a child process
(symbolic_worker.py) under a limit of CPU time, not wall time: a loaded machine does not change a verdict. Children
start at the first comparison, are reused, and end with this process.

Nearly all comparisons take a few milliseconds. Longer ones move to a separate lane at low priority, so that ordinary
answers do not queue up behind hostile ones.

A comparison that exhausts the limits, or loses its workers, is the answer's own fault (`TooCostly`), unless the gold
exhausts them by itself, or workers do not even answer a control comparison: then it stays open.
"""

import atexit
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

QUICK_CPU_S = 0.1  # per comparison, in the quick lane
CPU_S = 2.0  # per comparison, in the slow lane; also for a gold by itself
SLOW = (r"\sum", r"\prod", r"\int", r"\lim")  # go to the slow lane at once, because sympy evaluates them
WALL_S = 300.0  # per comparison: a backstop for a worker that neither works nor answers, also on a busy machine
START_WALL_S = 120.0  # importing sympy, on a loaded machine
MEMORY_BYTES = 1 << 30  # address space of one worker
MAX_COMPARISONS = 2000  # per worker, as sympy's caches grow
MAX_KNOWN = 20_000  # comparisons that are remembered: the responses of a group often give the same answer
SLOW_NICENESS = 10
CONTROL = ("x+1", "1+x")  # what any worker that works can compare

WORKER = Path(__file__).with_name("symbolic_worker.py")


class TooCostly(Exception):
    """The answer, not its gold, takes more CPU time or memory than a comparison may: it is wrong."""


class _WorkersLost(Exception):
    """Workers end or do not answer, whatever they are asked."""


class SymbolicPool:
    """A pool of up to `size` workers per lane, safe to call from any thread. Further callers wait for their turn."""

    def __init__(
        self, size: int = 2, cpu_s: float = CPU_S, memory_bytes: int = MEMORY_BYTES, worker: Path = WORKER
    ) -> None:
        self._quick = _Lane(size, min(QUICK_CPU_S, cpu_s), memory_bytes, 0, worker)
        self._slow = _Lane(size, cpu_s, memory_bytes, SLOW_NICENESS, worker)
        self.forget()

    def is_equal(self, pred: str, gold: str) -> bool | None:
        """Return whether two normalised LaTeX expressions are equal.

        Returns:
            None if that stays open: the gold by itself takes too much time or memory, or workers are lost whatever they
            are asked.
        Raises:
            TooCostly: the answer takes too much time or memory, or its workers are lost, while the gold by itself and
                a control comparison do not.
            RuntimeError: no worker can be started, for instance because math-verify is not installed.
        """
        try:
            equal, gold_is_slow = self._once((pred, gold), self._compare)
        except _WorkersLost:
            return None
        if equal is None and not gold_is_slow:
            raise TooCostly(f"{pred[:80]!r} against {gold[:80]!r}")
        return equal

    def _once(self, key: tuple[str, ...], work: Callable[..., Any]) -> Any:
        """Return `work(*key)`, done once for all threads that ask, and remembered unless it raises."""
        with self._lock:
            outcome = self._known.get(key)
            if is_new := outcome is None:
                if len(self._known) >= MAX_KNOWN:
                    self._known.clear()
                outcome = self._known[key] = Future()
        if is_new:
            try:
                outcome.set_result(work(*key))
            except BaseException as error:
                outcome.set_exception(error)
                with self._lock:
                    self._known.pop(key, None)
        return outcome.result()

    def _compare(self, pred: str, gold: str) -> tuple[bool | None, bool]:
        """Return whether they are equal, None without an answer; and whether the gold by itself has none either."""
        request, equal = {"pred": pred, "gold": gold}, None
        if not any(form in side for form in SLOW for side in (pred, gold)):
            equal = (self._quick.ask(request) or {}).get("equal")
        if equal is None:
            equal = self._ask_slow(request)
        return equal, equal is None and self._once((gold,), self._is_slow)

    def _is_slow(self, gold: str) -> bool:
        """Return whether a gold by itself, parsed and evaluated, exhausts the limits of a comparison."""
        return self._ask_slow({"gold": gold}) is None

    def _ask_slow(self, request: dict[str, str]) -> bool | None:
        """Return the slow lane's verdict; None also if only this request loses workers."""
        answer = self._slow.ask(request)
        if answer is None and self._slow.ask(dict(zip(("pred", "gold"), CONTROL, strict=True))) != {"equal": True}:
            raise _WorkersLost
        return answer["equal"] if answer else None

    def forget(self) -> None:
        """Start without workers and leave any untouched: a forked child must not share its parent's."""
        self._lock = threading.Lock()
        self._known: dict[tuple[str, ...], Future] = {}  # pairs of answer and gold, and golds by themselves
        self._quick.forget()
        self._slow.forget()

    def close(self) -> None:
        """End the idle workers and forget all verdicts; a later comparison starts new ones."""
        with self._lock:
            self._known.clear()
        self._quick.close()
        self._slow.close()

    def worker_pids(self) -> list[int]:
        """Return the process ids of the idle workers."""
        return self._quick.worker_pids() + self._slow.worker_pids()


class _Lane:
    """Workers with the same limits."""

    def __init__(self, size: int, cpu_s: float, memory_bytes: int, niceness: int, worker: Path):
        self._size, self._worker = size, worker
        self._limits = {"cpu_s": cpu_s, "memory_bytes": memory_bytes, "niceness": niceness}
        self.forget()

    def forget(self) -> None:
        self._turns = threading.BoundedSemaphore(self._size)
        self._lock = threading.Lock()
        self._idle: list[_Worker] = []

    def ask(self, request: dict[str, str]) -> dict[str, Any] | None:
        """Return the worker's answer, with `equal` None at the limit of CPU time or memory; None if two workers were
        lost, or one did not answer for `WALL_S`.

        Args:
            request: `pred` and `gold`, or only `gold`.
        """
        with self._turns:
            for _ in range(2):
                with self._lock:
                    worker = self._idle.pop() if self._idle else None
                worker = worker or _Worker(self._worker, self._limits)
                answer = None
                try:
                    answer = worker.ask(request, WALL_S)
                finally:
                    if answer is None or worker.comparisons >= MAX_COMPARISONS:
                        worker.kill()
                    else:
                        with self._lock:
                            self._idle.append(worker)
                if answer is not None or worker.out_of_time:
                    return answer
                # Something else ended the worker, such as the system's out-of-memory killer: try once more.
        return None

    def close(self) -> None:
        with self._lock:
            workers, self._idle = self._idle, []
        for worker in workers:
            worker.kill()

    def worker_pids(self) -> list[int]:
        with self._lock:
            return [worker.process.pid for worker in self._idle]


class _Worker:
    """One child process, which forks the process that works, and the connection to both."""

    def __init__(self, program: Path, limits: dict[str, float]):
        self.comparisons = 0
        self.out_of_time = False
        self._connection, child_end = Pipe()
        # It runs by path and with -P, so that the child imports only math-verify, neither this package nor verl.
        self.process = subprocess.Popen(
            [sys.executable, "-P", str(program), str(child_end.fileno())],
            pass_fds=[child_end.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        child_end.close()
        started = self.ask(limits, START_WALL_S)
        if not started or "error" in started:
            self.kill()
            reason = started["error"] if started else f"exit status {self.process.returncode} before it was ready"
            if self.out_of_time:
                reason = f"it was not ready within {START_WALL_S:g} s, which happens on an overloaded machine"
            raise RuntimeError(
                f"The process that compares answers did not start: {reason}. "
                f"Run `{sys.executable} -c 'import math_verify'`; if that fails, install the requirements again."
            )

    def ask(self, request: dict, wall_s: float) -> dict | None:
        """Return the worker's answer; None if it died or did not answer in time, and must be killed."""
        self.comparisons += 1
        try:
            self._connection.send_bytes(json.dumps(request).encode())
            if self._connection.poll(wall_s):
                return json.loads(self._connection.recv_bytes())
            self.out_of_time = True
        except (EOFError, ConnectionError):
            pass
        return None

    def kill(self) -> None:
        self._connection.close()
        self.process.kill()
        self.process.wait()


POOL = SymbolicPool()
is_equal = POOL.is_equal
atexit.register(POOL.close)
os.register_at_fork(after_in_child=POOL.forget)
