import asyncio
import os
import time

import pytest


@pytest.fixture
def make(cpu_platform, tmp_path, monkeypatch):
    """A trainer of two ranks and one rollout worker, as verl's CheckpointEngineManager sets them up."""
    from verl.checkpoint_engine import CheckpointEngineRegistry

    from verl_ext.cpu import checkpoint_engine

    monkeypatch.setattr(checkpoint_engine, "_FOLDER", tmp_path)

    def make():
        master, other = (CheckpointEngineRegistry.new("shared_file", bucket_size=1, is_master=m) for m in (True, False))
        rollout = CheckpointEngineRegistry.new("shared_file", bucket_size=1)
        engines = [master, other, rollout]
        actors, rollouts = type(master).build_topology(2, 1, [engine.prepare() for engine in engines])
        for engine, path in zip(engines, actors["path"] + rollouts["path"], strict=True):
            engine.init_process_group(path)
        return engines

    return make


def weights(walked):
    import torch

    parameter = torch.arange(6.0).reshape(2, 3)
    for name, weight in (("a", parameter), ("b", parameter.T), ("c", torch.ones(1, dtype=torch.bfloat16))):
        walked.append(name)
        yield name, weight


async def test_weights_arrive_as_they_were_sent_and_leave_nothing(make, tmp_path):
    for _ in range(2):  # two syncs
        master, other, rollout = make()
        walked = []

        async def receive(rollout=rollout):
            return {name: weight async for name, weight in rollout.receive_weights()}

        received = asyncio.create_task(receive())
        await asyncio.sleep(0.05)
        assert not received.done()
        await other.send_weights(weights(walked))
        assert walked == ["a", "b", "c"]  # gathering a weight is a collective: every rank takes part
        await master.send_weights(weights([]))
        expected = dict(weights([]))
        for name, weight in (await received).items():
            assert weight.dtype == expected[name].dtype and weight.equal(expected.pop(name))
        assert not expected
        for engine in (master, other, rollout):
            engine.finalize()
    assert not list(tmp_path.iterdir())


def test_what_a_killed_run_left_is_removed_once_nobody_waits_for_it(make, tmp_path):
    young, old, other = (tmp_path / name for name in ("retool_weights_1", "retool_weights_2.part", "psm_3"))
    for path, age_s in ((young, 500), (old, 700), (other, 700)):
        path.touch()
        os.utime(path, (time.time() - age_s,) * 2)
    make()
    assert sorted(tmp_path.iterdir()) == sorted([young, other])


async def test_weights_that_never_come_are_an_error(make, monkeypatch):
    from verl_ext.cpu import checkpoint_engine

    monkeypatch.setattr(checkpoint_engine, "_TIMEOUT_S", 0.1)
    _, _, rollout = make()
    with pytest.raises(TimeoutError, match="wrote no weights to .*retool_weights_.* within 0 s.*on the same machine"):
        await anext(rollout.receive_weights())


def test_the_folder_is_in_shared_memory(cpu_platform):
    from verl_ext.cpu import checkpoint_engine

    assert str(checkpoint_engine._FOLDER) == "/dev/shm"
