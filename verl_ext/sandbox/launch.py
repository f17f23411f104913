"""Start and stop a sandbox server from a pipeline or a test."""

import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from verl_ext.sandbox.limits import READY

PACKAGE_ROOT = Path(__file__).resolve().parents[2]


class SandboxNotReady(RuntimeError):
    """The server did not become ready; its own message is on stderr."""


@contextmanager
def running_server(
    *, workers: int = 2, port: int = 0, start_timeout_s: float = 60.0, options: Sequence[str] = ()
) -> Iterator[str]:
    """Run a server process on 127.0.0.1 for the length of a `with` block; yields its URL.

    The server also stops when this process dies, however it dies.

    Args:
        workers: programs that run at once.
        port: 0 picks a free one.
        options: further command-line options of the server, such as ("--isolation", "full").
    Raises:
        SandboxNotReady: see there.
    """
    command = [sys.executable, "-m", "verl_ext.sandbox.server", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--workers", str(workers), "--parent-pid", str(os.getpid()), *options]
    path = os.pathsep.join(filter(None, [str(PACKAGE_ROOT), os.environ.get("PYTHONPATH")]))
    server = subprocess.Popen(command, stdout=subprocess.PIPE, bufsize=0, env=os.environ | {"PYTHONPATH": path})
    assert server.stdout  # a pipe, as asked for
    try:
        yield _wait_until_ready(server, server.stdout, start_timeout_s)
    finally:
        server.terminate()
        try:
            server.wait(timeout=15)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
        server.stdout.close()


def _wait_until_ready(server: subprocess.Popen, stdout: IO[bytes], timeout_s: float) -> str:
    """Wait for the server's line on stdout, and return the URL in it."""
    started = time.monotonic()
    while select.select([stdout], [], [], max(started + timeout_s - time.monotonic(), 0))[0]:
        line = stdout.readline().decode(errors="replace")  # unbuffered: `select` sees what is left
        if line.startswith(READY):
            return line.removeprefix(READY).strip()
        if not line:
            raise SandboxNotReady(
                f"the sandbox server ended with exit code {server.wait()} after {time.monotonic() - started:.1f} s "
                "before it was ready; see its message on stderr"
            )
    raise SandboxNotReady(f"the sandbox server was not ready within {timeout_s:g} s; see its messages on stderr")
