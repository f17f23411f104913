"""Parameters of the recipes' models, against those that transformers makes."""

import dataclasses

import pytest

from verl_ext.memory.shape import read_shape

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
