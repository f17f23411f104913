"""What DapoReplayBuffer does with groups of which rollouts are excluded, and what it counts of them."""

import pytest

from tests.unit.trainer.prompt_groups import (
    MIXED,
    MODES,
    RAISED,
    RIGHT,
    SANDBOX_DOWN,
    UNVERIFIED,
    buffer_maker,
    group_of,
    info,
    keys_of,
)
from verl_ext.episode import SUMMARY, EpisodeKey


@pytest.fixture
def make(monkeypatch):
    return buffer_maker(monkeypatch)


@pytest.mark.parametrize("mode", MODES)
def test_a_group_with_more_than_half_valid_is_filled_with_copies_of_valid_rollouts(make, mode):
    queue, buffer = make([group_of(1, 0, 1, 0, 1, failed=(1, 4))], batch_size=1, mode=mode)
    batch, metrics = buffer.sample(1, "train", 1)
    keys = keys_of(batch)
    assert len(keys) == 5 and set(queue.tags) == set(keys)
    assert {"uid-0_0_0", "uid-0_2_0", "uid-0_3_0"} < set(keys)  # the valid ones; 1 and 4 are gone
    copies = [key for key in map(EpisodeKey.parse, keys) if key.copy]
    assert len(copies) == 2 and not {1, 4} & {key.session for key in copies}
    for key in copies:
        assert queue.values[str(key)] is queue.values[str(key.original)] and queue.tags[str(key)]["seq_len"] == 7
    assert (metrics["failure/groups_filled"], metrics["failure/groups_dropped"]) == (1, 0)
    assert metrics["failure/sandbox_failure"] == 2


def test_a_group_is_filled_with_whole_episodes_and_rid_of_whole_ones(make):
    """Every episode has two rows; the first one failed."""
    group = [info(i % 2, rows=2, sandbox_failure=float(i == 0)) for i in range(4)]
    queue, buffer = make([group], batch_size=1)
    batch, _ = buffer.sample(1, "train", 1)
    keys = [EpisodeKey.parse(key) for key in batch.keys]
    assert len(keys) == 8 and set(queue.tags) == set(batch.keys)
    episodes = {key.episode for key in keys}
    assert len(episodes) == 4 and sum(key.copy for key in episodes) == 1 and EpisodeKey("uid-0", 0) not in episodes
    assert {(key.episode, key.row) for key in keys} == {(key, row) for key in episodes for row in (0, 1)}


@pytest.mark.parametrize(
    ("group", "is_used"),
    [
        (group_of(1, 0, 1, 0, failed=(0,)), True),  # 3 of 4 are valid
        (group_of(1, 0, 1, 0, failed=(0, 1)), False),  # 2 of 4: half is not more than half
        (group_of(1, 0, 1, failed=(2,)), True),  # 2 of 3
        (group_of(1, 0, 0, failed=(0,)), False),  # equal once the failed one is out
    ],
)
def test_half_of_a_group_must_be_valid_and_its_valid_rewards_unequal(make, group, is_used):
    _queue, buffer = make([group, MIXED], batch_size=1)
    batch, _ = buffer.sample(1, "train", 1)
    assert bool(keys_of(batch)) == is_used
    assert len(batch.keys) == (len(group) if is_used else 2)


def test_advantages_of_a_filled_group_are_those_of_its_valid_rollouts_only(make):
    """With the keys that the buffer returns. Rewards 1, -1, 1, sample std 2/sqrt(3)."""
    import numpy as np
    import torch
    from verl import DataProto
    from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories

    from verl_ext.trainer.advantages import group_advantages

    accs = [1, 0, 1, 0, 0]
    queue, buffer = make([group_of(*accs, failed=(3, 4))], batch_size=1)
    batch, _ = buffer.sample(1, "train", 1)
    scores = torch.tensor([[2.0 * queue.values[key].data["reward_extra_info"]["acc"] - 1] for key in batch.keys])
    data = DataProto.from_dict(
        tensors={"token_level_rewards": scores, "response_mask": torch.ones(len(batch.keys), 1)},
        non_tensors={"uid": np.array([EpisodeKey.parse(key).uid for key in batch.keys], dtype=object)},
    )
    data = group_advantages(compute_advantage_for_multi_trajectories, data, batch.keys, "grpo", num_repeat=5)
    # mean 1/3; (1 - 1/3) / (2/sqrt 3) = 0.577; (-1 - 1/3) / (2/sqrt 3) = -1.155
    by_hand = {1.0: 0.57735, -1.0: -1.1547}
    assert len(batch.keys) == 5
    for score, advantage in zip(scores[:, 0].tolist(), data.batch["advantages"][:, 0].tolist(), strict=True):
        assert advantage == pytest.approx(by_hand[score], abs=1e-4)


