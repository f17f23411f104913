"""The acceptance of a GPU machine: its stages run in small on a CPU, and one that breaks is told, whatever it does."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.gpu import stage as stages
from tests.gpu.stage import Context, NotRun, Row, Stage, run_stage

REPO = Path(__file__).resolve().parents[2]
ON_TORCH = ("machine", "log_probs", "weights", "sft_step", "actor_step", "packing")


@pytest.fixture
def context(tmp_path) -> Context:
    return Context("cpu", tmp_path, tmp_path / "site")


def of(run, *packages: str, limit_s: int = 30, cuda_only: bool = False) -> Stage:
    return Stage("one", "a stage of a test", packages, run, limit_s, cuda_only)


def two_rows(context):
    yield Row("first", "1", "1", True)
    yield Row("told", "", "2")


def test_rows_come_in_order_and_a_told_one_is_no_failure(context):
    shown = []
    result = run_stage(of(two_rows), context, show=shown.append)
    assert [row.what for row in result.rows] == [row.what for row in shown] == ["first", "told"]
    assert result.passed and not result.error


def wrong(context):
    yield Row("first", "1", "2", False)


def raises(context):
    yield from two_rows(context)
    raise ValueError("three was expected")


def dies(context):
    yield from two_rows(context)
    os.kill(os.getpid(), signal.SIGKILL)


def hangs(context):
    yield from two_rows(context)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    (context.folder / "pid").write_text(str(child.pid))
    time.sleep(600)


def says_nothing(context):
    return iter(())


@pytest.mark.parametrize(
    ("run", "rows", "error"),
    [
        (wrong, 1, ""),
        (raises, 2, "ValueError: three was expected"),
        (dies, 2, "exit code -9"),
        (says_nothing, 0, "it has no row"),
    ],
)
def test_a_failure_is_told_with_the_rows_before_it(run, rows, error, context):
    result = run_stage(of(run), context)
    assert not result.passed and len(result.rows) == rows and error in result.error
    assert "NOT OK" in stages.table([result])
    assert stages.summary([result]) == "0 passed, 1 failed (one), 0 not run"


def test_a_stage_that_hangs_is_ended_with_what_it_started(context):
    result = run_stage(of(hangs, limit_s=3), context)
    assert len(result.rows) == 2 and "not done after 3 s" in result.error
    pid = int((context.folder / "one" / "pid").read_text())
    deadline = time.monotonic() + 10
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not is_running(pid)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def refuses(context):
    raise NotRun("flash-attn is not built")
    yield


@pytest.mark.parametrize(
    ("stage", "reason"),
    [
        (of(two_rows, "no-such-package"), "no-such-package is not installed"),
        (of(two_rows, "packaging<1"), "packaging<1 is needed,"),
        (of(two_rows, cuda_only=True), "a CPU has nothing of the kind"),
        (of(refuses), "flash-attn is not built"),
    ],
)
def test_what_cannot_run_says_why_and_is_neither_passed_nor_failed(stage, reason, context):
    result = run_stage(stage, context)
    assert reason in result.not_run and not result.rows and not result.passed
    assert stages.summary([result]) == "0 passed, 0 failed, 1 not run (one)"
    assert "| one | not run |" in stages.table([result])


def test_no_stage_is_longer_than_eight_minutes_and_each_has_a_name_of_its_own():
    from tests.gpu.stages import STAGES

    assert len(STAGES) >= 8 and len({stage.name for stage in STAGES}) == len(STAGES)
    assert all(stage.limit_s <= 8 * 60 for stage in STAGES)


def test_an_unknown_stage_is_refused_with_the_names_that_there_are(capsys):
    from tests.gpu.__main__ import main

    with pytest.raises(SystemExit):
        main(["machin"])
    assert "no such stage: machin. There are machine, log_probs" in capsys.readouterr().err


# The command ----------------------------------------------------------------------------------------------------------


def acceptance(*arguments: str, out: Path) -> subprocess.CompletedProcess:
    command = ["bash", str(REPO / "scripts" / "gpu_acceptance.sh"), *arguments, f"--out={out}"]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHON": sys.executable})


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_stages_on_torch_alone_pass_on_a_cpu(tmp_path):
    done = acceptance("--device=cpu", *ON_TORCH, "flash_attn", out=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    results = {each["name"]: each for each in json.loads((tmp_path / "acceptance.json").read_text())}
    assert [*results] == [*ON_TORCH[:5], "flash_attn", "packing"]
    assert results["flash_attn"]["not_run"] == "a CPU has nothing of the kind"
    for name in ON_TORCH:
        rows = results[name]["rows"]
        assert any(row["ok"] for row in rows) and all(row["ok"] is not False for row in rows), rows
    written = (tmp_path / "acceptance.md").read_text().splitlines()
    assert [line for line in done.stdout.splitlines() if line.startswith("|")] == [
        x for x in written if x.startswith("|")
    ]


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_stages_on_torch_alone_import_neither_verl_nor_what_only_it_brings(tmp_path):
    """The machine that is lent has torch and transformers, and neither of these."""
    absent = ("verl", "ray", "omegaconf", "hydra", "tensordict", "vllm", "wrapt", "datasets", "zmq")
    for name in absent:
        (tmp_path / "blocked" / name).mkdir(parents=True)
        (tmp_path / "blocked" / name / "__init__.py").write_text("raise ImportError('not on this machine')")
    program = f"""
import importlib.util as util, sys
find = util.find_spec
util.find_spec = lambda name, *rest: None if name in {absent} else find(name, *rest)
sys.path.insert(0, {str(tmp_path / "blocked")!r})
from tests.gpu.__main__ import main
sys.exit(main(["--device=cpu", "machine", "sft_step", "packing", "--out={tmp_path / "out"}"]))
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=REPO, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 passed (machine, sft_step, packing)" in done.stdout
