"""DapoReplayBuffer on an in-memory TransferQueue, whose prompts end as a test says."""

import logging
from types import SimpleNamespace

import pytest

MAX_LOOKS = 300  # a buffer that has looked so often will wait for ever


def info(acc, *, ok=0, errors=None, finish_reason="answer", void_turns=0, **fields):
    """`extra_fields` of one trajectory, as RetoolAgentLoop and RetoolRewardManager (`fields`) write it."""
    from verl_ext.rollout.tool_use import ToolUse

    defaults = {"sandbox_failure": 0.0, "unverified": 0.0, "truncated": 0.0, "response_tokens": 10.0}
    use = ToolUse(ok=ok, void_turns=void_turns).as_dict() | {"errors": errors or {}}
    reward = defaults | {"acc": float(acc), "train_acc": float(acc), "finish_reason": finish_reason} | fields
    return {
        "reward_extra_info": reward,
        "finish_reason": finish_reason,
        "tool_use": use,
        "model_spans": [(0, int(reward["response_tokens"]))],
    }


MIXED, RIGHT, WRONG = [info(0), info(1)], [info(1), info(1)], [info(0), info(0)]
SANDBOX_DOWN = [info(1), info(0, sandbox_failure=1.0, finish_reason="sandbox_failure")]
UNVERIFIED = [info(1), info(0, unverified=1.0)]
ABORTED = [info(1), info(0, finish_reason="aborted")]
SCORED_BY_OTHERS = [info(1), info(0, finish_reason="aborted")]  # a reward manager that repeats no finish_reason
del SCORED_BY_OTHERS[1]["reward_extra_info"]["finish_reason"]
RAISED = None  # a loop of the group raised: status "failure"
MODES = ["sync", "colocate_async", "separate_async"]


class FakeQueue:
    """TransferQueue's kv calls and the trainer's submissions. Each look lets every prompt in flight take one step."""

    def __init__(self, outcomes, partition="train"):
        self.outcomes, self.partition = iter(outcomes), partition
        self.tags, self.values, self.groups = {}, {}, {}
        self.submissions, self.looks, self.in_flight = [], 0, []

    def submit(self, count, global_steps=1):
        """The trainer's refill_fn."""
        self.submissions.append(count)
        for _ in range(count):
            uid = f"uid-{len(self.groups)}"
            self.groups[uid] = next(self.outcomes)
            self.tags[uid] = {"is_prompt": True, "status": "pending", "global_steps": global_steps}
            self.in_flight.append(uid)
        return count

    def kv_list(self):
        self.looks += 1
        assert self.looks < MAX_LOOKS, "the buffer waits for ever"
        for uid in list(self.in_flight):
            if self.tags[uid]["status"] == "pending":
                self.tags[uid]["status"] = "running"
                continue
            self.in_flight.remove(uid)
            group = self.groups[uid]
            self.tags[uid]["status"] = "failure" if group is RAISED else "finished"
            for i, extra in enumerate(MIXED[:1] if group is RAISED else group):
                self.tags[f"{uid}_{i}_0"] = {"status": "success", "seq_len": 7}
                self.values[f"{uid}_{i}_0"] = SimpleNamespace(data=extra)
        return {self.partition: {key: dict(tag) for key, tag in self.tags.items()}}

    def kv_batch_get(self, keys, partition_id, select_fields=("extra_fields",)):
        assert partition_id == self.partition and list(select_fields) == ["extra_fields"]
        return {"extra_fields": [self.values[key] for key in keys]}

    def kv_batch_put(self, keys, partition_id, fields, tags):
        assert partition_id == self.partition and not set(keys) & set(self.tags)
        self.tags |= dict(zip(keys, tags, strict=True))
        self.values |= dict(zip(keys, fields["extra_fields"], strict=True))

    def kv_clear(self, partition_id, keys):
        assert partition_id == self.partition
        for key in keys:
            del self.tags[key]  # KeyError: cleared twice
            self.values.pop(key, None)


