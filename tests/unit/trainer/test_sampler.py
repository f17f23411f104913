"""Which prompt groups DapoReplayBuffer replaces, asks for and returns."""

import logging

import pytest

from tests.unit.trainer.prompt_groups import (
    ABORTED,
    MIXED,
    MODES,
    RAISED,
    RIGHT,
    SANDBOX_DOWN,
    SCORED_BY_OTHERS,
    UNVERIFIED,
    WRONG,
    buffer_maker,
    info,
    sampled,
)
from verl_ext.episode import AgentUse
from verl_ext.trainer.domains import ONLY


@pytest.fixture
def make(monkeypatch):
    return buffer_maker(monkeypatch)


def test_groups_with_equal_rewards_are_replaced(make):
    queue, buffer = make([RIGHT, MIXED, WRONG, MIXED], batch_size=2)
    batch, metrics = buffer.sample(1, "train", 2)
    assert sampled(batch) == [1, 3]
    assert queue.submissions == [1, 1]
    assert metrics["filter_groups/generated"] == 4 and metrics["filter_groups/filled_with_equal"] == 0
    assert [tag["seq_len"] for tag in batch.tags] == [7] * 4


@pytest.mark.parametrize("mode", MODES)
def test_among_ended_groups_the_first_submitted_come_first(make, mode):
    """With ten or more prompts, sorting by name is not the order of submission."""
    _, buffer = make([MIXED] * 12, batch_size=12, mode=mode)
    if mode == "sync":
        buffer.num_to_submit = lambda batch_size: 12
    assert sampled(buffer.sample(1, "train", 11)[0]) == list(range(11))


def test_the_metric_of_the_configuration_decides_what_is_equal(make):
    control = [info(1, train_acc=0.0), info(1, train_acc=1.0)]  # equal in truth, drawn at random in the control run
    assert sampled(make([control], batch_size=1)[1].sample(1, "train", 1)[0]) == [0]
    _queue, buffer = make([control, MIXED], batch_size=1, metric="acc")
    assert sampled(buffer.sample(1, "train", 1)[0]) == [1]


def test_a_group_that_differs_in_a_bonus_alone_is_useful_if_the_whole_score_is_compared(make):
    bonus = [info(1, score=1.0), info(1, score=1.2)]
    equal = [info(0, score=-1.0), info(0, score=-1.0)]
    assert sampled(make([equal, bonus], batch_size=1, metric="score")[1].sample(1, "train", 1)[0]) == [1]
    assert sampled(make([bonus, MIXED], batch_size=1, metric="acc")[1].sample(1, "train", 1)[0]) == [1]


def test_each_part_of_the_reward_is_logged(make):
    groups = [
        [info(1, reward_base=1.0, reward_mine=0.5, reward_length=0.0), info(0, reward_base=-1.0, reward_mine=0.1)]
    ]
    metrics = make(groups, batch_size=1)[1].sample(1, "train", 1)[1]
    parts = {name: value for name, value in metrics.items() if name.startswith("train/reward_")}
    assert parts == {"train/reward_base": 0.0, "train/reward_mine": 0.3}, "a part that is always 0 is left out"


@pytest.mark.parametrize("enable", [True, False])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("failed", "reason"),
    [(SANDBOX_DOWN, "sandbox_failure"), (UNVERIFIED, "verifier_unknown"), (ABORTED, "aborted"), (RAISED, "raised")]
    + [(SCORED_BY_OTHERS, "aborted")],
)
def test_groups_that_infrastructure_failed_are_replaced_and_never_returned(make, failed, reason, enable, mode):
    queue, buffer = make([failed, MIXED, failed, MIXED, failed, MIXED], batch_size=3, enable=enable, mode=mode)
    batch, metrics = buffer.sample(1, "train", 3)
    assert sampled(batch) == [1, 3, 5]
    assert metrics["filter_groups/failed"] == metrics["failure/groups_dropped"] == 3
    assert metrics[f"failure/{reason}"] == 3 and metrics["failure/groups_filled"] == 0
    assert sum(queue.submissions) == 3


