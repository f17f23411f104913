"""vLLM worker extension for CPU; configs/hardware/cpu.yaml names it (`worker_extension_cls`)."""

from typing import Any

import torch
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension


def _keep_plain_weight(layer: torch.nn.Module, remove_weight: bool) -> None:
    layer.cpu_linear = torch.nn.functional.linear


class CPUWorkerExtension(vLLMColocateWorkerExtension):
    """verl's worker extension, on weights that can be loaded again after every update.

    vLLM 0.28.0, model_executor/layers/linear.py:202 packs CPU weights for oneDNN and drops `weight_loader`, so that
    verl's weight sync fails (and then hangs: its sender has no time-out). The extension keeps the plain weight and
    `F.linear`.
    """

    def __new__(cls, **kwargs: Any) -> "CPUWorkerExtension":
        import vllm.model_executor.layers.utils as layer_utils

        layer_utils.dispatch_cpu_unquantized_gemm = _keep_plain_weight
        return super().__new__(cls, **kwargs)
