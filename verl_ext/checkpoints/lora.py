"""Merged checkpoints of LoRA runs have their adapters in the weights.

verl 0.9.1 writes the untrained weights and, below them, a folder `lora_adapter` that neither transformers nor vLLM
reads: an evaluation, or RL after SFT, would silently use the base model. Here the folder is removed: passing it along
with the merged weights (verl's `lora_adapter_path`, vLLM's `--lora-modules`) would count the adapters twice.
"""

import shutil
from types import ModuleType
from typing import Any

import torch

A, B = ".lora_A.default.weight", ".lora_B.default.weight"


def fold(state: dict[str, torch.Tensor], scale: float) -> int:
    """Add every adapter's `scale` B A to its weight, in place, computed in fp32; return the number of adapters.

    Args:
        state: of peft's model: `X.base_layer.weight` [out, in], `X.lora_A.default.weight` [rank, in] and
            `X.lora_B.default.weight` [out, rank] of each layer X.
        scale: lora_alpha / lora_rank.
    Raises:
        ValueError: the weight of an adapter is missing, as in a checkpoint of `save_lora_only`.
    """
    layers = [name.removesuffix(A) for name in state if name.endswith(A)]
    for layer in layers:
        name = f"{layer}.base_layer.weight"
        if name not in state:
            raise ValueError(f"{name} is missing for its adapter. Merge a checkpoint that has all weights.")
        weight = state[name]
        state[name] = (weight.float() + scale * state[layer + B].float() @ state[layer + A].float()).to(weight.dtype)
    return len(layers)


def fold_when_merged(module: ModuleType) -> None:
    """verl/model_merger/base_model_merger.py (0.9.1): `BaseModelMerger`.

    - :311 `save_lora_adapter`, which takes the adapters out of the weights' state and writes them to a folder, gets the
      state with the adapters folded in, and the folder is removed.
    """
    merger = module.BaseModelMerger
    save = merger.save_lora_adapter

    def save_lora_adapter(self: Any, state_dict: dict[str, torch.Tensor]) -> None:
        if any(name.endswith(A) for name in state_dict):
            told = self._load_lora_train_meta() or {}
            rank, alpha = told.get("r"), told.get("lora_alpha")
            if not rank or not alpha:
                raise ValueError(
                    f"{self.config.local_dir}/lora_train_meta.json says r={rank}, lora_alpha={alpha}, so the scale "
                    "of its adapters is unknown. Write both numbers there as in the run's YAML."
                )
            print(f"{fold(state_dict, alpha / rank)} adapters were merged into the weights")
        if folder := save(self, state_dict):
            shutil.rmtree(folder)

    merger.save_lora_adapter = save_lora_adapter
