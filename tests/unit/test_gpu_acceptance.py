"""The acceptance of a GPU machine: its stages run in small on a CPU, and any failure of one is reported."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from tests.gpu import machine, runs, training
from tests.gpu.report import summary, table
from tests.gpu.stage import Context, NotRun, Row, Stage, run_stage
from verl_ext.memory.shape import ModelShape

REPO = Path(__file__).resolve().parents[2]
# Stage -> rows of it that can fail on a CPU.
ON_TORCH = {"machine": 3, "log_probs": 3, "weights": 1, "sft_step": 2, "actor_step": 2, "packing": 6, "sharing": 2}


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
    assert "NOT OK" in table([result])
    assert summary([result]) == "0 passed, 1 failed (one), 0 not run"


def test_a_stage_that_hangs_is_ended_with_what_it_started(context):
    result = run_stage(of(hangs, limit_s=3), context)
    assert len(result.rows) == 2 and "not done after 3 s" in result.error
    pid = int((context.folder / "one" / "pid").read_text())
    deadline = time.monotonic() + 10
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not is_running(pid)


BROKEN_OFF = """
import os, subprocess, sys, time
from tests.gpu import __main__ as acceptance, stages
from tests.gpu.stage import Stage

def hang(context):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"], start_new_session=True)
    (context.folder.parent / "pids").write_text(f"{os.getpid()} {child.pid}")
    time.sleep(300)
    yield

stages.STAGES[:] = [Stage("one", "a stage of a test", (), hang)]
acceptance.main(["one", "--device=cpu", "--out", sys.argv[1]])
"""


def test_a_command_that_is_ended_ends_its_stage_with_what_it_started(tmp_path):
    acceptance = subprocess.Popen([sys.executable, "-c", BROKEN_OFF, str(tmp_path)], cwd=REPO)
    try:
        deadline = time.monotonic() + 60
        while not (tmp_path / "pids").is_file() or not (tmp_path / "pids").read_text():
            assert time.monotonic() < deadline and acceptance.poll() is None
            time.sleep(0.05)
        acceptance.terminate()
        acceptance.wait(30)
    finally:
        acceptance.kill()
    assert acceptance.returncode != 0
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 2 and not any(map(is_running, pids))


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
    assert summary([result]) == "0 passed, 0 failed, 1 not run (one)"
    assert "| one | not run |" in table([result])


def test_flash_attention_is_not_built_and_a_wheel_of_it_is_installed(context, tmp_path, monkeypatch):
    wheels, stage = tmp_path / "wheels", of(machine.check_flash_attention)
    wheels.mkdir()
    (wheels / "flash_attn-2.8.3.tar.gz").write_bytes(b"the source")
    found = run_stage(stage, replace(context, wheels=wheels))
    assert "no wheel of it is in --wheels FOLDER. It is not built here: 22 of its 73 files took 9" in found.not_run
    with zipfile.ZipFile(wheels / "flash_attn-2.8.3-py3-none-any.whl", "w") as wheel:
        wheel.writestr("flash_attn.py", "__version__ = '2.8.3'\n")
        wheel.writestr(
            "flash_attn-2.8.3.dist-info/METADATA", "Metadata-Version: 2.1\nName: flash_attn\nVersion: 2.8.3\n"
        )
        wheel.writestr(
            "flash_attn-2.8.3.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr("flash_attn-2.8.3.dist-info/RECORD", "")
    context.site.mkdir()
    monkeypatch.syspath_prepend(context.site)
    found = run_stage(stage, replace(context, wheels=wheels))
    assert found.passed and found.rows == [Row("flash-attn", "2.8.3", "2.8.3", True)]


def test_no_stage_is_longer_than_eight_minutes_and_each_has_a_name_of_its_own():
    from tests.gpu.stages import STAGES

    assert len(STAGES) >= 8 and len({stage.name for stage in STAGES}) == len(STAGES)
    assert all(stage.limit_s <= 8 * 60 for stage in STAGES)


@pytest.fixture
def tools(tmp_path, monkeypatch):
    """`tools(NAME, RELEASE)` puts an nvcc into a folder, which it returns; at first there is none, and no ninja."""

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
    return tool


def test_nvcc_is_looked_for_where_the_set_up_looks(tools, monkeypatch):
    assert machine.nvcc_release() == ""
    tools("default", "13.0")
    assert machine.nvcc_release() == "13.0"
    tools("path", "13.1")
    assert machine.nvcc_release() == "13.1"
    monkeypatch.setenv("CUDA_PATH", tools("cuda_path", "13.2"))
    assert machine.nvcc_release() == "13.2"
    monkeypatch.setenv("CUDA_HOME", tools("cuda_home", "13.3"))
    assert machine.nvcc_release() == "13.3"
    monkeypatch.setenv("CUDA_HOME", "/nowhere")
    assert machine.nvcc_release() == "", "the set-up would refuse, too"


def test_a_missing_compiler_is_told_and_fails_no_stage(tools):
    nvcc, ninja = machine._check_compilers("13.0")
    assert (nvcc.seen, nvcc.ok, ninja.seen, ninja.ok) == ("none", None, "none", None)
    tools("path", "13.1")
    assert next(machine._check_compilers("13.0")) == Row("nvcc", "13.*", "13.1", True)
    assert next(machine._check_compilers("12.8")) == Row("nvcc", "12.*", "13.1", None)


# Single stages --------------------------------------------------------------------------------------------------------


def test_a_training_step_has_the_model_and_the_tokens_of_its_options(context):
    """The plan is the doctor's: 4096 tokens of the 0.6B without gradient checkpointing, as in test_estimate.py."""
    plan = training.plan_of(replace(context, shape="Qwen/Qwen3-0.6B", tokens=4096, checkpointing=False))
    assert (plan.shape.layers, plan.shape.hidden, plan.shape.parameters) == (28, 1024, 596_049_920)
    assert (plan.tokens, plan.checkpointing, plan.keeps_logits) == (4096, False, False)
    assert training.plan_of(replace(context, device="cuda")).tokens == 10_240
    with pytest.raises(ValueError, match="--shape Qwen/Qwen9: expected a folder with config.json, or a name such as"):
        training.plan_of(replace(context, shape="Qwen/Qwen9"))