@pytest.fixture
def make(monkeypatch):
    """(queue, buffer) for the outcomes of the prompts in the order of their submission."""
    import transfer_queue
    from omegaconf import OmegaConf

    from verl_ext.trainer.sampler import DapoReplayBuffer

    def make(
        outcomes,
        *,
        batch_size,
        partition="train",
        enable=True,
        max_num_gen_batches=4,
        metric="train_acc",
        mode="sync",
        void_turn_filter=False,
        parameter_sync_step=1,
        keep_surplus=None,
        max_off_policy_threshold=None,
    ):
        queue = FakeQueue(outcomes, partition)
        for name in ("kv_list", "kv_batch_get", "kv_batch_put", "kv_clear"):
            monkeypatch.setattr(transfer_queue, name, getattr(queue, name))
        filter_groups = {"enable": enable, "metric": metric, "max_num_gen_batches": max_num_gen_batches}
        buffer = DapoReplayBuffer(
            trainer_mode=mode,
            trainer_config=OmegaConf.create({"parameter_sync_step": parameter_sync_step}),
            max_off_policy_threshold=max_off_policy_threshold,
            max_off_policy_strategy="drop",
            sampler_kwargs=OmegaConf.create(
                {"poll_interval_s": 0.0, "filter_groups": filter_groups, "void_turn_filter": void_turn_filter}
                | ({} if keep_surplus is None else {"keep_surplus": keep_surplus})
            ),
            refill_fn=queue.submit,
        )
        queue.submit(batch_size)
        queue.submissions.clear()
        return queue, buffer

    return make


def sampled(batch):
    """Numbers of the prompts in a batch, in order of submission; checks that the groups are whole."""
    uids = [key.split("_")[0] for key in batch.keys]
    assert all(uids.count(uid) == 2 for uid in uids)
    return sorted({int(uid.removeprefix("uid-")) for uid in uids})


def test_groups_with_equal_rewards_are_replaced(make):
    queue, buffer = make([RIGHT, MIXED, WRONG, MIXED], batch_size=2)
    batch, metrics = buffer.sample(1, "train", 2)
    assert sampled(batch) == [1, 3]
    assert queue.submissions == [1, 1]
    assert metrics["filter_groups/generated"] == 4 and metrics["filter_groups/filled_with_equal"] == 0
    assert [tag["seq_len"] for tag in batch.tags] == [7] * 4


def test_the_metric_of_the_configuration_decides_what_is_equal(make):
    control = [info(1, train_acc=0.0), info(1, train_acc=1.0)]  # equal in truth, drawn at random in the control run
    assert sampled(make([control], batch_size=1)[1].sample(1, "train", 1)[0]) == [0]
    queue, buffer = make([control, MIXED], batch_size=1, metric="acc")
    assert sampled(buffer.sample(1, "train", 1)[0]) == [1]


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
    queue, buffer = make(
        [WRONG, SANDBOX_DOWN, RIGHT, UNVERIFIED, RAISED, WRONG, RIGHT], batch_size=2, max_num_gen_batches=2
    )
    batch, metrics = buffer.sample(1, "train", 2)
    assert set(sampled(batch)) < {0, 2, 5, 6}
    assert metrics["filter_groups/failed"] == 3  # they do not count towards max_num_gen_batches x 2 prompts:
    assert metrics["filter_groups/generated"] == 2 * 2 + 3


def test_only_the_returned_trajectories_stay_in_the_queue(make):
    queue, buffer = make([MIXED, RIGHT, SANDBOX_DOWN, RAISED, *[MIXED] * 20], batch_size=4)
    buffer.keep_rate = 0.5  # so it asks for more than it turns out to need
    batch, _ = buffer.sample(1, "train", 4)
    assert len(sampled(batch)) == 4
    assert len(queue.groups) > 4 + 3  # a surplus was generated
    assert set(queue.tags) == set(batch.keys)  # the trainer clears these when it has trained on them


