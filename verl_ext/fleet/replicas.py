"""Starts and stops one server on GPUs of its own, while a run goes on. Imports no vLLM: the registry's class does."""

import asyncio
import logging
import os
import signal
from contextlib import suppress
from typing import TYPE_CHECKING

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

if TYPE_CHECKING:
    from verl.workers.rollout.llm_server import LLMServerManager
    from verl.workers.rollout.replica import RolloutReplica

logger = logging.getLogger(__name__)
KILL_S = 15.0  # for Ray to start a task on a node


def start_replica(servers: "LLMServerManager", number: int) -> "RolloutReplica":
    """As verl's `_initialize_llm_servers` (llm_server.py:393, 0.9.1); it has no weights yet.

    Args:
        number: verl's `replica_rank`, which no other server of the run ever had.

    Raises:
        ValueError: Ray has no GPUs for it. Others: it does not start.
    """
    rollout = servers.rollout_config
    arguments = {"config": rollout, "model_config": servers.model_config, "gpus_per_node": rollout.n_gpus_per_node}
    replica = servers.rollout_replica_class(replica_rank=number, **arguments)
    try:
        asyncio.run(replica.init_standalone())
    except BaseException:
        stop_replica(replica)
        raise
    return replica


def stop_replica(replica: "RolloutReplica", hanging: tuple[str, int] | None = None) -> None:
    """End the processes of a server, dead or alive, and give its GPUs back to Ray.

    Args:
        hanging: node and process of its server, where that does not answer: Ray asks a process to end itself.
    """
    if hanging is not None:
        node, pid = hanging
        there = NodeAffinitySchedulingStrategy(node, soft=False)
        try:
            ray.get(_kill.options(scheduling_strategy=there).remote(pid), timeout=KILL_S)
        except RayError as error:
            logger.warning("process %d on node %s was not killed: %r", pid, node, error)
    for actor in (*replica.servers, *replica.workers):
        with suppress(RayError):
            ray.kill(actor)
    for group in (replica.resource_pool.pgs if replica.resource_pool else None) or ():
        ray.util.remove_placement_group(group)


@ray.remote(num_cpus=0)
def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
