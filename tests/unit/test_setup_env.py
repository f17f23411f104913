"""scripts/setup_env.sh says in one line what is missing, and picks the stack that the doctor compares with."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from verl_ext.versions import detect_hardware

ROOT = Path(__file__).resolve().parents[2]

# Everything that the checks call; a test replaces or removes one.
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
    ("tool", "script", "expected"),
    [
        ("git", None, "git was not found"),
        ("uname", "echo Darwin arm64", "this is Darwin arm64, and the pinned wheels are for Linux x86_64"),
        ("getconf", "exit 1", "this system has no glibc"),
        ("df", "echo h; echo / 9 9 5242880 9% /", "5 GB are free"),
        ("python3", "echo 3.14", "python3 is 3.14). Install one"),
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


@pytest.mark.parametrize(("driver_exit", "here", "other"), [(0, "gpu", "cpu"), (9, "cpu", "gpu")])
def test_setup_and_doctor_agree_on_the_hardware(driver_exit, here, other, checkout, monkeypatch):
    replace(checkout / "bin" / "nvidia-smi", f"exit {driver_exit}")
    replace(checkout / "bin" / "df", "echo h; echo / 9 9 99999999 9% /")
    monkeypatch.setenv("RETOOL_FLASH_ATTN", "0")
    assert detect_hardware() == here
    assert f"ok: {here} stack" in check(checkout).stdout
    monkeypatch.setenv("RETOOL_HARDWARE", other)
    assert detect_hardware() == other
    assert f"ok: {other} stack" in check(checkout).stdout


def test_unknown_hardware_and_unknown_argument_are_refused(checkout):
    assert "RETOOL_HARDWARE is 'tpu', expected cpu or gpu" in check(checkout, RETOOL_HARDWARE="tpu").stderr
    done = check(checkout, "--chekc")
    assert done.returncode == 1 and "unknown argument '--chekc'" in done.stderr


# flash-attn -----------------------------------------------------------------------------------------------------------

GPU_TOOLS = ("grep", "cut", "sort", "paste", "sed", "cat")
REAL = {tool: shutil.which(tool) for tool in (*GPU_TOOLS, "awk")}  # before a test has another PATH
NVCC = "echo 'Cuda compilation tools, release {}, V1'"


@pytest.fixture
def gpu(checkout, monkeypatch) -> Path:
    """A checkout on a machine with one GPU of capability 9.0, nvcc 13.0, 8 cores and 100 GB; every check passes."""
    bin = checkout / "bin"
    for tool in GPU_TOOLS:
        replace(bin / tool, f'exec {REAL[tool]} "$@"')
    replace(bin / "nvidia-smi", 'case "$1" in --query-gpu=compute_cap) echo 9.0;; esac')
    replace(bin / "df", "echo h; echo / 9 9 99999999 9% /")
    replace(bin / "nvcc", NVCC.format("13.0"))
    replace(bin / "g++", "exit 0")
    replace(bin / "nproc", "echo 8")
    replace(bin / "awk", f'case "$1" in */^MemAvailable/*) echo 100;; *) exec {REAL["awk"]} "$@";; esac')
    (checkout / "requirements").mkdir()
    shutil.copy(ROOT / "requirements" / "gpu.txt", checkout / "requirements")
    monkeypatch.setenv("CGROUP_ROOT", str(checkout / "root"))  # which has no control groups
    monkeypatch.setenv("CUDA_HOME", str(checkout))  # there may be another nvcc in /usr/local/cuda
    for name in ("RETOOL_FLASH_ATTN", "MAX_JOBS", "FLASH_ATTN_CUDA_ARCHS", "NVCC_THREADS", "CXX"):
        monkeypatch.delenv(name, raising=False)
    return checkout


def test_flash_attn_is_compiled_for_the_gpu_that_is_here(gpu):
    done = check(gpu)
    assert done.returncode == 0, done.stderr
    assert "flash-attn will be compiled by CUDA 13.0 for 90, 8 job(s) at a time" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("[setup] ok: gpu stack")


@pytest.mark.parametrize(
    ("tool", "script", "expected"),
    [
        ("nvcc", None, "nvcc was not found (PATH, CUDA_HOME, /usr/local/cuda)"),
        (
            "nvcc",
            NVCC.format("12.8"),
            "is from CUDA 12.8, but the locked torch is built for CUDA 13 and compiles with no other",
        ),
        ("nvcc", "echo nothing", "is from CUDA ?, but the locked torch is built for CUDA 13"),
        ("g++", None, "no C++ compiler was found"),
        ("python3", 'case "$2" in *Python.h*) exit 1;; *venv*) ;; *) echo 3.12;; esac', "apt install python3.12-dev"),
        (
            "nvidia-smi",
            'case "$1" in --query*) echo 7.5;; esac',
            "compute capability 7.x, and flash-attn needs 8, 9, 10",
        ),
    ],
)
def test_what_flash_attn_lacks_is_said_before_anything_is_installed(tool, script, expected, gpu):
    (gpu / "bin" / tool).unlink() if script is None else replace(gpu / "bin" / tool, script)
    done = check(gpu)
    assert done.returncode == 1 and expected in done.stderr, done.stderr
    assert "RETOOL_FLASH_ATTN=0 (slower, see --help)" in done.stderr or tool == "g++"
    assert done.stderr.startswith("[setup] error: ") and done.stderr.count("\n") == 1, done.stderr
    assert check(gpu, RETOOL_FLASH_ATTN="0").returncode == 0


@pytest.mark.parametrize(
    ("capabilities", "architectures"),
    [("8.0", "80"), ("8.6\\n8.9", "80"), ("8.9\\n9.0", "80;90"), ("10.3", "100"), ("12.0", "120"), ("", "all")],
)
def test_architectures_follow_the_gpus(capabilities, architectures, gpu):
    replace(gpu / "bin" / "nvidia-smi", f"""case "$1" in --query-gpu=compute_cap) printf '{capabilities}';; esac""")
    done = check(gpu)
    assert done.returncode == 0, done.stderr
    assert f"CUDA 13.0 for {architectures}" in done.stdout
    assert ("warning: nvidia-smi reports no compute capability" in done.stdout) == (capabilities == "")
    (gpu / "bin" / "nvidia-smi").unlink()  # an image is built where there is no GPU
    assert "CUDA 13.0 for all" in check(gpu, RETOOL_HARDWARE="gpu").stdout


VERSION_1 = "5:cpuset:/job\n4:memory:/job/step\n0::/\n"
V1 = "memory/job/memory.limit_in_bytes"


@pytest.mark.parametrize(
    ("memory_gb", "groups", "limits", "jobs"),  # 6 GB for each job
    [
        (100, "0::/", {"memory.max": "max"}, 8),
        (30, "0::/", {"memory.max": "max"}, 5),
        (3, "0::/", {"memory.max": "max"}, 1),
        (100, "0::/", {"memory.max": "20000000000"}, 3),
        (12, "0::/", {"memory.max": "99000000000"}, 2),
        (100, "0::/job/step", {"memory.max": "max", "job/memory.max": "20000000000", "job/step/memory.max": "max"}, 3),
        (100, VERSION_1, {V1: "20000000000", "memory/job/step/memory.limit_in_bytes": "9223372036854771712"}, 3),
        (100, "0::/", {V1: "20000000000"}, 8),
        (100, None, {"memory.max": "20000000000"}, 8),
    ],
    ids="cores memory little container container-larger nested version-1 of-others no-groups".split(),
)
def test_jobs_follow_cores_and_memory(memory_gb, groups, limits, jobs, gpu):
    replace(
        gpu / "bin" / "awk", f'case "$1" in */^MemAvailable/*) echo {memory_gb};; *) exec {REAL["awk"]} "$@";; esac'
    )
    files = {f"sys/fs/cgroup/{file}": limit for file, limit in limits.items()}
    files |= {} if groups is None else {"proc/self/cgroup": groups}
    for file, text in files.items():
        (gpu / "root" / file).parent.mkdir(parents=True, exist_ok=True)
        (gpu / "root" / file).write_text(f"{text}\n")
    assert f"for 90, {jobs} job(s) at a time" in check(gpu).stdout
    assert "for 90, 7 job(s)" in check(gpu, MAX_JOBS="7").stdout


def test_a_wheel_or_no_flash_attn_needs_no_compiler(gpu, tmp_path):
    (gpu / "bin" / "nvcc").unlink()
    assert check(gpu, RETOOL_FLASH_ATTN="0").returncode == 0
    wheel = tmp_path / "flash_attn-2.8.3-py3-none-any.whl"
    assert "is no file" in check(gpu, RETOOL_FLASH_ATTN=str(wheel)).stderr
    wheel.touch()
    assert check(gpu, RETOOL_FLASH_ATTN=str(wheel)).returncode == 0
    assert "expected 0, 1 or a path to a wheel" in check(gpu, RETOOL_FLASH_ATTN="no").stderr


def test_a_later_call_keeps_the_choice(gpu):
    (gpu / "bin" / "nvcc").unlink()
    (gpu / ".venv").mkdir()
    (gpu / ".venv" / "retool-env.txt").write_text("gpu\nflash-attn 0\n")
    assert check(gpu).returncode == 0
    assert "nvcc was not found" in check(gpu, RETOOL_FLASH_ATTN="1").stderr


# pip's configuration --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("no_index", "times"), [("True", 1), ("0", 0)])  # the variable overrides the file
def test_uv_gets_each_line_of_pips_configuration_as_an_option(no_index, times, tmp_path):
    (tmp_path / "pip.conf").write_text(
        "[global]\nextra-index-url =\n    https://a.example/simple\n    https://b.example/simple\n"
        "find-links =\n    /wheels\n    /more\ntrusted-host = a.example b.example\nno-index = yes\n"
    )
    (tmp_path / "bin").mkdir()
    replace(tmp_path / "bin" / "python", f'exec {sys.executable} "$@"')
    script = (ROOT / "scripts" / "setup_env.sh").read_text()
    function = "tell_uv() {" + script.partition("tell_uv() {")[2].partition("\n}\n")[0] + "\n}\n"
    command = ["/bin/bash", "-c", function + "UV_OPTIONS=(); tell_uv; printf '%s\\n' \"${UV_OPTIONS[@]}\""]
    environment = {"VENV": str(tmp_path), "PIP_CONFIG_FILE": str(tmp_path / "pip.conf"), "PIP_NO_INDEX": no_index}
    told = subprocess.run(command, capture_output=True, text=True, env=environment, check=True).stdout.splitlines()
    expected = {"--index=https://a.example/simple", "--index=https://b.example/simple", "--find-links=/wheels"}
    assert expected | {"--find-links=/more", "--allow-insecure-host=b.example"} <= set(told)
    assert told.count("--no-index") == times
