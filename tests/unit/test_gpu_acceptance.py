"""The acceptance of a GPU machine: its stages run in small on a CPU, and any failure of one is reported."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from scripts.gpu_acceptance import __main__ as acceptance
from scripts.gpu_acceptance import learning, machine, runs, training, wheels
from scripts.gpu_acceptance.stage import Context, NotRun, Result, Row, Stage, run_stage

REPO = Path(__file__).resolve().parents[2]
# Stage -> rows of it that can fail on a CPU.
ON_TORCH = {"machine": 3, "log_probs": 3, "weights": 1, "actor_step": 2, "packing": 6, "sharing": 2}


@pytest.fixture
def context(tmp_path) -> Context:
    return Context("cpu", tmp_path)


def of(run, *packages: str, limit_s: float = 30, cuda_only: bool = False) -> Stage:
    return Stage("one", "a stage of a test", packages, run, limit_s, cuda_only)


def two_rows(context):
    yield Row("first", "1", "1", True)
    yield Row("told", "", "2")


def test_rows_come_in_order_and_one_without_an_expectation_is_no_failure(context):
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
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    (context.folder.parent / "pids").write_text(f"{os.getpid()} {child.pid}")
    time.sleep(600)


@pytest.mark.parametrize(
    ("run", "rows", "error"),
    [
        (wrong, 1, ""),
        (raises, 2, "ValueError: three was expected"),
        (dies, 2, "exit code -9"),
        (lambda context: iter(()), 0, "it has no row"),
    ],
)
def test_a_failure_is_reported_with_the_rows_before_it(run, rows, error, context):
    result = run_stage(of(run), context)
    assert not result.passed and len(result.rows) == rows and error in result.error
    assert "NOT OK" in acceptance.table([result])
    assert acceptance.summary([result]) == "0 passed, 1 failed (one), 0 not run"


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.nightly
def test_a_stage_that_hangs_is_ended_with_what_it_started(context):
    result = run_stage(of(hangs, limit_s=3), context)
    assert len(result.rows) == 2 and "not done after 3 s" in result.error
    assert not any(is_running(int(pid)) for pid in (context.folder / "pids").read_text().split())


INTERRUPTED = """
import sys
from scripts.gpu_acceptance import __main__ as acceptance
from tests.unit.test_gpu_acceptance import of, hangs, two_rows
from dataclasses import replace
acceptance.STAGES[:] = [replace(of(two_rows), name="zero"), of(hangs, limit_s=300)]
acceptance.main(["--device=cpu", "--out", sys.argv[1]])
"""


def test_a_command_that_is_interrupted_ends_its_stage_and_keeps_the_table_of_those_before(tmp_path):
    command = subprocess.Popen([sys.executable, "-c", INTERRUPTED, str(tmp_path)], cwd=REPO)
    try:
        deadline = time.monotonic() + 60
        while not (tmp_path / "pids").is_file() or not (tmp_path / "pids").read_text():
            assert time.monotonic() < deadline and command.poll() is None
            time.sleep(0.05)
        command.terminate()
        command.wait(30)
    finally:
        command.kill()
    assert command.returncode != 0
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 2 and not any(map(is_running, pids))
    assert "| zero | first | 1 | 1 | ok |" in (tmp_path / "acceptance.md").read_text()


def refuses(context):
    raise NotRun("vLLM finds no GPU")
    yield


@pytest.mark.parametrize(
    ("stage", "reason"),
    [
        (of(two_rows, "no-such-package"), "no-such-package is not installed"),
        (of(two_rows, "packaging<1"), "packaging<1 is needed,"),
        (of(two_rows, cuda_only=True), "a CPU has nothing of the kind"),
        (of(refuses), "vLLM finds no GPU"),
    ],
)
def test_what_cannot_run_says_why_and_is_neither_passed_nor_failed(stage, reason, context):
    result = run_stage(stage, context)
    assert reason in result.not_run and not result.rows and not result.passed
    assert acceptance.summary([result]) == "0 passed, 0 failed, 1 not run (one)"
    assert "| one | not run |" in acceptance.table([result])


PASSED, FAILED = Result("a", [Row("", "1", "1", True)]), Result("b", [Row("", "1", "2", False)])
NOT_RUN = Result("c", not_run="no vllm")


@pytest.mark.parametrize(
    ("results", "status"),
    [
        ([PASSED], 0),
        ([PASSED, FAILED, NOT_RUN], 1),
        ([PASSED, Result("d", error="no row")], 1),
        ([PASSED, NOT_RUN], 3),
        ([NOT_RUN], 3),
    ],
)
def test_exit_status_tells_a_failure_from_a_stage_that_did_not_run(results, status):
    assert acceptance.exit_status(results) == status


def test_all_stages_together_end_after_the_minutes_of_the_command(context):
    short = acceptance.run_next(of(hangs), context, left_s=2)
    assert "not done after 2 s" in short.error and [row.what for row in short.rows] == ["first", "told"]
    assert "run it alone" in acceptance.run_next(of(two_rows), context, left_s=0).not_run


def test_an_unknown_stage_is_refused_with_the_names_that_there_are(capsys):
    with pytest.raises(SystemExit) as stop:
        acceptance.main(["machin"])
    assert stop.value.code == 2
    assert "no such stage: machin. There are machine, log_probs" in capsys.readouterr().err


def test_nvcc_is_looked_for_as_setup_does(tmp_path, monkeypatch):
    def tool(name: str, release: str) -> str:
        file = tmp_path / name / "bin" / "nvcc"
        file.parent.mkdir(parents=True)
        file.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V1'\n")
        file.chmod(0o755)
        return str(tmp_path / name)

    for variable in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "path" / "bin"))
    monkeypatch.setattr(machine, "DEFAULT_NVCC", str(tmp_path / "default" / "bin" / "nvcc"))
    assert machine.nvcc_release() == ""
    tool("default", "13.0")
    assert machine.nvcc_release() == "13.0"
    tool("path", "13.1")
    assert machine.nvcc_release() == "13.1"
    monkeypatch.setenv("CUDA_PATH", tool("cuda_path", "13.2"))
    assert machine.nvcc_release() == "13.2"
    monkeypatch.setenv("CUDA_HOME", tool("cuda_home", "13.3"))
    assert machine.nvcc_release() == "13.3"
    monkeypatch.setenv("CUDA_HOME", "/nowhere")
    assert machine.nvcc_release() == "", "setup would refuse, too"


# Single stages --------------------------------------------------------------------------------------------------------


def test_the_gradient_of_the_logits_is_torchs_own_in_their_place():
    import torch

    torch.manual_seed(0)
    labels, upstream = torch.randint(0, 11, (300,)), torch.randn(300)
    leaf = torch.randn(300, 11, requires_grad=True)
    logits = leaf * 1  # a leaf has no place to give
    training.log_probs_of(logits, labels).backward(upstream)
    other = leaf.detach().clone().requires_grad_()
    other.log_softmax(-1).gather(-1, labels[:, None])[:, 0].backward(upstream)
    torch.testing.assert_close(leaf.grad, other.grad)
    assert torch.equal(logits.detach(), leaf.grad)


@pytest.mark.parametrize(
    ("text", "servers"),
    [
        ("(TaskRunner) LLMServerManager: ['192.0.2.2:41049']\n", 1),
        ("LLMServerManager: ['a:1']\nLLMServerManager: ['a:1', 'b:2']\n", 2),
        ("it stopped before\n", 0),
    ],
)
def test_servers_are_counted_as_verl_names_them_at_the_last_start(text, servers, tmp_path):
    (tmp_path / "log.txt").write_text(text)
    assert runs.servers_in(tmp_path / "log.txt") == servers


@pytest.mark.parametrize(
    ("last", "expected"), [({6: 2.5}, [True, True]), ({6: 2.505}, [True, False]), ({}, [False, False])]
)
def test_losses_that_differ_or_are_missing_are_not_those_of_a_cpu(last, expected):
    recorded = {1: 6.0, 2: 5.0, 3: 4.0, 4: 3.5, 5: 3.0, 6: 2.5}
    losses = {step: loss for step, loss in recorded.items() if step < 6} | last
    assert [row.ok for row in runs.against_recorded(losses, recorded)] == expected


@pytest.mark.parametrize(
    ("seen", "off", "ok"),
    [(10.29, "+2.9%", True), (9.71, "-2.9%", True), (10.31, "+3.1%", False), (9.6, "-4.0%", False)],
)
def test_a_peak_is_expected_within_the_margin_of_what_was_said(seen, off, ok):
    row = learning.against("the doctor", 10.0, seen)
    assert (row.expected, row.ok) == ("10 GiB, within 3%", ok) and row.seen.endswith(off)


def test_a_cpu_has_no_peak_to_compare():
    row = learning.against("the doctor", 10.0, 0.0)
    assert (row.expected, row.ok) == ("10 GiB", None)


def test_time_is_shared_out_over_the_steps_after_the_first(tmp_path):
    steps = [{"step": 9.0, "gen": 8.0}, {"step": 2.0, "gen": 1.0, "adv": 0.5}, {"step": 3.0, "gen": 2.0, "adv": 0.5}]
    lines = [{"step": i, "data": {f"timing_s/{k}": v for k, v in each.items()}} for i, each in enumerate(steps, 1)]
    (tmp_path / "metrics-1.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    each, parts = learning.times(tmp_path)
    assert each.seen == "9.00, 2.00, 3.00"
    assert parts.seen.startswith("gen 60%, old_log_prob 0%, adv 20%")  # 3 of 5 s, 1 of 5


# Wheels ---------------------------------------------------------------------------------------------------------------

PINS = """\
# a comment
torch==2.11.0 \\
    --hash=sha256:aa \\
    --hash=sha256:bb
    # via verl
