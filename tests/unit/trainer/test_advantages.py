"""Advantages of a batch as verl's trainer has them computed: filled groups, groups of one, units of the mean."""

import math

import pytest
import torch

from verl_ext.episode import EpisodeKey

# A group of four of which one failed: a copy of session 0 takes its place. Valid rewards 1, 0, 0.
COPY = str(EpisodeKey("a", 0, copy=1))
FILLED = {"a_0_0": 1.0, "a_1_0": 0.0, "a_2_0": 0.0, COPY: 1.0}
NO_STD = "algorithm.norm_adv_by_std_in_grpo=false"


def first(found):
    return [row[0] for row in found.values()]


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        ("grpo", [2 / 3, -1 / 3, -1 / 3, 2 / 3]),  # mean 1/3
        ("grpo_vectorized", [1.154698, -0.577349, -0.577349, 1.154698]),  # by the std 1 / sqrt 3, whatever is set
        ("rloo", [1.0, -0.5, -0.5, 1.0]),  # less the mean of the other two: 1 - 0, 0 - 1/2; verl: +-.667
        ("rloo_vectorized", [1.0, -0.5, -0.5, 1.0]),
        ("maxrl", [2.0, -1.0, -1.0, 2.0]),  # (1 - 1/3) / (1/3); verl's treatment: +-1
    ],
)
def test_a_copy_is_outside_of_the_baseline_of_every_estimator(advantages, estimator, expected):
    found = advantages(FILLED, (), estimator, NO_STD)
    assert first(found) == pytest.approx(expected, abs=1e-6)
    assert found[COPY] == found["a_0_0"] == pytest.approx([expected[0], 0.0, expected[0]], abs=1e-6)


@pytest.mark.parametrize("estimator", ["grpo", "grpo_vectorized", "rloo", "reinforce_plus_plus_baseline", "maxrl"])
def test_a_group_of_one_has_advantage_0(advantages, estimator):
    """verl gives it its score, 1 or .999999. A copy of the only one does not make it a group of two."""
    copy = str(EpisodeKey("one", 0, copy=1))
    found = advantages({"one_0_0": 1.0, copy: 1.0} | FILLED, (), estimator, NO_STD)
    assert found["one_0_0"] == found[copy] == [0.0, 0.0, 0.0] and found["a_0_0"][0] > 0.1


def test_a_group_of_one_trains_if_the_estimator_has_no_groups(advantages):
    """reinforce_plus_plus compares with the batch: rewards 1 and 0 lie on both sides of its mean."""
    found = advantages({"one_0_0": 1.0, "two_0_0": 0.0}, (), "reinforce_plus_plus")
    assert found["one_0_0"][0] > 0 > found["two_0_0"][0]


GROUP_MEANS = ["grpo", "grpo_vectorized", "grpo_passk", "rloo", "rloo_vectorized", "opo", "gpg", "maxrl"]
EQUAL = {
    f"u{size}x{number}_{i}_0": reward
    for size in (2, 3, 7, 8, 16, 64)
    for number, reward in enumerate((0.95, -0.9, 0.1, 1 / 3, -1.0000001))
    for i in range(size)
}


@pytest.mark.parametrize("estimator", GROUP_MEANS)
def test_a_group_of_equal_rewards_has_exactly_0(advantages, estimator):
    """verl's own gives eight times -.9 .056 each, because float32 rounds their mean and their deviation."""
    found = advantages(EQUAL | FILLED, (), estimator)
    assert {number for key in EQUAL for number in found[key]} == {0.0} and found["a_0_0"][0] > 0.1


def test_equal_groups_have_exactly_0_before_a_batch_is_whitened(advantages):
    """reinforce_plus_plus_baseline divides by the deviation of the batch: without these, that of rounding."""
    found = advantages(EQUAL, (), "reinforce_plus_plus_baseline")
    assert {number for numbers in found.values() for number in numbers} == {0.0}


@pytest.mark.parametrize("estimator", ["grpo", "grpo_vectorized"])
def test_rewards_that_differ_by_a_millionth_keep_their_difference(advantages, estimator):
    """One of four is d above: mean d / 4, sample std d / 2, 1e-6 in the denominator."""
    one, other = torch.tensor([0.95, 0.95 + 1e-6]).tolist()
    found = first(advantages({"u_0_0": one, "u_1_0": one, "u_2_0": one, "u_3_0": other}, (), estimator))
    d = other - one
    assert found == pytest.approx([-d / 4 / (d / 2 + 1e-6)] * 3 + [3 * d / 4 / (d / 2 + 1e-6)], rel=1e-4)