@pytest.mark.parametrize(
    ("keep_rate", "max_num_gen_batches", "submissions"),
    [
        # 8 in flight make 4 useful groups, +- sqrt(8 * .5 * .5) = 1.41: (8 + 1.41 - 4) / .5 = 10.8 more prompts.
        (0.5, 4, [11]),
        (0.5, 2, [8]),  # 2 x 8 prompts at the most
        (0.95, 4, [2]),  # 7.6 +- 0.62: (8 + 0.62 - 7.6) / .95 = 1.1
        (0.995, 4, []),  # 7.96 +- 0.2: what is missing is less than half a group
        (1.0, 4, []),
    ],
)
def test_prompts_are_asked_for_at_once_as_the_share_of_useful_groups_lets_expect(
    make, keep_rate, max_num_gen_batches, submissions
):
    queue, buffer = make([MIXED] * 100, batch_size=8, max_num_gen_batches=max_num_gen_batches)
    buffer.keep_rate = keep_rate
    buffer.sample(1, "train", 8)
    assert queue.submissions == submissions


def test_the_expected_share_of_useful_groups_follows_what_is_seen(make):
    queue, buffer = make([MIXED, WRONG, WRONG, WRONG], batch_size=2, max_num_gen_batches=2)
    assert buffer.keep_rate == 1.0
    _, metrics = buffer.sample(1, "train", 2)
    assert metrics["filter_groups/keep_rate"] == 0.25
    assert buffer.keep_rate == pytest.approx(0.625)  # halfway from 1 to 0.25

    queue, buffer = make([WRONG] * 4, batch_size=2, max_num_gen_batches=2)
    buffer.sample(1, "train", 2)
    assert buffer.keep_rate == pytest.approx(0.55)  # halfway from 1 to 0.1: never less than 0.1


def test_at_max_num_gen_batches_equal_groups_fill_up_and_the_log_says_so(make, caplog):
    outcomes = [RIGHT, WRONG, WRONG, RIGHT, WRONG, MIXED]  # one useful group in the six that may be generated
    queue, buffer = make(outcomes, batch_size=2, max_num_gen_batches=3)
    with caplog.at_level(logging.WARNING, logger="verl_ext.trainer.sampler"):
        batch, metrics = buffer.sample(7, "train", 2)
    assert 5 in sampled(batch) and len(sampled(batch)) == 2
    assert metrics["filter_groups/generated"] == 6 and metrics["filter_groups/filled_with_equal"] == 1
    assert "step 7: only 1 of 2 groups had unequal rewards after 6 prompts (max_num_gen_batches=3)" in caplog.text
    assert buffer.fillers == {f"uid-{i}" for i in sampled(batch) if i != 5}
    assert set(queue.tags) == set(batch.keys)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("failed", "remedy"),
    [
        (SANDBOX_DOWN, "Start the sandbox"),
        (UNVERIFIED, "See the reward manager's warnings"),
        (ABORTED, "See the log of the rollout servers"),
        (RAISED, "Correct what the log has as 'Error in _run_prompt'"),
    ],
)
def test_a_run_in_which_everything_fails_outside_the_model_stops_and_says_what_to_do(make, mode, failed, remedy):
    queue, buffer = make([failed] * 100, batch_size=2, max_num_gen_batches=3, mode=mode)
    said = rf"\d+ of \d+ prompt groups of step 4 failed for reasons outside the model \(.*\)\. {remedy}.*then resume"
    with pytest.raises(RuntimeError, match=said):
        buffer.sample(4, "train", 2)
    assert 6 < len(queue.groups) <= 6 + 2 + 6  # stops once more than 3 x 2 have failed


def test_without_filtering_equal_groups_are_trained_on(make):
    queue, buffer = make([RIGHT, WRONG, MIXED], batch_size=3, enable=False)
    batch, metrics = buffer.sample(1, "train", 3)
    assert sampled(batch) == [0, 1, 2] and queue.submissions == []
    assert metrics["filter_groups/keep_rate"] == 1.0


def test_validation_returns_every_group_and_generates_nothing_anew(make):
    outcomes = [RIGHT, WRONG, MIXED, SANDBOX_DOWN, UNVERIFIED]
    queue, buffer = make(outcomes, batch_size=5, partition="val")
    batch, metrics = buffer.sample(1, "val", 5)
    assert sampled(batch) == [0, 1, 2, 3, 4]
    assert metrics == {} and queue.submissions == []


