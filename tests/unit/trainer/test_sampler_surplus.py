"""How DapoReplayBuffer fills a batch that lacks useful groups, keeps surplus ones, and logs what became of each."""

import logging

import pytest

from tests.unit.trainer.prompt_groups import (
    MIXED,
    MODES,
    RIGHT,
    SANDBOX_DOWN,
    VOID,
    WRONG,
    buffer_maker,
    sampled,
)
from verl_ext.trainer.domains import ONLY


@pytest.fixture
def make(monkeypatch):
    return buffer_maker(monkeypatch)


@pytest.mark.parametrize("mode", MODES[1:])
def test_fillers_never_take_the_place_of_useful_groups_that_are_ready(make, mode):
    """4 equal groups, more than the 3 that may be replaced, are older than 3 useful ones that end with them."""
    queue, buffer = make([RIGHT] * 4 + [MIXED] * 3 + [RIGHT] * 9, batch_size=4, max_num_gen_batches=1, mode=mode)
    queue.submit(3, global_steps=2)
    batch, metrics = buffer.sample(2, "train", 3)
    assert sampled(batch) == [4, 5, 6]
    assert metrics["filter_groups/filled_with_equal"] == 0 and buffer.selection.fillers == set()


@pytest.mark.parametrize("mode", MODES[1:])
def test_if_useful_groups_are_missing_the_oldest_equal_ones_fill_up(make, mode):
    queue, buffer = make([RIGHT] * 4 + [WRONG, MIXED, RIGHT], batch_size=0, max_num_gen_batches=1, mode=mode)
    for step in (4, 3, 1, 2, 5, 6, 1):  # of uid-0, uid-1, ...
        queue.submit(1, global_steps=step)
    batch, metrics = buffer.sample(6, "train", 4)
    assert sampled(batch) == [2, 3, 5, 6]  # the useful one, and those of the steps 1, 1 and 2
    assert buffer.selection.fillers == {"uid-2", "uid-3", "uid-6"}
    assert metrics["filter_groups/filled_with_equal"] == 3


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
    assert sampled(batch) == [1, 3, 5] == sorted(int(uid.removeprefix("uid-")) for uid in buffer.selection.fillers)


def test_that_equal_groups_are_taken_is_reported_once_in_each_step(make, caplog):
    _queue, buffer = make([RIGHT] * 100, batch_size=6, max_num_gen_batches=1, mode="separate_async")
    with caplog.at_level(logging.WARNING, logger="verl_ext.trainer.sampler"):
        buffer.wait_for_sampleable(3, "train", 2)
        assert [buffer.get_sampleable_count(3, "train") for _ in range(3)] == [6] * 3  # looked again, said nothing
        buffer.sample(3, "train", 2)
        assert caplog.text.count("step 3:") == 1 and "are replaced by others" in caplog.text
        buffer.sample(4, "train", 2)
        assert caplog.text.count("step 4:") == 1


def submit_step(queue, buffer, step, batch_size):
    """Begin a step as the trainer does in the mode `sync`."""
    buffer.refill_fn = lambda count: queue.submit(count, global_steps=step)
    if missing := buffer.num_to_submit(batch_size):
        queue.submit(missing, global_steps=step)


@pytest.mark.parametrize(("keep_surplus", "threshold"), [(None, 8), (False, None), (True, 1)])
def test_surplus_groups_are_counted_and_dropped_by_default_and_if_none_may_be_stale(make, keep_surplus, threshold):
    queue, buffer = make([MIXED] * 5, batch_size=5, keep_surplus=keep_surplus, max_off_policy_threshold=threshold)
    batch, metrics = buffer.sample(1, "train", 3)
    assert (metrics["filter_groups/surplus"], metrics["filter_groups/kept"]) == (2, 0)
    assert set(queue.tags) == set(batch.keys) and buffer.num_to_submit(3) == 3


def test_surplus_groups_are_the_first_of_the_next_step_and_save_its_prompts(make):
    queue, buffer = make(
        [MIXED] * 5 + [MIXED, WRONG, MIXED], batch_size=5, keep_surplus=True, max_off_policy_threshold=2
    )
    first, metrics = buffer.sample(1, "train", 3)
    assert (metrics["filter_groups/surplus"], metrics["filter_groups/kept"]) == (2, 2)
    told = [*buffer.take_ended(1).accs]
    queue.kv_clear("train", first.keys)  # the trainer has trained on them
    submit_step(queue, buffer, 2, 4)
    assert len(queue.groups) == 7  # 5 of step 1, and 4 - 2
    second, metrics = buffer.sample(2, "train", 4)
    assert sampled(second) == [3, 4, 5, 7] and sampled(first) == [0, 1, 2]
    assert metrics["filter_groups/generated"] == 3 and metrics["filter_groups/keep_rate"] == pytest.approx(2 / 3)
    assert (metrics["filter_groups/surplus"], metrics["filter_groups/kept"]) == (0, 0)
    told += buffer.take_ended(2).accs
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
    assert buffer.domains.keep_rates[ONLY] == 1.0  # no group ended: nothing was learned of the share of useful ones
    assert (metrics["filter_groups/surplus"], metrics["filter_groups/kept"]) == (2, 0)
    assert set(queue.tags) == set(batch.keys) and buffer.num_to_submit(1) == 1


def what_became(caplog):
    """Return the figures in the log's lines on the prompt groups, one for each batch."""
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
        buffer.domains.keep_rates[ONLY] = 1.0  # so that it asks for no more than it needs
        submit_step(queue, buffer, 2, 3)
        assert sampled(buffer.sample(2, "train", 3)[0]) == [5, 6, 8]
    first = {"trained": "2", "surplus": "2", "equal": "2", "failed": "1", "void": "1"}
    assert what_became(caplog) == [first, {"trained": "3"}]


def test_the_log_distinguishes_stale_groups_from_trained_and_equal_ones(make, caplog):
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
