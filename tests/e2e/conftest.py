"""Fixtures and helpers of the end-to-end tests: the tiny task with few rows, and the real commands run on it."""

import atexit
import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from tests.processes import kill_tree
from verl_ext.cpu.warm_python import EXECUTABLE_VARIABLE, warm_python

REPO = Path(__file__).resolve().parents[2]
WORKER = os.environ.get("PYTEST_XDIST_WORKER", "")  # "gw0", or "" if all tests run in one process
MARK = f"RETOOL_E2E{WORKER}"  # in the environment of every process that these tests start
if WORKER and MARK not in os.environ:  # pytest may import this file under two names
    # Workers run in parallel, and Ray notes below this folder which cluster was started last.
    os.environ["TMPDIR"] = os.environ["RAY_TMPDIR"] = tempfile.tempdir = tempfile.mkdtemp(prefix=f"{WORKER}-")
    os.chmod(tempfile.tempdir, 0o711)  # a sandbox started as root runs programs below it as another user
    atexit.register(shutil.rmtree, tempfile.tempdir, ignore_errors=True)
os.environ.setdefault(MARK, uuid4().hex)
OWN_SERVER = {EXECUTABLE_VARIABLE: ""}  # for `launch` and `pipeline`, see `python`
# The longest tests begin first: if one began last, one process would wait for the other.
LONG = ("test_resume.py", "test_failures.py", "test_launchers.py", "test_server_deaths.py", "test_gpu_stages.py")
SMALL_DATA = ["--prepare=--sft=2000", "--prepare=--rl=256", "--prepare=--test=16", "--prepare=--ood=8"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        has_tier = item.get_closest_marker("slow") or item.get_closest_marker("nightly")
        if item.path.parent == Path(__file__).parent and not has_tier:
            raise pytest.UsageError(f"{item.nodeid}: a test in tests/e2e is `slow` or `nightly`; see CONTRIBUTING.md")
    items.sort(key=lambda item: LONG.index(item.path.name) if item.path.name in LONG else len(LONG))


@pytest.fixture(scope="session")
def python() -> Iterator[str]:
    """Yield a stand-in for Python, with warm_python.ENVIRONMENT: processes fork from one that has the imports.

    All tests share one server, because its imports would be a good part of every start. `run_tiny_*.sh` find it by the
    variable; `OWN_SERVER` gives them a separate one, as a user has.
    """
    with warm_python() as executable:
        os.environ[EXECUTABLE_VARIABLE] = executable
        yield executable
        del os.environ[EXECUTABLE_VARIABLE]
    assert not os.path.exists(executable)


@pytest.fixture(scope="session")
def small(python: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a quickstart folder with data, a model after 30 steps of SFT, and its merged weights; workers share it."""
    folder = tmp_path_factory.getbasetemp()
    out = (folder.parent if WORKER else folder) / "small"
    with open(out.with_suffix(".lock"), "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not os.fstat(lock.fileno()).st_size:
            pipeline(out, "--stage=data", "--stage=sft", "--stage=merge", "--sft=trainer.total_training_steps=30")
            lock.write("made\n")
    return out


@pytest.fixture(scope="session")
def vllm(python: str, small: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yield the base URL of vLLM's server on the merged weights of `small`."""
    from tests.e2e.vllm_server import serve  # it imports this file

    options = ("--dtype", "float32", "--max-model-len", "1024", "--enforce-eager")
    log = tmp_path_factory.mktemp("vllm") / "server.log"
    with serve(python, small / "sft" / "merged", log, *options) as url:
        yield url


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list]:
    """Make a folder with a model of random weights, version 0, and its versions 0, 1, 2; see versions.py."""
    from tests.e2e.versions import build_versions

    folder = tmp_path_factory.mktemp("versions")
    return folder, build_versions(folder)


def pipeline(out: Path, *arguments: str, timeout_s: float = 900, **environment: str) -> str:
    """Run the quickstart's pipeline and return its output; a failure shows it."""
    command = [sys.executable, "-m", "verl_ext.quickstart", "--out", str(out), *SMALL_DATA, *arguments]
    environ = os.environ | environment
    result = subprocess.run(command, cwd=REPO, env=environ, capture_output=True, text=True, timeout=timeout_s)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def launch(script: str, log: Path, *overrides: str, **environment: str) -> subprocess.Popen:
    """Start a launcher of recipe/retool in a separate session, without the doctor: tests break what it checks."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "ab") as sink:
        return subprocess.Popen(
            ["bash", str(REPO / "recipe" / "retool" / script), *overrides],
            env=os.environ | {"PYTHON": sys.executable, "DOCTOR": "0"} | environment,
            stdout=sink,
            stderr=sink,
            start_new_session=True,
        )


def launch_tiny(kind: str, out: Path, small: Path, *overrides: str, **environment: str) -> subprocess.Popen:
    """Start run_tiny_`kind`.sh with the data and the merged model of `small`; its log is `out`/log.txt."""
    inputs = {"DATA_DIR": str(small / "data"), "MODEL_PATH": str(small / "sft" / "merged"), "OUTPUT_DIR": str(out)}
    return launch(f"run_tiny_{kind}.sh", out / "log.txt", *overrides, **inputs | environment)


def run_to_end(process: subprocess.Popen, log: Path, timeout_s: float = 1200) -> None:
    """Wait for a launcher, and fail with the end of its log unless it succeeds in time."""
    try:
        status = process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        status = f"none after {timeout_s:.0f} s"
    finally:
        kill_tree(process.pid)
    assert status == 0, f"exit status {status}; the log ends with:\n{log.read_text(errors='replace')[-4000:]}"


def read_metrics(folder: Path, keep: Callable[[dict], bool] = lambda data: True) -> list[tuple[int, dict]]:
    """Read (step, metrics) of all starts of a run, in the order they were logged."""
    lines = [line for path in sorted(folder.glob("metrics*.jsonl")) for line in path.read_text().splitlines()]
    return [(r["step"], r["data"]) for r in map(json.loads, lines) if keep(r["data"])]
