"""The optimal token baseline for responses with tool calls."""

import pytest
import torch

from tests.unit.objectives.cases import float64
from verl_ext.objectives.tir_otb import at_last_own, tir_otb


def test_two_responses_by_hand():
    """A tool wrote the token in the middle of the first, the second has two tokens; rewards 1 and 0 at the end.

    pi .5, sum pi^2 1: 1 - 1 + 1 = 1 a token; pi .25, sum 1: 1 - .5 + 1 = 1.5. W: 1, 2 and 1.5, 3.
    Baselines: (1 x 1 + 0 x 1.5) / 2.5 = .4 and (1 x 2 + 0 x 3) / 5 = .4. A: .6 .6 and -.4 -.4.
    """
    mask = torch.tensor([[True, False, True], [True, True, False]])
    rewards = float64([[0.0, 5.0, 1.0], [0.0, 0.0, 7.0]])  # what is off the mask is never read
    log_prob = float64([[0.5] * 3, [0.25] * 3]).log()
    found = tir_otb(rewards, mask, ["a", "a"], log_prob, torch.ones(2, 3, dtype=torch.float64))
    assert found[0].tolist() == pytest.approx([0.6, 0.0, 0.6]) and found[1].tolist() == pytest.approx([-0.4, -0.4, 0.0])


def test_where_one_response_alone_goes_on_its_baseline_is_0():
    """Lengths 3 and 1, W as above with 1 a token: baseline (1 + 0) / 2 = .5 of the first token; then A = G = 1."""
    mask = torch.tensor([[True, True, True], [True, False, False]])
    rewards, ones = float64([[0.0, 0.0, 1.0], [0.0, 0.0, 0.0]]), torch.ones(2, 3, dtype=torch.float64)
    found = tir_otb(rewards, mask, ["a", "a"], (0.5 * ones).log(), ones)
    assert found[0].tolist() == pytest.approx([0.5, 1.0, 1.0]) and found[1].tolist() == pytest.approx([-0.5, 0.0, 0.0])


def test_weights_count_squared():
    """Weights 2 and 1, energies 4 and 1: baseline 1 x 4 / (4 + 1) = .8."""
    mask, ones = torch.ones(2, 1, dtype=torch.bool), torch.ones(2, 1, dtype=torch.float64)
    found = tir_otb(float64([[1.0], [0.0]]), mask, ["a", "a"], (0.5 * ones).log(), ones, float64([[2.0], [1.0]]))
    assert found.flatten().tolist() == pytest.approx([0.2, -0.8])


def test_a_group_of_one_has_0():
    ones = torch.ones(1, 2, dtype=torch.float64)
    assert tir_otb(ones, ones.bool(), ["a"], -ones, ones).tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize(("reward", "dtype"), [(0.95, torch.float32), (1 / 3, torch.float32), (0.1, torch.bfloat16)])
def test_equal_rewards_have_exactly_0_where_two_responses_have_the_token(reward, dtype):
    """pi = 1 - 1e-4: W is 1e-8 at the first token, as the 1e-8 of the denominator, by which the baseline would be half.

    The longer of the two responses has its last token to itself, with baseline 0.
    """
    mask = torch.tensor([[True, True, True], [True, True, False]])
    scores = at_last_own(torch.full((2,), reward, dtype=dtype), mask)
    pi = 1 - 1e-4
    log_prob = torch.full((2, 3), pi, dtype=torch.float64).log()
    found = tir_otb(scores, mask, ["a", "a"], log_prob, torch.full((2, 3), pi**2 + (1 - pi) ** 2, dtype=torch.float64))
    assert found.tolist() == [[0.0, 0.0, scores[0, 2].item()], [0.0, 0.0, 0.0]]


def test_a_score_stands_at_the_policys_last_token():
    """After it a tool's token, padding, or nothing; a response without a token of the policy has none."""
    mask = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 0, 1], [0, 0, 0]]).bool()
    found = at_last_own(float64([1.0, 2.0, 3.0, 4.0]), mask)
    assert found.tolist() == [[0, 1, 0], [2, 0, 0], [0, 0, 3], [0, 0, 0]]


def batch():
    """Five responses of two groups, one without a token of the policy, tools' tokens within, weights."""
    generator = torch.Generator().manual_seed(6)

    def uniform():
        return torch.rand(5, 6, generator=generator, dtype=torch.float64)

    rows = [[1, 1, 0, 1, 1, 0], [1, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0], [1, 0, 1, 1, 0, 0]]
    mask = torch.tensor(rows).bool()
    return uniform(), mask, ["a", "a", "b", "a", "b"], uniform().log(), uniform(), 2 * uniform()


def test_tool_tokens_and_padding_do_not_matter():
    rewards, mask, groups, *numbers = batch()
    expected = tir_otb(rewards, mask, groups, *numbers)
    others = [torch.where(mask, each, -7.0) for each in (rewards, *numbers)]
    padded = [torch.nn.functional.pad(each, (0, 3), value=-7.0) for each in others]
    found = tir_otb(padded[0], torch.nn.functional.pad(mask, (0, 3)), groups, *padded[1:])
    assert torch.allclose(found[:, :6], expected, atol=1e-12, rtol=0) and expected[mask].abs().min() > 1e-3
    assert found[:, 6:].abs().sum() == 0 == expected[~mask].abs().sum()


def test_the_order_of_responses_does_not_matter():
    rewards, mask, groups, *numbers = batch()
    expected = tir_otb(rewards, mask, groups, *numbers)
    order = [3, 1, 4, 2, 0]
    moved = [each[order] for each in (rewards, mask, *numbers)]
    found = tir_otb(moved[0], moved[1], [groups[row] for row in order], *moved[2:])
    assert torch.allclose(found, expected[order], atol=1e-12, rtol=0)


def test_a_log_prob_that_is_no_number_leaves_the_advantages_of_the_others():
    """It adds nothing to W: only the first token adds 1, so W is 1, 1 and 1.5, 3; baselines .4 and .25."""
    mask = torch.ones(2, 2, dtype=torch.bool)
    log_prob = float64([[0.5, 0.5], [0.25, 0.25]]).log()
    log_prob[0, 1] = torch.nan
    found = tir_otb(float64([[0.0, 1.0], [0.0, 0.0]]), mask, ["a", "a"], log_prob, torch.ones(2, 2).double())
    assert found.flatten().tolist() == pytest.approx([0.6, 0.75, -0.4, -0.25])
