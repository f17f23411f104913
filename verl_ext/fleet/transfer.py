"""A weight update that no dead server holds up: verl's `CheckpointEngineManager`, step by step.

It skips servers that die during it, are declared dead (`recovery.py`), or cannot be reached for a moment, and gives new
ones their weights. Applies to servers on dedicated GPUs (verl's replica mode standalone). Line numbers are of verl
0.9.1, checkpoint_engine/base.py.
"""

import asyncio
import itertools
import logging
import os
import threading
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, Protocol, cast

from ray.exceptions import ActorUnavailableError
from verl.checkpoint_engine.base import CheckpointEngineManager, _worker_cls
from verl.single_controller.ray import RayClassWithInitArgs, RayWorkerGroup
from verl.utils.ray_utils import auto_await
from verl.workers.rollout.replica import RolloutReplica

from verl_ext.fleet.health import Pulse
from verl_ext.rollout.liveness import GONE

logger = logging.getLogger(__name__)
logger.setLevel(os.getenv("VERL_LOGGING_LEVEL", "INFO"))

UNWATCHED_S = 120.0  # without a round of the watch, which takes a second or two, or longer if the router is away
POLL_S = 0.1  # how soon a weight update skips a replica that was declared dead


class Workers(Protocol):
    """A RayWorkerGroup, with the methods that verl gives it when it is made; each returns an answer per worker."""

    world_size: int

    def update_weights(self, *, global_steps: int | None, mode: str | None = ...) -> list[Any]: ...
    def execute_checkpoint_engine(self, method: list[str], **arguments: list[Any]) -> list[Any]: ...


def worker_group(replicas: Sequence[RolloutReplica]) -> Workers:
    """Return the workers of some replicas as one group, whose answers come in the replicas' order."""
    workers = [worker for replica in replicas for worker in replica.workers]
    group = RayWorkerGroup(worker_handles=workers, ray_cls_with_init=RayClassWithInitArgs(cls=_worker_cls))
    return cast(Workers, group)


