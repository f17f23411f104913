"""scripts/ray_cluster.sh, recipe/ray_job.sh and the launchers: what they pass to Ray, and what an old Ray left.

Two real nodes: tests/e2e/test_two_nodes.py.
"""

import os
import subprocess
from pathlib import Path
from socket import create_server

import pytest

REPO = Path(__file__).resolve().parents[2]


@pytest.fixture
def fake_python(tmp_path: Path) -> str:
    """Stands in for Python: prints the arguments, one a line, without the program of `-c`."""
    path = tmp_path / "python"
    path.write_text('#!/usr/bin/env bash\nshift 2\nprintf "%s\\n" "$@"\n')
    path.chmod(0o755)
    return str(path)


def call(script: str, *arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess:
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(cwd),
        "RAY_AUTH_TOKEN": "0" * 32,
        "DOCTOR": "0",
    } | environment
    command = ["bash", str(REPO / script), *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=20)


def test_head_has_a_dashboard_only_if_asked(tmp_path: Path, fake_python: str):
    plain = call("scripts/ray_cluster.sh", "head", cwd=tmp_path, PYTHON=fake_python).stdout.splitlines()
    assert plain[:3] == ["start", "--head", "--port=6379"] and "--include-dashboard=false" in plain
    asked = call("scripts/ray_cluster.sh", "head", cwd=tmp_path, PYTHON=fake_python, DASHBOARD="true")
    assert "--include-dashboard=true" in asked.stdout.splitlines()


def test_worker_joins_the_head_with_its_own_address_and_sizes(tmp_path: Path, fake_python: str):
    sizes = {"NODE_IP": "127.0.0.3", "NUM_GPUS": "1", "NUM_CPUS": "16"}
    result = call("scripts/ray_cluster.sh", "worker", "10.0.0.1:6379", cwd=tmp_path, PYTHON=fake_python, **sizes)
    expected = {"--address=10.0.0.1:6379", "--node-ip-address=127.0.0.3", "--num-gpus=1", "--num-cpus=16"}
    assert expected < set(result.stdout.splitlines())


@pytest.mark.parametrize("arguments", [(), ("worker",), ("wait",), ("start",)])
def test_cluster_script_says_what_is_missing(arguments: tuple[str, ...], tmp_path: Path, fake_python: str):
    result = call("scripts/ray_cluster.sh", *arguments, cwd=tmp_path, PYTHON=fake_python)
    assert result.returncode != 0
    assert any(
        hint in result.stderr
        for hint in ("give the head as HOST:PORT", "give the number of nodes", "on the first machine")
    )


def test_job_runs_the_launcher_with_its_variables_and_overrides(tmp_path: Path, fake_python: str):
    result = call(
        *("recipe/ray_job.sh", "run_qwen2-32b_dapo.sh", "trainer.save_freq=10"),
        cwd=tmp_path,
        PYTHON=fake_python,
        NNODES="2",
        TRAIN_FILE="my data.parquet",
        REPO="/shared/verl-retool",
    )
    assert result.stdout.splitlines() == [
        *("job", "submit", "--address", "http://127.0.0.1:8265", "--"),
        *("env", "RAY_AUTH_MODE=token", "TRAIN_FILE=my data.parquet", "NNODES=2", "DOCTOR=0"),
        *("bash", "/shared/verl-retool/recipe/retool/run_qwen2-32b_dapo.sh", "trainer.save_freq=10"),
    ]


def test_job_names_the_launchers_there_are(tmp_path: Path, fake_python: str):
    unknown = call("recipe/ray_job.sh", "run_34b.sh", cwd=tmp_path, PYTHON=fake_python)
    assert unknown.returncode == 1 and "no recipe/retool/run_34b.sh" in unknown.stderr
    assert "run_qwen2-32b_dapo.sh" in unknown.stderr
    assert "expected a launcher" in call("recipe/ray_job.sh", cwd=tmp_path, PYTHON=fake_python).stderr


@pytest.fixture
def noted(tmp_path: Path) -> Path:
    """The file in which Ray notes the address of the cluster that was started last."""
    path = tmp_path / "ray" / "ray_current_cluster"
    path.parent.mkdir()
    return path


def start(tmp_path: Path, fake_python: str, launcher: str, *overrides: str, **environment: str):
    present = dict.fromkeys(("MODEL_PATH", "TRAIN_FILE", "VAL_FILE", "DATA_DIR", "RAY_TMPDIR"), str(tmp_path))
    environment = present | {"PYTHON": fake_python, "OUTPUT_DIR": str(tmp_path / "out")} | environment
    return call(f"recipe/retool/{launcher}", *overrides, cwd=tmp_path, **environment)


@pytest.mark.parametrize("launcher", ["run_qwen2-32b_dapo.sh", "run_tiny_dapo.sh"])
def test_launcher_forgets_a_ray_that_is_gone(noted: Path, tmp_path: Path, fake_python: str, launcher: str):
    with create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        noted.write_text(address)
        assert start(tmp_path, fake_python, launcher).returncode == 0
        assert noted.read_text() == address, "that Ray runs"
    printed = start(tmp_path, fake_python, launcher, "--cfg", "job")
    assert printed.returncode == 0 and noted.exists(), "printing a run changes nothing"
    assert start(tmp_path, fake_python, launcher, RAY_ADDRESS="10.0.0.1:6379").returncode == 0
    assert noted.exists(), "RAY_ADDRESS is what counts"
    started = start(tmp_path, fake_python, launcher)
    assert started.returncode == 0 and f"no Ray answers at {address}" in started.stderr
    assert not noted.exists()
    assert start(tmp_path, fake_python, launcher).stderr == ""
