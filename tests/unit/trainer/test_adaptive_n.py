import math

import pytest

from verl_ext.events import Ended, Started
from verl_ext.runs.journal import StepJournal
from verl_ext.trainer.adaptive_n import AdaptiveN, AdaptiveSampling, difficulty, number_of_responses

WRITE_UP = {
    "phases": [[0, 24], [30, 16], [80, 12]],
    "easy_above": 0.9,
    "easy_visits": 3,
    "easy_n": 8,
    "hard_below": 0.5,
    "hard_n": 24,
}
SETTINGS = AdaptiveN(**WRITE_UP)


@pytest.mark.parametrize(
    ("rates", "expected"),
    [
        ([], ""),
        ([1.0, 1.0], ""),  # easy only after three groups
        ([1.0, 1.0, 1.0], "easy"),
        ([0.0, 1.0, 0.95, 1.0], "easy"),  # the last three
        ([1.0, 1.0, 0.9], ""),  # 0.9 is not above 0.9
        ([0.5], ""),  # 0.5 is not below 0.5
        ([0.49], "hard"),
        ([1.0, 1.0, 1.0, 0.0], "hard"),
        ([0.0, 0.75], ""),
    ],
)
def test_difficulty_is_decided_by_the_last_pass_rates(rates, expected):
    assert difficulty(rates, SETTINGS) == expected


@pytest.mark.parametrize(
    ("step", "rates", "expected"),
    [
        (1, [], 24),
        (29, [], 24),
        (30, [], 16),
        (80, [], 12),
        (30, [0.25], 24),
        (30, [1.0] * 3, 8),
        (80, [0.0], 24),
        (80, [0.7], 12),
    ],
)
def test_number_of_responses_by_phase_and_difficulty(step, rates, expected):
    assert number_of_responses(step, rates, SETTINGS) == expected


def test_easy_never_gets_more_and_hard_never_less_than_the_phase():
    settings = AdaptiveN(**WRITE_UP | {"phases": [[0, 6], [10, 32]]})
    assert number_of_responses(1, [1.0] * 3, settings) == 6
    assert number_of_responses(10, [0.0], settings) == 32


@pytest.mark.parametrize(
    "wrong",
    [{"phases": [[0, 1]]}, {"easy_n": 1}, {"hard_n": 1}, {"easy_visits": 0}, {"hard_below": 0.95}, {"easy_above": 1.5}],
)
def test_settings_out_of_range_are_refused(wrong):
    with pytest.raises(ValueError, match="retool.adaptive_n"):
        AdaptiveN(**WRITE_UP | wrong)


@pytest.fixture
def sampling(tmp_path):
    return AdaptiveSampling(SETTINGS, StepJournal(tmp_path / "pass_rates.jsonl"))


def one_step(sampling, step, text, accs, known=None):
    """Submit one prompt, let its group end; return its number of responses."""
    (number,) = sampling.assign(step, [f"uid-{step}"], [text], [known])
    sampling.on_ended(Ended(step, accs={f"uid-{step}": accs}))
    return number


def test_a_problem_is_known_from_one_group_to_the_next(sampling):
    assert [one_step(sampling, step, "a", [1, 1]) for step in range(40, 44)] == [16, 16, 16, 8]
    assert one_step(sampling, 44, "b", [0, 1, 0, 0]) == 16
    assert one_step(sampling, 45, "b", []) == 24  # 1 of 4; then infrastructure failed all: nothing was learned
    assert one_step(sampling, 46, "b", [1, 1, 0]) == 24
    assert one_step(sampling, 47, "b", [1]) == 16  # 2 of 3
    assert one_step(sampling, 48, "a", [0]) == 8
    assert one_step(sampling, 49, "a", [0]) == 24


def test_the_pass_rate_of_the_data_counts_until_the_run_knows_better(sampling):
    assert one_step(sampling, 40, "a", [1, 0], known=0.25) == 24
    assert one_step(sampling, 41, "a", [1, 1], known=0.25) == 16  # 1 of 2 in this run
    assert one_step(sampling, 42, "b", [1, 1], known=1.0) == 8
    assert one_step(sampling, 43, "b", [0, 1], known=1.0) == 8
    assert one_step(sampling, 44, "b", [0, 1], known=1.0) == 16  # 1, 1, 0.5
    assert one_step(sampling, 45, "c", [0, 1], known=math.nan) == 16
    assert one_step(sampling, 46, "d", [0, 1], known=None) == 16


def test_pass_rates_outlive_a_resume_but_not_those_after_its_step(sampling, tmp_path):
    one_step(sampling, 40, "a", [0, 0])
    one_step(sampling, 41, "b", [0, 0])
    resumed = AdaptiveSampling(SETTINGS, StepJournal(tmp_path / "pass_rates.jsonl"))
    resumed.on_started(Started(40, decode=str))
    assert resumed.assign(41, ["x", "y"], ["a", "b"], [None, None]) == [24, 16]
    resumed.on_ended(Ended(41, accs={"of-an-older-run": [1]}))  # it is not known of which problem


def test_a_group_in_flight_at_a_checkpoint_counts_for_its_problem_in_the_run_that_resumes(sampling, tmp_path):
    """The asynchronous modes send it again under its name."""
    sampling.assign(40, ["x", "y"], ["a", "b"], [None, None])
    sampling.on_ended(Ended(40, accs={"x": [1, 1]}))
    sampling.assign(41, ["z"], ["c"], [None])  # after the checkpoint: drawn again, under another name
    resumed = AdaptiveSampling(SETTINGS, StepJournal(tmp_path / "pass_rates.jsonl"))
    resumed.on_started(Started(40, decode=str))
    resumed.on_ended(Ended(41, accs={key: [0, 0] for key in "xyz"}))
    assert resumed.assign(41, ["1", "2", "3"], ["a", "b", "c"], [None] * 3) == [16, 24, 16]


def test_metrics_are_of_the_prompts_of_a_step(sampling):
    one_step(sampling, 40, "a", [0, 0])
    sampling.assign(41, ["1", "2"], ["a", "b"], [None, 1.0])
    sampling.assign(41, ["3", "4"], ["c", "d"], [None, None])  # a refill
    expected = {"mean": (24 + 8 + 16 + 16) / 4, "min": 8, "max": 24, "easy": 0.25, "hard": 0.25}
    assert sampling.on_ended(Ended(41)) == {f"rollout_n/{name}": value for name, value in expected.items()}
    assert sampling.on_ended(Ended(42)) == {}


def test_groups_of_unequal_size_have_each_their_own_grpo_baseline():
    """One right of 4: mean -.5, sample std 1: 1.5 and -.5. One right of 2: mean 0, std 1.4142: +-.7071."""
    import torch
    from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage

    rewards = torch.tensor([1.0, -1.0, -1.0, -1.0, 1.0, -1.0])[:, None]
    uids = ["a", "a", "a", "a", "b", "b"]
    advantages, _ = compute_grpo_outcome_advantage(rewards, torch.ones(6, 1), uids)
    assert advantages[:, 0].tolist() == pytest.approx([1.5, -0.5, -0.5, -0.5, 0.7071, -0.7071], abs=1e-4)