flash-attn==2.8.3 \\
    --hash=sha256:cc
nvidia-cublas==13.1 ; sys_platform == 'linux' \\
    --hash=sha256:dd
typing-extensions==4.1 \\
    --hash=sha256:ee
vllm==0.24.0 --hash=sha256:ff
"""


@pytest.mark.parametrize(
    ("there", "needed"),
    [
        ("", ["torch", "nvidia-cublas", "typing-extensions", "vllm"]),
        ("torch==2.11.0+cu130\nnvidia_cublas==13.0\nTyping_Extensions==4.1", ["vllm"]),
        ("torch==2.11.0\ntyping_extensions==4.0", ["nvidia-cublas", "typing-extensions", "vllm"]),
        ("torch==2.10.0\nnvidia-cublas==13.0", ["torch", "nvidia-cublas", "typing-extensions", "vllm"]),
        ("torch==2.10.0\nnvidia-cublas==13.1", ["torch", "typing-extensions", "vllm"]),
    ],
)
def test_a_machine_needs_what_it_has_not_in_the_locked_version_and_keeps_the_cuda_of_its_torch(there, needed):
    pins = wheels.read_pins(PINS)
    assert wheels.lacking(pins, there) == needed
    assert pins["torch"].count("--hash") == 2 and pins["vllm"] == "vllm==0.24.0 --hash=sha256:ff"


def test_parts_are_no_larger_than_asked_for_and_join_to_the_same_bytes(tmp_path):
    file, again = tmp_path / "wheels.tar", tmp_path / "again"
    file.write_bytes(bytes(range(256)) * 4 + b"end")
    parts = wheels.split(file, tmp_path, 256)
    assert [part.stat().st_size for part in parts] == [256] * 4 + [3]
    wheels.join(tmp_path, again)
    assert again.read_bytes() == file.read_bytes()


def test_a_part_that_is_missing_or_damaged_is_named(tmp_path):
    file = tmp_path / "wheels.tar"
    file.write_bytes(b"abcdef")
    first, second, _ = wheels.split(file, tmp_path, 2)
    first.write_bytes(b"xb")
    second.unlink()
    with pytest.raises(SystemExit, match=r"wheels\.tar\.000 has another hash, wheels\.tar\.001 is missing"):
        wheels.join(tmp_path, tmp_path / "again")


# The command ----------------------------------------------------------------------------------------------------------


@pytest.mark.nightly
@pytest.mark.timeout(180)
def test_stages_on_torch_alone_pass_on_a_cpu_and_import_neither_verl_nor_what_only_it_brings(tmp_path):
    """A machine may have torch and transformers, and none of these."""
    absent = ("verl", "ray", "omegaconf", "hydra", "tensordict", "vllm", "wrapt", "datasets", "zmq")
    blocked = tmp_path / "blocked"
    for name in absent:
        (blocked / name).mkdir(parents=True)
        (blocked / name / "__init__.py").write_text("raise ImportError('not on this machine')")
    (blocked / "sitecustomize.py").write_text(
        f"""
