"""Copied rows of TransferQueue."""

import pytest

from tests.unit.trainer.prompt_groups import MIXED, MODES, FakeQueue, buffer_maker


def test_a_copy_comes_after_all_outputs_of_its_session(monkeypatch):
    import transfer_queue as tq

    from verl_ext.trainer.queue import copy_rollouts

    queue = FakeQueue([])
    queue.tags = {"u": {"is_prompt": True}, "u_0_0": {}, "u_0_1": {"status": "success"}, "u_1_0": {}}
    queue.values = dict.fromkeys(("u_0_0", "u_0_1", "u_1_0"), MIXED[0])
    for name in ("kv_batch_put", "kv_clear"):
        monkeypatch.setattr(tq, name, getattr(queue, name))
    monkeypatch.setattr(tq, "kv_batch_get", lambda keys, partition_id: {"extra_fields": [*map(queue.values.get, keys)]})
    snapshot = dict(queue.tags)
    assert copy_rollouts("train", ["u_0_0", "u_0_0", "u_1_0"], snapshot) == ["u_0_2", "u_0_3", "u_1_1"]
    assert queue.tags["u_0_1"] == {"status": "success"} and snapshot.keys() == queue.tags.keys()


@pytest.mark.parametrize("partition", ["train", "val"])
@pytest.mark.parametrize("mode", MODES)
def test_what_a_rollout_found_broken_ends_the_run_before_its_group_is_replaced(monkeypatch, mode, partition):
    from verl_ext.trainer.queue import stop_where_a_rollout_says_so

    queue, buffer = buffer_maker(monkeypatch)([None, *[MIXED] * 9], batch_size=2, mode=mode, partition=partition)
    stop_where_a_rollout_says_so(buffer)
    queue.tags["uid-0_3_0"] = {"status": "failure", "stops_run": "V gave acc=nan on row 7. Correct the verifier."}
    with pytest.raises(
        RuntimeError, match="^V gave acc=nan on row 7. Correct the verifier. The same command then continues"
    ):
        buffer.sample(1, partition, 2)
    assert len(queue.groups) == 2, "nothing was generated in its place"


def test_a_run_that_is_resumed_forgets_what_stopped_it(monkeypatch):
    """In the asynchronous modes the queue is in the checkpoint. The group still counts as failed, and is replaced."""
    import transfer_queue as tq

    from verl_ext.trainer.queue import clear_leftovers

    queue = FakeQueue([])
    queue.tags = {"u": {"is_prompt": True, "status": "failure"}, "u_0_0": {"stops_run": "said"}, "u_1_0": {}}
    queue.tags |= {"gone_0_0": {"stops_run": "said"}}
    for name in ("kv_list", "kv_clear"):
        monkeypatch.setattr(tq, name, getattr(queue, name))
    clear_leftovers()
    assert queue.tags.keys() == {"u", "u_1_0"}
