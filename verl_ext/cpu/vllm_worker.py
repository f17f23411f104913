"""vLLM worker extension for CPU; configs/hardware/cpu.yaml names it (`worker_extension_cls`)."""

from typing import Any

import torch
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension


def sample_by_inversion(logits: torch.Tensor) -> torch.Tensor:
    """Draw one token per row from softmax(logits), by one uniform number per row and the cumulative distribution.

    Args:
        logits: floats of shape (requests, vocabulary), after temperature and top-k/top-p; -inf is never drawn.
    Returns:
        Token ids, int64 of shape (requests,).
    """
    cumulative = logits.softmax(-1, dtype=torch.float32).cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    drawn = torch.rand_like(total) * total
    return torch.searchsorted(cumulative, drawn, right=True).clamp_(max=logits.shape[-1] - 1).squeeze(-1)


class CPUWorkerExtension(vLLMColocateWorkerExtension):
    """verl's worker extension, on weights that can be loaded again after every update, with a faster sampler.

    vLLM 0.28.0, model_executor/layers/linear.py:202 packs CPU weights for oneDNN and drops the plain weight with its
    `weight_loader`, so that verl's weight sync fails (and then hangs: its sender has no time-out). The extension keeps
    the plain weight next to the packed one; verl's `update_weights_from_ipc` has vLLM pack again after the last bucket.

    The replaced v1/sample/ops/topk_topp_sampler.py:`compiled_random_sample` draws an exponential per vocabulary token.
    """

    def __new__(cls, **kwargs: Any) -> "CPUWorkerExtension":
        import vllm.model_executor.layers.utils as layer_utils
        import vllm.v1.sample.ops.topk_topp_sampler as sampler

        pack = layer_utils.dispatch_cpu_unquantized_gemm
        layer_utils.dispatch_cpu_unquantized_gemm = lambda layer, remove_weight: pack(layer, remove_weight=False)
        sampler.compiled_random_sample = sample_by_inversion
        return super().__new__(cls, **kwargs)
