"""Rows of TransferQueue: read as episodes, copied, removed."""

from types import SimpleNamespace

import pytest

from tests.unit.trainer.prompt_groups import MIXED, MODES, FakeQueue, buffer_maker, info
from verl_ext.episode import EpisodeKey


@pytest.fixture
def queue(monkeypatch):
    """An empty queue, behind the calls that trainer and sampler make."""
    import transfer_queue as tq

    queue = FakeQueue([])
    for name in ("kv_list", "kv_batch_get", "kv_batch_put", "kv_clear"):
        monkeypatch.setattr(tq, name, getattr(queue, name))
    return queue


def fill(queue, *keys, **tags):
    """Put rows there, whose tags and values have the key in them; return the sampler's snapshot."""
    queue.tags |= {key: {"of": key, **tags} for key in keys}
    queue.values |= {key: SimpleNamespace(data={"of": key}) for key in keys}
    return {key: dict(tag) for key, tag in queue.tags.items()}


def test_an_episode_is_copied_and_removed_with_all_its_rows(queue):
    from verl_ext.trainer.queue import copy_episodes, remove

    snapshot = fill(queue, "u_0_0", "u_0_1", "u_1_0", "u_10_0", "u_10_1", "v_0_0")
    ten, one = EpisodeKey("u", 10), EpisodeKey("u", 1)
    copies = copy_episodes("train", [ten, one], snapshot)
    assert copies == {ten: EpisodeKey("u", 10, copy=1), one: EpisodeKey("u", 1, copy=1)}
    made = {str(EpisodeKey("u", 10, 1, row)): f"u_10_{row}" for row in (0, 1)} | {str(copies[one]): "u_1_0"}
    assert snapshot.keys() == queue.tags.keys() == {*made, "u_0_0", "u_0_1", "u_1_0", "u_10_0", "u_10_1", "v_0_0"}
    for copy, source in made.items():
        assert queue.values[copy].data == {"of": source} and queue.tags[copy] == snapshot[copy] == {"of": source}
    remove("train", {ten, EpisodeKey("u", 0)}, snapshot)
    assert snapshot.keys() == queue.tags.keys() == queue.values.keys() == {*made, "u_1_0", "v_0_0"}


def test_real_keys_are_in_the_order_of_their_rows_and_without_padding(queue):
    import transfer_queue as tq

    from verl_ext.trainer.queue import real_keys

    keys = ["a_0_10", "a_1_0", "a_0_9", "pad_0_0", "a_1000001_0"]
    tags = [{"is_padding": key.startswith("pad")} for key in keys]
    found = real_keys(tq.KVBatchMeta(partition_id="train", keys=keys, tags=tags))
    assert [*found] == ["a_1_0", "a_1000001_0", "a_0_9", "a_0_10"]
    assert found["a_1000001_0"] == EpisodeKey("a", 1, copy=1) and found["a_0_10"] == EpisodeKey("a", 0, row=10)


def test_rows_of_one_episode_are_one_episode(queue):
    from verl_ext.trainer.queue import episodes_of

    keys = [EpisodeKey("a", 0), EpisodeKey("a", 0, row=1), EpisodeKey("a", 0, copy=1), EpisodeKey("a", 1)]
    extras = [info(1, ok=1), SimpleNamespace(data=info(1, ok=2)), info(1, ok=3), info(1, ok=4)]
    found = episodes_of(keys, extras)
    assert [episode.key for episode in found] == [keys[0], keys[2], keys[3]]
    assert [episode.use.ok for episode in found] == [2, 3, 4]


def test_the_share_of_cut_responses_counts_episodes_of_our_loop(queue):
    """One of two: the cut one has two rows; another project's loop noted nothing, and padding is no response."""
    import transfer_queue as tq

    from verl_ext.trainer.queue import share_cut

    cut, other = info(0, finish_reason="max_tokens"), {"reward_extra_info": {"acc": 1.0}}
    rows = {"a_0_0": cut, "a_0_1": cut, "a_1_0": info(1), "a_2_0": other, "pad_0_0": cut}
    queue.values |= {key: SimpleNamespace(data=value) for key, value in rows.items()}

    def share(keys):
        tags = [{"is_padding": key.startswith("pad")} for key in keys]
        return share_cut(tq.KVBatchMeta(partition_id="train", keys=keys, tags=tags))

    assert share([*rows]) == 0.5
    assert share(["a_2_0"]) is None and share(["pad_0_0"]) is None


@pytest.mark.parametrize("partition", ["train", "val"])
@pytest.mark.parametrize("mode", MODES)
def test_what_a_rollout_found_broken_ends_the_run_before_its_group_is_replaced(monkeypatch, mode, partition):
    queue, buffer = buffer_maker(monkeypatch)([None, *[MIXED] * 9], batch_size=2, mode=mode, partition=partition)
    queue.tags["uid-0_3_0"] = {"status": "failure", "stops_run": "V gave acc=nan on row 7. Correct the verifier."}
    with pytest.raises(
        RuntimeError, match="^V gave acc=nan on row 7. Correct the verifier. The same command then continues"
    ):
        buffer.sample(1, partition, 2)
    assert len(queue.groups) == 2, "nothing was generated in its place"


def test_a_run_that_is_resumed_forgets_what_stopped_it(queue):
    """In the asynchronous modes the queue is in the checkpoint. The group still counts as failed, and is replaced."""
    from verl_ext.trainer.queue import clear_leftovers

    queue.tags = {"u": {"is_prompt": True, "status": "failure"}, "u_0_0": {"stops_run": "said"}, "u_1_0": {}}
    queue.tags |= {"gone_0_0": {"stops_run": "said"}}
    clear_leftovers()
    assert queue.tags.keys() == {"u", "u_1_0"}
