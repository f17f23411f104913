"""Rows of TransferQueue that are copied."""

from tests.unit.trainer.prompt_groups import MIXED, FakeQueue


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
