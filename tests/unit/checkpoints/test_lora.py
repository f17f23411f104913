"""Adapters in merged checkpoints, with verl's own merger."""

import json

import pytest
import torch

from verl_ext.checkpoints.lora import fold

LAYER = "base_model.model.model.layers.0.self_attn.q_proj"


def state() -> dict[str, torch.Tensor]:
    """A layer of two outputs and three inputs, with an adapter of rank 1: B A = [[1, 2, 3], [-1, -2, -3]]."""
    return {
        f"{LAYER}.base_layer.weight": torch.tensor([[1.0, 1.0, 1.0], [2.0, 2.0, 2.0]]),
        f"{LAYER}.lora_A.default.weight": torch.tensor([[1.0, 2.0, 3.0]]),
        f"{LAYER}.lora_B.default.weight": torch.tensor([[1.0], [-1.0]]),
        "base_model.model.model.norm.weight": torch.tensor([5.0]),
    }


def test_an_adapter_is_added_to_its_weight():
    folded = state()
    assert fold(folded, 2.0) == 1
    # 1 + 2 x (1, 2, 3) and 2 - 2 x (1, 2, 3)
    assert folded[f"{LAYER}.base_layer.weight"].tolist() == [[3.0, 5.0, 7.0], [0.0, -2.0, -4.0]]
    assert folded["base_model.model.model.norm.weight"].tolist() == [5.0]


def test_the_type_of_the_weights_stays():
    half = {name: tensor.bfloat16() for name, tensor in state().items()}
    fold(half, 2.0)
    assert half[f"{LAYER}.base_layer.weight"].dtype == torch.bfloat16


def test_a_checkpoint_of_only_adapters_is_refused():
    alone = state()
    del alone[f"{LAYER}.base_layer.weight"]
    with pytest.raises(ValueError, match="q_proj.base_layer.weight is missing for its adapter"):
        fold(alone, 1.0)


@pytest.fixture
def merger(tmp_path):
    """verl's merger of a folder."""
    import verl  # noqa: F401
    from verl.model_merger.base_model_merger import BaseModelMerger, ModelMergerConfig

    class Merger(BaseModelMerger):
        def __init__(self, config):  # reads no model
            self.config = config

        def merge_and_save(self): ...

        def cleanup(self): ...

    return Merger(
        ModelMergerConfig(operation="merge", backend="fsdp", local_dir=str(tmp_path), target_dir=str(tmp_path / "out"))
    )


def test_verls_merger_gives_the_trained_weights_and_no_adapters_that_would_count_twice(merger, tmp_path):
    (tmp_path / "lora_train_meta.json").write_text(json.dumps({"r": 1, "lora_alpha": 2, "task_type": "CAUSAL_LM"}))
    merged = state()
    assert merger.save_lora_adapter(merged) is None
    assert list((tmp_path / "out").iterdir()) == []
    assert merged["model.layers.0.self_attn.q_proj.weight"].tolist() == [[3.0, 5.0, 7.0], [0.0, -2.0, -4.0]]
    assert merged.keys() == {"model.layers.0.self_attn.q_proj.weight", "model.norm.weight"}


def test_an_unknown_scale_is_refused(merger):
    with pytest.raises(ValueError, match="r=None, lora_alpha=None, so the scale of its adapters is unknown"):
        merger.save_lora_adapter(state())


def test_a_checkpoint_without_adapters_is_merged_as_before(merger):
    plain = {"model.norm.weight": torch.tensor([5.0])}
    assert merger.save_lora_adapter(plain) is None and plain.keys() == {"model.norm.weight"}