def test_failed_groups_do_not_fill_up_a_batch_that_lacks_useful_ones(make):
    _queue, buffer = make(
        [WRONG, SANDBOX_DOWN, RIGHT, UNVERIFIED, RAISED, WRONG, RIGHT], batch_size=2, max_num_gen_batches=2
    )
    batch, metrics = buffer.sample(1, "train", 2)
    assert set(sampled(batch)) < {0, 2, 5, 6}
    assert metrics["filter_groups/failed"] == 3  # they do not count towards max_num_gen_batches x 2 prompts:
    assert metrics["filter_groups/generated"] == 2 * 2 + 3


def test_only_the_returned_trajectories_stay_in_the_queue(make):
    queue, buffer = make([MIXED, RIGHT, SANDBOX_DOWN, RAISED, *[MIXED] * 20], batch_size=4)
    buffer.domains.keep_rates[ONLY] = 0.5  # so it asks for more than it turns out to need
    batch, _ = buffer.sample(1, "train", 4)
    assert len(sampled(batch)) == 4
    assert len(queue.groups) > 4 + 3  # a surplus was generated
    assert set(queue.tags) == set(batch.keys)  # the trainer clears these when it has trained on them


@pytest.mark.parametrize(
    ("keep_rate", "max_num_gen_batches", "submissions"),
    [
        # 8 in flight make 4 useful groups, +- sqrt(8 * .5 * .5) = 1.41: (8 + 1.41 - 4) / .5 = 10.8 more prompts.
        (0.5, 4, [11]),
        (0.5, 2, [8]),  # at most 2 x 8 prompts
        (0.95, 4, [2]),  # 7.6 +- 0.62: (8 + 0.62 - 7.6) / .95 = 1.1
        (0.995, 4, []),  # 7.96 +- 0.2: what is missing is less than half a group
        (1.0, 4, []),
    ],
)
def test_prompts_are_asked_for_at_once_as_the_share_of_useful_groups_lets_expect(
    make, keep_rate, max_num_gen_batches, submissions
):
    queue, buffer = make([MIXED] * 100, batch_size=8, max_num_gen_batches=max_num_gen_batches)
    buffer.domains.keep_rates[ONLY] = keep_rate
    buffer.sample(1, "train", 8)
    assert queue.submissions == submissions


def test_the_expected_share_of_useful_groups_follows_what_is_seen(make):
    _queue, buffer = make([MIXED, WRONG, WRONG, WRONG], batch_size=2, max_num_gen_batches=2)
    assert buffer.domains.keep_rates[ONLY] == 1.0
    _, metrics = buffer.sample(1, "train", 2)
    assert metrics["filter_groups/keep_rate"] == 0.25
    assert buffer.domains.keep_rates[ONLY] == pytest.approx(0.625)  # halfway from 1 to 0.25

    _queue, buffer = make([WRONG] * 4, batch_size=2, max_num_gen_batches=2)
    buffer.sample(1, "train", 2)
    assert buffer.domains.keep_rates[ONLY] == pytest.approx(0.55)  # halfway from 1 to 0.1: never less than 0.1