@pytest.mark.parametrize("estimator", GROUP_MEANS)
def test_advantages_of_unequal_groups_are_verls(advantages, estimator):
    """One batch without copies, with groups of different sizes: verl's function, called with its rewards."""
    import numpy as np
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn

    rewards = torch.randn(12, generator=torch.Generator().manual_seed(3)).tolist()
    keys = [f"{group}_{i}_0" for group, size in (("a", 2), ("b", 3), ("c", 7)) for i in range(size)]
    found = torch.tensor(list(advantages(dict(zip(keys, rewards, strict=True)), (), estimator).values()))
    scores = torch.zeros(12, 3)
    scores[:, 2] = torch.tensor(rewards)
    verls, _ = get_adv_estimator_fn(estimator)(
        token_level_rewards=scores,
        response_mask=torch.tensor([[1, 0, 1]] * 12),
        index=np.array([key[0] for key in keys], dtype=object),
        config={"norm_adv_by_std_in_grpo": True},
    )
    assert torch.allclose(found, verls, atol=1e-6)


@pytest.mark.parametrize("estimator", ["grpo", "maxrl", "reinforce_plus_plus"])
@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_not_a_number_is_refused(advantages, estimator, reward):
    """verl would make all advantages of the group NaN, and skip the update."""
    with pytest.raises(ValueError, match=rf"The reward of b_1_0 .* is {reward}; expected a finite number"):
        advantages(FILLED | {"b_0_0": 1.0, "b_1_0": reward}, (), estimator)


def test_grpo_of_whole_groups_is_verls(advantages):
    """1 and -1, twice each: sample std 2 / sqrt 3, .866."""
    found = advantages({"u_0_0": 1.0, "u_1_0": -1.0, "u_2_0": 1.0, "u_3_0": -1.0}, (), "grpo")
    assert first(found) == pytest.approx([0.8660, -0.8660, 0.8660, -0.8660], abs=1e-4)


# Episodes of several rows ---------------------------------------------------------------------------------------------

TWO_ROWS = {"a_0_0": 3, "a_0_1": 2, "a_1_0": 1}  # key -> tokens; the group has two episodes, of rewards 1 and 0
REWARDS_OF_ROWS = {"a_0_0": 1.0, "a_0_1": 1.0, "a_1_0": 0.0}


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "rloo_vectorized", "grpo_vectorized", "maxrl"])
def test_an_episode_of_two_rows_is_once_in_the_baseline_and_shares_its_advantage(advantages, estimator):
    """Mean 1/2 of two episodes, and not 2/3 of three rows; the other one of two: 1 - 0, 0 - 1. MaxRL: by the mean."""
    found = advantages(REWARDS_OF_ROWS, (), estimator, NO_STD, lengths=TWO_ROWS)
    one = {"grpo": 0.5, "grpo_vectorized": 0.5**0.5}.get(estimator, 1.0)  # vectorized: by the std, 1 / sqrt 2
    for key, tokens in TWO_ROWS.items():
        assert found[key] == pytest.approx([-one if key == "a_1_0" else one] * tokens, abs=1e-5)


def test_an_episode_of_two_rows_alone_in_its_group_has_advantage_0(advantages):
    found = advantages({"one_0_0": 1.0, "one_0_1": 1.0} | FILLED, (), "rloo")
    assert found["one_0_0"] == found["one_0_1"] == [0.0, 0.0, 0.0]


def test_the_last_row_is_in_the_baseline_in_whatever_order_the_batch_has_the_rows(advantages):
    """The rows have unequal rewards here, so that the baseline shows which one it took: 1 less that of session 1."""
    rewards = {"a_0_10": 1.0, "a_1_0": 0.5, "a_0_2": 0.0, "a_0_0": 0.0}
    found = advantages(rewards, (), "rloo")
    assert first(found) == [0.5, -0.5, 0.5, 0.5]


def test_the_copy_of_an_episode_of_two_rows_has_its_advantage_in_both(advantages):
    """Session 2 failed. Rewards 1, 0: mean 1/2, also with the copy."""
    first_row, last_row = (str(EpisodeKey("a", 0, copy=1, row=row)) for row in (0, 1))
    rewards = REWARDS_OF_ROWS | {first_row: 1.0, last_row: 1.0}
    found = advantages(rewards, (), "grpo", NO_STD, lengths=TWO_ROWS | {first_row: 3, last_row: 2})
    assert (found[first_row], found[last_row]) == ([0.5] * 3, [0.5] * 2) and found["a_1_0"] == [-0.5]


@pytest.mark.parametrize("baseline_only", [(), {"a_0_0"}])
def test_a_mean_over_responses_counts_episodes(advantages, baseline_only):
    """verl divides by 4 rows, one of which is its padding, although there are 2 episodes. Rows weigh by tokens."""
    rewards, lengths = REWARDS_OF_ROWS | {"x_0_0": 0.0}, TWO_ROWS | {"x_0_0": 1}
    batch = {"lengths": lengths, "padding": {"x_0_0"}, "baseline_only": baseline_only}
    found = advantages(rewards, (), "grpo", NO_STD, objective="grpo", **batch)
    one = 0.0 if baseline_only else 0.5 * 4 / 2
    expected = {"a_0_0": [one * 3 / 5] * 3, "a_0_1": [one * 2 / 5] * 2, "a_1_0": [-0.5 * 4 / 2], "x_0_0": [0.0]}
    assert {key: pytest.approx(numbers) for key, numbers in expected.items()} == found