def test_a_validation_that_stored_nothing_at_all_is_named(make):
    from verl_ext.trainer.exclusions import NothingStored

    queue, buffer = make([[], []], batch_size=2, partition="val")
    with pytest.raises(NothingStored, match="All rollouts of 2 validation prompts raised. Correct what the log has"):
        buffer.sample(1, "val", 2)


def test_validation_does_not_wait_for_a_group_whose_loop_raised(make):
    queue, buffer = make([RIGHT, RAISED], batch_size=2, partition="val")
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
    queue, buffer = make(groups, batch_size=2, mode=mode)
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
    assert buffer._seen.groups == 0


def test_no_tool_call_at_all_is_an_error_rate_of_0(make):
    _, buffer = make([MIXED], batch_size=1)
    _, metrics = buffer.sample(1, "train", 1)
    assert metrics["tool/error_rate"] == 0.0 and metrics["tool/timeout_rate"] == 0.0


def group_of(*accs, failed=(), **fields):
    """Rollouts with these accuracies; those at `failed` were failed by the sandbox."""
    return [info(acc, sandbox_failure=float(i in failed), **fields) for i, acc in enumerate(accs)]


def keys_of(batch, uid="uid-0"):
    return sorted(key for key in batch.keys if key.startswith(f"{uid}_"))


@pytest.mark.parametrize("mode", MODES)
def test_a_group_with_more_than_half_valid_is_filled_with_copies_of_valid_rollouts(make, mode):
    queue, buffer = make([group_of(1, 0, 1, 0, 1, failed=(1, 4))], batch_size=1, mode=mode)
    batch, metrics = buffer.sample(1, "train", 1)
    keys = keys_of(batch)
    assert len(keys) == 5 and set(queue.tags) == set(keys)
    assert {"uid-0_0_0", "uid-0_2_0", "uid-0_3_0"} < set(keys)  # the valid ones; 1 and 4 are gone
    copies = [key for key in keys if key.endswith("_1")]  # further outputs of their session
    assert len(copies) == 2 and not {"uid-0_1_1", "uid-0_4_1"} & set(copies)
    for key in copies:
        assert queue.values[key] is queue.values[f"{key[:-1]}0"] and queue.tags[key]["seq_len"] == 7
    assert (metrics["failure/groups_filled"], metrics["failure/groups_dropped"]) == (1, 0)
    assert metrics["failure/sandbox_failure"] == 2


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
    queue, buffer = make([group, MIXED], batch_size=1)
    batch, _ = buffer.sample(1, "train", 1)
    assert bool(keys_of(batch)) == is_used
    assert len(batch.keys) == (len(group) if is_used else 2)


def test_advantages_of_a_filled_group_are_those_of_its_valid_rollouts_alone(make):
    """By verl's own function, with the keys that the buffer returns. Rewards 1, -1, 1, sample std 2/sqrt(3)."""
    import numpy as np
    import torch
    from verl import DataProto
    from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories

    accs = [1, 0, 1, 0, 0]
    queue, buffer = make([group_of(*accs, failed=(3, 4))], batch_size=1)
    batch, _ = buffer.sample(1, "train", 1)
    scores = torch.tensor([[2.0 * queue.values[key].data["reward_extra_info"]["acc"] - 1] for key in batch.keys])
    data = DataProto.from_dict(
        tensors={"token_level_rewards": scores, "response_mask": torch.ones(len(batch.keys), 1)},
        non_tensors={"uid": np.array([key.split("_")[0] for key in batch.keys], dtype=object)},
    )
    data = compute_advantage_for_multi_trajectories(data, batch.keys, adv_estimator="grpo", num_repeat=5)
    # mean 1/3; (1 - 1/3) / (2/sqrt 3) = 0.577; (-1 - 1/3) / (2/sqrt 3) = -1.155
    by_hand = {1.0: 0.57735, -1.0: -1.1547}
    assert len(batch.keys) == 5
    for score, advantage in zip(scores[:, 0].tolist(), data.batch["advantages"][:, 0].tolist(), strict=True):
        assert advantage == pytest.approx(by_hand[score], abs=1e-4)


