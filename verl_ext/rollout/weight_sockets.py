"""The sockets in /tmp by which an actor's weights reach the vLLM server on its node: no two runs share one, and no
sender waits forever.

verl 0.9.1 names them by Ray's job id. That is 01000000 in every separate cluster, so if two runs share a machine, the
one that binds second takes the socket of the first: its server would hang, or get the other run's weights. This module
adds the id of Ray's node, which is random, on both sides; both are on one node.
"""

import functools
import os
from types import ModuleType
from typing import Any

import ray
import zmq

from verl_ext.versions import VERL, require_versions

ANSWER_S = 600.0  # loading a bucket takes seconds; before the first one, the server must have started


def name_senders(adapters: ModuleType) -> None:
    """Patch `ServerAdapter` in the actor's process (verl/workers/rollout/vllm_rollout/vllm_rollout.py:141)."""
    require_versions(VERL, "verl_ext/rollout/weight_sockets.py")
    adapter = adapters.ServerAdapter
    init = adapter.__init__

    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        context = ray.get_runtime_context()
        job = context.get_job_id()
        self.zmq_handle = self.zmq_handle.replace(f"-{job}-", f"-{job}-{context.get_node_id()[:16]}-", 1)

    adapter.__init__ = __init__


def name_receivers(servers: ModuleType) -> None:
    """Patch `vLLMHttpServer`, whose engine's processes inherit the variable.

    See verl/workers/rollout/vllm_rollout/vllm_async_server.py:143.
    """
    require_versions(VERL, "verl_ext/rollout/weight_sockets.py")
    server = servers.vLLMHttpServer
    init = server.__init__

    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        context = ray.get_runtime_context()
        os.environ["VERL_RAY_JOB_ID"] = f"{context.get_job_id()}-{context.get_node_id()[:16]}"

    server.__init__ = __init__


def bound_waits(transfers: ModuleType) -> None:
    """Limit how long `BucketedWeightSender` waits (verl/workers/rollout/vllm_rollout/bucketed_weight_transfer.py:71).

    A server whose engine is dead or could not load the weights sends no answer: the run then ends with an error.
    """
    require_versions(VERL, "verl_ext/rollout/weight_sockets.py")
    sender = transfers.BucketedWeightSender
    init_socket, send_weights = sender._init_socket, sender.async_send_weights

    @functools.wraps(init_socket)
    def _init_socket(self: Any) -> None:
        init_socket(self)
        self.socket.setsockopt(zmq.SNDTIMEO, int(1000 * ANSWER_S))  # it waits here until the server is there
        self.socket.setsockopt(zmq.RCVTIMEO, int(1000 * ANSWER_S))
        self.socket.setsockopt(zmq.LINGER, 0)  # unsent messages do not keep the process from ending

    @functools.wraps(send_weights)
    async def async_send_weights(self: Any, weights: Any) -> None:
        try:
            await send_weights(self, weights)
        except zmq.Again:
            raise TimeoutError(
                f"The vLLM server took no weights from {self.zmq_handle} for {ANSWER_S:.0f} s: its engine is dead or "
                "failed to load them. Its log says why. Fix that; the same command continues from the last checkpoint."
            ) from None

    sender._init_socket, sender.async_send_weights = _init_socket, async_send_weights
