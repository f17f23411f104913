"""Programs that attack the sandbox: one property a case, and after each the server is healthy and nothing is left.

All of it runs inside a sandbox server; the only network targets are listeners on 127.0.0.1 that a test opens itself.
A program prints `held` when what it tried failed as it should. A case is skipped if a layer that it needs is off.

    SANDBOX_TEST_ISOLATION=none pytest tests/unit/sandbox/hostile

runs what is harmless to a machine (all but HARMFUL) without isolation: cases that only isolation makes pass then fail.
"""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from time import monotonic, sleep
from typing import NamedTuple
from uuid import uuid4

import pytest

from tests.unit.sandbox.server_process import Server

# In the name of everything that a program tries to leave. What runs has `HostileServer.mark` in its place: the same for
# no two servers, where the names of the tests must be the same in all processes.
MARK = "verl-hostile-MARK"
ISOLATION = os.environ.get("SANDBOX_TEST_ISOLATION", "auto")
ALL_LAYERS = {"namespaces", "root", "proc", "landlock", "seccomp", "uid"}
SECCOMP, ROOT, PROC, NAMESPACES = {"seccomp"}, {"root"}, {"proc"}, {"namespaces"}
FILES = {"landlock"}
HARMFUL = pytest.mark.skipif(ISOLATION == "none", reason="would harm the machine without isolation")

PRELUDE = """
import ctypes, errno, os, sys
libc = ctypes.CDLL(None, use_errno=True)
def denied(attempt, *errors):
    try:
        result = attempt()
    except (errors or PermissionError):
        print("held")
    else:
        print("ESCAPED", result)
def syscall(number, *args):
    result = libc.syscall(ctypes.c_long(number), *[ctypes.c_long(a) if isinstance(a, int) else a for a in args])
    return errno.errorcode[ctypes.get_errno()] if result == -1 else result
def call_denied(number, *args):
    result = syscall(number, *args)
    print("held" if result == "EPERM" else f"ESCAPED {result}")
"""


class HostileServer(Server):
    """Every program begins with PRELUDE and has `mark` where its text has MARK; `check` finds what it left."""

    def __init__(self, *options: str) -> None:
        super().__init__(*options)
        self.mark = f"verl-hostile-{uuid4().hex}"
        self.layers = set(self.ping()["layers"])

    def run(self, code: str, **fields: object) -> dict:
        code = PRELUDE + code.replace(MARK, self.mark)
        return super().run(code, **{"memory_limit_MB": 1024, "run_timeout": 10} | fields)

    def check(self) -> None:
        """It executes code, and nothing is left: no process but the zygote and two idle workers, no file."""
        assert self.ping()["status"] == "ok"
        deadline = monotonic() + 3
        while (left := [*self.descendants()[3:], *self.root.iterdir()]) and monotonic() < deadline:
            sleep(0.01)
        for folder in ("/", "/tmp", "/dev/shm", "/var/tmp"):
            left += Path(folder).glob(f"{self.mark}*")
        for path in left:
            if isinstance(path, Path):  # so that the next test does not find it as well
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        assert not left


def need(server: HostileServer, layers: set[str]) -> None:
    """Skip if a layer is off on this machine."""
    missing = layers - server.layers
    if missing and ISOLATION != "none":
        pytest.skip(f"off on this machine: {', '.join(sorted(missing))}")


class Case(NamedTuple):
    """A program that prints `held` on its only line when what it tries fails as it should."""

    name: str
    needs: set[str]
    code: str
    harmful: bool = False


def cases(*table: Case) -> Callable:
    return pytest.mark.parametrize(
        "case", [pytest.param(case, id=case.name, marks=[HARMFUL] if case.harmful else []) for case in table]
    )
