"""A wheel that is built here and installed elsewhere: it has every file, and its commands work in any folder."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

import verl_ext
from verl_ext.__main__ import COMMANDS
from verl_ext.versions import PYTHON_VERSIONS

REPO = Path(__file__).resolve().parents[2]
TRACKED = subprocess.run(["git", "ls-files"], cwd=REPO, check=True, capture_output=True, text=True).stdout.splitlines()
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
SHIPPED = ("configs", "data", "recipe", "requirements")
WRITTEN = ("data/kept.parquet", "data/kept.pass_rates.jsonl", "data/kept.samples/settings.json")  # by our commands


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, source = tmp_path_factory.mktemp("wheel"), tmp_path_factory.mktemp("source")
    for name in TRACKED:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPO / name, source / name)
    for name in WRITTEN:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).touch()
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", folder, source]
    subprocess.run(command, check=True)
    return next(folder.glob("verl_retool-*.whl"))


@pytest.fixture(scope="module")
def bare(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel, beside no checkout: the `bin` of it. Other packages are those of this Python."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", "--no-index", wheel]
    subprocess.run(pip, check=True, env=ENVIRONMENT)
    site = next((folder / "lib").glob("python*/site-packages"))
    (site / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")  # the .pth files there do not count
    return folder / "bin"


def retool(bare: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [bare / "retool", *arguments]
    return subprocess.run(command, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=200)


def test_each_python_that_is_tested_is_declared_and_may_be_set_up() -> None:
    project = tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = [each.rpartition(" ")[2] for each in project["classifiers"] if each.startswith("Programming Language")]
    assert declared[1:] == [*PYTHON_VERSIONS]
    script = (REPO / "scripts" / "setup_env.sh").read_text(encoding="utf-8")
    [line] = [line for line in script.splitlines() if line.startswith("is_supported()")]
    for version in (*PYTHON_VERSIONS, "3.14", "3.10"):
        status = subprocess.run(["bash", "-c", f"{line}\nis_supported {version}"]).returncode
        assert (status == 0) == (version in PYTHON_VERSIONS)


def test_a_wheel_has_all_files_of_the_package_and_what_it_reads_beside_it(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    expected = {name for name in TRACKED if name.startswith("verl_ext/")}
    expected |= {f"verl_ext/shipped/{name}" for name in TRACKED if name.split("/")[0] in SHIPPED}
    assert {"verl_ext/py.typed", "verl_ext/shipped/configs/tiny_dapo.yaml"} <= expected
    assert expected - names == set()
    assert not [name for name in names if "/kept." in name], "a user's own data"
    assert not [name for name in names if "__pycache__" in name or name.startswith(("tests/", "scripts/"))]


def test_the_command_lists_every_command_and_says_its_version(bare: Path, tmp_path: Path) -> None:
    said = retool(bare, tmp_path, "--help").stdout
    assert [line.split()[0] for line in said.splitlines() if line.startswith("  ")] == list(COMMANDS)
    assert retool(bare, tmp_path, "--version").stdout == f"verl-retool {verl_ext.__version__}\n"


def test_a_wrong_command_is_answered_with_the_right_ones(bare: Path, tmp_path: Path) -> None:
    done = retool(bare, tmp_path, "docter")
    assert done.returncode == 1 and "'docter'" in done.stderr and "doctor" in done.stderr


LIGHT = ("sandbox", "ledger", "checkpoints", "traces", "environments", "gateway", "fleet")  # the others take seconds


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in LIGHT else pytest.mark.nightly) for n in COMMANDS])
def test_each_command_is_there(name: str, bare: Path, tmp_path: Path) -> None:
    done = retool(bare, tmp_path, name, "--help")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: ")


def test_without_the_training_stack_a_command_says_what_installs_it(bare: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-S", "-m", "verl_ext", "doctor"]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True)
    assert done.returncode == 1 and "setup_env.sh" in done.stderr and "Traceback" not in done.stderr


def test_the_doctor_reads_the_configurations_of_the_wheel(bare: Path, tmp_path: Path) -> None:
    """Relative paths count from the folder of the command; the agent loops come with the package."""
    (tmp_path / "mine.parquet").write_bytes(b"no table")
    mine = [f"data.{part}_files=mine.parquet" for part in ("train", "val")]
    done = retool(bare, tmp_path, "doctor", "--json", "--quick", "--config-name", "qwen2-32b_dapo", *mine)
    findings = json.loads(done.stdout)["findings"]
    said = {topic: [each for each in findings if each["topic"] == topic] for topic in ("names", "data")}
    assert [each["level"] for each in said["names"]] == ["OK"], said["names"]
    assert all("does not exist" not in each["message"] for each in said["data"]), said["data"]
    assert any(str(tmp_path / "mine.parquet") in each["message"] for each in said["data"]), said["data"]


def test_the_verifier_grades_a_file(bare: Path, tmp_path: Path) -> None:
    row = {"response": "It is \\boxed{4}.", "ground_truth": "4", "data_source": "mine"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    done = retool(bare, tmp_path, "grade", "--input", "rows.jsonl", "--output", "graded.jsonl")
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "graded.jsonl").read_text())["acc"] == 1