def test_what_the_policy_can_cause_is_a_normal_sample(make):
    """Its code timing out, too much output, too many calls, malformed calls, void turns: all trained as they are."""
    reasons = ["max_turns", "max_tokens", "malformed_limit", "answer"]
    group = [
        info(i == 3, finish_reason=reason, errors={"timeout": 3}, void_turns=1) for i, reason in enumerate(reasons)
    ]
    queue, buffer = make([group], batch_size=1)
    batch, metrics = buffer.sample(1, "train", 1)
    assert len(batch.keys) == 4 and metrics["failure/groups_filled"] == 0
    assert metrics["finish/turn_limit"] == metrics["finish/malformed_limit"] == 0.25


@pytest.mark.parametrize("mode", MODES)
def test_void_turns_are_left_out_where_that_is_asked_for_but_not_for_ever(make, mode):
    one_void = [info(1), info(0), info(0, void_turns=1)]
    all_void = [info(1, void_turns=2), info(0, void_turns=1), info(0, void_turns=1)]
    queue, buffer = make([all_void, one_void], batch_size=1, void_turn_filter=True, mode=mode)
    batch, metrics = buffer.sample(1, "train", 1)
    assert "uid-1_2_0" not in batch.keys and len(keys_of(batch, "uid-1")) == 3 == len(batch.keys)
    assert metrics["failure/void_turn"] == 4 and metrics["failure/groups_dropped"] == 0
    assert metrics["turn/void_rate"] == 4 / 6

    queue, buffer = make([all_void] * 9, batch_size=1, max_num_gen_batches=2, void_turn_filter=True, mode=mode)
    batch, metrics = buffer.sample(1, "train", 1)
    assert len(batch.keys) == 3 and metrics["filter_groups/filled_with_equal"] == len(buffer.fillers) == 1


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
    assert len(queue.groups) <= 2 * 2 + 3
    assert caplog.text.count("step 3:") == 1 and "only 0 had unequal rewards" in caplog.text


def test_stale_groups_are_dropped_in_asynchronous_modes(make):
    queue, buffer = make([MIXED, MIXED, MIXED], batch_size=2, mode="separate_async")
    buffer.max_off_policy_threshold = 2
    batch, _ = buffer.sample(2, "train", 1)  # made in step 1, and taken in step 2: within the threshold
    assert sampled(batch) in ([0], [1])
    buffer.refill_fn = lambda count: queue.submit(count, global_steps=3)
    batch, metrics = buffer.sample(3, "train", 1)
    assert sampled(batch) == [2] and metrics["training/off_policy/evicted_samples"] == 1


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


def test_a_metric_that_the_reward_manager_does_not_give_is_named(make):
    queue, buffer = make([MIXED], batch_size=1, metric="seq_reward")
    with pytest.raises(ValueError, match="filter_groups.metric is 'seq_reward'.*Expected one of acc, .*train_acc"):
        buffer.sample(1, "train", 1)


def test_max_num_gen_batches_must_be_1_at_least(make):
    with pytest.raises(ValueError, match="max_num_gen_batches is 0; expected at least 1"):
        make([MIXED], batch_size=1, max_num_gen_batches=0)


@pytest.mark.parametrize("mode", MODES)
def test_a_trainer_that_asks_is_told_how_every_group_ended(make, mode):
    """Also those that are left out, but without infrastructure failures."""
    groups = [RIGHT, [info(1, void_turns=1), info(0)], SANDBOX_DOWN, RAISED, MIXED]
    queue, buffer = make(groups, batch_size=5, mode=mode, enable=False)
    queue.outcomes = iter([MIXED] * 2)
    told = []
    buffer.on_group_end = lambda uid, accs: told.append((uid, accs))
    buffer.sample(1, "train", 5)
    first = [(f"uid-{i}", accs) for i, accs in enumerate([[1, 1], [1, 0], [1], [], [0, 1]])]
    assert sorted(told)[:5] == first and len(told) == len({uid for uid, _ in told}) == 7