@pytest.fixture
def one_thread():
    """Use one thread, as the command does on a CPU: the sums are small, and processes outnumber cores."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.nightly
def test_a_training_step_of_another_model_runs_without_checkpointing(one_thread, context, tmp_path):
    shape = ModelShape("qwen2", 2, 32, 64, 2, 1, 16, 96, False)
    (tmp_path / "config.json").write_text(json.dumps(shape.config()))
    options = {"shape": str(tmp_path), "tokens": 40, "checkpointing": False, "keep_logits": True}
    rows = [*training.check_sft_step(replace(context, **options))]
    # embedding and head 2 x 96 x 32, norm 32; a layer: q, o 2 x 32 x 32, k, v 2 x 32 x 16, biases 32 + 2 x 16, norms
    # 2 x 32, MLP 3 x 32 x 64: 9,344; together 24,864 parameters of 4 bytes, .09 MiB
    assert shape.parameters == 24_864
    assert rows[0].seen == "0.1 MiB of weights, 2 x 40 tokens"
    assert [row.ok for row in rows if row.ok is not None] == [True, True]


@pytest.mark.parametrize("keep_logits", [False, True])
def test_the_gradient_of_the_logits_is_torchs_own_wherever_it_is_put(keep_logits):
    import torch

    torch.manual_seed(0)
    labels, upstream = torch.randint(0, 11, (300,)), torch.randn(300)
    leaf = torch.randn(300, 11, requires_grad=True)
    logits = leaf * 1  # a leaf has no place to give
    training.log_probs_of(logits, labels, keep_logits=keep_logits).backward(upstream)
    other = leaf.detach().clone().requires_grad_()
    other.log_softmax(-1).gather(-1, labels[:, None])[:, 0].backward(upstream)
    torch.testing.assert_close(leaf.grad, other.grad)
    assert torch.equal(logits.detach(), leaf.detach()) is keep_logits


@pytest.fixture
def evaluated(monkeypatch) -> dict[str, str]:
    """Stands in for an evaluation's command: notes its model, and writes a result of 8 samples, 1.5 calls each."""
    seen = {}

    def run(command, log, **environment):
        out = Path(command[command.index("--out") + 1])
        seen["model"] = command[command.index("--model") + 1]
        out.mkdir(parents=True)
        samples, calls = {"wanted": 8, "judged": 8}, 0.0 if seen["model"].endswith("random") else 1.5
        tools = {"tool/calls": calls, "tool/ok_rate": 0.75}
        (out / "result.json").write_text(json.dumps({"samples": samples, "tools": tools}))

    @contextmanager
    def running_server():
        yield "http://127.0.0.1:1"

    monkeypatch.setattr(runs, "run", run)
    monkeypatch.setattr(runs, "make_inputs", lambda folder: {"MODEL_PATH": "a/random", "DATA_DIR": "data"})
    monkeypatch.setattr("verl_ext.sandbox.launch.running_server", running_server)
    return seen