class FleetCheckpointManager(CheckpointEngineManager):
    """verl's manager of weight updates, which skips dead servers.

    Args:
        group: makes one worker group of some replicas.

    Attributes:
        replicas: those that have weights, as verl's.
        newcomers: replicas that started and have no weights yet (replacements, or added by command), and those that an
            update skipped because they were silent or could not be reached.
        starting: numbers of replicas that start by command, and of dead ones whose replacement starts.
        dead: replicas that nothing waits for.
        failures: the error of each dead replica that failed in an update.
        version: of the newest update that went to all replicas.
        lock: held by code that needs the actor's weights, and the lists of replicas, to stay unchanged.
        numbers: of new replicas, each used once.
        suspected: silent replicas, which an update skips and which come back as newcomers.
        updating: replicas that are loading weights: their engines need not answer.
        pulse: of the watch, while it runs.
        fault: why nobody watches the replicas any more, so that a hanging one would not be declared dead.
    """

    def __init__(
        self,
        config: Any,
        actor_wg: RayWorkerGroup,
        replicas: Sequence[RolloutReplica],
        group: Callable[[Sequence[RolloutReplica]], Workers] = worker_group,
    ):
        super().__init__(config=config, actor_wg=actor_wg, replicas=list(replicas))
        self._group = group
        self.newcomers: list[RolloutReplica] = []
        self.starting: set[int] = set()
        self.dead: set[RolloutReplica] = set()
        self.failures: dict[RolloutReplica, str] = {}
        self.version: int | None = None
        self.lock = threading.RLock()
        self.numbers = itertools.count(1 + max((each.replica_rank for each in replicas), default=-1))
        self.suspected: set[RolloutReplica] = set()
        self.updating: frozenset[RolloutReplica] = frozenset()
        self.pulse: Pulse | None = None
        self.fault: Exception | None = None

    def check(self) -> None:
        """Raise RuntimeError if nobody watches the replicas any more."""
        pulse = self.pulse  # the watching thread removes it when it ends
        if self.fault is None and pulse is not None and (silent_s := pulse.silent_s()) > UNWATCHED_S:
            self.fault = TimeoutError(
                f"the thread that watches them has not finished a round for {silent_s:.0f} s (is the Ray head gone?)"
            )
        if self.fault is not None:
            raise RuntimeError(
                f"The rollout servers are no longer watched: {self.fault}. Start the run again; it resumes from its "
                "newest checkpoint."
            ) from self.fault

    @auto_await
    async def update_weights(self, global_steps: int | None = None) -> dict[str, Any]:
        """Update as verl's (:510), but only the replicas that answer each call, newcomers included."""
        with self.lock:
            metrics = await self._update([*self.replicas, *self.newcomers], global_steps)
            self.version = global_steps
        return metrics

    def let_newcomers_in(self) -> None:
        """Give only newcomers the weights of the newest update, which the actor must still have."""
        with self.lock:
            asyncio.run(self._update(list(self.newcomers), self.version))

    async def _update(self, replicas: list[RolloutReplica], version: int | None) -> dict[str, Any]:
        silent = self.suspected & {*replicas}
        self.newcomers += [each for each in self.replicas if each in silent]
        self.replicas = [each for each in self.replicas if each not in silent]
        replicas = [each for each in replicas if each not in silent]
        try:
            living, metrics = await self._transfer(replicas, version)
        finally:
            self.updating = frozenset()
        out_of_reach = [each for each in replicas if each not in living and each not in self.dead]
        self.newcomers += [each for each in out_of_reach if each not in self.newcomers]
        self.replicas = [each for each in self.replicas if each not in replicas and each not in self.dead] + living
        for each in replicas:
            if each in self.newcomers and each not in out_of_reach:
                self.newcomers.remove(each)
        return metrics

    async def _transfer(
        self, replicas: list[RolloutReplica], version: int | None
    ) -> tuple[list[RolloutReplica], dict[str, Any]]:
        """Run the steps of verl's update; return the replicas that answered in all, and the sender's metrics."""
        living = await self._of_living(replicas, lambda replica: replica.abort_all_requests())
        living = await self._of_living(living, lambda replica: replica.release_kv_cache())
        self.updating = frozenset(living)
        living = await self._in_one_group(living)
        if not living:
            logger.warning("no server is left that could get the weights of version %s.", version)
            return [], {}
        actor = cast(Workers, self.actor_wg)
        sent = _begun(actor.update_weights(global_steps=version, mode=self.backend))
        living = await self._on_workers(living, lambda group: group.update_weights(global_steps=version), sent)
        metrics: dict[str, Any] = {}
        for result in await asyncio.gather(*sent):
            metrics |= result if isinstance(result, dict) else {}
        await asyncio.gather(*actor.execute_checkpoint_engine(["finalize"] * actor.world_size))
        living = await self._on_workers(
            living, lambda group: group.execute_checkpoint_engine(["finalize"] * group.world_size)
        )
        self.updating = frozenset()
        living = await self._of_living(living, lambda replica: replica.resume_kv_cache())
        return await self._of_living(living, lambda replica: replica.resume_generation()), metrics

    async def _in_one_group(self, replicas: list[RolloutReplica]) -> list[RolloutReplica]:
        """Replace verl's `build_process_group` (:422), which a dead worker ends and a hanging one blocks forever."""
        actor, prepared = cast(Workers, self.actor_wg), {}

        def all_ranks(group: Workers, method: str, **arguments: list[Any]) -> list[Any]:
            return group.execute_checkpoint_engine(**arguments | {"method": [method] * group.world_size})

        async def prepare(replica: RolloutReplica) -> None:
            prepared[replica] = await asyncio.gather(*all_ranks(self._group([replica]), "prepare"))

        living = await self._of_living(replicas, prepare)
        if not living:
            return []
        told = [*await asyncio.gather(*all_ranks(actor, "prepare"))]
        told += [each for replica in living for each in prepared[replica]]
        of_actor, of_servers = self.backend_cls.build_topology(actor.world_size, len(told) - actor.world_size, told)
        joined = _begun(all_ranks(actor, "init_process_group", **of_actor))
        living = await self._on_workers(
            living, lambda group: all_ranks(group, "init_process_group", **of_servers), joined
        )
        await asyncio.gather(*joined)
        return living

    async def _on_workers(
        self,
        replicas: list[RolloutReplica],
        call: Callable[[Workers], list[Any]],
        of_actor: Sequence[asyncio.Future] = (),
    ) -> list[RolloutReplica]:
        """Call all workers of the replicas as one group; return the replicas whose workers all answered."""
        if not replicas:
            return []
        answers = iter(call(self._group(replicas)))
        of = {replica: [next(answers) for _ in replica.workers] for replica in replicas}
        return await self._of_living(replicas, lambda replica: asyncio.gather(*of[replica]), of_actor)

    async def _of_living(
        self,
        replicas: list[RolloutReplica],
        call: Callable[[RolloutReplica], Awaitable[Any]],
        of_actor: Sequence[asyncio.Future] = (),
    ) -> list[RolloutReplica]:
        """Call each replica; return those that answered.

        A replica that dies during the call, fails in it, is declared dead, or cannot be reached is left out.

        Args:
            of_actor: calls of the actor that the replicas wait for: if one fails, they would wait forever.

        Raises:
            Exception: the actor failed, all replicas failed alike, or nobody watches.
        """
        replicas = [each for each in replicas if each not in self.dead]
        calls = dict(zip(replicas, _begun(map(call, replicas)), strict=True))
        try:
            while waiting := [each for replica, each in calls.items() if replica not in self.dead and not each.done()]:
                open_of_actor = [each for each in of_actor if not each.done()]
                await asyncio.wait([*waiting, *open_of_actor], timeout=POLL_S, return_when=asyncio.FIRST_COMPLETED)
                self.check()
                for each in of_actor:
                    if each.done():
                        each.result()
        finally:
            for each in calls.values():
                each.cancel()
        return self._living({replica: each for replica, each in calls.items() if replica not in self.dead})

    def _living(self, calls: dict[RolloutReplica, asyncio.Future]) -> list[RolloutReplica]:
        """Return the replicas whose ended calls succeeded. One with its own error (CUDA) counts as dead."""
        living, failed = [], {}
        for replica, each in calls.items():
            if (error := each.exception()) is None:
                living.append(replica)
            elif isinstance(error, ActorUnavailableError):
                logger.warning("%s cannot be reached and keeps its weights: %r", replica.server_address, error)
            elif is_death(error):
                self.dead.add(replica)
            else:
                failed[replica] = error
        others = {*self.replicas} - self.dead - failed.keys()
        if not (living or others) and are_alike([*failed.values()]):
            raise next(iter(failed.values()))
        for replica, error in failed.items():
            logger.error("%s failed during the update of its weights", replica.server_address, exc_info=error)
            self.failures[replica] = f"it failed during the update of its weights: {error!r}"
            self.dead.add(replica)
        return living


def are_alike(errors: Sequence[BaseException]) -> bool:
    """Return whether several servers failed with one kind of error, our fault. A single failure does not show that."""
    return len(errors) > 1 and len({type(error).__name__ for error in errors}) == 1


def read(call: asyncio.Future) -> None:
    """Read a call's error, for `add_done_callback`: asyncio complains about an error that nobody reads."""
    if not call.cancelled():
        call.exception()


def _begun(calls: Iterable[Awaitable[Any]]) -> list[asyncio.Future]:
    begun: list[asyncio.Future] = [asyncio.ensure_future(each) for each in calls]
    for each in begun:
        each.add_done_callback(read)
    return begun


def is_death(error: BaseException) -> bool:
    """Return whether a call of a server or of its worker failed because the process or the engine is gone.

    ActorUnavailableError, also a RayActorError, is no death: to Ray, the process lives and cannot be reached now.
    """
    if isinstance(error, ActorUnavailableError):
        return False
    return isinstance(error, GONE) or "EngineDeadError" in f"{error!r} {error}"  # wrapped by Ray, also twice
