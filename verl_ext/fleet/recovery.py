"""Detect dead servers, take them out of the fleet, and replace them.

`Fleet` watches from a thread of the trainer's process and decides by `health.py`; `transfer.py` has how a weight update
treats dead and new servers. Applies to servers on dedicated GPUs (verl's replica mode standalone).
"""

import asyncio
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ray.exceptions import ActorUnavailableError
from verl.workers.rollout.llm_server import LLMServerManager
from verl.workers.rollout.replica import RolloutReplica

from verl_ext.fleet.health import Health, Pulse, State
from verl_ext.fleet.replicas import GIVE_UP_S, give_up, in_thread, start_in_time, start_replica, stop_replica
from verl_ext.fleet.routing import ROUTER_S
from verl_ext.fleet.transfer import FleetCheckpointManager, are_alike, is_death, read
from verl_ext.ledger.servers import ServerJournal
from verl_ext.rollout.liveness import GONE
from verl_ext.settings import HealthSettings

logger = logging.getLogger(__name__)
logger.setLevel(os.getenv("VERL_LOGGING_LEVEL", "INFO"))

ON_THEIR_WAY_S = 1.0  # for the returned requests to arrive, before the process is killed
START_PAUSE_S = 10.0  # between two tries to start a replacement; doubles up to MAX_START_PAUSE_S
MAX_START_PAUSE_S = 600.0  # so that a lost GPU does not use up the run's replacements at once
LOCK_S = 1.0  # between two checks that the watch still runs
MAX_UNTOLD = 60  # consecutive rounds without reaching the router; one more ends the run


@dataclass(eq=False)
class _Server:
    replica: RolloutReplica
    health: Health
    beat: asyncio.Future | None = None  # not answered yet
    has_answered: bool = False  # in this round
    has_begun: bool = False  # it has weights, so requests come
    is_missed: bool = False  # it was missing from the router
    was_missed: bool = False  # at its newest beat: an answer to an older beat may predate its death

    @property
    def name(self) -> str:
        return self.replica.server_address


