"""Means over tokens and responses, and their units."""

import pytest
import torch

from tests.unit.objectives.cases import float64
from verl_ext.objectives.mean import MODES, episode_factors, mean_loss, unit_factors

OBJECTIVE = float64([[1.0, 0.0, 0.0], [-1.0, -1.0, -1.0]])  # responses of 1 and 3 tokens, with A = 1 and -1
MASK = torch.tensor([[True, False, False], [True, True, True]])


@pytest.mark.parametrize(
    ("mode", "scale", "expected"),
    [
        ("token-mean", None, 0.5),  # -(1 - 3) / 4
        ("seq-mean-token-mean", None, 0.0),  # -(1 - 1) / 2
        ("seq-mean-token-sum", None, 1.0),  # -(1 - 3) / 2
        ("seq-mean-token-sum-norm", 10, 0.1),  # -(1 - 3) / 2 / 10: Dr. GRPO
    ],
)
def test_each_mean_by_hand(mode, scale, expected):
    assert mean_loss(OBJECTIVE, MASK, mode=mode, scale=scale).item() == pytest.approx(expected)


@pytest.mark.parametrize("width", [4, 8])
def test_dr_grpo_does_not_see_the_padding(width):
    """One response of 4 tokens, A = 1, scale 10: -4 / 10, padded to 4 or to 8. Without a scale verl has -1 and -.5."""
    mask = torch.arange(width)[None] < 4
    assert mean_loss(mask.double(), mask, mode="seq-mean-token-sum-norm", scale=10) == pytest.approx(-0.4)


@pytest.mark.parametrize("mode", MODES)
def test_without_a_token_the_loss_is_0_and_so_is_its_gradient(mode):
    objective = torch.full((2, 3), float("nan"), dtype=torch.float64, requires_grad=True)
    scale = 10 if mode.endswith("norm") else None
    for numbers in ({}, {"tokens": 0, "responses": 0}):
        loss = mean_loss(objective, torch.zeros(2, 3, dtype=torch.bool), mode=mode, scale=scale, **numbers)
        (gradient,) = torch.autograd.grad(loss, objective)
        assert loss.item() == 0.0 and gradient.abs().sum() == 0.0


def test_units_by_hand():
    """Groups a of 1 + 1 tokens and b of 2 + 4, two updates. Batch: 2 / 8. Group: 2 / (2 x 2) and 2 / (2 x 6)."""
    lengths, groups = torch.tensor([1, 2, 1, 4, 0]), ["a", "b", "a", "b", "padding"]

    def factors(unit):
        return unit_factors(lengths, groups, unit=unit, updates=2).tolist()

    assert factors("mini_batch") == [1.0] * 5
    assert factors("batch") == [0.25] * 5
    assert factors("group") == pytest.approx([0.5, 1 / 6, 0.5, 1 / 6, 0.0])


@pytest.mark.parametrize("unit", ["batch", "group"])
@pytest.mark.parametrize("split", [[8], [4, 4], [1, 2, 3, 2]])
@pytest.mark.parametrize(("micro", "ranks"), [(1, 1), (3, 1), (2, 2)])
def test_a_unit_is_exact_however_the_batch_is_split(unit, split, micro, ranks):
    """The mean over the updates is the paper's mean over the batch, wherever mini- and micro-batches and ranks end."""
    generator = torch.Generator().manual_seed(3)
    values = torch.randn(8, 5, generator=generator, dtype=torch.float64)
    mask = torch.arange(5) < torch.tensor([5, 1, 3, 2, 4, 5, 1, 2])[:, None]
    groups = list("aabbbccc")
    if unit == "batch":
        expected = -values[mask].sum() / mask.sum()
    else:
        of = [torch.tensor([each == name for each in groups]) for name in "abc"]
        expected = -sum(values[rows][mask[rows]].sum() / mask[rows].sum() for rows in of) / 3
    factors = unit_factors(mask.sum(-1), groups, unit=unit, updates=len(split))
    objective = values * factors[:, None]
    order = torch.randperm(8, generator=generator)
    updates = []
    for rows in order.split(split):
        per_rank = []
        for own in rows.tensor_split(ranks):
            parts = [
                mean_loss(objective[part], mask[part], mode="token-mean", unit=unit, ranks=ranks, tokens=99)
                for part in own.split(micro)
            ]
            per_rank.append(sum(parts))
        updates.append(sum(per_rank) / ranks)  # FSDP averages over ranks
    assert float(sum(updates) / len(updates)) == pytest.approx(float(expected), abs=1e-12)


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"mode": "token-sum"}, "token-mean"),
        ({"mode": "token-mean", "unit": "prompt"}, "mini_batch"),
        ({"mode": "seq-mean-token-mean", "unit": "group"}, "token-mean"),
        ({"mode": "seq-mean-token-sum-norm"}, "max_response_length"),
        ({"mode": "token-mean", "scale": 5}, "loss_scale_factor"),
    ],
)
def test_what_does_not_go_together_is_refused(settings, word):
    with pytest.raises(ValueError, match=word):
        mean_loss(OBJECTIVE, MASK, **settings)


def test_a_mean_over_rows_is_made_one_over_episodes():
    """Four rows, of which two are of one episode, with 3 and 1 tokens, and one is padding: 4 rows by 2 episodes."""
    lengths, episodes = torch.tensor([3, 2, 1, 0]), ["a", "b", "a", None]
    assert episode_factors(lengths, episodes, mode="seq-mean-token-mean").tolist() == [1.5, 2.0, 0.5, 2.0]
    for mode in ("seq-mean-token-sum", "seq-mean-token-sum-norm"):
        assert episode_factors(lengths, episodes, mode=mode).tolist() == [2.0] * 4
    for mode in ("token-mean", "token-sum"):
        assert episode_factors(lengths, episodes, mode=mode).tolist() == [1.0] * 4
