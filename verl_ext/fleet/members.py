"""The list of rollout servers of a run in progress, and the commands that add or remove one.

Applies to runs whose servers have dedicated GPUs. verl keeps three lists: LLMServerManager has the one that a profile
reads, its router the one that requests use, and CheckpointEngineManager the one that gets weights. All three change
together here, and never during a weight update.
"""

import asyncio
import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import ray
from ray.exceptions import GetTimeoutError, RayError

from verl_ext.fleet import commands
from verl_ext.fleet.commands import Command, Refused
from verl_ext.fleet.modes import (
    getter,
    in_sentences,
    needs_loops_that_ask_for_servers,
    needs_servers_that_may_change,
)
from verl_ext.fleet.replicas import free_gpus, give_up, start_in_time, start_replica, stop_replica
from verl_ext.fleet.routing import ROUTER_ONCE_S, server_of

if TYPE_CHECKING:
    from verl.checkpoint_engine import CheckpointEngineManager
    from verl.workers.rollout.llm_server import LLMServerManager
    from verl.workers.rollout.replica import RolloutReplica

logger = logging.getLogger(__name__)
logger.setLevel(os.getenv("VERL_LOGGING_LEVEL", "INFO"))

START_S = 900.0  # for a server to start, unless `retool.fleet.health.wait_s` sets another limit
LEAVE_S = 120.0  # for a leaving server to abort its requests; vLLM answers within seconds
GRACE_S = 5.0  # for requests that the router sent but that have not arrived yet; the server sends them back
VERSION_S = 5.0  # for a server to report the version of its weights
WAITS = "waits for weights"