class Fleet:
    """Watch the servers of a run and replace dead ones.

    Args:
        limits: `retool.fleet.health`.
        weights: gives the servers their weights.
        router: any of verl's load balancers, a Ray actor.
        start: number -> a started replica.
        stop: (replica, hangs=False) frees all that a replica holds, even if its process hangs. Both may block.
        note: receives each event, as `ServerJournal.note` does.
    """

    def __init__(
        self,
        limits: HealthSettings,
        weights: FleetCheckpointManager,
        router: Any,
        start: Callable[[int], RolloutReplica],
        stop: Callable[..., None],
        note: Callable[[str, str, str], None],
        clock: Callable[[], float] = time.monotonic,
    ):
        self._limits, self._weights, self._router, self._clock = limits, weights, router, clock
        self._start_replica, self._stop_replica, self._note = start, stop, note
        self._servers: list[_Server] = []
        self._known: set[RolloutReplica] = set()  # are or were watched
        self._noted = {*weights.replicas}  # their start is in the journal or queued for it
        self._events: deque[tuple[str, str, str]] = deque()  # not in the journal yet
        self._unwritten = self._untold = 0
        self._waited_s = 0.0  # for a router that did not answer in the last round
        self._left: set[str] = set()  # names of servers that died or were removed
        self._starts = 0
        self._burials: set[asyncio.Task] = set()
        self._arrival: asyncio.Future | None = None  # of newcomers, in progress
        self._actor_is_idle = self._is_exact = False
        self._closing, self._pulse = threading.Event(), Pulse()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._watch()), daemon=True, name="fleet")
        self._follow()

    @classmethod
    def of_run(
        cls, folder: Path | None, limits: HealthSettings, weights: FleetCheckpointManager, servers: LLMServerManager
    ) -> "Fleet":
        """Return the fleet of a run whose servers verl started.

        Args:
            folder: of the run, for its journal of servers; None: no journal is written.
        """
        start, note = partial(start_replica, servers), lambda *event: None
        if folder:
            journal = ServerJournal(folder)
            journal.begin([each.server_address for each in weights.replicas])
            note = journal.note
        return cls(limits, weights, servers.global_load_balancer, start, stop_replica, note)

    # The trainer's thread --------------------------------------------------------------------------------------------

    def watch(self) -> None:
        """Start the watch in a separate thread."""
        self._weights.pulse = self._pulse
        self._thread.start()

    @property
    def is_watching(self) -> bool:
        return self._thread.is_alive()

    def close(self) -> None:
        self._closing.set()
        self._thread.join(timeout=GIVE_UP_S)

    def actor_waits(self, *, is_exact: bool) -> None:
        """Note that the actor is idle until `actor_works`, so that newcomers can get weights from it.

        Args:
            is_exact: the actor has the weights of the newest update. Otherwise newcomers are only let in if no other
                server is left: the weights of their tokens are then a fraction of a step newer than their version.
        """
        self._is_exact, self._actor_is_idle = is_exact, True

    def actor_works(self) -> None:
        """Wait until no newcomer is getting weights from the actor.

        Raises:
            RuntimeError: the watch failed or is stuck.
        """
        self._actor_is_idle = False  # no other transfer begins
        while not self._weights.lock.acquire(timeout=LOCK_S):  # wait for a running one
            self._weights.check()
        self._weights.lock.release()
        self._weights.check()

    @property
    def lets_newcomers_in(self) -> bool:
        """Whether the actor is idle and newcomers may have its weights."""
        is_last_resort = not any(each not in self._weights.dead for each in self._weights.replicas)
        return self._actor_is_idle and (self._is_exact or is_last_resort)

    # The fleet's thread ----------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        try:
            while not self._closing.is_set():
                began = self._clock()
                await self.round()
                self._pulse.rounds += 1
                await asyncio.sleep(max(0.0, self._limits.every_s - (self._clock() - began)))
        except Exception as error:  # any: the trainer raises it, even while it waits
            logger.exception("watching the rollout servers failed")
            self._weights.fault = error
        finally:
            self._weights.pulse = None
            self._write_events()

    async def round(self) -> None:
        """Ask each server for a heartbeat, judge it, and update the router."""
        self._follow()
        beats = []
        for server in self._servers:
            server.has_answered = False
            if server.beat is None:
                server.was_missed = server.is_missed
                server.beat = asyncio.ensure_future(_beat(server.replica))
                server.beat.add_done_callback(read)  # nobody reads the beat of a server that has left meanwhile
            beats.append(server.beat)
        if beats:
            await asyncio.wait(beats, timeout=self._limits.every_s)
        odd = [error for beat in beats if (error := _odd_error(beat))]
        if len(odd) == len(self._servers) and are_alike(odd):
            raise odd[0]
        for server in list(self._servers):
            self._judge(server)
        try:
            await asyncio.wait_for(self._tell_router(), ROUTER_S)
            self._untold, self._waited_s = 0, 0.0
        except (ActorUnavailableError, TimeoutError) as error:  # the next round tries again
            self._untold += 1
            self._waited_s = ROUTER_S if isinstance(error, TimeoutError) else 0.0
            if self._untold > MAX_UNTOLD:
                raise TimeoutError(f"the router did not answer in {self._untold} rounds in a row") from error
            logger.warning("the router could not be reached in %d rounds in a row: %r", self._untold, error)
        ready = [each for each in self._weights.newcomers if each not in self._weights.suspected]
        if ready and self.lets_newcomers_in and self._arrival is None:
            self._arrival = asyncio.wrap_future(in_thread(self._let_newcomers_in))
        if self._arrival is not None and self._arrival.done():
            arrival, self._arrival = self._arrival, None
            arrival.result()
        for burial in [each for each in self._burials if each.done()]:
            self._burials.discard(burial)
            burial.result()
        self._write_events()
        weights = self._weights
        # `starting` first: a server that another thread starts is a newcomer before it leaves `starting`.
        if not (
            weights.starting
            or self._servers
            or self._burials
            or any(each not in weights.dead for each in (*weights.newcomers, *weights.replicas))
        ):
            spent = f"all retool.fleet.health.max_replacements={self._limits.max_replacements} replacements are used"
            raise RuntimeError(f"no server is left, and {spent}. See the servers' log, or raise the limit")

    def _follow(self) -> None:
        """Watch exactly the servers that belong to the run now; commands may add and remove some while none is dead."""
        weights = self._weights
        # An update moves servers between the two lists, and has them in both meanwhile.
        members = dict.fromkeys([*weights.replicas, *weights.newcomers, *weights.replicas])
        for server in list(self._servers):
            if server.replica not in members and server.replica not in weights.dead:
                self._servers.remove(server)
                self._known.discard(server.replica)
                self._left.add(server.name)
                self._events.append(("removed", server.name, "by command"))
        for replica in [*members, *weights.dead]:  # one that joined since the last round may have died in an update
            if replica not in self._known:
                self._known.add(replica)
                self._servers.append(_Server(replica, Health(self._limits, self._clock)))
            if replica not in self._noted:
                self._noted.add(replica)
                self._events.append(("started", replica.server_address, "by command"))

    def _write_events(self) -> None:
        """Write events to the journal in order. If the disk is full, they wait for the next round."""
        try:
            while self._events:
                self._note(*self._events[0])
                self._events.popleft()
        except OSError as error:
            if len(self._events) != self._unwritten:
                logger.error("%d events of servers could not be written yet: %r", len(self._events), error)
        self._unwritten = len(self._events)

    def _judge(self, server: _Server) -> None:
        before, health = server.health.state, server.health
        if server.beat is not None and server.beat.done():
            error, odd, server.beat = server.beat.exception(), _odd_error(server.beat), None
            if error is None:
                server.has_answered = True
                health.answered()
            elif odd:
                logger.error("the heartbeat of %s failed", server.name, exc_info=odd)
                health.failed(f"its heartbeat failed: {odd!r}")
            elif isinstance(error, ActorUnavailableError):
                pass  # only silence: the network failed
            else:
                health.failed("its process is gone" if isinstance(error, GONE) else "its engine is dead")
        if server.replica in self._weights.dead:
            why = self._weights.failures.get(server.replica, "it was dead when its weights were to be updated")
            health.failed(why)
        state = health.look(server.replica in self._weights.updating, self._waited_s)
        if state is State.DEAD:
            logger.warning("server %s is dead: %s. Its requests continue on other servers.", server.name, health.why)
            self._servers.remove(server)
            self._left.add(server.name)  # the router learns of it at the end of this round
            self._weights.dead.add(server.replica)
            self._burials.add(asyncio.ensure_future(self._bury(server)))
        elif state is not before:
            logger.info("server %s is %s, was %s", server.name, state, before)
        if state is State.SUSPECTED:
            self._weights.suspected.add(server.replica)
        else:
            self._weights.suspected.discard(server.replica)

    async def _tell_router(self) -> None:
        """Let those of our servers get requests that are well and have weights; leave other servers untouched.

        A dead server leaves in the round of its death. A client may have taken one out because of a death that no
        heartbeat has noticed yet. It comes back only when it answers a beat that was sent after it was missed. A server
        that a command removes meanwhile leaves in the next round.
        """
        wanted = {
            server.name: server.replica.server_handle
            for server in self._servers
            if server.health.takes_requests and server.replica in self._weights.replicas
        }
        if self._weights.version is not None:  # the first servers are in the router before that
            for server in self._servers:
                if server.name in wanted and not server.has_begun:
                    server.has_begun = True
                    server.health.begins()
        there = set(await self._router.get_all_servers.remote())
        ours = self._left | {server.name for server in self._servers}
        answered = {server.name for server in self._servers if server.has_answered and server.was_missed}
        new = {name: handle for name, handle in wanted.items() if name not in there and name in answered}
        for server in self._servers:
            server.is_missed = server.name not in there and server.name not in new
        if new:
            if tell_ranks := getattr(self._router, "tell_ranks", None):  # verl's own has none
                ranks = {each.name: each.replica.config.data_parallel_size for each in self._servers}
                await tell_ranks.remote({name: ranks[name] for name in new})
            await self._router.add_servers.remote(new)
        if gone := sorted(there & ours - wanted.keys()):
            await self._router.remove_servers.remote(gone)

    def _let_newcomers_in(self) -> None:
        """Give newcomers weights. Runs in a thread next to the heartbeats, because a newcomer may die during it."""
        with self._weights.lock:
            if self.lets_newcomers_in:  # still
                self._weights.let_newcomers_in()

    async def _bury(self, server: _Server) -> None:
        """Get back the tokens of its requests, free its GPUs and processes, and start a replacement."""
        self._events.append(("died", server.name, server.health.why))
        self._weights.starting.add(server.replica.replica_rank)  # the GPUs that it frees are for its replacement
        hangs = await give_up(server.replica, ON_THEIR_WAY_S)
        try:
            await asyncio.wrap_future(in_thread(self._stop_replica, server.replica, hangs))
        except Exception:  # any of Ray's: the others live, and a replacement may start all the same
            logger.exception("server %s is dead, but its GPUs and processes were not freed", server.name)
        try:
            await self._replace(server.name)
        finally:
            self._weights.starting.discard(server.replica.replica_rank)

    async def _replace(self, name: str) -> None:
        pause_s = START_PAUSE_S
        while self._starts < self._limits.max_replacements:
            self._starts += 1
            try:
                start = partial(self._start_replica, next(self._weights.numbers))
                started = in_thread(start_in_time, start, self._stop_replica, self._limits.wait_s)
                replica = await asyncio.wrap_future(started)
            except Exception as error:  # of vLLM, Ray or the machine: the cause may pass
                logger.exception("the replacement of server %s did not start", name)
                self._events.append(("start_failed", f"in place of {name}", repr(error)))
                if self._starts < self._limits.max_replacements:
                    await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, MAX_START_PAUSE_S)
                continue
            logger.info("server %s takes the place of %s, and waits for weights", replica.server_address, name)
            self._events.append(("replaced", replica.server_address, f"in place of {name}"))
            self._noted.add(replica)
            self._weights.newcomers.append(replica)
            return
        logger.error(
            "Server %s is not replaced: all retool.fleet.health.max_replacements=%d replacements are used. See the "
            "servers' log for the cause, or raise the limit.",
            *(name, self._limits.max_replacements),
        )


async def _beat(replica: RolloutReplica) -> None:
    """Wait for the heartbeat of a server and of its workers, separate processes that get its weights.

    A worker's method runs in the actor's event loop. Ray answers `__ray_ready__` outside it, even if the loop hangs.
    """
    workers = [worker.get_replica_rank.remote() for worker in replica.workers]
    await asyncio.gather(replica.server_handle.beat.remote(), *workers)


def _odd_error(beat: asyncio.Future) -> BaseException | None:
    """Return the error of a heartbeat that failed neither by a death nor by the network, else None."""
    error = beat.exception() if beat.done() else None
    return None if error is None or isinstance(error, ActorUnavailableError) or is_death(error) else error