def test_groups_of_unequal_size_are_filled_replaced_and_trained_on_each_by_its_own_rule(make):
    three, five = group_of(1, 0, 1), group_of(1, 0, 1, 0, 1, failed=(1, 3))  # 3 of 5 valid, but all right: replaced
    eight, two = group_of(1, 0, 1, 0, 1, 0, 1, 0, failed=(0, 1, 2)), group_of(0, 1)  # 5 of 8 valid: filled
    half = group_of(1, 0, 1, 0, failed=(0, 1))  # 2 of 4: replaced
    queue, buffer = make([three, five, eight, half, two, group_of(1, 1, 0, 0, 0)], batch_size=4)
    batch, metrics = buffer.sample(1, "train", 4)
    sizes = {uid: len(keys_of(batch, uid)) for uid in queue.groups}
    assert sizes == {"uid-0": 3, "uid-1": 0, "uid-2": 8, "uid-3": 0, "uid-4": 2, "uid-5": 5}
    assert (metrics["failure/groups_filled"], metrics["failure/groups_dropped"]) == (1, 1)


VOID = [info(1, void_turns=1), info(0, void_turns=1)]


@pytest.mark.parametrize("mode", MODES[1:])
def test_fillers_never_take_the_place_of_useful_groups_that_are_ready(make, mode):
    """4 equal groups, more than the 3 that may be replaced, are older than 3 useful ones that end with them."""
    queue, buffer = make([RIGHT] * 4 + [MIXED] * 3 + [RIGHT] * 9, batch_size=4, max_num_gen_batches=1, mode=mode)
    queue.submit(3, global_steps=2)
    batch, metrics = buffer.sample(2, "train", 3)
    assert sampled(batch) == [4, 5, 6]
    assert metrics["filter_groups/filled_with_equal"] == 0 and buffer.fillers == set()


@pytest.mark.parametrize("mode", MODES[1:])
def test_where_useful_groups_are_missing_the_oldest_equal_ones_fill_up(make, mode):
    queue, buffer = make([RIGHT] * 4 + [WRONG, MIXED, RIGHT], batch_size=0, max_num_gen_batches=1, mode=mode)
    for step in (4, 3, 1, 2, 5, 6, 1):  # of uid-0, uid-1, ...
        queue.submit(1, global_steps=step)
    batch, metrics = buffer.sample(6, "train", 4)
    assert sampled(batch) == [2, 3, 5, 6]  # the useful one, and those of the steps 1, 1 and 2
    assert buffer.fillers == {"uid-2", "uid-3", "uid-6"} and metrics["filter_groups/filled_with_equal"] == 3


@pytest.mark.parametrize("mode", MODES)
def test_the_oldest_useful_groups_are_taken_first(make, mode):
    queue, buffer = make([MIXED] * 4, batch_size=0, mode=mode)
    for step in (3, 1, 4, 2):
        queue.submit(1, global_steps=step)
    batch, _ = buffer.sample(4, "train", 2)
    assert sampled(batch) == [1, 3]


@pytest.mark.parametrize("mode", MODES)
def test_equal_groups_fill_a_batch_before_those_of_void_turns(make, mode):
    queue, buffer = make([VOID, RIGHT] * 3, batch_size=3, max_num_gen_batches=1, void_turn_filter=True, mode=mode)
    queue.submit(3)
    batch, _ = buffer.sample(1, "train", 3)
    assert sampled(batch) == [1, 3, 5] == sorted(int(uid.removeprefix("uid-")) for uid in buffer.fillers)


@pytest.mark.parametrize("mode", MODES)
def test_a_filler_is_without_its_failed_rollouts(make, mode):
    groups = [group_of(1, 1, 1, failed=(i % 3,)) for i in range(9)]
    queue, buffer = make(groups, batch_size=2, max_num_gen_batches=1, mode=mode)
    queue.submit(1)
    batch, metrics = buffer.sample(1, "train", 2)
    assert metrics["filter_groups/filled_with_equal"] == metrics["failure/groups_filled"] == 2
    for uid in buffer.fillers:
        keys = keys_of(batch, uid)
        failed = int(uid.removeprefix("uid-")) % 3
        assert len(keys) == 3 and not any(key.startswith(f"{uid}_{failed}_") for key in keys)