def test_at_max_num_gen_batches_equal_groups_fill_up_and_the_log_says_so(make, caplog):
    outcomes = [RIGHT, WRONG, WRONG, RIGHT, WRONG, MIXED]  # one useful group in the six that may be generated
    queue, buffer = make(outcomes, batch_size=2, max_num_gen_batches=3)
    with caplog.at_level(logging.WARNING, logger="verl_ext.trainer.sampler"):
        batch, metrics = buffer.sample(7, "train", 2)
    assert 5 in sampled(batch) and len(sampled(batch)) == 2
    assert metrics["filter_groups/generated"] == 6 and metrics["filter_groups/filled_with_equal"] == 1
    assert "step 7: only 1 of 2 groups had unequal rewards after 6 prompts (max_num_gen_batches=3)" in caplog.text
    assert buffer.selection.fillers == {f"uid-{i}" for i in sampled(batch) if i != 5}
    assert set(queue.tags) == set(batch.keys)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("failed", "remedy"),
    [
        (SANDBOX_DOWN, "Start the sandbox"),
        (UNVERIFIED, "See the reward manager's warnings"),
        (ABORTED, "See the log of the rollout servers"),
        (RAISED, "Fix the error that the log reports as 'Error in _run_prompt'"),
    ],
)
def test_a_run_in_which_everything_fails_outside_the_model_stops_and_says_what_to_do(make, mode, failed, remedy):
    queue, buffer = make([failed] * 100, batch_size=2, max_num_gen_batches=3, mode=mode)
    said = rf"(\d+) of \1 prompt groups of step 4 failed for reasons outside the model \(.*\)\. {remedy}.*then resume"
    with pytest.raises(RuntimeError, match=said):
        buffer.sample(4, "train", 2)
    assert 6 < len(queue.groups) <= 6 + 2 + 6  # stops once more than 3 x 2 have failed


def test_the_remedy_is_that_of_most_groups(make):
    """Seven groups raised, and one of eight rollouts lost its sandbox: eight rollouts, and one group."""
    down = [info(0, sandbox_failure=1.0, finish_reason="sandbox_failure")] * 8
    _, buffer = make([down, *[RAISED] * 20], batch_size=2, max_num_gen_batches=3)
    with pytest.raises(
        RuntimeError, match="sandbox_failure 8, raised 7.*Fix the error that the log reports as 'Error in _run_prompt'"
    ):
        buffer.sample(4, "train", 2)


@pytest.mark.parametrize("mode", MODES)
def test_a_group_whose_episode_has_two_rows_is_sampled_whole(make, mode):
    """Figures count episodes: 1 right of 2 in the first group, 2 of 2 in the one that is replaced with all its rows."""
    long, equal = [info(1, rows=2), info(0)], [info(1, rows=3), info(1)]
    queue, buffer = make([long, equal, MIXED], batch_size=2, mode=mode)
    batch, metrics = buffer.sample(1, "train", 2)
    assert sorted(batch.keys) == ["uid-0_0_0", "uid-0_0_1", "uid-0_1_0", "uid-2_0_0", "uid-2_1_0"]
    assert set(queue.tags) == set(batch.keys)
    assert metrics["train/acc"] == 4 / 6 and metrics["train/model_tokens"] == (20 + 10 + 30 + 10 + 10 + 10) / 6
    ends = buffer.take_ended(1)
    assert ends.counts.rollouts == 6 and ends.fates["uid-0"] == {"trained": 2} and ends.fates["uid-1"].total() == 2


def test_what_agents_did_is_a_mean_over_the_episodes_of_a_step(make):
    """Two of four episodes are agents', with 3 rows and 1; of three rows as of one, an episode counts once."""
    of_agents = [info(1, rows=3, agent=AgentUse(rows=3, turns=5)), info(0, agent=AgentUse(rows=1, turns=2))]
    _, buffer = make([of_agents, MIXED], batch_size=2)
    _, metrics = buffer.sample(1, "train", 2)
    assert (metrics["agent/rows"], metrics["agent/turns"], metrics["agent/forks"]) == (2.0, 3.5, 0.0)


def test_a_reward_manager_that_reports_only_acc_has_its_metrics(make):
    foreign = {"reward_extra_info": {"acc": 0.0}}
    own = info(1, finish_reason="max_tokens", response_tokens=30) | {"reward_extra_info": {"acc": 1.0}}
    _, buffer = make([[own, foreign], MIXED], batch_size=2, metric="acc")
    _, metrics = buffer.sample(1, "train", 2)
    of_these = {name: value for name, value in metrics.items() if name.startswith("train/")}
    # the second rollout is of another project's loop, which reports no length; those of MIXED have 10 tokens
    assert of_these == pytest.approx({"train/acc": 0.5, "train/truncation_rate": 1 / 3, "train/model_tokens": 50 / 3})


