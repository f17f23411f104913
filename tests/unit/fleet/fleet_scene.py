"""A fleet over made-up replicas: servers, their workers, the actor, and a fake clock."""

import asyncio
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from tests.unit.fleet.remote import Remote
from verl_ext.ledger.servers import ServerJournal
from verl_ext.settings import HealthSettings

LIMITS = HealthSettings(
    every_s=0.01, suspect_s=0.035, dead_s=0.1, update_s=1, start_s=0, attempts=3, wait_s=1, max_replacements=3
)


class EngineDeadError(Exception):
    """Stands in for vLLM's error."""


class Worker:
    """What Ray's handle refers to. `mode`: well, dead (says so), hangs, unreachable, or gone or oom (the process)."""

    def __init__(self) -> None:
        self.mode, self.given_up = "well", 0
        self._hanging: list[asyncio.Future] = []

    def wake(self) -> None:
        """Answer the calls that it left hanging, and those to come."""
        self.mode = "well"
        for each in self._hanging:
            if not each.done():
                each.set_result(None)

    async def get_replica_rank(self) -> None:
        await self.answer()

    async def answer(self) -> None:
        from ray.exceptions import ActorUnavailableError, OutOfMemoryError, RayActorError

        if self.mode == "hangs":
            self._hanging.append(asyncio.get_running_loop().create_future())
            await self._hanging[-1]
        if self.mode == "gone":
            raise RayActorError()
        if self.mode == "oom":
            raise OutOfMemoryError("Ray's memory monitor killed it")
        if self.mode == "unreachable":
            raise ActorUnavailableError("no route", None)
        if self.mode == "dead":
            raise EngineDeadError()


class Server(Worker):
    """A worker that also has vLLM's engine."""

    async def beat(self) -> None:
        await self.answer()

    async def give_up(self) -> None:
        self.given_up += 1
        if self.mode == "gone":
            await self.answer()


class Replica:
    """Like verl's; its calls behave as `at` says: name of a call -> mode of the server."""

    def __init__(self, number: int, log: list | None = None, **at: str):
        self.replica_rank, self.at, self.log = number, at, [] if log is None else log
        self.server, self.worker = Server(), Worker()
        self.workers = [Remote(self.worker)]
        self.config = SimpleNamespace(data_parallel_size=1)
        self.server_handle, self.server_address = Remote(self.server), f"server {number}"

    def __repr__(self) -> str:
        return self.server_address

    async def call(self, name: str) -> None:
        self.log.append((name, self.replica_rank))
        self.server.mode = self.at.get(name, self.server.mode)
        await self.server.answer()

    async def abort_all_requests(self):
        await self.call("abort")

    async def release_kv_cache(self):
        await self.call("release")

    async def resume_kv_cache(self):
        await self.call("refill")

    async def resume_generation(self):
        await self.call("resume")


class Group:
    """verl's worker group of some replicas."""

    def __init__(self, replicas: list[Replica]):
        self.replicas, self.world_size = list(replicas), len(replicas)

    def update_weights(self, global_steps: int) -> list[Any]:
        return [each.call("load") for each in self.replicas]

    def execute_checkpoint_engine(self, method: list[str], **arguments: list[Any]) -> list[Any]:
        assert {len(each) for each in (method, *arguments.values())} == {self.world_size}
        return [each.call(method[0]) for each in self.replicas]


class Actor:
    world_size = 1

    def __init__(self) -> None:
        self.sent: list[int] = []

    def update_weights(self, global_steps: int, mode: str) -> list[Any]:
        async def send() -> dict:
            self.sent.append(global_steps)
            return {"sent": 1.0}

        return [send()]

    def execute_checkpoint_engine(self, method: list[str], **arguments: list[Any]) -> list[Any]:
        return [asyncio.sleep(0)]


class Scene:
    """A fleet of two servers that have weights of version 1; a round is a hundredth of a second.

    Args:
        balancer: of the servers in a dict, verl's own unless another is given.
        clock: seconds; without one, each round of `rounds` takes a hundredth.
        limits: what differs from `LIMITS`.
    """

    def __init__(self, make: Any, folder: Any, balancer: Any = None, clock: Any = None, **limits: Any):
        from verl.workers.rollout.router import GlobalRequestLoadBalancer

        from verl_ext.fleet.recovery import Fleet

        self.replicas = [Replica(0), Replica(1)]
        self.weights = make(*self.replicas)
        self.weights.version = 1
        handles = {each.server_address: each.server_handle for each in self.replicas}
        self.balancer = (balancer or GlobalRequestLoadBalancer)(handles | {"of another pool": None})
        self.now, self.started, self.failing_starts = 0.0, [], 0
        self.stopped: list[Replica] = []
        self.hanging: list[Replica] = []  # of those that were stopped
        self.journal, self.disk_is_full = ServerJournal(folder), False
        self.journal.begin(each.server_address for each in self.replicas)
        self.fleet = Fleet(
            HealthSettings(**vars(LIMITS) | limits),
            self.weights,
            Remote(self.balancer),
            start=lambda number: self.start(number),  # what a test puts in its place
            stop=lambda *arguments: self.stop(*arguments),
            note=self.note,
            clock=clock or (lambda: self.now),
        )

    def start(self, number: int) -> Replica:
        if self.failing_starts:
            self.failing_starts -= 1
            raise OSError("no GPU")
        self.started.append(Replica(number))
        return self.started[-1]

    def stop(self, replica: Replica, hangs: bool = False) -> None:
        self.hanging += [replica] * hangs
        self.stopped.append(replica)

    def note(self, *event: str) -> None:
        if self.disk_is_full:
            raise OSError(28, "No space left on device")
        self.journal.note(*event)

    def routed(self) -> list[str]:
        return [each for each in self.balancer.get_all_servers() if each != "of another pool"]

    async def rounds(self, number: int) -> None:
        for _ in range(number):
            self.now += 0.01
            await self.fleet.round()

    async def until(self, is_so: Any) -> None:
        """Make rounds until something is so."""
        deadline = time.monotonic() + 10
        while not is_so():
            assert time.monotonic() < deadline, "it did not come to pass in 10 s"
            await self.rounds(1)


def wait_until(is_so: Callable[[], Any]) -> None:
    """Wait for what other threads do."""
    deadline = time.monotonic() + 10
    while not is_so():
        assert time.monotonic() < deadline, "it did not come to pass in 10 s"
        time.sleep(0.01)
