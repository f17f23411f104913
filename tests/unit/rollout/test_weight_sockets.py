"""The sockets of two runs on one machine."""

import os
from types import SimpleNamespace

import pytest

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