def test_a_filler_has_no_advantage_in_any_row(advantages):
    found = advantages(REWARDS_OF_ROWS | {"b_0_0": 1.0, "b_1_0": -1.0}, {"a"}, "grpo", NO_STD)
    assert first(found) == [0.0, 0.0, 0.0, 1.0, -1.0]


# SimpleTIR: a response with a void turn stays in the baseline ---------------------------------------------------------


def test_a_void_response_is_in_the_baseline_and_not_in_the_loss(advantages):
    """Rewards 1, 0 (void), 0, 1: mean 1/2, so .5, 0, -.5, .5. Left out: mean 2/3, so .333, -, -.667, .333."""
    rewards = {"a_0_0": 1.0, "a_1_0": 0.0, "a_2_0": 0.0, "a_3_0": 1.0}
    found = advantages(rewards, (), "grpo", NO_STD, baseline_only={"a_1_0"})
    assert first(found) == [0.5, 0.0, -0.5, 0.5] and found["a_1_0"] == [0.0, 0.0, 0.0]


# Units ----------------------------------------------------------------------------------------------------------------

TWO_GROUPS = {"a_0_0": 1.0, "a_1_0": -1.0, "b_0_0": 1.0, "b_1_0": -1.0}
LENGTHS = {"a_0_0": 1, "a_1_0": 1, "b_0_0": 2, "b_1_0": 4}


def test_the_unit_is_a_factor_of_the_advantages(advantages):
    """A = +-1; 8 tokens; tiny_dapo has 16 / 8 = 2 updates. Batch: 2 / 8. Group: 2 / (2 x 2) and 2 / (2 x 6)."""
    unit = "actor_rollout_ref.actor.policy_loss.unit"
    found = {
        each: first(advantages(TWO_GROUPS, (), "grpo", NO_STD, f"{unit}={each}", lengths=LENGTHS, objective="dapo"))
        for each in ("mini_batch", "batch", "group")
    }
    assert found["mini_batch"] == [1.0, -1.0, 1.0, -1.0]
    assert found["batch"] == [0.25, -0.25, 0.25, -0.25]
    assert found["group"] == pytest.approx([0.5, -0.5, 1 / 6, -1 / 6])


def test_a_filler_has_no_advantage_in_any_unit(advantages):
    unit = "actor_rollout_ref.actor.policy_loss.unit=group"
    found = advantages(TWO_GROUPS, {"b"}, "grpo", NO_STD, unit, lengths=LENGTHS, objective="dapo")
    assert first(found) == [0.5, -0.5, 0.0, 0.0]


@pytest.mark.parametrize(
    ("objective", "more"), [("grpo", ()), ("dapo", ()), (None, ("actor_rollout_ref.actor.loss_agg_mode=token-sum",))]
)
def test_verls_padding_is_in_no_mean_over_responses(advantages, objective, more):
    """verl divides by 6 rows although there are 4 responses; a mean over tokens has no token of padding in it."""
    rewards, padding = TWO_GROUPS | {"x_0_0": 0.0, "y_0_0": 0.0}, {"x_0_0", "y_0_0"}
    found = advantages(rewards, {"b"}, "grpo", NO_STD, *more, objective=objective, padding=padding)
    one = 6 / 4 if objective == "grpo" else 1.0
    assert first(found) == pytest.approx([one, -one, 0.0, 0.0, 0.0, 0.0])


# The optimal token baseline -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("estimator", ["tir_otb", "tir_optimal_token_baseline"])
def test_verls_trainer_gets_the_sum_of_squared_probabilities(advantages, estimator):
    """As objectives/test_tir_otb.py: W 1, 2 and 1.5, 3; A .6 and -.4. The third row is a copy of the first."""
    ones = torch.ones(3)
    found = advantages(
        {"a_0_0": 1.0, "a_1_0": 0.0, COPY: 1.0},
        (),
        estimator,
        objective="tir_otb",
        old_log_probs=[ones * math.log(0.5), ones * math.log(0.25), ones * math.log(0.5)],
        sum_pi_squared=[ones, ones, ones],
    )
    assert found["a_0_0"] == found[COPY] == pytest.approx([0.6, 0.0, 0.6])
    assert found["a_1_0"] == pytest.approx([-0.4, 0.0, -0.4])