def test_a_batch_is_copied_and_cleared_in_one_call_each(make, monkeypatch):
    """A call is a message to TransferQueue, and a look at every row of the queue."""
    import transfer_queue

    groups = [group_of(1, 0, 1, 0, failed=(i % 4,)) for i in range(6)]
    queue, buffer = make(groups, batch_size=6)
    calls = []

    def noting(name):
        call = getattr(queue, name)
        return lambda **arguments: calls.append((name, len(arguments["keys"]))) or call(**arguments)

    for name in ("kv_batch_put", "kv_clear"):
        monkeypatch.setattr(transfer_queue, name, noting(name))
    batch, metrics = buffer.sample(1, "train", 6)
    assert metrics["failure/groups_filled"] == 6 and len(batch.keys) == 24
    assert [call for call in calls if call[1]] == [("kv_batch_put", 6), ("kv_clear", 6), ("kv_clear", 6)]


def test_what_the_policy_can_cause_is_a_normal_sample(make):
    """Time-outs of its code, too much output, too many calls, malformed calls and void turns are all trained on."""
    reasons = ["max_turns", "max_tokens", "malformed_limit", "answer"]
    group = [
        info(i == 3, finish_reason=reason, errors={"timeout": 3}, void_turns=1) for i, reason in enumerate(reasons)
    ]
    _queue, buffer = make([group], batch_size=1)
    batch, metrics = buffer.sample(1, "train", 1)
    assert len(batch.keys) == 4 and metrics["failure/groups_filled"] == 0
    assert metrics["finish/turn_limit"] == metrics["finish/malformed_limit"] == 0.25


@pytest.mark.parametrize("mode", MODES)
def test_void_turns_are_left_out_if_requested_but_not_forever(make, mode):
    one_void = [info(1), info(0), info(0, void_turns=1)]
    all_void = [info(1, void_turns=2), info(0, void_turns=1), info(0, void_turns=1)]
    _queue, buffer = make([all_void, one_void], batch_size=1, void_turn_filter=True, mode=mode)
    batch, metrics = buffer.sample(1, "train", 1)
    assert "uid-1_2_0" not in batch.keys and len(keys_of(batch, "uid-1")) == 3 == len(batch.keys)
    assert buffer.selection.left_out == {EpisodeKey("uid-1", 2): "left out of the batch: void_turn"}
    assert metrics["failure/void_turn"] == 4 and metrics["failure/groups_dropped"] == 0
    assert metrics["turn/void_rate"] == 4 / 6

    _queue, buffer = make([all_void] * 9, batch_size=1, max_num_gen_batches=2, void_turn_filter=True, mode=mode)
    batch, metrics = buffer.sample(1, "train", 1)
    assert len(batch.keys) == 3 and metrics["filter_groups/filled_with_equal"] == len(buffer.selection.fillers) == 1


def test_counts_of_a_step_are_counts_although_verl_averages_over_its_mini_batches(make):
    from verl.trainer.ppo.v1.utils import MetricsAggregator

    whole, filled = group_of(1, 0, 1), group_of(1, 0, 1, failed=(2,))
    queue, buffer = make(
        [SANDBOX_DOWN, whole, RAISED, SANDBOX_DOWN, filled], batch_size=1, mode="separate_async", parameter_sync_step=2
    )
    aggregator = MetricsAggregator()
    for _ in range(2):  # what is replaced for the first batch: 0; for the second: 2 and 3
        batch, metrics = buffer.sample(1, "train", 1)
        aggregator.add_step_metrics(metrics, sample_count=len(batch.keys))
        queue.submit(len(queue.groups) == 2)
    step = aggregator.get_aggregated_metrics()
    expected = {"sandbox_failure": 3, "raised": 1, "groups_dropped": 3, "groups_filled": 1}
    assert {name: step[f"failure/{name}"] for name in expected} == expected
    assert step["filter_groups/failed"] == 3 and step["train/acc"] < 1


def test_means_of_a_step_are_over_all_that_ended_however_many_each_of_its_batches_saw(make):
    """One group ends for the first batch, five for the second, of which it takes one: 1 + 0 right of 2, 8 of 10."""
    from verl.trainer.ppo.v1.utils import MetricsAggregator

    queue, buffer = make([MIXED], batch_size=1, mode="separate_async", parameter_sync_step=2)
    queue.outcomes = iter([RIGHT, RIGHT, RIGHT, MIXED, MIXED, *[MIXED] * 3])  # three are replaced, and end later
    aggregator = MetricsAggregator()
    for number in (0, 5):
        queue.submit(number)
        batch, metrics = buffer.sample(1, "train", 1)
        aggregator.add_step_metrics(metrics, sample_count=len(batch.keys))
    step = aggregator.get_aggregated_metrics()
    assert step["train/acc"] == pytest.approx(9 / 12)  # a mean of the two means: .65
    assert step["filter_groups/keep_rate"] == 0.5  # 1 of 1, 2 of 5


