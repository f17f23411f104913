"""The process in which answers are parsed as expressions: run by path by symbolic.py, never imported by it.

It reads one JSON request after another from the connection whose file number is argv[1] and answers each: `pred` and
`gold` are compared, a `gold` without a `pred` is only evaluated (does it exhaust the limits by itself?). It imports
sympy once, and forks a child that does the work under limits of memory and, per request, of CPU time: when the kernel
ends a child at a limit, that costs only another fork and no import.
The comparison itself is in algebra.py.
"""

import ctypes
import importlib.util
import json
import logging
import os
import resource
import signal
import sys
from multiprocessing.connection import Connection
from pathlib import Path

# Compared once before the first fork, so that parser and sympy are warm in all children: the first comparison of a kind
# costs 30 to 120 ms of CPU, the next 5 to 50. Without it a child could reach the quick lane's limit again and again.
WARM_UP = [
    (r"\frac{x+2}{7}", r"\frac{1}{7}(x+2)"),
    (r"3\cdot\sqrt{13}/2", r"\frac{3\sqrt{13}}{2}-\sqrt[3]{4}"),
    ("x(4x+1)-2", "4x^2+x-2"),
    (r"2\pi - \ln{5}", r"2\pi-\ln(6)"),
    (r"\sin^{2}(2x)+\tan x", r"\cos(3x)"),
    (r"e^{-x^2}", r"\log_{2} 6"),
    (r"\frac{-1+i\sqrt{3}}{2}", "3-4i"),
    (r"\binom{n}{3}", "n!+|x|"),
    ("2x-4y+3=0", "y=2x+3"),
    (r"x \le 2", r"(-\infty ,2]"),
    (r"|x|>8", r"(-\infty ,-8)\cup(8,\infty )"),
    (r"x_1+a_{n}", "7z^{96}(4z+1)"),
]


def main() -> None:
    connection = Connection(int(sys.argv[1]))
    limits = json.loads(connection.recv_bytes())
    resource.setrlimit(resource.RLIMIT_AS, (limits["memory_bytes"], limits["memory_bytes"]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(limits["niceness"])
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends a child when the CPU time of its request is up
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPROF])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then closes the connection
    try:
        is_equal = load()
    except ImportError as error:
        connection.send_bytes(json.dumps({"error": f"{error}"}).encode())
        return
    connection.send_bytes(json.dumps({"ready": True}).encode())
    parent = os.getpid()
    while True:
        child = os.fork()
        if child == 0:
            die_with(parent)
            work(connection, is_equal, limits["cpu_s"])
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if os.waitstatus_to_exitcode(status) != -signal.SIGPROF:
            return  # the connection was closed, or something else ended the child: symbolic.py tries again
        connection.send_bytes(json.dumps({"equal": None}).encode())


def work(connection: Connection, is_equal, cpu_s: float) -> None:
    """Answer requests until the connection closes."""
    while True:
        try:
            request = json.loads(connection.recv_bytes())
        except (EOFError, ConnectionError):
            return
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        try:
            answer = {"equal": is_equal(request.get("pred"), request["gold"])}
        except MemoryError:
            os.kill(os.getpid(), signal.SIGPROF)  # frees all it holds, and the parent answers as for a time-out
        except Exception:  # whatever sympy raises on a strange but harmless expression: not shown to be equal
            answer = {"equal": False}
        signal.setitimer(signal.ITIMER_PROF, 0)
        connection.send_bytes(json.dumps(answer).encode())


def die_with(parent: int) -> None:
    """Make the kernel kill this process when `parent`, which forked it, ends."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(0)


def load():
    """Import algebra.py, and with it sympy and math-verify (0.5 s); return its `is_equal`."""
    spec = importlib.util.spec_from_file_location("algebra", Path(__file__).with_name("algebra.py"))
    assert spec and spec.loader  # as the file's name ends in .py
    algebra = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(algebra)
    logging.disable(logging.CRITICAL)
    for pred, gold in WARM_UP:
        algebra.is_equal(pred, gold)
    return algebra.is_equal


if __name__ == "__main__":
    main()
