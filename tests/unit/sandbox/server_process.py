"""A sandbox server in a separate process, as the tests of this folder start it."""

import json
import os
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Container, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

REPOSITORY = Path(__file__).parents[3]
# After a program's time limit. The server's own limits are 3.5 + 1.5 s; the rest is for a busy machine.
ANSWER_S = 7.0
SECRET = "sk-not-for-programs"  # in the server's environment
# Programs then see the interpreter there, read-only, and have only $TMPDIR to write to (docs/guides/sandbox.md).
IS_BELOW_TMP = any(prefix.startswith("/tmp/") for prefix in (sys.prefix, sys.base_prefix))


LAUNCHER = (sys.executable, "-m", "verl_ext.sandbox.server", "--port", "0")


class Server:
    """A server process; `run` posts to /run_code.

    Args:
        launcher: command that ends as the server, on a free port; takes the server's options.
    """

    def __init__(self, *options: str, workers: int = 2, launcher: Sequence[str] = LAUNCHER) -> None:
        command = [*launcher, "--workers", str(workers), *options]
        self.process = subprocess.Popen(
            command,
            cwd=REPOSITORY,
            env=os.environ | {"MY_SECRET": SECRET},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        line = self.process.stdout.readline()
        ready = re.fullmatch(r"sandbox ready on (http://127\.0\.0\.1:\d+)\n", line)
        assert ready, (line, self.process.stderr.read())
        self.url = ready[1]
        self.second_line = self.process.stdout.readline()
        self.root = root_of(self.descendants())

    def request(
        self, path: str, body: bytes | None = None, method: str | None = None, **headers: str
    ) -> tuple[int, dict[str, str], bytes]:
        """Return HTTP status, headers and body of the answer."""
        headers = {"Content-Type": "application/json"} | headers
        request = urllib.request.Request(self.url + path, body, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=30) as response:
                return response.status, dict(response.headers), response.read()
        except urllib.error.HTTPError as error:
            return error.code, dict(error.headers), error.read()

    def post(self, body: bytes, **headers: str) -> tuple[int, dict[str, str], dict]:
        """Return HTTP status, headers and JSON of the answer to a /run_code."""
        status, headers, content = self.request("/run_code", body, **headers)
        return status, headers, json.loads(content)

    def ping(self) -> dict:
        status, _, content = self.request("/v1/ping")
        assert status == 200, content
        return json.loads(content)

    def run(self, code: str, **fields: object) -> dict:
        status, _, answer = self.post(json.dumps({"code": code, "language": "python"} | fields).encode())
        assert status == 200, answer
        return answer

    def result(self, code: str, **fields: object) -> dict:
        """Return `run_result` of a program that the sandbox itself ran well."""
        answer = self.run(code, **fields)
        assert answer["status"] != "SandboxError", answer
        return answer["run_result"]

    def descendants(self) -> list[psutil.Process]:
        """Return the zygote first, then its workers and their programs."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def stop(self) -> None:
        self.process.terminate()
        self.process.communicate(timeout=10)


def wait_until(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "did not become true in time"
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_for_program(server: Server, but: Container[int] = (), fds: Container[int] = (3,)) -> psutil.Process:
    """Wait for a program that has begun: its three streams are open, and in a session also its channel to the worker.

    A program leads a process session, which no worker does.

    Args:
        but: processes to ignore.
        fds: how many files the program has open.
    """
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        for process in server.descendants()[1:]:
            try:
                if process.pid not in but and os.getsid(process.pid) == process.pid and process.num_fds() in fds:
                    return process
            except (psutil.NoSuchProcess, ProcessLookupError):
                continue  # it ended after it was listed
        time.sleep(0.01)
    raise AssertionError("no program began within 5 s")


def wait_for_sleeping_program(server: Server, but: Container[int] = (), fds: Container[int] = (3,)) -> psutil.Process:
    """Wait for a program that has begun and sleeps; see `wait_for_program`."""
    program = wait_for_program(server, but, fds)
    wait_until(lambda: program.status() == psutil.STATUS_SLEEPING)
    return program


def running(processes: list[psutil.Process]) -> list[int]:
    return [process.pid for process in processes if is_running(process.pid)]


def root_of(processes: list[psutil.Process]) -> Path:
    """Return the folder that the server made for its programs, from the zygote's command line."""
    words: list[str] = []
    for process in processes:
        with suppress(psutil.NoSuchProcess):  # a program that has just ended
            words += process.cmdline()
    commands = " ".join(words)
    return Path(re.search(r"/[^\s\"]*verl-sandbox-\w+", commands)[0])