def test_the_copies_that_fill_a_group_are_drawn_from_all_valid_rollouts(make):
    queue, buffer = make([group_of(1, 0, 1, 0, failed=(1,))] * 40, batch_size=40)
    batch, _ = buffer.sample(1, "train", 40)
    copied = [key.split("_")[1] for key in batch.keys if key.endswith("_1")]
    counts = [copied.count(session) for session in "0123"]
    assert counts[1] == 0 and sum(counts) == 40
    assert min(counts[0], counts[2], counts[3]) >= 5  # 13 of each are expected


def test_pass_rates_count_rollouts_that_the_void_turn_filter_leaves_out(make):
    queue, buffer = make([[info(1, void_turns=1), info(0), info(0), info(1)]], batch_size=1, void_turn_filter=True)
    told = []
    buffer.on_group_end = lambda uid, accs: told.append(accs)
    batch, _ = buffer.sample(1, "train", 1)
    assert told == [[1, 0, 0, 1]] and "uid-0_0_0" not in batch.keys


def test_that_equal_groups_are_taken_is_said_once_in_each_step(make, caplog):
    queue, buffer = make([RIGHT] * 100, batch_size=6, max_num_gen_batches=1, mode="separate_async")
    with caplog.at_level(logging.WARNING, logger="verl_ext.trainer.sampler"):
        buffer.wait_for_sampleable(3, "train", 2)
        assert [buffer.get_sampleable_count(3, "train") for _ in range(3)] == [6] * 3  # looked again, said nothing
        buffer.sample(3, "train", 2)
        assert caplog.text.count("step 3:") == 1 and "others are taken now" in caplog.text
        buffer.sample(4, "train", 2)
        assert caplog.text.count("step 4:") == 1


def submit_step(queue, buffer, step, batch_size):
    """As the trainer begins a step of the mode `sync`."""
    buffer.refill_fn = lambda count: queue.submit(count, global_steps=step)
    if missing := buffer.num_to_submit(batch_size):
        queue.submit(missing, global_steps=step)


@pytest.mark.parametrize(("keep_surplus", "threshold"), [(None, 8), (False, None), (True, 1)])
def test_surplus_groups_are_counted_and_dropped_by_default_and_where_none_may_be_stale(make, keep_surplus, threshold):
    queue, buffer = make([MIXED] * 5, batch_size=5, keep_surplus=keep_surplus, max_off_policy_threshold=threshold)
    batch, metrics = buffer.sample(1, "train", 3)
    assert (metrics["filter_groups/surplus"], metrics["filter_groups/kept"]) == (2, 0)
    assert set(queue.tags) == set(batch.keys) and buffer.num_to_submit(3) == 3


def test_surplus_groups_are_the_first_of_the_next_step_and_save_its_prompts(make):
    queue, buffer = make([MIXED] * 5 + [MIXED, WRONG, MIXED], batch_size=5, keep_surplus=True)
    told = []
    buffer.on_group_end = lambda uid, accs: told.append(uid)
    first, metrics = buffer.sample(1, "train", 3)
    assert (metrics["filter_groups/surplus"], metrics["filter_groups/kept"]) == (2, 2)
    queue.kv_clear("train", first.keys)  # the trainer has trained on them
    submit_step(queue, buffer, 2, 4)
    assert len(queue.groups) == 7  # 5 of step 1, and 4 - 2
    second, metrics = buffer.sample(2, "train", 4)
    assert sampled(second) == [3, 4, 5, 7] and sampled(first) == [0, 1, 2]
    assert metrics["filter_groups/generated"] == 3 and metrics["filter_groups/keep_rate"] == pytest.approx(2 / 3)
    assert (metrics["filter_groups/surplus"], metrics["filter_groups/kept"]) == (0, 0)
    assert set(queue.tags) == set(second.keys) and len(told) == len(set(told)) == 8


