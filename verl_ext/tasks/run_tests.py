"""Run the tests of a repository in the scoring box: `python3 -I -B /tests/run.py`, of which this file is the text.

It uses only the standard library. Each test file runs in a process of its own, confined by `as-agent`, in which pytest
imports the code of the agent. The code can do there what it likes; it is held to this:

- Each process has a fresh copy of the repository, and all others are killed when it ends.
- It reports over a descriptor, by a token that each process has anew. Each test must report once; a process must say
  that it ended. What is missing has not passed.
- Tests that must fail (canaries.py) fail, and the test files are as they were.

It exits with 0 if all is as /tests/spec.json expects, and prints what is not, as JSON; if nothing can run, why. With an
empty `expected` it prints each test's outcome.
"""

import importlib.util
import json
import os
import secrets
import selectors
import shutil
import signal
import subprocess
import sys
import time
import zlib
from base64 import b64encode
from pathlib import Path
from typing import IO

APP, TESTS = Path("/app"), Path("/tests")
DELETED = Path("/home/agent/deleted.json")  # sources that the agent deleted (crossing.py)
CONFINED = ["as-agent"]
MAX_REPORT = 4 * 2**20  # bytes that one process may report
MAX_SAID = 2000  # characters of what the last process printed

# In the process of one test file. Everything that it needs is imported before the repository's folders can be.
CHILD = """
import doctest, fcntl, json, os, pdb, random, sys, unittest, unittest.mock
order = json.loads(sys.stdin.readline())
channel = fcntl.fcntl(1, fcntl.F_DUPFD_CLOEXEC, order["channel"])
os.dup2(2, 1)
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
import pytest
def make(token, write=os.write, dumps=json.dumps, leave=os._exit):
    def say(*what):
        write(channel, (dumps([token, *what]) + "\\n").encode())
    class Results:
        @pytest.hookimpl(tryfirst=True)
        def pytest_runtest_logreport(self, report):
            say(report.nodeid, report.when, report.outcome, hasattr(report, "wasxfail"))
    return Results(), say, leave
results, say, leave = make(order.pop("token"))
options = ["-q", "-p", "no:cacheprovider", "-o", "addopts=", "--rootdir=.", "--continue-on-collection-errors"]
sys.path[:0] = order["paths"]
code = pytest.main([*options, order["file"]], plugins=[results])
say("end", int(code))
leave(0)
"""


def main() -> None:
    if Path(__file__) != TESTS / "run.py":
        sys.exit("run_tests.py empties /app and kills all processes: it runs in a box only, as /tests/run.py.")
    if broken := why_it_cannot():  # nothing of the agent has run yet
        print(json.dumps({"broken": broken}))
        sys.exit(3)
    spec = json.loads((TESTS / "spec.json").read_text())
    pristine = put_together(spec)
    protected = {path: (TESTS / "files" / path).read_bytes() for path in spec["tests"]}
    outcomes: dict[str, str] = {}
    faults: list[str] = []
    deadline = time.monotonic() + spec["all_s"]
    for file in spec["files"]:
        lay_out(pristine)
        limit = min(spec["file_s"], deadline - time.monotonic())
        said = subprocess.DEVNULL if spec["expected"] else (TESTS / "said.txt").open("wb")  # of trusted code only
        lines = run_file(file, spec["paths"], limit, faults, said) if limit > 0 else []
        outcomes |= outcomes_of(lines, file, faults)
        for path, content in protected.items():
            if not (APP / path).is_file() or (APP / path).is_symlink() or (APP / path).read_bytes() != content:
                faults.append(f"{file}: its process changed {path}")
    if not spec["expected"]:
        said = (TESTS / "said.txt").read_text(errors="replace")[-MAX_SAID:] if spec["files"] else ""
        found = {"outcomes": outcomes, "faults": faults, "said": said}
        packed = b64encode(zlib.compress(json.dumps(found).encode())).decode()
        print(json.dumps({"measured": packed}))
        return
    sys.exit(judge(spec, outcomes, faults))


def why_it_cannot() -> str:
    """Return why no test can run in this box; "" if they can."""
    if importlib.util.find_spec("pytest") is None:
        return f"{sys.executable} has no pytest. Install it in the environment of the sandbox server."
    done = subprocess.run([*CONFINED, "true"], capture_output=True, text=True)
    return f"as-agent ended with {done.returncode}: {done.stderr[-300:]}" if done.returncode else ""


def judge(spec: dict, outcomes: dict[str, str], faults: list[str]) -> int:
    """Print what is not as expected, and return the exit code."""
    expected = spec["expected"]
    faults += [
        f"a test that must fail passed: {name}" for name in expected["canaries"] if outcomes.get(name) == "passed"
    ]
    unmet = {key: [name for name in expected[key] if outcomes.get(name) != "passed"] for key in ("fixed", "kept")}
    counts = {key: [len(expected[key]) - len(names), len(expected[key])] for key, names in unmet.items()}
    print(json.dumps(counts | {"unmet": {key: names[:5] for key, names in unmet.items()}, "faults": faults[:5]}))
    return int(bool(faults or unmet["fixed"] or unmet["kept"]))


