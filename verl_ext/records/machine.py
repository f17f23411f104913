"""The machine that a process is on: its GPUs, memory and limits."""

import os
import resource
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

# The least that CUDA 13 runs on, which requirements/gpu.txt pins (NVIDIA's CUDA 13.0 release notes).
CUDA_13_DRIVER = 580
SHM_RL = 8 << 30  # bytes of /dev/shm: Ray's objects and the weights' way to vLLM; Docker's default is 64 MB


@dataclass(frozen=True)
class Gpu:
    name: str
    total_gib: float | None  # None: nvidia-smi does not tell, as of a MIG part or of memory shared with the host
    used_gib: float | None
    driver: str


@dataclass(frozen=True)
class Machine:
    """What a run finds here; tests make their own."""

    gpus: tuple[Gpu, ...]
    memory_bytes: int  # of the host, or of its container
    shm_bytes: int  # size of /dev/shm
    open_files: tuple[int, int]  # soft and hard limit
    environment: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def here(cls) -> "Machine":
        shm = shutil.disk_usage("/dev/shm").total if os.path.isdir("/dev/shm") else 0
        return cls(query_gpus(), memory_bytes(), shm, resource.getrlimit(resource.RLIMIT_NOFILE), dict(os.environ))

    @property
    def ray_address_file(self) -> Path:
        """Where `ray start` notes its cluster, as ray/_common/utils.py:329 (2.60) finds it."""
        folder = self.environment.get("RAY_TMPDIR") or self.environment.get("TMPDIR") or "/tmp"
        return Path(folder) / "ray" / "ray_current_cluster"


def query_gpus() -> tuple[Gpu, ...]:
    """The GPUs that this process may see, by nvidia-smi; none where it does not answer."""
    command = ["nvidia-smi", "--query-gpu=index,uuid,name,memory.total,memory.used,driver_version"]
    try:
        done = subprocess.run([*command, "--format=csv,noheader,nounits"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    variable = os.environ.get("CUDA_VISIBLE_DEVICES")
    visible = None if variable is None else [item.strip() for item in variable.split(",")]
    gpus, driver = [], ""
    for line in done.stdout.splitlines() if done.returncode == 0 else []:
        index, uuid, name, total_mib, used_mib, driver = (part.strip() for part in line.split(","))
        starts = tuple(item for item in visible or [] if item.startswith("GPU-"))
        if visible is None or index in visible or uuid.startswith(starts):
            # not a number: [N/A], [Insufficient Permissions]
            memory = (float(mib) / 1024 if mib.isdecimal() else None for mib in (total_mib, used_mib))
            gpus.append(Gpu(name, *memory, driver))
    if driver:
        gpus += [Gpu("MIG part", None, None, driver) for item in visible or [] if item.startswith("MIG-")]
    return tuple(gpus)


def memory_bytes() -> int:
    """Of this machine, or of its container where that has less."""
    memory, limit = psutil.virtual_memory().total, Path("/sys/fs/cgroup/memory.max")
    if limit.is_file() and (text := limit.read_text().strip()).isdecimal():
        memory = min(memory, int(text))
    return memory
