"""A verl platform for machines without an accelerator.

configs/hardware/cpu.yaml declares N GPUs to Ray (`ray_kwargs.ray_init.num_gpus`), so verl's placement groups and
resource checks work unchanged; torch only ever sees the CPU. Collectives run over gloo, and weights reach vLLM through
shared memory.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import psutil
import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry


class CpuDeviceId(str):
    """The device id "cpu". verl uses ids in two ways: `tensor.to(id)` wants "cpu", `f"{name}:{id}"` wants "cpu:0"."""

    def __new__(cls) -> "CpuDeviceId":
        return super().__new__(cls, "cpu")

    def __format__(self, spec: str) -> str:
        return "0"

    def __reduce__(self) -> tuple:  # str's own calls __new__ with the value
        return CpuDeviceId, ()


class CpuDeviceModule(ModuleType):
    """`torch.cpu` plus the functions of `torch.cuda` that verl also calls: memory is 0 bytes, caches do nothing."""

    _ZERO = ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved")
    _NOTHING = (
        "empty_cache",
        "ipc_collect",
        "reset_accumulated_memory_stats",
        "reset_peak_memory_stats",
        "set_per_process_memory_fraction",
    )

    def __getattr__(self, name: str) -> Any:
        if name in self._ZERO:
            return lambda *args, **kwargs: 0
        if name in self._NOTHING:
            return lambda *args, **kwargs: None
        return getattr(torch.cpu, name)

    def current_device(self) -> CpuDeviceId:
        return CpuDeviceId()

    def get_device_name(self, device: Any = None) -> str:
        return "CPU"

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        memory = psutil.virtual_memory()
        return memory.available, memory.total

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        torch.set_rng_state(state)


_DEVICE_MODULE = CpuDeviceModule("verl_ext.cpu.device")


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):
    """The CPU platform; the methods are those of verl's `PlatformBase`."""

    @property
    def device_name(self) -> str:
        return "cpu"

    vendor_name = device_name

    @property
    def device_module(self) -> ModuleType:
        return _DEVICE_MODULE

    def is_available(self) -> bool:
        return True

    def current_device(self) -> CpuDeviceId:
        return CpuDeviceId()

    def device_count(self) -> int:
        return 1

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"  # Ray sets it for its (here pretended) GPUs

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False  # so verl sends weights through POSIX shared memory

    def _nothing(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing in place of what only an accelerator has: other devices, streams, an allocator, profilers."""

    set_device = synchronize = set_allocator_settings = empty_cache = profiler_start = profiler_stop = cudart = _nothing
