"""Run verl 0.9.1 and vLLM on a machine without an accelerator, without editing site-packages.

`platform.py` is the verl platform, `attention.py` stands in for flash-attention 2, `vllm_worker.py` keeps vLLM's
weights loadable, `patches.py` holds every override of an internal, each naming the version and line that it replaces.
`warm_python.py` forks processes from one that has imported torch and vLLM; `checkpoint_engine.py` sends weights.
In: verl, when it is imported. Out: verl on the CPU; unchanged if torch has an accelerator.
"""

import importlib.util
import os
from types import ModuleType


def is_cpu_only() -> bool:
    """Return True if torch can drive no accelerator: a CPU build of torch, and no NPU plug-in.

    `torch.cuda.is_available()` would not do: it is False in Ray's CPU-only actors on machines with GPUs.
    `VERL_PLATFORM`, verl's own switch, has the last word (`VERL_PLATFORM=cpu` runs a CUDA build of torch on the CPU).
    """
    wanted = os.environ.get("VERL_PLATFORM", "").strip().lower()
    if wanted:
        return wanted == "cpu"
    import torch

    builds = (torch.version.cuda, torch.version.hip, torch.version.xpu)
    return builds == (None, None, None) and importlib.util.find_spec("torch_npu") is None


def activate_if_needed(verl: ModuleType) -> None:
    """Install the CPU platform if this is a CPU-only machine; otherwise do nothing.

    Args:
        verl: the imported package.
    Raises:
        RuntimeError: verl, torch, transformers or vLLM is not the version that the patches were written for.
    """
    if is_cpu_only():
        from verl_ext.cpu import patches

        patches.install()
