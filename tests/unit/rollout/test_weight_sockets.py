"""The sockets of two runs on one machine."""

import asyncio
import contextlib
import os
import threading
from types import SimpleNamespace

import pytest
import torch

from verl_ext.rollout import weight_sockets

pytest.importorskip("ray")


@pytest.fixture
def handles(monkeypatch):
    """(the sender's, the receiver's) socket in a cluster, as verl names them with our addition."""

    class ServerAdapter:
        def __init__(self):
            job = weight_sockets.ray.get_runtime_context().get_job_id()
            self.zmq_handle = f"ipc:///tmp/rl-colocate-zmq-{job}-replica-0-rank-0.sock"

    class vLLMHttpServer:
        def __init__(self):
            os.environ["VERL_RAY_JOB_ID"] = weight_sockets.ray.get_runtime_context().get_job_id()

    monkeypatch.setenv("VERL_RAY_JOB_ID", "")
    weight_sockets.name_senders(SimpleNamespace(ServerAdapter=ServerAdapter))
    weight_sockets.name_receivers(SimpleNamespace(vLLMHttpServer=vLLMHttpServer))

    def of(node):
        context = SimpleNamespace(get_job_id=lambda: "01000000", get_node_id=lambda: node)
        monkeypatch.setattr(weight_sockets, "ray", SimpleNamespace(get_runtime_context=lambda: context))
        sender = ServerAdapter().zmq_handle
        vLLMHttpServer()
        return sender, f"ipc:///tmp/rl-colocate-zmq-{os.environ['VERL_RAY_JOB_ID']}-replica-0-rank-0.sock"

    return of


def test_actor_and_server_of_a_run_meet_and_those_of_two_runs_do_not(handles):
    (sender, receiver), (other, _) = handles("a" * 56), handles("b" * 56)
    assert sender == receiver != other
    assert len(sender.removeprefix("ipc://")) < 108  # of a Unix socket


def test_verls_own_classes_are_the_ones_that_are_named(cpu_platform):
    pytest.importorskip("vllm", reason="vLLM is not installed")
    from verl.workers.rollout.vllm_rollout import vllm_async_server, vllm_rollout

    for named in (vllm_rollout.ServerAdapter, vllm_async_server.vLLMHttpServer):
        assert named.__init__.__code__.co_filename.endswith("verl_ext/rollout/weight_sockets.py")


@pytest.fixture
def transfer(cpu_platform, tmp_path):
    """A sender of verl's, and its receiver."""
    from verl.workers.rollout.vllm_rollout import bucketed_weight_transfer as transfers

    handle = f"ipc://{tmp_path}/weights.sock"
    sender = transfers.BucketedWeightSender(handle, bucket_size_mb=1, use_shm=True)
    return sender, transfers.BucketedWeightReceiver(handle, torch.device("cpu"), use_shm=True)


def weights(number=3):
    return ((f"layer.{i}", torch.full((150_000,), float(i))) for i in range(number))  # .6 MB each: a bucket each


@pytest.mark.timeout(30)
@pytest.mark.parametrize("fails_at", [None, 1])
def test_a_server_that_answers_nothing_ends_the_update(transfer, fails_at, monkeypatch):
    """There is no receiver, or one whose loader raises at its second bucket."""
    monkeypatch.setattr(weight_sockets, "ANSWER_S", 3.0)
    sender, receiver = transfer
    loaded = []

    def load(bucket, is_last):
        if len(loaded) == fails_at:
            raise MemoryError("no room")
        loaded.append([name for name, _ in bucket])

    receiving = threading.Thread(target=receive, args=(receiver, load), daemon=True)
    if fails_at:
        receiving.start()
    with pytest.raises(TimeoutError, match="took no weights from ipc:.*weights.sock for 3 s: its engine is dead or"):
        asyncio.run(sender.async_send_weights(weights()))
    if fails_at:
        receiving.join()
        assert loaded == [["layer.0"]]
    assert sender.socket is None


def receive(receiver, load):
    with contextlib.suppress(MemoryError, BufferError):  # verl's, as the error holds on to the bucket
        receiver.receive_weights(load)


@pytest.mark.timeout(30)
def test_a_server_that_answers_gets_all_weights(transfer):
    sender, receiver = transfer
    loaded = {}

    def load(bucket, is_last):
        loaded.update((name, weight[0].item()) for name, weight in bucket)

    receiving = threading.Thread(target=receive, args=(receiver, load), daemon=True)
    receiving.start()
    asyncio.run(sender.async_send_weights(weights()))
    receiving.join()
    assert loaded == {"layer.0": 0.0, "layer.1": 1.0, "layer.2": 2.0}
