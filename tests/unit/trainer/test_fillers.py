"""Advantages of fillers, by verl's own functions on a batch in memory."""

import pytest

# Four right answers of 9,000, 9,000, 9,550 and 12,400 tokens, with `length_penalty: piecewise`; and a useful group.
ALL_RIGHT = {"f_0_0": 0.99, "f_1_0": 0.99, "f_2_0": 0.9845, "f_3_0": 0.94}


USEFUL = {"u_0_0": 1.0, "u_1_0": -1.0, "u_2_0": 1.0, "u_3_0": -1.0}


def test_right_answers_that_differ_in_length_penalties_train_by_verl_and_not_as_fillers(advantages):
    """Mean .9761, sample std .0242. The useful group: 1 and -1, mean 0, sample std 2 / sqrt 3."""
    verls = advantages(ALL_RIGHT | USEFUL, (), "grpo")
    assert [round(verls[key][0], 2) for key in ALL_RIGHT] == [0.57, 0.57, 0.35, -1.49]
    ours = advantages(ALL_RIGHT | USEFUL, "f", "grpo")
    assert {key: ours[key] for key in ALL_RIGHT} == {key: [0.0, 0.0, 0.0] for key in ALL_RIGHT}
    assert {key: ours[key] for key in USEFUL} == {key: verls[key] for key in USEFUL}
    assert ours["u_0_0"] == pytest.approx([0.866, 0.0, 0.866], abs=1e-3)


@pytest.mark.parametrize("estimator", ["rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "opo"])
def test_fillers_have_advantage_0_with_every_estimator(advantages, estimator):
    ours = advantages(ALL_RIGHT | USEFUL, "f", estimator)
    assert all(ours[key] == [0.0, 0.0, 0.0] for key in ALL_RIGHT)
    assert all(ours[key][0] != 0.0 for key in USEFUL)


def test_the_tokens_of_fillers_stay_in_the_denominator_of_the_token_mean(advantages):
    """Two tokens of each of 8 responses: half of the 16 are fillers'. Only the useful half would give twice this."""
    import torch
    from verl.trainer.ppo.core_algos import agg_loss

    ours = torch.tensor([*advantages(ALL_RIGHT | USEFUL, "f", "grpo").values()])
    mask = torch.tensor([[1.0, 0.0, 1.0]] * 8)
    log_prob = torch.zeros(8, 3, requires_grad=True)

    def gradient(rows):
        loss = agg_loss(-ours[rows] * log_prob[rows], mask[rows], "token-mean")
        return torch.autograd.grad(loss, log_prob)[0]

    both, useful = gradient(slice(0, 8)), gradient(slice(4, 8))
    assert both[:4].abs().sum() == 0.0
    assert torch.allclose(2 * both[4:], useful[4:]) and both[4, 0] == pytest.approx(-0.866 / 16, abs=1e-4)
