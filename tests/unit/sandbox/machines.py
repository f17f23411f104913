"""Machines where the sandbox has other layers, as launchers of `server_process.Server`; and who may play them."""

import json
import os
import platform
import sys
from collections.abc import Callable, Iterator

import pytest

from tests.unit.sandbox.server.test_isolation import OPEN_INTERPRETER, REFUSE, SECCOMP, UNSHARE
from tests.unit.sandbox.server_process import LAUNCHER, Server

NOBODY = 'isolation.set_uid(65534)\nos.environ["HOME"] = "/"\n'
AS_NOBODY = (
    NOBODY + 'os.execv(sys.executable, [sys.executable, "-m", "verl_ext.sandbox.server", "--port", "0", *sys.argv[1:]])'
)

# Docker leaves root these capabilities (linux/capability.h), of which none reads another user's process.
DOCKER_CAPABILITIES = """
for capability in set(range(41)) - {0, 1, 3, 4, 5, 6, 7, 8, 10, 13, 18, 27, 29, 31}:
    isolation.libc.prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP
"""
# What plain `docker run` refuses is played by a refusal of unshare(), without which there are no mounts either.
MACHINES = {
    "all layers": LAUNCHER,
    "plain Docker": (sys.executable, "-c", OPEN_INTERPRETER + DOCKER_CAPABILITIES + REFUSE, json.dumps([UNSHARE])),
    "ordinary user": (sys.executable, "-c", OPEN_INTERPRETER + AS_NOBODY),
    "ordinary user in plain Docker": (sys.executable, "-c", OPEN_INTERPRETER + NOBODY + REFUSE, json.dumps([UNSHARE])),
    "no seccomp": (sys.executable, "-c", REFUSE, json.dumps([SECCOMP])),
}
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can play the machine, or the user")
needs_x86_64 = pytest.mark.skipif(platform.machine() != "x86_64", reason="the numbers here are those of x86_64")


def machines(*names: str) -> list:
    """Return the parameters of a test or fixture, with what a machine needs; all but the first kind are nightly."""
    marks = [needs_root, needs_x86_64, pytest.mark.nightly]
    return [pytest.param(name, marks=[] if name == "all layers" else marks) for name in names]


USUAL = machines("all layers", "ordinary user in plain Docker", "plain Docker", "ordinary user")


def server_on(params: list, *options: str, workers: int = 2, needs: str = "rlimits") -> Callable:
    """Return a module's fixture: a server on each machine of `params`. It is skipped if the layer `needs` is off."""

    @pytest.fixture(scope="module", params=params)
    def start(request) -> Iterator[Server]:
        server = Server("--preload", "", *options, workers=workers, launcher=MACHINES[request.param])
        try:
            if needs not in server.ping()["layers"]:
                pytest.skip(f"no {needs} on this machine")
            yield server
        finally:
            server.stop()

    return start