def test_a_reward_noted_at_the_last_token_of_a_tool_counts_at_the_policys_last_one(advantages):
    """The same, and the reply to the last code ends the response: verl notes the score there."""
    ones = torch.ones(3)
    found = advantages(
        {"a_0_0": 1.0, "a_1_0": 0.0},
        (),
        "tir_otb",
        objective="tir_otb",
        mask=(1, 1, 0),
        old_log_probs=[ones * math.log(0.5), ones * math.log(0.25)],
        sum_pi_squared=[ones, ones],
    )
    assert found["a_0_0"] == pytest.approx([0.6, 0.6, 0.0]) and found["a_1_0"] == pytest.approx([-0.4, -0.4, 0.0])


@pytest.mark.parametrize("estimator", ["gae", "reinforce_plus_plus"])
def test_no_estimator_loses_a_reward_noted_at_the_last_token_of_a_tool(advantages, estimator):
    """Rewards 1 and -1, whitened over the four tokens of the policy: +-sqrt(3/4), as the deviation is sqrt(4/3)."""
    critic = {"values": [torch.zeros(3)] * 2} if estimator == "gae" else {}
    found = advantages({"a_0_0": 1.0, "a_1_0": -1.0}, (), estimator, mask=(1, 1, 0), **critic)
    assert found["a_0_0"] == pytest.approx([0.75**0.5, 0.75**0.5, 0.0], abs=1e-3)
    assert found["a_1_0"] == pytest.approx([-(0.75**0.5), -(0.75**0.5), 0.0], abs=1e-3)


def test_advantages_are_verls_where_the_formula_is(cpu_platform):
    import numpy as np
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn

    from tests.unit.objectives.cases import random_batch
    from verl_ext.objectives.group_mean import group_mean

    given, groups = random_batch(seed=8), ["a", "b", "a", "b", "a", "a", "b", "b"]
    generator = torch.Generator().manual_seed(9)
    rewards = torch.randn(8, 6, generator=generator, dtype=torch.float64)
    arguments = {"response_mask": given.mask.double(), "index": np.array(groups, dtype=object)}
    for by_std in (True, False):
        settings = {"token_level_rewards": rewards.clone(), "norm_adv_by_std_in_grpo": by_std}
        verls, _ = get_adv_estimator_fn("grpo")(**arguments, **settings)
        ours = group_mean(rewards.sum(-1), groups, by_std=by_std)
        assert torch.allclose(ours[:, None] * given.mask, verls, atol=1e-12)
    rewards = rewards * given.mask  # verl drops what is noted elsewhere
    squares = torch.rand(8, 6, generator=generator, dtype=torch.float64)
    more = {"old_log_probs": given.log_prob, "sum_pi_squared": squares}
    for weights in (None, torch.rand(8, 6, generator=generator, dtype=torch.float64)):
        both = [
            get_adv_estimator_fn(name)(
                **arguments, **more, token_level_rewards=rewards.clone(), rollout_is_weights=weights
            )
            for name in ("tir_otb", "tir_optimal_token_baseline")
        ]
        assert torch.allclose(both[0][0], both[1][0], atol=1e-9) and torch.allclose(both[0][1], both[1][1], atol=1e-12)


def test_the_pass_for_old_log_probs_is_asked_for_it(make, monkeypatch):
    """verl's never is (trainer_base.py:1653). Of prompt and response, as it is stored, the response's part is kept."""
    import transfer_queue as tq
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer
    from verl.utils import tensordict_utils as tu

    off = "algorithm.rollout_correction.bypass_mode=false"
    trainer, _ = make("actor_rollout_ref.actor.calculate_sum_pi_squared=true", off)
    asked, put = [], {}

    def verls(self, batch, metrics):
        asked.append(batch.extra_info["calculate_sum_pi_squared"])
        return batch

    def get(keys, partition_id, select_fields):
        whole = torch.nested.as_nested_tensor([torch.tensor([0.1, 0.2, 0.3, 0.4])], layout=torch.jagged)
        mask = torch.nested.as_nested_tensor([torch.ones(2, dtype=torch.long)], layout=torch.jagged)
        return tu.get_tensordict({"sum_pi_squared": whole, "response_mask": mask})

    monkeypatch.setattr(PPOTrainer, "_compute_old_log_prob", verls)
    monkeypatch.setattr(tq, "kv_batch_get", get)
    monkeypatch.setattr(tq, "kv_batch_put", lambda keys, partition_id, fields: put.update(fields.items()))
    batch = tq.KVBatchMeta(partition_id="train", keys=["a_0_0"], tags=[{}])
    trainer._compute_old_log_prob(batch, {})
    assert asked == [True] and batch.extra_info["calculate_sum_pi_squared"] is False
    assert put["sum_pi_squared"].unbind()[0].tolist() == pytest.approx([0.2, 0.3])  # the token before has the logits
