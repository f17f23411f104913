"""DapoReplayBuffer on an in-memory TransferQueue, whose prompts end as a test says."""

import logging
from types import SimpleNamespace

import pytest

MAX_LOOKS = 300  # a buffer that has looked so often will wait for ever


def info(acc, **fields):
    """`reward_extra_info` of one trajectory, as RetoolRewardManager writes it."""
    defaults = {"sandbox_failure": 0.0, "unverified": 0.0, "truncated": 0.0, "response_tokens": 10.0}
    defaults |= {"tool_calls": 0.0, "tool_errors": 0.0, "tool_timeouts": 0.0}
    return defaults | {"acc": float(acc), "train_acc": float(acc)} | fields


MIXED, RIGHT, WRONG = [info(0), info(1)], [info(1), info(1)], [info(0), info(0)]
SANDBOX_DOWN = [info(1), info(0, sandbox_failure=1.0)]
UNVERIFIED = [info(1), info(0, unverified=1.0)]
RAISED = None  # a loop of the group raised: status "failure"


class FakeQueue:
    """TransferQueue's kv calls and the trainer's submissions. Each look lets every prompt in flight take one step."""

    def __init__(self, outcomes, partition="train"):
        self.outcomes, self.partition = iter(outcomes), partition
        self.tags, self.values, self.groups = {}, {}, {}
        self.submissions, self.looks, self.in_flight = [], 0, []

    def submit(self, count):
        """The trainer's refill_fn."""
        self.submissions.append(count)
        for _ in range(count):
            uid = f"uid-{len(self.groups)}"
            self.groups[uid] = next(self.outcomes)
            self.tags[uid] = {"is_prompt": True, "status": "pending", "global_steps": 1}
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
                self.values[f"{uid}_{i}_0"] = SimpleNamespace(data={"reward_extra_info": extra})
        return {self.partition: {key: dict(tag) for key, tag in self.tags.items()}}

    def kv_batch_get(self, keys, partition_id, select_fields):
        assert partition_id == self.partition and select_fields == ["extra_fields"]
        return {"extra_fields": [self.values[key] for key in keys]}

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

    from verl_ext.replay_buffer import DapoReplayBuffer

    def make(outcomes, *, batch_size, partition="train", enable=True, max_num_gen_batches=4, metric="train_acc"):
        queue = FakeQueue(outcomes, partition)
        for name in ("kv_list", "kv_batch_get", "kv_clear"):
            monkeypatch.setattr(transfer_queue, name, getattr(queue, name))
        filter_groups = {"enable": enable, "metric": metric, "max_num_gen_batches": max_num_gen_batches}
        buffer = DapoReplayBuffer(
            trainer_mode="sync",
            trainer_config=OmegaConf.create({}),
            max_off_policy_threshold=None,
            max_off_policy_strategy="drop",
            sampler_kwargs=OmegaConf.create({"poll_interval_s": 0.0, "filter_groups": filter_groups}),
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
@pytest.mark.parametrize("failed", [SANDBOX_DOWN, UNVERIFIED, RAISED], ids=["sandbox", "unverified", "raised"])
def test_groups_that_the_world_failed_are_replaced_and_never_returned(make, failed, enable):
    queue, buffer = make([failed, MIXED, failed, MIXED, failed, MIXED], batch_size=3, enable=enable)
    batch, metrics = buffer.sample(1, "train", 3)
    assert sampled(batch) == [1, 3, 5]
    assert metrics["filter_groups/failed"] == 3
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
    with caplog.at_level(logging.WARNING, logger="verl_ext.replay_buffer"):
        batch, metrics = buffer.sample(7, "train", 2)
    assert 5 in sampled(batch) and len(sampled(batch)) == 2
    assert metrics["filter_groups/generated"] == 6 and metrics["filter_groups/filled_with_equal"] == 1
    assert "step 7: only 1 of 2 groups had unequal rewards after 6 prompts (max_num_gen_batches=3)" in caplog.text
    assert set(queue.tags) == set(batch.keys)


def test_a_world_that_fails_everything_stops_the_run(make):
    queue, buffer = make([SANDBOX_DOWN] * 100, batch_size=2, max_num_gen_batches=3)
    with pytest.raises(RuntimeError, match=r"\d+ of \d+ prompt groups of step 4 failed for reasons outside the model"):
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


def test_validation_does_not_wait_for_a_group_whose_loop_raised(make):
    queue, buffer = make([RIGHT, RAISED], batch_size=2, partition="val")
    batch, _ = buffer.sample(1, "val", 2)
    assert batch.keys == ["uid-0_0_0", "uid-0_1_0", "uid-1_0_0"]  # what there is of it


def test_metrics_are_over_all_that_was_generated_but_not_over_failed_groups(make):
    groups = [
        [info(1, tool_calls=2.0, tool_errors=1.0, response_tokens=30.0), info(1)],  # equal: left out of the batch
        [info(0, tool_calls=1.0, tool_errors=1.0, tool_timeouts=1.0, truncated=1.0), info(1, tool_calls=1.0)],
        [info(1, tool_calls=9.0, sandbox_failure=1.0), info(1, tool_calls=9.0)],  # failed: counted nowhere
        [info(0), info(1, response_tokens=20.0)],
    ]
    queue, buffer = make(groups, batch_size=2)
    batch, metrics = buffer.sample(1, "train", 2)
    assert sampled(batch) == [1, 3]
    assert metrics == {
        "train/acc": 4 / 6,  # 1 1 | 0 1 | 0 1
        "train/truncation_rate": 1 / 6,
        "train/model_tokens": 90 / 6,  # 30 10 | 10 10 | 10 20
        "tool/code_ratio": 3 / 6,  # 2 0 | 1 1 | 0 0
        "tool/calls": 4 / 6,
        "tool/error_rate": 2 / 4,  # per call
        "tool/timeout_rate": 1 / 4,
        "filter_groups/generated": 4.0,
        "filter_groups/keep_rate": 2 / 3,  # of the groups that did not fail
        "filter_groups/failed": 1.0,
        "filter_groups/filled_with_equal": 0.0,
    }


def test_no_tool_call_at_all_is_an_error_rate_of_0(make):
    _, buffer = make([MIXED], batch_size=1)
    _, metrics = buffer.sample(1, "train", 1)
    assert metrics["tool/error_rate"] == 0.0 and metrics["tool/timeout_rate"] == 0.0


def test_max_num_gen_batches_must_be_1_at_least(make):
    with pytest.raises(ValueError, match="max_num_gen_batches is 0; expected at least 1"):
        make([MIXED], batch_size=1, max_num_gen_batches=0)
