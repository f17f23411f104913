import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed")


@pytest.fixture
def extension(cpu_platform, monkeypatch):
    """The extension's patches, on vLLM's modules as published."""
    import vllm.model_executor.layers.utils as layer_utils
    import vllm.v1.sample.ops.topk_topp_sampler as sampler

    from verl_ext.cpu.vllm_worker import CPUWorkerExtension

    for module, name in ((layer_utils, "dispatch_cpu_unquantized_gemm"), (sampler, "compiled_random_sample")):
        monkeypatch.setattr(module, name, getattr(module, name))
    monkeypatch.setattr(CPUWorkerExtension.__mro__[1], "__new__", lambda cls, **kwargs: object.__new__(cls))
    return CPUWorkerExtension()


def test_packed_products_follow_the_weights_that_are_loaded(extension):
    import vllm.model_executor.layers.utils as layer_utils

    generator = torch.Generator().manual_seed(0)
    layer = torch.nn.Linear(64, 96, bias=False)
    x = torch.randn((5, 64), generator=generator)
    for _ in range(2):  # as at the start, and after an update
        layer.weight.data.copy_(torch.randn((96, 64), generator=generator))
        layer_utils.dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
        with torch.no_grad():
            product = layer_utils.cpu_unquantized_gemm(layer, x, layer.weight)
        torch.testing.assert_close(product, x @ layer.weight.T, rtol=0, atol=1e-4)
    assert layer.weight.shape == (96, 64)


def test_samples_have_the_distribution_of_the_logits(extension):
    import vllm.v1.sample.ops.topk_topp_sampler as sampler

    torch.manual_seed(0)
    probs = torch.tensor([0.0, 0.5, 0.0, 0.3, 0.15, 0.05, 0.0])
    draws = 20_000
    tokens = sampler.compiled_random_sample(probs.log().expand(draws, -1))
    counts = torch.bincount(tokens, minlength=7)
    assert counts[probs == 0].sum() == 0
    spread = (draws * probs * (1 - probs)).sqrt()
    assert ((counts - draws * probs).abs() <= 4 * spread).all()


def test_the_last_token_of_the_vocabulary_is_the_highest(extension, monkeypatch):
    import vllm.v1.sample.ops.topk_topp_sampler as sampler

    monkeypatch.setattr(torch, "rand_like", torch.ones_like)  # what rounding can make of a number below 1
    assert sampler.compiled_random_sample(torch.zeros(2, 5)).tolist() == [4, 4]
