"""The harness's model computes what transformers does, which the actor runs; tests/e2e compares the actor with vLLM."""

import math

import pytest
import torch

from scripts.studies.tiny_model import TinyModel, prefix_tree


def actors_log_probs(tiny, sampled):
    """float[B, R]: of transformers' model."""
    logits = tiny.actor(sampled.ids).logits
    picked = logits.gather(1, sampled.places[..., None].expand(-1, -1, logits.shape[-1]))
    return picked.log_softmax(-1).gather(-1, sampled.targets[..., None])[..., 0]


def test_log_probs_are_the_actors(tiny, sampled):
    with torch.no_grad():
        expected = actors_log_probs(tiny, sampled)
        found = TinyModel(tiny.config).log_probs(tiny.weights, *sampled[1:4], sampled.batch.mask)
    mask = sampled.batch.mask
    assert mask.sum() > 500
    assert (found - expected)[mask].abs().max() < 2e-5 and not found[~mask].any()


def test_what_rows_begin_with_alike_is_one_node():
    """Rows of 4, 3, 4 and 2 tokens; the 9 after 7 and the 9 after 8 are two."""
    ids = torch.tensor([[5, 7, 9, 1], [5, 7, 9, 0], [5, 8, 9, 1], [5, 7, 0, 0]])
    nodes, places = prefix_tree(ids, torch.tensor([4, 3, 4, 2]))
    assert nodes.tolist() == [[0, 1, 3, 5], [0, 1, 3, 0], [0, 2, 4, 6], [0, 1, 0, 0]]
    assert ids.flatten()[places].tolist() == [5, 7, 8, 9, 9, 1, 1]
    assert (places % 4).tolist() == [0, 1, 1, 2, 2, 3, 3]


def test_what_is_computed_once_has_the_gradient_of_all_its_rows(tiny):
    """Three rows, each with its own prompt or all with one, computed in one pass and in a pass each."""
    ids = torch.tensor([[5, 6, 7, 8, 9], [5, 6, 7, 8, 11], [5, 6, 30, 31, 0]])
    places = torch.tensor([[1, 2, 3], [1, 2, 3], [1, 2, 0]])
    targets, mask = ids.gather(1, places + 1), torch.tensor([[1, 1, 1], [1, 1, 1], [1, 1, 0]], dtype=torch.bool)
    factors, model = torch.tensor([[1.0, -2.0, 3.0], [0.5, 1.0, -1.0], [2.0, 1.0, 0.0]]), TinyModel(tiny.config)
    weights = {name: each.clone().requires_grad_() for name, each in tiny.weights.items()}

    def gradient(rows: slice) -> torch.Tensor:
        found = model.log_probs(weights, ids[rows], places[rows], targets[rows], mask[rows])
        loss = (found * factors[rows]).sum()
        return torch.cat([each.flatten() for each in torch.autograd.grad(loss, list(weights.values()))])

    each = [gradient(slice(row, row + 1)) for row in range(3)]
    together = gradient(slice(3))
    assert (together - sum(each)).norm() < 1e-5 * together.norm() and min(one.norm() for one in each) > 0.1


def sample(tiny, weights, *, reply, stop, prompts, seed=0, limit=60, bf16=False):
    generator = torch.Generator().manual_seed(seed)
    model = TinyModel(tiny.config, bf16=bf16)
    return model.sample(weights, prompts, limit=limit, reply=reply, stop=stop, generator=generator)


def recomputed(tiny, prompt, rollout):
    """Return the log-probs of a rollout's tokens in one pass, without a cache and without padding."""
    ids = torch.tensor([prompt + rollout.ids])
    places = torch.arange(len(prompt) - 1, ids.shape[1] - 1)[None]
    everywhere = torch.ones_like(places, dtype=torch.bool)
    return TinyModel(tiny.config).log_probs(tiny.weights, ids, places, ids[:, len(prompt) :], everywhere)[0].tolist()


PROMPTS = [[5, 6, 7], [9] * 11, [30, 31, 32, 33, 34, 35]] * 8


@pytest.fixture(scope="module")
def rollouts(tiny):
    """Of weights as they are; any of the tokens 100 to 131 would do as the stop: 100 does."""
    return sample(tiny, tiny.weights, reply=lambda rollout: [1, 2, 3], stop=100, prompts=PROMPTS)


def test_sampled_log_probs_are_those_of_one_pass(tiny, rollouts):
    """Prompts of three lengths, rows that end at different times, and tool output in some."""
    assert any(0 in rollout.mask for rollout in rollouts) and len({len(each.ids) for each in rollouts}) > 1
    for prompt, rollout in zip(PROMPTS, rollouts, strict=True):
        expected = recomputed(tiny, prompt, rollout)
        for own, noted, log_prob in zip(rollout.mask, rollout.log_probs, expected, strict=True):
            assert math.isclose(noted, log_prob, abs_tol=2e-5) if own else noted == 0


def test_a_stop_token_is_followed_by_the_reply(rollouts):
    for rollout in rollouts:
        for place, (token, own) in enumerate(zip(rollout.ids, rollout.mask, strict=True)):
            if token == 100 and own and place + 4 < len(rollout.ids):
                assert rollout.ids[place + 1 : place + 4] == [1, 2, 3]
                assert rollout.mask[place : place + 5] == [1, 0, 0, 0, 1]


def test_a_response_ends_where_it_may_not_call_and_at_the_limit(tiny):
    for rollout in sample(tiny, tiny.weights, reply=lambda rollout: None, stop=100, prompts=PROMPTS):
        ended = rollout.ids[-1] in (100, tiny.config["eos_token_id"])
        assert ended or len(rollout.ids) == 60
        assert not {100, tiny.config["eos_token_id"]} & set(rollout.ids[:-1])


def test_tokens_are_drawn_from_the_policy(tiny):
    """20,000 first tokens after one prompt: shares are within 5 standard errors of the probabilities."""
    drawn = sample(tiny, tiny.weights, reply=lambda rollout: None, stop=-1, prompts=[[5, 6, 7]] * 20_000, limit=1)
    with torch.no_grad():
        probs = tiny.actor(torch.tensor([[5, 6, 7]])).logits[0, -1].softmax(-1)
    counts = torch.bincount(torch.tensor([each.ids[0] for each in drawn]), minlength=len(probs))
    error = (probs * (1 - probs) / 20_000).sqrt()
    assert ((counts / 20_000 - probs).abs() <= 5 * error + 1e-4).all()


def test_an_engine_in_bf16_is_near_and_not_equal(tiny):
    (rollout,) = sample(tiny, tiny.weights, reply=lambda rollout: None, stop=-1, prompts=[[5, 6, 7]], bf16=True)
    off = [abs(a - b) for a, b in zip(rollout.log_probs, recomputed(tiny, [5, 6, 7], rollout), strict=True)]
    assert 1e-4 < sum(off) / len(off) < 0.1


def test_another_architecture_is_refused(tiny):
    with pytest.raises(ValueError, match="one key head"):
        TinyModel(tiny.config | {"num_key_value_heads": 2})
