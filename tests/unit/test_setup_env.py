"""scripts/setup_env.sh says in one line what is missing, and picks the stack that the doctor compares with."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from verl_ext.versions import detect_hardware

ROOT = Path(__file__).resolve().parents[2]

# All that the checks call; a test replaces or removes one.
TOOLS = ("bash", "dirname", "uname", "getconf", "awk", "df", "git", "gcc", "cc", "python3")


@pytest.fixture
def checkout(tmp_path, monkeypatch) -> Path:
    """A folder with the script and no .venv; PATH is its `bin` with TOOLS only, where python3 is the running Python."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "setup_env.sh", tmp_path / "scripts")
    for tool in TOOLS:
        target = sys.executable if tool == "python3" else shutil.which(tool)
        replace(tmp_path / "bin" / tool, f'exec {target} "$@"')
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    for name in ("RETOOL_HARDWARE", "PYTHON", "CC"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def replace(tool: Path, script: str) -> None:
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)


def check(checkout: Path, argument: str = "--check", **environment: str) -> subprocess.CompletedProcess:
    command = ["/bin/bash", str(checkout / "scripts" / "setup_env.sh"), argument]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})


def test_check_passes_on_this_machine(checkout):
    done = check(checkout)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("[setup] ok: cpu stack")


@pytest.mark.parametrize(
    "tool, script, expected",
    [
        ("git", None, "git was not found"),
        ("uname", "echo Darwin arm64", "this is Darwin arm64, and the pinned wheels are for Linux x86_64"),
        ("getconf", "exit 1", "no glibc here"),
        ("df", "echo h; echo / 9 9 5242880 9% /", "5 GB are free"),
        ("python3", "echo 3.13", "python3 is 3.13). Install one"),
        ("python3", None, "python3 does not run). Install one"),
        ("python3", 'case "$2" in *venv*) exit 1;; *) echo 3.12;; esac', "apt install python3.12-venv"),
        ("python3", 'case "$2" in *libnuma*) exit 1;; *) echo 3.12;; esac', "apt install libnuma1"),
    ],
)
def test_what_is_missing_is_said_in_one_line(tool, script, expected, checkout):
    (checkout / "bin" / tool).unlink() if script is None else replace(checkout / "bin" / tool, script)
    done = check(checkout)
    assert done.returncode == 1
    assert expected in done.stderr
    assert done.stderr.startswith("[setup] error: ") and done.stderr.count("\n") == 1, done.stderr


def test_compiler_is_gcc_or_cc_or_what_CC_names(checkout):
    (checkout / "bin" / "gcc").unlink()
    assert check(checkout).returncode == 0
    (checkout / "bin" / "cc").unlink()
    assert "no C compiler was found" in check(checkout).stderr
    assert check(checkout, CC=str(checkout / "bin" / "git")).returncode == 0


@pytest.mark.parametrize("driver_exit, here, other", [(0, "gpu", "cpu"), (9, "cpu", "gpu")])
def test_setup_and_doctor_agree_on_the_hardware(driver_exit, here, other, checkout, monkeypatch):
    replace(checkout / "bin" / "nvidia-smi", f"exit {driver_exit}")
    replace(checkout / "bin" / "df", "echo h; echo / 9 9 99999999 9% /")
    assert detect_hardware() == here
    assert f"ok: {here} stack" in check(checkout).stdout
    monkeypatch.setenv("RETOOL_HARDWARE", other)
    assert detect_hardware() == other
    assert f"ok: {other} stack" in check(checkout).stdout


def test_unknown_hardware_and_unknown_argument_are_refused(checkout):
    assert "RETOOL_HARDWARE is 'tpu', expected cpu or gpu" in check(checkout, RETOOL_HARDWARE="tpu").stderr
    done = check(checkout, "--chekc")
    assert done.returncode == 1 and "unknown argument '--chekc'" in done.stderr