def test_a_step_in_which_no_group_ended_has_no_share_of_useful_ones(make):
    _, buffer = make([MIXED] * 2, batch_size=2, mode="separate_async")
    assert buffer.sample(1, "train", 1)[1]["filter_groups/keep_rate"] == 1.0
    _, metrics = buffer.sample(2, "train", 1)  # of a group that ended before
    assert "filter_groups/keep_rate" not in metrics and "train/acc" not in metrics


def test_groups_of_unequal_size_are_filled_replaced_and_trained_on_each_by_its_own_rule(make):
    three, five = group_of(1, 0, 1), group_of(1, 0, 1, 0, 1, failed=(1, 3))  # 3 of 5 valid, but all right: replaced
    eight, two = group_of(1, 0, 1, 0, 1, 0, 1, 0, failed=(0, 1, 2)), group_of(0, 1)  # 5 of 8 valid: filled
    half = group_of(1, 0, 1, 0, failed=(0, 1))  # 2 of 4: replaced
    queue, buffer = make([three, five, eight, half, two, group_of(1, 1, 0, 0, 0)], batch_size=4)
    batch, metrics = buffer.sample(1, "train", 4)
    sizes = {uid: len(keys_of(batch, uid)) for uid in queue.groups}
    assert sizes == {"uid-0": 3, "uid-1": 0, "uid-2": 8, "uid-3": 0, "uid-4": 2, "uid-5": 5}
    assert (metrics["failure/groups_filled"], metrics["failure/groups_dropped"]) == (1, 1)


@pytest.mark.parametrize("mode", MODES)
def test_a_filler_is_without_its_failed_rollouts(make, mode):
    groups = [group_of(1, 1, 1, failed=(i % 3,)) for i in range(9)]
    queue, buffer = make(groups, batch_size=2, max_num_gen_batches=1, mode=mode)
    queue.submit(1)
    batch, metrics = buffer.sample(1, "train", 2)
    assert metrics["filter_groups/filled_with_equal"] == metrics["failure/groups_filled"] == 2
    for uid in buffer.selection.fillers:
        keys = [EpisodeKey.parse(key) for key in keys_of(batch, uid)]
        failed = int(uid.removeprefix("uid-")) % 3
        assert len(keys) == 3 and failed not in {key.session for key in keys}


def test_the_copies_that_fill_a_group_are_drawn_from_all_valid_rollouts(make):
    _queue, buffer = make([group_of(1, 0, 1, 0, failed=(1,))] * 40, batch_size=40)
    batch, _ = buffer.sample(1, "train", 40)
    copied = [key.session for key in map(EpisodeKey.parse, batch.keys) if key.copy]
    counts = [copied.count(session) for session in range(4)]
    assert counts[1] == 0 and sum(counts) == 40
    assert min(counts[0], counts[2], counts[3]) >= 5  # 13 of each are expected


def test_pass_rates_count_rollouts_that_the_void_turn_filter_leaves_out(make):
    _queue, buffer = make([[info(1, void_turns=1), info(0), info(0), info(1)]], batch_size=1, void_turn_filter=True)
    batch, _ = buffer.sample(1, "train", 1)
    assert buffer.take_ended(1).accs == {"uid-0": [1, 0, 0, 1]} and "uid-0_0_0" not in batch.keys


@pytest.mark.parametrize("mode", MODES)
def test_the_trainer_is_told_what_ended_once(make, mode):
    groups = [RIGHT, SANDBOX_DOWN, RAISED, UNVERIFIED, [info(1, void_turns=1), info(0), info(1)], MIXED]
    queue, buffer = make(groups + [MIXED] * 9, batch_size=6, mode=mode, void_turn_filter=True)
    buffer.sample(1, "train", 6)
    ended = buffer.take_ended(1).counts
    assert ended.groups == len(queue.groups) and not queue.in_flight
    assert +ended.excluded == {"sandbox_failure": 1, "verifier_unknown": 1, "raised": 1, "void_turn": 1}
    assert ended.rollouts == 2 * (ended.groups - 2) + 3  # all but the group that raised; one has three
    assert ended.raised == {"uid-2"}
    assert buffer.take_ended(1).counts.groups == 0


def test_the_trainer_is_told_which_servers_were_lost_under_requests(make, monkeypatch):
    first, second = info(1, lost=["a:80", "b:80", "a:80"]), info(0, lost=["a:80"])
    monkeypatch.setitem(
        MIXED[0], SUMMARY, info(0, lost=["c:80"])[SUMMARY]
    )  # of the group that raised, the one that did not
    _, buffer = make([RAISED, [first, second]], batch_size=1)
    buffer.sample(1, "train", 1)
    assert buffer.take_ended(1).counts.lost == {"a:80": 3, "b:80": 1, "c:80": 1}
    assert not buffer.take_ended(1).counts.lost