def test_surplus_groups_wait_no_longer_than_the_staleness_option_says(make):
    """Threshold 2: a group of step 1 may be trained on in step 2, not in step 3."""
    queue, buffer = make([MIXED] * 6, batch_size=4, keep_surplus=True, max_off_policy_threshold=2)
    batch, metrics = buffer.sample(1, "train", 1)
    assert (metrics["filter_groups/surplus"], metrics["filter_groups/kept"]) == (3, 3)
    queue.kv_clear("train", batch.keys)
    submit_step(queue, buffer, 2, 1)  # nothing: three are waiting
    assert len(queue.groups) == 4
    batch, metrics = buffer.sample(2, "train", 1)
    assert sampled(batch) == [1] and metrics["filter_groups/generated"] == 0
    assert (metrics["filter_groups/surplus"], metrics["filter_groups/kept"]) == (2, 0)
    assert set(queue.tags) == set(batch.keys) and buffer.num_to_submit(1) == 1


def what_became(caplog):
    """Of the log's lines on the prompt groups, one for each batch."""
    said = [record.getMessage() for record in caplog.records if "what became" in record.getMessage()]
    return [dict(pair.split() for pair in line.split(": ", 2)[2].split(", ")) for line in said]


def test_the_log_says_what_became_of_every_prompt_group(make, caplog):
    """Of 8 prompts: 4 useful, of which a batch takes 2; a kept one is trained in the next step. VOID: neither valid."""
    outcomes = [MIXED, MIXED, RIGHT, SANDBOX_DOWN, VOID, MIXED, MIXED, WRONG, MIXED]
    queue, buffer = make(outcomes, batch_size=8, keep_surplus=True, max_off_policy_threshold=2, void_turn_filter=True)
    with caplog.at_level(logging.INFO, logger="verl_ext.trainer.sampler"):
        batch, _ = buffer.sample(1, "train", 2)
        assert (sampled(batch), buffer.num_kept) == ([0, 1], 2)
        queue.kv_clear("train", batch.keys)
        buffer.keep_rate = 1.0  # so that it asks for no more than it needs
        submit_step(queue, buffer, 2, 3)
        assert sampled(buffer.sample(2, "train", 3)[0]) == [5, 6, 8]
    first = {"trained": "2", "surplus": "2", "equal": "2", "failed": "1", "void": "1"}
    assert what_became(caplog) == [first, {"trained": "3"}]


def test_the_log_tells_stale_groups_from_trained_ones_and_from_equal_ones(make, caplog):
    queue, buffer = make(
        [MIXED, RIGHT, MIXED, WRONG, MIXED], batch_size=2, mode="separate_async", max_off_policy_threshold=2
    )
    buffer.refill_fn = lambda count: queue.submit(count, global_steps=3)
    queue.kv_list(), queue.kv_list()  # both groups of step 1 have ended
    with caplog.at_level(logging.INFO, logger="verl_ext.trainer.sampler"):
        assert [buffer.get_sampleable_count(3, "train") for _ in range(2)] == [0, 0]  # counted once, however often seen
        batch, metrics = buffer.sample(3, "train", 1)
    assert sampled(batch) == [2] and metrics["training/off_policy/evicted_samples"] == 2
    assert what_became(caplog) == [{"stale": "1", "equal": "2", "trained": "1"}]


@pytest.mark.parametrize("mode", MODES)
def test_the_trainer_is_told_what_ended_once(make, mode):
    groups = [RIGHT, SANDBOX_DOWN, RAISED, UNVERIFIED, [info(1, void_turns=1), info(0), info(1)], MIXED]
    queue, buffer = make(groups + [MIXED] * 9, batch_size=6, mode=mode, void_turn_filter=True)
    buffer.sample(1, "train", 6)
    ended = buffer.take_ended()
    assert ended.groups == len(queue.groups) and not queue.in_flight
    assert +ended.excluded == {"sandbox_failure": 1, "verifier_unknown": 1, "raised": 1, "void_turn": 1}
    assert ended.rollouts == 2 * (ended.groups - 2) + 3  # all but the group that raised; one has three
    assert buffer.take_ended().groups == 0
