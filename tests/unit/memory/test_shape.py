"""Parameters of the recipes' models, against those that transformers makes."""

import dataclasses
import json

import pytest

from verl_ext.memory.shape import read_positions, read_shape

# sum(p.numel()) of the whole models made on the meta device
EXPECTED = {
    "Qwen2.5-32B-Instruct": 32763876352,
    "Qwen2.5-7B-Instruct": 7615616512,
    "Qwen3-0.6B": 596049920,
    "Qwen3-4B-Instruct-2507": 4022468096,
}


@pytest.mark.parametrize("name", EXPECTED)
def test_parameters_are_those_that_transformers_makes(name, tmp_path):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    whole = read_shape(f"Qwen/{name}")
    assert whole.parameters == EXPECTED[name]
    shape = dataclasses.replace(whole, layers=2)  # of which all others are copies
    config = AutoConfig.for_model(**shape.config())
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())
    config.save_pretrained(tmp_path)
    assert read_shape(str(tmp_path)) == shape


@pytest.mark.parametrize(
    ("config", "positions"),
    [
        ({"max_position_embeddings": 64}, 64),
        ({"model_type": "mixtral", "text_config": {"max_position_embeddings": 32}}, 32),
        ({"max_position_embeddings": 64, "text_config": {"max_position_embeddings": 32}}, 64),
        ({"max_position_embeddings": 64, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, 64),
        ({"model_type": "qwen2"}, None),
    ],
)
def test_positions_are_those_that_verl_reads(config, positions, tmp_path):
    from types import SimpleNamespace

    from verl.workers.rollout.utils import get_max_position_embeddings

    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_positions(str(tmp_path)) == positions
    if positions:
        text = SimpleNamespace(**config.get("text_config", {}))
        assert get_max_position_embeddings(SimpleNamespace(**config | {"text_config": text})) == positions


def test_positions_of_the_recipes_models_are_known():
    assert {read_positions(f"Qwen/{name}") for name in EXPECTED} == {32_768, 40_960, 262_144}
    assert read_positions("Qwen2.5-7B-Instruct") is None, "a folder that is not here"


@pytest.mark.parametrize(
    ("targets", "excluded"),
    [
        ("all-linear", None),
        ("all-linear", ["down_proj", "self_attn.k_proj"]),
        (["q_proj", "v_proj", "lm_head"], None),
        (r".*\.layers\.1\..*_proj", r".*\.o_proj"),
    ],
)
def test_adapters_have_the_parameters_that_peft_gives_them(targets, excluded):
    import peft
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = dataclasses.replace(read_shape("Qwen/Qwen3-0.6B"), layers=2)
    config = AutoConfig.for_model(**shape.config())
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
        chosen = {"target_modules": targets, "exclude_modules": excluded}
        model = peft.get_peft_model(model, peft.LoraConfig(r=32, task_type="CAUSAL_LM", **chosen))
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert shape.adapter_parameters(32, targets, excluded) == trained