def test_without_filtering_equal_groups_are_trained_on(make):
    queue, buffer = make([RIGHT, WRONG, MIXED], batch_size=3, enable=False)
    batch, metrics = buffer.sample(1, "train", 3)
    assert sampled(batch) == [0, 1, 2] and queue.submissions == []
    assert metrics["filter_groups/keep_rate"] == 1.0


def test_validation_returns_every_group_and_generates_nothing_again(make):
    outcomes = [RIGHT, WRONG, MIXED, SANDBOX_DOWN, UNVERIFIED]
    queue, buffer = make(outcomes, batch_size=5, partition="val")
    batch, metrics = buffer.sample(1, "val", 5)
    assert sampled(batch) == [0, 1, 2, 3, 4]
    assert metrics == {} and queue.submissions == []


def test_a_validation_that_stored_nothing_at_all_is_named(make):
    from verl_ext.trainer.exclusions import NothingStored

    _queue, buffer = make([[], []], batch_size=2, partition="val")
    with pytest.raises(NothingStored, match="All rollouts of 2 validation prompts raised. Fix the error that the log"):
        buffer.sample(1, "val", 2)


def test_validation_does_not_wait_for_a_group_whose_loop_raised(make):
    _queue, buffer = make([RIGHT, RAISED], batch_size=2, partition="val")
    batch, _ = buffer.sample(1, "val", 2)
    assert batch.keys == ["uid-0_0_0", "uid-0_1_0", "uid-1_0_0"]  # what there is of it


@pytest.mark.parametrize("mode", MODES)
def test_metrics_are_over_all_that_was_generated_but_not_over_failed_rollouts(make, mode):
    groups = [
        [info(1, ok=1, errors={"NameError": 1}, response_tokens=30.0), info(1)],  # equal: left out of the batch
        [info(0, errors={"timeout": 1}, truncated=1.0, finish_reason="max_tokens"), info(1, ok=1)],
        [info(1, ok=9, sandbox_failure=1.0), info(1, ok=5)],  # the failed one is counted nowhere
        [info(0), info(1, response_tokens=20.0)],
    ]
    _queue, buffer = make(groups, batch_size=2, mode=mode)
    batch, metrics = buffer.sample(1, "train", 2)
    assert sampled(batch) == [1, 3]
    expected = {
        "train/acc": 5 / 7,  # 1 1 | 0 1 | - 1 | 0 1
        "train/truncation_rate": 1 / 7,
        "train/model_tokens": 100 / 7,  # 30 10 | 10 10 | - 10 | 10 20
        "tool/code_ratio": 4 / 7,  # 2 0 | 1 1 | - 5 | 0 0
        "tool/calls": 9 / 7,
        "tool/error_rate": 2 / 9,  # per call
        "tool/timeout_rate": 1 / 9,
        "tool/error/NameError": 1 / 9,
        "finish/answer": 6 / 7,
        "finish/token_limit": 1 / 7,
        "filter_groups/keep_rate": 2 / 3,  # of the groups that did not fail
        "filter_groups/failed": 1.0,
        "filter_groups/filled_with_equal": 0.0,
        "failure/sandbox_failure": 1.0,
        "failure/groups_dropped": 1.0,
        "failure/groups_filled": 0.0,
    }
    assert {name: metrics.get(name) for name in expected} == pytest.approx(expected)
    buffer.sample(2, "train", 0)  # what was counted is not counted again
    assert buffer._counts.seen.groups == 0


def test_no_tool_call_at_all_is_an_error_rate_of_0(make):
    _, buffer = make([MIXED], batch_size=1)
    _, metrics = buffer.sample(1, "train", 1)
    assert metrics["tool/error_rate"] == 0.0 and metrics["tool/timeout_rate"] == 0.0