import importlib.util as util
find = util.find_spec
util.find_spec = lambda name, *rest: None if name in {absent} else find(name, *rest)
"""
    )
    line = ["bash", str(REPO / "scripts" / "gpu_acceptance.sh"), "--device=cpu", *ON_TORCH, "buckets", "sleep"]
    environment = os.environ | {"PYTHON": sys.executable, "PYTHONPATH": str(blocked)}
    done = subprocess.run([*line, f"--out={tmp_path}"], capture_output=True, text=True, env=environment)
    assert done.returncode == 3, done.stdout + done.stderr
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in done.stdout.splitlines() if line[:1] == "|"]
    signs = {name: [row[4] for row in rows if row[0] == name and row[4]] for name in ON_TORCH}
    assert signs == {name: ["ok"] * count for name, count in ON_TORCH.items()}, done.stdout
    said = {row[0]: row[3] for row in rows if row[1] == "not run"}
    assert said["buckets"].startswith("verl==0.9.1 is not installed; ")
    assert said["sleep"] == "a CPU has nothing of the kind"
    assert done.stdout.splitlines()[-2] in (tmp_path / "acceptance.md").read_text()


def test_a_python_without_any_package_names_what_each_stage_lacks(tmp_path):
    command = [sys.executable, "-S", "-m", "scripts.gpu_acceptance", "machine", "--device=cpu", "--out", str(tmp_path)]
    ended = subprocess.run(command, cwd=REPO, env={"PATH": os.defpath}, capture_output=True, text=True)
    assert ended.returncode == 3, ended.stderr
    assert "packaging is not installed" in ended.stdout
