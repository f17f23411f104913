import pytest

EVEN, UNEVEN = [5, 4, 6], [1, 30, 2]


def naive(q, k, v, *, causal, scale=None):
    """Masked softmax attention of one sequence, written out. q: [query, heads, dim]; k, v: [key, key heads, dim]."""
    import torch

    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if causal:  # query i of n sees keys up to i + (number of keys - n)
        query, key = torch.arange(q.shape[0])[:, None], torch.arange(k.shape[0])[None]
        scores = scores.masked_fill(key > query + k.shape[0] - q.shape[0], float("-inf"))
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)


def random_qkv(*query_shape, key_length=None, key_heads=None):
    """float64 q, k, v with gradients; `query_shape` ends in length, heads, dim."""
    import torch

    generator = torch.Generator().manual_seed(0)
    *batch, length, heads, dim = query_shape
    shapes = [(*batch, length, heads, dim)] + 2 * [(*batch, key_length or length, key_heads or heads, dim)]
    return [torch.randn(s, generator=generator, dtype=torch.float64, requires_grad=True) for s in shapes]


def assert_same_values_and_gradients(ours, expected, inputs):
    import torch

    torch.testing.assert_close(ours, expected)
    weight = torch.randn(ours.shape, generator=torch.Generator().manual_seed(1), dtype=ours.dtype)
    for one, other in zip(
        torch.autograd.grad((ours * weight).sum(), inputs),
        torch.autograd.grad((expected * weight).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


def cumulative(lengths):
    import torch

    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


@pytest.mark.parametrize("key_heads", [4, 2, 1], ids=["mha", "gqa", "mqa"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("key_length", [6, 9], ids=["square", "with a cache"])
def test_flash_attn_func_is_masked_softmax_attention(causal, key_heads, key_length):
    import torch

    from verl_ext.cpu.attention import flash_attn_func

    q, k, v = random_qkv(2, 6, 4, 8, key_length=key_length, key_heads=key_heads)
    ours = flash_attn_func(q, k, v, causal=causal)
    expected = torch.stack([naive(q[i], k[i], v[i], causal=causal) for i in range(2)])
    assert_same_values_and_gradients(ours, expected, [q, k, v])


@pytest.mark.parametrize("key_heads", [4, 2], ids=["mha", "gqa"])
@pytest.mark.parametrize(("lengths", "causal"), [(EVEN, True), (UNEVEN, True), (EVEN, False)])
def test_packed_sequences_attend_to_themselves_only(lengths, causal, key_heads):
    import torch

    from verl_ext.cpu.attention import flash_attn_varlen_func

    q, k, v = random_qkv(sum(lengths), 4, 8, key_heads=key_heads)
    ends = cumulative(lengths)
    ours = flash_attn_varlen_func(q, k, v, ends, ends, max(lengths), max(lengths), causal=causal)
    parts = zip(*(x.split(lengths) for x in (q, k, v)), strict=True)
    assert_same_values_and_gradients(ours, torch.cat([naive(*part, causal=causal) for part in parts]), [q, k, v])


def test_the_softmax_scale_is_used_by_both_kernels():
    import torch

    from verl_ext.cpu.attention import flash_attn_func, flash_attn_varlen_func

    q, k, v = random_qkv(5, 4, 8)
    expected = naive(q, k, v, causal=True, scale=0.7)
    ours = flash_attn_func(q[None], k[None], v[None], softmax_scale=0.7, causal=True)[0]
    torch.testing.assert_close(ours, expected)
    ours = flash_attn_varlen_func(q, k, v, cumulative([5]), cumulative([5]), 5, 5, softmax_scale=0.7, causal=True)
    torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("refused", [{"window_size": (4, 0)}, {"softcap": 30.0}])
def test_what_the_stand_in_cannot_do_is_refused(refused):
    from verl_ext.cpu.attention import flash_attn_func, flash_attn_varlen_func

    q, k, v = random_qkv(5, 4, 8)
    with pytest.raises(ValueError, match="no sliding window and no soft-capping.*attn_implementation=eager"):
        flash_attn_func(q[None], k[None], v[None], **refused)
    with pytest.raises(ValueError, match="no sliding window and no soft-capping"):
        flash_attn_varlen_func(q, k, v, cumulative([5]), cumulative([5]), 5, 5, **refused)


def test_queries_at_the_end_of_more_keys_see_all_of_them():
    import torch

    from verl_ext.cpu.attention import flash_attn_varlen_func

    q, k, v = random_qkv(5, 4, 8, key_length=9, key_heads=2)
    queries, keys = [2, 3], [5, 4]
    ours = flash_attn_varlen_func(q, k, v, cumulative(queries), cumulative(keys), 3, 5, causal=True)
    parts = zip(q.split(queries), k.split(keys), v.split(keys), strict=True)
    expected = torch.cat([naive(*each, causal=True) for each in parts])
    assert_same_values_and_gradients(ours, expected, [q, k, v])


@pytest.mark.parametrize("lengths", [EVEN, UNEVEN])
def test_a_packed_batch_gives_qwen2_the_logits_of_each_sequence_alone(cpu_platform, lengths):
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    def model(attention):
        config = Qwen2Config(
            vocab_size=50,
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            attn_implementation=attention,
        )
        torch.manual_seed(0)
        return Qwen2ForCausalLM(config).eval()

    flash, eager = model("flash_attention_2"), model("eager")
    assert flash.config._attn_implementation == "flash_attention_2"
    sequences = torch.randint(50, (sum(lengths),), generator=torch.Generator().manual_seed(0)).split(lengths)
    positions = torch.cat([torch.arange(length) for length in lengths])
    with torch.no_grad():
        packed = flash(input_ids=torch.cat(sequences)[None], position_ids=positions[None], use_cache=False).logits[0]
        alone = [eager(input_ids=sequence[None], use_cache=False).logits[0] for sequence in sequences]
    torch.testing.assert_close(packed, torch.cat(alone), rtol=0, atol=1e-5)


def test_where_products_are_rounded_those_of_attention_are_not_in_both_directions(monkeypatch):
    import torch
    import torch.nn.functional as F

    from verl_ext.cpu.attention import flash_attn_func, flash_attn_varlen_func

    seen, attention = [], F.scaled_dot_product_attention

    def watched(*args, **kwargs):
        seen.append(torch.get_float32_matmul_precision())
        out = attention(*args, **kwargs)
        if out.requires_grad:
            out.register_hook(lambda gradient: seen.append(torch.get_float32_matmul_precision()))
        return out

    def with_gradients(attend, inputs, *options):
        out = attend(*inputs, *options, causal=True)
        return out, *torch.autograd.grad(out.square().sum(), inputs)

    inputs = [each.detach().float().requires_grad_() for each in random_qkv(2, 7, 4, 8)]
    packed = [each.detach().flatten(0, 1).requires_grad_() for each in inputs]
    cases = (flash_attn_func, inputs), (flash_attn_varlen_func, packed, *2 * [cumulative([7, 7])], 7, 7)
    expected = [with_gradients(*case) for case in cases]
    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        ours = [with_gradients(*case) for case in cases]
        with torch.no_grad():
            flash_attn_func(*inputs, causal=True)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)
    assert seen == 7 * ["highest"]  # three segments forward and backward, and one without gradients
    torch.testing.assert_close(ours, expected, rtol=0, atol=0)


def test_the_backward_pass_frees_what_attention_took_although_the_loss_is_kept(monkeypatch):
    import weakref

    import torch

    from verl_ext.cpu.attention import _in_full_precision

    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    kept: list[weakref.ref] = []

    def attend(q, k):
        kept.append(weakref.ref(q))
        return q * k

    loss = _in_full_precision(attend, torch.ones(3, requires_grad=True), torch.ones(3)).sum()
    assert kept[0]() is not None
    loss.backward()
    assert kept[0]() is None and loss.grad_fn is not None