class Members:
    """The servers of one run, identified by verl's `replica_rank`, which is never reused.

    Args:
        servers: manages the servers, all of which have dedicated GPUs.
        checkpoints: gives them weights. If servers are watched, it also lets them join (transfer.py).
        stop: (replica, hangs=False) frees all that a replica holds, even if its process hangs.
    """

    def __init__(
        self,
        servers: "LLMServerManager",
        checkpoints: "CheckpointEngineManager",
        stop: Callable[..., None] = stop_replica,
    ):
        self._servers, self._checkpoints, self._stop_replica = servers, checkpoints, stop
        # Held while weights or the lists change. If servers are watched, it is the lock of `transfer.py`.
        self._lock = getattr(checkpoints, "lock", None) or threading.Lock()
        highest = max((each.replica_rank for each in checkpoints.replicas), default=-1)
        self._numbers = getattr(checkpoints, "numbers", None) or itertools.count(highest + 1)
        self._newcomers: list[RolloutReplica] | None = getattr(checkpoints, "newcomers", None)
        self._starting: set[int] = getattr(checkpoints, "starting", set())
        self._adding = threading.Lock()
        self._coming: dict[int, str] = {}  # server -> its progress
        self._ready: list[RolloutReplica] = []  # started, without weights yet; watched ones are in newcomers
        self._leaving: dict[int, RolloutReplica] = {}
        self._setting = getter(servers.config)
        stays = "A run keeps the servers of its start", "restart it with as many servers as it needs", self._setting
        within = [*needs_loops_that_ask_for_servers(*stays)]
        self._router_knows_load = not within
        self._refusals = in_sentences((*needs_servers_that_may_change(*stays), *within))

    @contextmanager
    def weights_change(self) -> Iterator[None]:
        """Enclose an update of all servers' weights; added servers get their first weights in it and join after it."""
        with self._lock:
            new, self._ready = self._ready, []
            self._set([*self._checkpoints.replicas, *new])
            yield
            self._set(self._checkpoints.replicas)
            if new:
                handles = {each.server_address: each.server_handle for each in new}
                ray.get(self._servers.global_load_balancer.add_servers.remote(handles), timeout=ROUTER_ONCE_S)
            for each in new:
                del self._coming[each.replica_rank]
                logger.info("fleet: server %d has joined at %s", each.replica_rank, each.server_address)

    @contextmanager
    def obeying(self, run: Path) -> Iterator[None]:
        """Run a thread that looks for commands in the run's folder until the block ends."""
        commands.clear(run)
        ended = threading.Event()

        def look() -> None:
            while not ended.wait(commands.EVERY_S):
                try:
                    for command in commands.take(run):  # a command that waits for an update delays no other
                        threading.Thread(target=self.obey, args=(command,), name="fleet command", daemon=True).start()
                except OSError:
                    logger.exception("fleet: a command in %s could not be read", run / commands.FOLDER)

        thread = threading.Thread(target=look, name="fleet commands", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def obey(self, command: Command) -> None:
        """Execute a command and answer it."""
        try:
            self._obey(command)
        except OSError:
            logger.exception("fleet: the answer to %s could not be written", command.words)

    def _obey(self, command: Command) -> None:
        try:
            match command.words:
                case ["list"]:
                    command.answer(self.rows())
                case ["add"]:
                    command.answer(self.add())
                case ["remove", server]:
                    command.answer(self.remove(int(server)))
                case words:
                    raise Refused(f"Expected list, add, or remove with a number; got {words}.")
        except Refused as error:
            command.refuse(str(error))
        except Exception as error:  # any: the sender gets it, and the run continues
            logger.exception("fleet: %s failed", command.words)
            command.refuse(f"{command.words} failed: {error!r}. See the run's log.")

    def rows(self) -> list[dict[str, Any]]:
        """Return each server's number, address, state, requests (in total and per rank), and its weights' step."""
        answer = self._servers.global_load_balancer.get_status.remote()
        status = cast(dict[str, Any], ray.get(answer, timeout=ROUTER_ONCE_S))
        slots = status.get("slots", status["servers"]) if self._router_knows_load else {}
        rows, coming = [], dict(self._coming)
        waiting = [each for each in self._newcomers or () if each.replica_rank not in coming]
        there = [each for each in self._checkpoints.replicas if each.replica_rank not in coming and each not in waiting]
        for state, replicas in (("serves", there), ("leaves", [*self._leaving.values()]), (WAITS, waiting)):
            for each in replicas:
                address = each.server_address
                ranks = [load for slot, load in slots.items() if server_of(slot) == address]
                row = {"server": each.replica_rank, "state": "dead" if each in self._dead else state, "ranks": ranks}
                load = sum(ranks) if ranks else None
                rows.append(row | {"address": address, "requests": load, "version": _version(each)})
        unknown = {"ranks": [], "address": None, "requests": None, "version": None}
        rows += [{"server": server, "state": state, **unknown} for server, state in coming.items()]
        return sorted(rows, key=lambda row: row["server"])

    def add(self) -> str:
        """Start a server; it joins with the next weights.

        Raises:
            Refused: Ray has no free GPUs, or weights would not reach the server.
        """
        self._refuse_changes()
        rollout = self._servers.rollout_config  # as in verl's replica.py:107: no replica may be left to ask
        wanted = rollout.tensor_model_parallel_size * rollout.data_parallel_size * rollout.pipeline_model_parallel_size
        with self._adding:  # Ray counts GPUs as free until a starting server has taken them
            free, starting = free_gpus(), len(self._starting)
            if free < wanted * (1 + starting):
                behind = f", and {starting} starting servers may still need some of them" if starting else ""
                raise Refused(
                    f"A server needs {wanted} GPUs, but Ray has {free:g} free{behind}. Remove a server first, "
                    "or start Ray on one more node of the run's cluster."
                )
            server = next(self._numbers)
            self._coming[server] = "starts"
            self._starting.add(server)
        threading.Thread(target=self._start, args=(server,), name=f"start server {server}", daemon=True).start()
        return f"Server {server} is starting. It gets weights and joins by the end of the step in which it is ready."

    def _start(self, server: int) -> None:
        try:
            start = partial(start_replica, self._servers, server)
            replica = start_in_time(start, self._stop_replica, self._setting("retool.fleet.health.wait_s", START_S))
        except Exception as error:  # any: the run continues with the servers that it has
            logger.exception("fleet: server %d did not start", server)
            self._starting.discard(server)
            self._coming[server] = f"did not start: {error!r}"
            return
        with self._lock:
            if self._newcomers is None:
                self._ready.append(replica)
                self._starting.discard(server)
                self._coming[server] = WAITS
            else:  # the watch lets it join, or declares it dead
                self._newcomers.append(replica)
                self._starting.discard(server)
                del self._coming[server]
        logger.info("fleet: server %d has started and waits for weights", server)

    def remove(self, server: int) -> str:
        """Send a server no more requests, and stop it when its running ones have ended or moved elsewhere.

        Raises:
            Refused: there is no such server, it is the only live one, or weights would not reach the others.
        """
        self._refuse_changes()
        with self._lock:
            replicas = self._checkpoints.replicas
            living = [each for each in replicas if each not in self._dead]
            silent = getattr(self._checkpoints, "suspected", ())
            numbers = [each.replica_rank for each in living]
            if server not in numbers:
                raise Refused(f"There is no server {server}. Expected one of {numbers}.")
            if not [each for each in living if each.replica_rank != server and each not in silent]:
                only = "the only one" if len(living) == 1 else "the only one that answers"
                raise Refused(f"Server {server} is {only}. Without it, nothing would generate. Add another one first.")
            (replica,) = [each for each in replicas if each.replica_rank == server]
            router = self._servers.global_load_balancer  # first: if it does not answer, the server stays
            try:
                ray.get(router.remove_servers.remote([replica.server_address]), timeout=ROUTER_ONCE_S)
            except TimeoutError:  # the router may remove the server later: the next message adds the server again
                if replica not in self._dead:
                    router.add_servers.remote({replica.server_address: replica.server_handle})
                raise
            if replica in self._dead:
                raise Refused(f"Server {server} has just died.")
            self._set([each for each in replicas if each is not replica])
            self._leaving[server] = replica
        threading.Thread(target=self._stop, args=(replica,), name=f"stop server {server}", daemon=True).start()
        return f"Server {server} gets no more requests. It stops when its requests have ended or moved elsewhere."

    def _stop(self, replica: "RolloutReplica") -> None:
        server, hangs = replica.replica_rank, False
        try:
            asyncio.run(asyncio.wait_for(replica.abort_all_requests(reject_request=True), LEAVE_S))
            time.sleep(GRACE_S)
        except Exception as error:  # it may be dead already; it is stopped in any case
            hangs = isinstance(error, TimeoutError)
            logger.warning("fleet: server %d did not let go of its requests", server, exc_info=True)
            if self._newcomers is not None:  # only watched servers return the tokens of their requests
                asyncio.run(give_up(replica, GRACE_S))
        try:
            self._stop_replica(replica, hangs)
            logger.info("fleet: server %d has left", server)
        except Exception:  # any of Ray's: the run continues
            logger.exception("fleet: server %d gets no requests, but its GPUs and processes were not freed", server)
        finally:
            del self._leaving[server]

    @property
    def _dead(self) -> Collection["RolloutReplica"]:
        """The dead servers that stay in the lists until the next update; empty if servers are not watched."""
        return getattr(self._checkpoints, "dead", ())

    def _refuse_changes(self) -> None:
        if self._refusals:
            raise Refused(self._refusals)

    def _set(self, replicas: list["RolloutReplica"]) -> None:
        """Set separate lists, because verl's two managers begin with the same list object and both append to it."""
        self._checkpoints.replicas = replicas
        self._servers.rollout_replicas = [*replicas]
        self._servers.server_handles = [each.server_handle for each in replicas]
        self._servers.server_addresses = [each.server_address for each in replicas]


def _version(replica: "RolloutReplica") -> int | None:
    """Return the step whose weights a server has, or None if it does not answer in time."""
    try:
        answer = replica.server_handle.__ray_call__.remote(lambda server: server.global_steps)
        return cast(int | None, ray.get(answer, timeout=VERSION_S))
    except (RayError, GetTimeoutError):
        return None