def test_an_evaluation_takes_the_model_that_learned_to_call_and_counts_its_calls(evaluated, context):
    stage = replace(context, folder=context.folder / "evaluation")
    model, judged, calls = runs.check_evaluation(stage)
    assert "random weights: no calls are expected" in model.seen and judged.ok
    assert (calls.ok, calls.seen.split(",")[0]) == (None, "0")

    (context.folder / "rl" / "policy").mkdir(parents=True)
    shutil.rmtree(stage.folder)
    model, judged, calls = runs.check_evaluation(stage)
    assert evaluated["model"] == str(context.folder / "rl" / "policy") and "of the stage rl" in model.seen
    assert calls == Row("tool calls", ">= 1", "12, 75% of them ran well", True)


def test_a_model_that_learned_to_call_and_does_not_is_a_failure(evaluated, context, monkeypatch):
    monkeypatch.setattr("verl_ext.evaluation.checkpoint.find_checkpoint", lambda run: run)
    monkeypatch.setattr("verl_ext.evaluation.checkpoint.merge", lambda run: Path("merged/random"))
    *_, calls = runs.check_evaluation(replace(context, folder=context.folder / "evaluation", run=Path("outputs/run")))
    assert evaluated["model"] == "merged/random" and calls.ok is False


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


def test_losses_that_differ_or_are_missing_are_not_those_of_a_cpu():
    recorded = {1: 6.0, 2: 5.0, 3: 4.0, 4: 3.5, 5: 3.0, 6: 2.5}
    for losses, expected in {
        (1.0, 1.0): [True, True],
        (1.0, 1.002): [True, False],
        (1.0, None): [False, False],
    }.items():
        last = {6: 2.5 * losses[1]} if losses[1] else {}
        rows = runs._against_recorded({**recorded, 6: 0} | last if last else dict(list(recorded.items())[:5]), recorded)
        assert [row.ok for row in rows] == expected


# pytest ---------------------------------------------------------------------------------------------------------------


def test_torch_asks_nvml_and_not_cuda_when_test_modules_are_imported(tmp_path):
    """They import verl, which asks torch for a GPU (its utils/device.py:61).

    A stage is forked from pytest's process, and no fork of a process that has asked CUDA can use it.
    """
    (tmp_path / "test_asks.py").write_text("import os; print('asks', os.environ.get('PYTORCH_NVML_BASED_CUDA_CHECK'))")
    program = [sys.executable, "-m", "pytest", "-s", "-m", "gpu", "--collect-only", "-p", "no:cacheprovider"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTORCH_NVML_BASED_CUDA_CHECK"}
    paths = ["tests/gpu", str(tmp_path / "test_asks.py")]
    done = subprocess.run([*program, *paths], cwd=REPO, env=environment, capture_output=True, text=True)
    assert "asks 1\n" in done.stdout and "test_stage[rl]" in done.stdout, done.stdout + done.stderr


# The command ----------------------------------------------------------------------------------------------------------


@pytest.mark.nightly
@pytest.mark.timeout(180)
def test_stages_on_torch_alone_pass_on_a_cpu_and_import_neither_verl_nor_what_only_it_brings(tmp_path):
    """The machine that is lent has torch and transformers, and none of these."""
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
    stages = (*ON_TORCH, "flash_attn", "buckets")
    line = ["bash", str(REPO / "scripts" / "gpu_acceptance.sh"), "--device=cpu", *stages, f"--out={tmp_path / 'out'}"]
    environment = os.environ | {"PYTHON": sys.executable, "PYTHONPATH": str(blocked)}
    done = subprocess.run(line, capture_output=True, text=True, env=environment)
    assert done.returncode == 3, done.stdout + done.stderr
    results = {each["name"]: each for each in json.loads((tmp_path / "out" / "acceptance.json").read_text())}
    assert [*results] == [*[*ON_TORCH][:5], "flash_attn", *[*ON_TORCH][5:], "buckets"]
    assert results["flash_attn"]["not_run"] == "a CPU has nothing of the kind"
    assert results["buckets"]["not_run"].startswith("verl==0.9.1 is not installed; ")
    for name, count in ON_TORCH.items():
        assert [row["ok"] for row in results[name]["rows"] if row["ok"] is not None] == [True] * count, results[name]
    written = (tmp_path / "out" / "acceptance.md").read_text().split("\n\n")[0].splitlines()
    assert [line for line in done.stdout.splitlines() if line.startswith("|")] == written


def test_a_python_without_any_package_names_what_each_stage_lacks(tmp_path):
    command = [sys.executable, "-S", "-m", "tests.gpu", "machine", "--device", "cpu", "--out", str(tmp_path)]
    ended = subprocess.run(command, cwd=Path(__file__).parents[2], env={"PATH": os.defpath}, capture_output=True)
    assert ended.returncode == 3, ended.stderr.decode()
    assert "psutil is not installed" in ended.stdout.decode() or "packaging is not installed" in ended.stdout.decode()