def put_together(spec: dict) -> Path:
    """Return a folder, out of reach, with the repository as the agent left its sources, and with the tests."""
    pristine = TESTS / "base"
    pristine.mkdir(exist_ok=True)
    for path in json.loads(DELETED.read_text()) if DELETED.exists() else []:
        (pristine / path).unlink(missing_ok=True)
    shutil.copytree(APP, pristine, symlinks=True, dirs_exist_ok=True)
    for path in spec["tests"]:
        (pristine / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(TESTS / "files" / path, pristine / path)
    return pristine


def lay_out(pristine: Path) -> None:
    """Make /app a copy of the repository anew."""
    for entry in APP.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()
    shutil.copytree(pristine, APP, symlinks=True, dirs_exist_ok=True)


def run_file(file: str, paths: list[str], limit_s: float, faults: list[str], said: int | IO[bytes]) -> list[list]:
    """Return what the process of a test file reported: [node id, phase, outcome, whether it was expected to fail].

    `said` is for what it prints.
    """
    token = secrets.token_hex(16)
    order = {"token": token, "file": file, "paths": paths, "channel": 30 + secrets.randbelow(200)}
    environment = {key: os.environ[key] for key in ("PATH", "LANG") if key in os.environ} | {"HOME": "/tmp"}
    child = subprocess.Popen(
        [*CONFINED, sys.executable, "-I", "-B", "-c", CHILD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=said,
        bufsize=0,
        cwd=APP,
        env=environment,
        start_new_session=True,
    )
    assert child.stdin and child.stdout  # pipes, as asked for
    try:
        child.stdin.write(json.dumps(order).encode() + b"\n")
        child.stdin.close()
    except BrokenPipeError:
        pass
    lines = []
    for line in listen(child, child.stdout, time.monotonic() + limit_s).splitlines():
        try:
            begin, *rest = json.loads(line)
        except (ValueError, TypeError):
            begin, rest = None, None
        if begin == token:
            lines.append(rest)
        else:
            faults.append(f"{file}: its process wrote results of its own")
            break
    return lines


def listen(child: subprocess.Popen, stdout: IO[bytes], deadline: float) -> bytes:
    """Return what a process writes until it ends or its time is over; then all others are killed, too."""
    said, ended = b"", False
    os.set_blocking(stdout.fileno(), False)
    with selectors.DefaultSelector() as waiting:
        waiting.register(stdout, selectors.EVENT_READ)
        while not ended and len(said) <= MAX_REPORT and time.monotonic() < deadline:
            ended = child.poll() is not None  # then the pipe is read once more, as another process may hold it
            if waiting.select(0 if ended else min(0.2, max(0.0, deadline - time.monotonic()))):
                while (part := stdout.read(2**16)) and len(said) <= MAX_REPORT:
                    said += part
                if part == b"":
                    break
    kill_others()
    stdout.close()
    child.wait()
    return said[:MAX_REPORT]


def kill_others() -> None:
    """Kill every process but this one, those above it and the first."""
    spared, pid = {1}, os.getpid()
    while pid > 1:
        spared.add(pid)
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            break
    for _ in range(100):
        alive = [int(name) for name in os.listdir("/proc") if name.isdecimal() and int(name) not in spared]
        alive = [pid for pid in alive if not is_dead(pid)]
        if not alive:
            return
        for pid in alive:
            try:
                os.kill(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                pass
        time.sleep(0.002)


def is_dead(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def outcomes_of(lines: list[list], file: str, faults: list[str]) -> dict[str, str]:
    """Return the outcome of each test: passed, failed, skipped or error; of no test unless the process ended well."""
    phases: dict[str, dict[str, str]] = {}
    ended = [line for line in lines if line[0] == "end"]
    for name, when, outcome, expected in (line for line in lines if line[0] != "end"):
        if when in phases.setdefault(name, {}):
            faults.append(f"{file}: {name} was reported twice")
        phases[name][when] = "skipped" if expected else outcome
    if len(ended) != 1 or lines[-1] is not ended[0] or ended[0][1] not in (0, 1, 2):
        return dict.fromkeys(phases, "error")
    return {name: outcome_of(each) for name, each in phases.items()}


def outcome_of(phases: dict[str, str]) -> str:
    if phases == dict.fromkeys(("setup", "call", "teardown"), "passed"):
        return "passed"
    if phases.get("call") == "failed":
        return "failed"
    return "skipped" if "skipped" in phases.values() else "error"


if __name__ == "__main__":
    main()
