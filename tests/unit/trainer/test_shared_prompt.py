"""Log-probs and gradients of the pass that computes a prompt once, compared with those of single sequences."""

from types import SimpleNamespace

import pytest

PROMPTS = [[5, 6, 7], [5, 6, 7], [8, 9], [5, 6, 7], [8, 9]]
RESPONSES = [[10, 11], [12], [13, 14, 15], [16, 17, 18, 19], [20, 21]]
SHAPE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
SHAPE |= {"num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 64}


def test_a_prompt_is_kept_once_and_its_keys_serve_every_response():
    import torch

    from verl_ext.trainer.shared_prompt import pack

    #                       0  1  2    3  4  5    6  7      the third sequence has another prompt
    ids = torch.tensor([1, 2, 10, 1, 2, 11, 3, 12])
    packing = pack(ids, lengths=[3, 3, 2], prompt_lengths=[2, 2, 1])
    assert packing.kept.tolist() == [0, 1, 2, 5, 6, 7]  # of the second sequence only its response, at place 3 of these
    assert packing.source.tolist() == [0, 1, 2, 0, 1, 3, 4, 5]
    assert packing.keys.tolist() == [0, 1, 2] + [0, 1, 3] + [4, 5]
    assert packing.cu_queries.tolist() == [0, 3, 4, 6]
    assert packing.cu_keys.tolist() == [0, 3, 6, 8]
    assert (packing.max_queries, packing.max_keys) == (3, 3)


def nested(rows):
    import torch

    return torch.nested.as_nested_tensor([torch.tensor(row) for row in rows], layout=torch.jagged)


def micro_batch(temperature: float, **fields):
    from tensordict import TensorDict
    from verl.utils import tensordict_utils as tu

    sequences = [prompt + response for prompt, response in zip(PROMPTS, RESPONSES, strict=True)]
    fields = {
        "input_ids": nested(sequences),
        "position_ids": nested([list(range(len(s))) for s in sequences]),
        **fields,
    }
    batch = TensorDict(fields, batch_size=[len(sequences)])
    tu.assign_non_tensor(batch, temperature=temperature, use_remove_padding=True, use_fused_kernels=True)
    return batch


@pytest.fixture
def engine(request):
    """What verl's FSDP engine is to `prepare_model_inputs`, with a random model in float64 that the backend patched."""
    import torch
    import transformers
    import verl.workers.engine.fsdp.transformer_impl as engines
    from verl.models.transformers import monkey_patch

    from verl_ext.trainer.shared_prompt import name_rows

    name, options = request.param
    kind = getattr(transformers, f"{name}Config")(**SHAPE, **options, attn_implementation="flash_attention_2")
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(kind, dtype=torch.float64)
    plain, prepare = type(model).forward, engines.FSDPEngineWithLMHead.prepare_model_inputs
    monkey_patch.apply_monkey_patch(model, use_fused_kernels=True, fused_kernels_backend="shared_prompt")
    yield SimpleNamespace(
        module=model,
        plain=plain,
        prepare=engines.FSDPEngineWithLMHead.prepare_model_inputs,
        use_ulysses_sp=False,
        ulysses_sequence_parallel_size=1,
        pad_to_length=False,
        _get_packed_pad_size=lambda length: 0,
        model_config=SimpleNamespace(use_fused_kernels=True, fused_kernel_options={"impl_backend": "shared_prompt"}),
    )
    type(model).forward, engines.FSDPEngineWithLMHead.prepare_model_inputs = plain, prepare
    name_rows.cache_clear()


MODELS = pytest.mark.parametrize(
    "engine",
    [("Llama", {"tie_word_embeddings": True}), ("Qwen3", {"head_dim": 8}), ("Qwen2", {})],
    indirect=True,
    ids=["llama, tied", "qwen3", "qwen2"],
)


def expected(engine, temperature: float):
    """log-probs of all tokens but the first of each sequence, each sequence by itself."""
    import torch

    found = []
    for prompt, response in zip(PROMPTS, RESPONSES, strict=True):
        ids = torch.tensor([prompt + response])
        logits = engine.plain(engine.module, input_ids=ids).logits[0, :-1] / temperature
        found.append(logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0])
    return found


def gradients(engine, log_probs):
    import torch

    weights = torch.arange(1.0, len(log_probs) + 1, dtype=torch.float64)
    engine.module.zero_grad()
    (log_probs * weights).sum().backward()
    return [parameter.grad.clone() for parameter in engine.module.parameters()]


@MODELS
def test_log_probs_and_gradients_of_responses_are_those_of_sequences_one_by_one(engine):
    import torch

    batch = micro_batch(0.7, prompts=nested(PROMPTS), responses=nested(RESPONSES))
    inputs, _ = engine.prepare(engine, batch)
    output = engine.module(**inputs)
    of_responses = torch.cat(
        [found[-len(response) :] for found, response in zip(expected(engine, 0.7), RESPONSES, strict=True)]
    )
    ours = output.log_probs[0, inputs["rows"]]
    assert output.log_probs.shape == output.entropy.shape == (1, sum(map(len, PROMPTS + RESPONSES)))
    torch.testing.assert_close(ours, of_responses)
    for one, other in zip(gradients(engine, ours), gradients(engine, of_responses), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)  # RMSNorm is in float32


@MODELS
def test_sft_has_log_probs_where_its_loss_is(engine):
    import torch

    masks = [[0] * len(prompt) + [1] * len(response) for prompt, response in zip(PROMPTS, RESPONSES, strict=True)]
    masks[3][4] = 0  # a token of a tool
    inputs, _ = engine.prepare(engine, micro_batch(1.0, loss_mask=nested(masks)))
    log_probs = engine.module(**inputs).log_probs[0]
    of_all = torch.cat([torch.cat([found, torch.zeros(1)]) for found in expected(engine, 1.0)])
    mask = torch.cat([torch.tensor([*mask[1:], 0]) for mask in masks])
    torch.testing.assert_close(log_probs, of_all * mask)


@pytest.mark.parametrize("engine", [("Llama", {})], indirect=True)
def test_what_cannot_be_right_is_refused(engine):
    from verl.models.transformers import monkey_patch

    engine.ulysses_sequence_parallel_size = 2
    with pytest.raises(ValueError, match="ulysses_sequence_parallel_size=1, not 2"):
        engine.prepare(engine, micro_batch(1.0, prompts=nested(PROMPTS)))
    engine.module.config.model_type = "mamba"
    with pytest.raises(ValueError, match="the model is mamba with flash_attention_2. Set use_fused_kernels=false"):
        monkey_patch.apply_monkey_patch(engine.module, use_fused_kernels=True, fused_kernels_backend="shared_prompt")
