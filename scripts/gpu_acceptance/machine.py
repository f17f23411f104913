"""The machine itself: driver, versions, compiler, and whether its arithmetic is right."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from scripts.gpu_acceptance.numbers import below, relative_error
from scripts.gpu_acceptance.stage import Context, NotRun, Row, installed
from verl_ext.versions import pinned_version, read_lock

DEFAULT_NVCC = "/usr/local/cuda/bin/nvcc"
LOCK = Path(__file__).resolve().parents[2] / "requirements" / "gpu.txt"


def locked(name: str) -> str:
    return next(pinned_version(pin) for pin in read_lock(LOCK) if pin.name == name)


def find_nvcc() -> str | None:
    """Where scripts/setup_env.sh looks, and torch (utils/cpp_extension.py): the variables come before PATH."""
    if home := os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH"):
        return shutil.which(f"{home}/bin/nvcc")
    return shutil.which("nvcc") or shutil.which(DEFAULT_NVCC)


def nvcc_release() -> str:
    """`13.0`; empty where there is no nvcc."""
    if (nvcc := find_nvcc()) is None:
        return ""
    found = re.search(r"release ([\d.]+)", subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout)
    return found[1] if found else ""


def check_machine(context: Context) -> Iterator[Row]:
    import torch

    for name in ("torch", "transformers", "flash-attn"):
        version, wanted = installed(name).split("+")[0], locked(name)
        # Another version, or no flash-attn, is no fault of the machine: the stages on torch alone run with it.
        yield Row(name, wanted, version, (version == wanted or None) if context.is_cuda else None)
    if context.is_cuda:
        yield from _check_gpu()
    yield from _check_host(context)
    yield from _check_products(torch, context)


def _check_gpu() -> Iterator[Row]:
    import torch

    from verl_ext.runs.machine import CUDA_13_DRIVER, query_gpus

    if not torch.cuda.is_available():
        raise NotRun("torch finds no GPU (torch.cuda.is_available())")
    gpus = query_gpus()
    driver = gpus[0].driver if gpus else "nvidia-smi does not answer"
    yield Row(
        "driver",
        f">= {CUDA_13_DRIVER}",
        driver,
        driver.split(".")[0].isdecimal() and int(driver.split(".")[0]) >= CUDA_13_DRIVER,
    )
    properties = torch.cuda.get_device_properties(0)
    capability = f"{properties.major}.{properties.minor}"
    yield Row("GPU", "", f"{properties.name}, {properties.total_memory / 2**30:.1f} GiB, capability {capability}")
    yield Row("capability", ">= 8.0 (bf16, flash-attn)", capability, properties.major >= 8)
    cuda = torch.version.cuda or "none"
    yield Row("CUDA of torch", locked("cuda-toolkit")[:4], cuda, cuda == locked("cuda-toolkit")[:4])
    yield from _check_compilers(cuda)


def _check_compilers(cuda: str) -> Iterator[Row]:
    """For the torch of this CUDA. No stage compiles: none, or another one, is no failure."""
    nvcc, ninja = nvcc_release(), shutil.which("ninja")
    yield Row("nvcc", f"{cuda.split('.')[0]}.*", nvcc or "none", nvcc.split(".")[0] == cuda.split(".")[0] or None)
    yield Row("ninja", "on PATH", ninja or "none", bool(ninja) or None)


def _check_host(context: Context) -> Iterator[Row]:
    from verl_ext.runs.machine import SHM_RL, Machine

    here = Machine.here()
    yield Row("host memory, cores", "", f"{here.memory_bytes / 2**30:.0f} GiB, {len(os.sched_getaffinity(0))}")
    enough = here.shm_bytes >= SHM_RL
    yield Row(
        "/dev/shm", f">= {SHM_RL >> 30} GiB", f"{here.shm_bytes / 2**30:.1f} GiB", enough if context.is_cuda else None
    )
    yield Row("open files", "", f"{here.open_files[0]}, at most {here.open_files[1]}")


def _check_products(torch, context: Context) -> Iterator[Row]:
    """Against fp64, by the norm of the difference: 24 bits of a fraction (fp32), 8 (bf16) and their sums."""
    size = 4096 if context.is_cuda else 128
    generator = torch.Generator(context.device).manual_seed(0)
    a, b = (torch.randn(size, size, device=context.device, generator=generator) for _ in range(2))
    exact = a.double() @ b.double()
    yield below("fp32 product against fp64", relative_error(a @ b, exact), 1e-5)  # TF32 would give about 3e-4
    yield below("bf16 product against fp64", relative_error(a.bfloat16() @ b.bfloat16(), exact), 1e-2)
    ties = torch.randint(0, 8, (64, size), device=context.device, generator=generator).float()
    first = torch.topk(ties, size // 4).indices
    same = all(torch.equal(torch.topk(ties.clone(), size // 4).indices, first) for _ in range(10))
    yield Row("torch.topk among equal values, ten times", "the same", "the same" if same else "other indices", same)
    if context.is_cuda:
        size = 8192
        a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        seconds = _seconds(torch, lambda: a @ b)
        yield Row(f"bf16 product of {size}", "", f"{2 * size**3 / seconds / 1e12:.0f} TFLOP/s")
        big = torch.empty(2**30, dtype=torch.uint8, device="cuda")
        seconds = _seconds(torch, lambda: big.clone())
        yield Row("copy on the GPU", "", f"{2 * big.numel() / seconds / 1e12:.2f} TB/s, read and written")


def _seconds(torch, call) -> float:
    """Median of ten, after three to warm up."""
    times = []
    for _ in range(13):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1000)
    return sorted(times[3:])[5]