@pytest.mark.parametrize("mode", MODES[1:])
def test_asynchronous_sampling_evicts_and_refills_one_by_one(make, mode):
    queue, buffer = make([RIGHT, MIXED, WRONG, MIXED, MIXED], batch_size=3, mode=mode)
    batch, metrics = buffer.sample(1, "train", 3)
    assert sampled(batch) == [1, 3, 4] and sum(queue.submissions) == 2
    assert metrics["training/filter_groups/evicted_samples"] == 2
    assert set(queue.tags) == set(batch.keys)


@pytest.mark.parametrize("mode", MODES[1:])
def test_asynchronous_sampling_of_equal_groups_has_an_end(make, mode, caplog):
    queue, buffer = make([RIGHT] * 100, batch_size=2, max_num_gen_batches=2, mode=mode)
    with caplog.at_level(logging.WARNING, logger="verl_ext.trainer.sampler"):
        batch, metrics = buffer.sample(3, "train", 2)
    assert len(batch.keys) == 4 and metrics["filter_groups/filled_with_equal"] == 2
    assert len(queue.groups) == 2 * 2, "as many prompts as in the mode sync"
    assert caplog.text.count("step 3:") == 1 and "only 0 had unequal rewards" in caplog.text


@pytest.mark.parametrize("mode", MODES[1:])
def test_what_one_batch_may_not_replace_the_next_one_does_not_replace_at_once(make, mode):
    """Eight equal groups wait: each batch of two may replace the two oldest, and takes two."""
    queue, buffer = make([RIGHT] * 100, batch_size=8, max_num_gen_batches=2, mode=mode)
    for number in (1, 2):
        batch, _ = buffer.sample(3, "train", 2)
        assert len(batch.keys) == 4 and len(queue.groups) == 8 + 2 * number


def test_stale_groups_are_dropped_in_asynchronous_modes(make):
    queue, buffer = make([MIXED, MIXED, MIXED], batch_size=2, mode="separate_async")
    buffer.max_off_policy_threshold = 2
    batch, _ = buffer.sample(2, "train", 1)  # made in step 1, and taken in step 2: within the threshold
    assert sampled(batch) in ([0], [1])
    buffer.refill_fn = lambda count: queue.submit(count, global_steps=3)
    batch, metrics = buffer.sample(3, "train", 1)
    assert sampled(batch) == [2] and metrics["training/off_policy/evicted_samples"] == 1


def test_a_metric_that_the_reward_manager_does_not_give_is_named(make):
    _queue, buffer = make([MIXED], batch_size=1, metric="seq_reward")
    with pytest.raises(ValueError, match="filter_groups.metric is 'seq_reward'.*Expected one of acc, .*train_acc"):
        buffer.sample(1, "train", 1)


def test_max_num_gen_batches_must_be_1_at_least(make):
    with pytest.raises(ValueError, match="max_num_gen_batches is 0; expected at least 1"):
        make([MIXED], batch_size=1, max_num_gen_batches=0)


@pytest.mark.parametrize("mode", MODES)
def test_a_trainer_that_asks_is_told_how_every_group_ended(make, mode):
    """Including those that are left out, but without infrastructure failures."""
    groups = [RIGHT, [info(1, void_turns=1), info(0)], SANDBOX_DOWN, RAISED, MIXED]
    queue, buffer = make(groups, batch_size=5, mode=mode, enable=False)
    queue.outcomes = iter([MIXED] * 2)
    buffer.sample(1, "train", 5)
    told = buffer.take_ended(1).accs
    first = [(f"uid-{i}", accs) for i, accs in enumerate([[1, 1], [1, 0], [1], [], [0, 1]])]
    assert sorted(told.items())[:5] == first and len(told) == 7 and not buffer.take_ended(2).accs
