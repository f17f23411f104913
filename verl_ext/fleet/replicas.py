"""Start and stop one server on dedicated GPUs while a run continues. Only the registry's class imports vLLM."""

import asyncio
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import ray
from ray._private import state  # what Ray's head knows; the public API for it needs Ray's dashboard
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

if TYPE_CHECKING:
    from verl.workers.rollout.llm_server import LLMServerManager
    from verl.workers.rollout.replica import RolloutReplica

logger = logging.getLogger(__name__)
GIVE_UP_S = 15.0  # for a server to return its requests; one whose own process hangs never does
KILL_S = 15.0  # for Ray to start a task on a node
FREE_S = 30.0  # for Ray to take the GPUs of a server back; it takes some tenths of a second


def start_replica(servers: "LLMServerManager", number: int) -> "RolloutReplica":
    """Start a replica, without weights, as verl's `_initialize_llm_servers` does (llm_server.py:393, 0.9.1).

    Args:
        number: verl's `replica_rank`, which no other server of the run ever had.

    Raises:
        ValueError: Ray has no GPUs for it. Other errors: it does not start.
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


def start_in_time(
    start: Callable[[], "RolloutReplica"], stop: Callable[["RolloutReplica"], None], wait_s: float
) -> "RolloutReplica":
    """Start within a time limit, which Ray's wait for GPUs lacks. A replica that starts later is stopped.

    Raises:
        TimeoutError: it took longer. Other errors: those of `start`.
    """

    def stop_late(answer: Future) -> None:
        if answer.exception() is None:
            logger.warning("a server took longer than %g s to start and is stopped", wait_s)
            stop(answer.result())

    answer = in_thread(start)
    try:
        return answer.result(timeout=wait_s)
    except TimeoutError as error:
        if answer.done():  # at the last moment, or `start` itself raised the error
            return answer.result()
        answer.add_done_callback(stop_late)
        raise TimeoutError(
            f"the server did not start in {wait_s:g} s (retool.fleet.health.wait_s). If it starts later, it is stopped"
        ) from error


def in_thread(function: Callable[..., Any], *args: Any) -> Future:
    """Begin a call in a thread that holds up the end of neither an event loop nor the process: Ray may not answer."""
    answer: Future = Future()

    def run() -> None:
        if answer.set_running_or_notify_cancel():
            try:
                answer.set_result(function(*args))
            except Exception as error:  # any: it is raised to the caller
                answer.set_exception(error)

    threading.Thread(target=run, daemon=True, name="a call of the fleet").start()
    return answer


async def give_up(replica: "RolloutReplica", then_s: float) -> bool:
    """Get the tokens of the requests of a server whose engine is dead or hangs from its front end (watched.py).

    Args:
        then_s: to wait for the requests to arrive where they came from.
    Returns:
        whether the front end hangs as well.
    """
    try:
        await asyncio.wait_for(replica.server_handle.give_up.remote(), GIVE_UP_S)
        await asyncio.sleep(then_s)
    except (TimeoutError, RayError) as error:
        logger.warning("server %s did not hand back its requests: %r", replica.server_address, error)
        return isinstance(error, TimeoutError)
    return False


def stop_replica(replica: "RolloutReplica", hangs: bool = False) -> None:
    """End the processes of a server, dead or alive, and give its GPUs back to Ray.

    Return once Ray has taken them back, so that another server can start on them at once: verl raises if they are not
    free (ray/base.py:239). Other servers may stop and start meanwhile.

    Args:
        hangs: the server's process does not answer. It is killed, because Ray only asks a process to end itself.
    """
    if hangs and (place := place_of(replica)):
        node, pid = place
        there = NodeAffinitySchedulingStrategy(node, soft=False)
        try:
            ray.get(_kill.options(scheduling_strategy=there).remote(pid), timeout=KILL_S)
        except RayError as error:
            logger.warning("process %d on node %s was not killed: %r", pid, node, error)
    for actor in (*replica.servers, *replica.workers):
        with suppress(RayError):
            ray.kill(actor)
    groups = (replica.resource_pool.pgs if replica.resource_pool else None) or ()
    for group in groups:
        ray.util.remove_placement_group(group)
    held = tuple(group.id.hex() for group in groups)
    deadline = time.monotonic() + FREE_S
    # A group's GPUs are a separate resource, "GPU_group_0_<id>", until the node has taken them back. The group's state
    # does not show it: it is REMOVED at once.
    while left := [each for each in ray.cluster_resources() if each.endswith(held)]:
        if time.monotonic() > deadline:
            logger.warning("Ray has not freed %s of a server that was stopped %g s ago.", left, FREE_S)
            return
        time.sleep(0.1)


def place_of(replica: "RolloutReplica") -> tuple[str, int] | None:
    """Return the node and pid of a live server, else None. Ray's head is asked, because the server may hang."""
    known = state.actors(replica.server_handle._actor_id.hex())
    return (known["Address"]["NodeID"], known["Pid"]) if known.get("State") == "ALIVE" else None


def free_gpus() -> float:
    """Return Ray's free GPUs, or NPUs, counted as by verl's ResourcePoolManager."""
    resources = ray.available_resources()
    return resources.get("GPU", 0) or resources.get("NPU", 0)


@ray.remote(num_cpus=0)
def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
