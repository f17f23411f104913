"""The fleet over made-up replicas: who leaves, who comes, and that no update waits for the dead."""

import asyncio
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.fleet.remote import Remote
from verl_ext.ledger.servers import ServerJournal, read_servers
from verl_ext.settings import HealthSettings

pytestmark = pytest.mark.timeout(180)  # Ray's and verl's imports

LIMITS = HealthSettings(
    every_s=0.01, suspect_s=0.035, dead_s=0.1, update_s=1, start_s=0, attempts=3, wait_s=1, max_replacements=3
)


class EngineDeadError(Exception):
    """As vLLM's."""


class Worker:
    """What Ray's handle leads to. `mode`: well, dead (says so), hangs, unreachable, or gone or oom (the process)."""

    def __init__(self) -> None:
        self.mode, self.given_up = "well", 0

    async def __ray_ready__(self) -> None:
        await self._answer()

    async def _answer(self) -> None:
        from ray.exceptions import ActorUnavailableError, OutOfMemoryError, RayActorError

        if self.mode == "hangs":
            await asyncio.sleep(3600)
        if self.mode == "gone":
            raise RayActorError()
        if self.mode == "oom":
            raise OutOfMemoryError("Ray's memory monitor killed it")
        if self.mode == "unreachable":
            raise ActorUnavailableError("no route", None)
        if self.mode == "dead":
            raise EngineDeadError()


class Server(Worker):
    """With vLLM's engine."""

    async def beat(self) -> tuple[str, int]:
        await self._answer()
        return "node", 123

    async def give_up(self) -> None:
        self.given_up += 1
        if self.mode == "gone":
            await self._answer()


class Replica:
    """As verl's; its calls behave as `at` says: name of a call -> mode of the server."""

    def __init__(self, number: int, log: list | None = None, **at: str):
        self.replica_rank, self.at, self.log = number, at, [] if log is None else log
        self.server, self.worker = Server(), Worker()
        self.workers = [Remote(self.worker)]
        self.server_handle, self.server_address = Remote(self.server), f"server {number}"

    def __repr__(self) -> str:
        return self.server_address

    async def call(self, name: str) -> None:
        self.log.append((name, self.replica_rank))
        self.server.mode = self.at.get(name, self.server.mode)
        await self.server._answer()

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


@pytest.fixture
def make(cpu_platform, monkeypatch):
    """Makes the manager of the weights of some replicas."""
    from verl_ext.fleet import recovery, transfer

    monkeypatch.setattr(transfer, "_group", Group)
    monkeypatch.setattr(transfer, "POLL_S", 0.01)
    monkeypatch.setattr(recovery, "GIVE_UP_S", 0.05)
    monkeypatch.setattr(recovery, "ON_THEIR_WAY_S", 0.0)
    monkeypatch.setattr(recovery, "START_PAUSE_S", 0.0)

    def makes(*replicas: Replica) -> Any:
        engine = SimpleNamespace(backend="shared_file", custom_backend_module="verl_ext.cpu.checkpoint_engine")
        return transfer.FleetCheckpointManager(engine, Actor(), replicas)

    return makes


# Updates of the weights ----------------------------------------------------------------------------------------------

STEPS = ["abort", "release", "prepare", "init_process_group", "load", "finalize", "refill", "resume"]


def test_an_update_is_verls_where_all_live(make):
    log: list = []
    replicas = [Replica(0, log), Replica(1, log)]
    manager = make(*replicas)
    assert manager.update_weights(global_steps=4) == {"sent": 1.0}
    assert log == [(name, number) for name in STEPS for number in (0, 1)]
    assert manager.replicas == replicas and manager.actor_wg.sent == [4] and manager.version == 4
    assert not manager.dead and not manager.is_updating


@pytest.mark.parametrize("mode", ["dead", "gone", "oom"])
@pytest.mark.parametrize("step", STEPS)
def test_an_update_goes_on_without_a_replica_that_dies_in_it(make, step, mode):
    dying, other = Replica(0, **{step: mode}), Replica(1)
    manager = make(dying, other)
    manager.update_weights(global_steps=4)
    assert manager.replicas == [other] and manager.dead == {dying}
    assert [name for name, _ in other.log] == STEPS
    assert dying.log[-1][0] == step


@pytest.mark.parametrize("step", ["abort", "prepare", "load", "resume"])
def test_an_update_waits_for_one_that_hangs_until_it_is_declared_dead(make, step):
    hanging, other = Replica(0, **{step: "hangs"}), Replica(1)
    manager = make(hanging, other)
    threading.Timer(0.3, manager.dead.add, [hanging]).start()  # the fleet's thread
    began = time.monotonic()
    manager.update_weights(global_steps=4)
    assert 0.25 < time.monotonic() - began < 5
    assert manager.replicas == [other] and other.log[-1][0] == "resume"


def test_what_was_declared_dead_before_is_not_asked(make):
    dead, other = Replica(0), Replica(1)
    manager = make(dead, other)
    manager.dead.add(dead)
    manager.update_weights(global_steps=4)
    assert not dead.log and [name for name, _ in other.log] == STEPS and manager.replicas == [other]


def test_an_error_that_is_no_death_is_raised(make):
    class Wrong(Replica):
        async def resume_generation(self):
            raise TimeoutError("2 requests were admitted and did not reach vLLM's engine")

    manager = make(Wrong(0), Replica(1))
    with pytest.raises(TimeoutError, match="2 requests"):
        manager.update_weights(global_steps=4)
    assert not manager.is_updating


def test_an_update_without_a_server_left_sends_nothing(make):
    manager = make(Replica(0, abort="dead"))
    assert manager.update_weights(global_steps=4) == {}
    assert manager.replicas == [] and manager.actor_wg.sent == [] and manager.version == 4


def test_newcomers_get_the_next_update_and_belong_to_it_then(make):
    old, new = Replica(0), Replica(1)
    manager = make(old)
    manager.newcomers.append(new)
    manager.update_weights(global_steps=4)
    assert manager.replicas == [old, new] and manager.newcomers == []
    assert [name for name, _ in new.log] == [name for name, _ in old.log] == STEPS


def test_newcomers_alone_get_the_weights_that_the_others_have(make):
    old, new = Replica(0), Replica(1)
    manager = make(old)
    manager.update_weights(global_steps=4)
    old.log.clear()
    manager.newcomers.append(new)
    manager.let_newcomers_in()
    assert manager.actor_wg.sent == [4, 4] and [name for name, _ in new.log] == STEPS and not old.log
    assert manager.replicas == [old, new] and manager.newcomers == []


# The fleet -----------------------------------------------------------------------------------------------------------


class Scene:
    """A fleet of two servers that have weights of version 1; a round is a hundredth of a second."""

    def __init__(self, make: Any, folder: Any, **changes: Any):
        from verl.workers.rollout.router import GlobalRequestLoadBalancer

        from verl_ext.fleet.recovery import Fleet

        self.replicas = [Replica(0), Replica(1)]
        self.weights = make(*self.replicas)
        self.weights.version = 1
        handles = {each.server_address: each.server_handle for each in self.replicas}
        self.balancer = GlobalRequestLoadBalancer(handles | {"of another pool": None})
        self.now, self.stopped, self.started, self.failing_starts = 0.0, [], [], 0
        self.hanging: list = []
        journal = ServerJournal(folder)
        journal.begin(each.server_address for each in self.replicas)
        self.fleet = Fleet(
            HealthSettings(**vars(LIMITS) | changes),
            self.weights,
            Remote(self.balancer),
            start=self.start,
            stop=lambda replica, hanging: (self.stopped.append(replica), self.hanging.append(hanging)),
            note=journal.note,
            clock=lambda: self.now,
        )

    def start(self, number: int) -> Replica:
        if self.failing_starts:
            self.failing_starts -= 1
            raise OSError("no GPU")
        self.started.append(Replica(number))
        return self.started[-1]

    def routed(self) -> list[str]:
        return [each for each in self.balancer.get_all_servers() if each != "of another pool"]

    async def rounds(self, number: int) -> None:
        for _ in range(number):
            self.now += 0.01
            await self.fleet.round()

    async def until(self, is_so: Any) -> None:
        deadline = time.monotonic() + 10
        while not is_so():
            assert time.monotonic() < deadline, "it did not come to pass in 10 s"
            await self.rounds(1)


@pytest.fixture
def scene(make, tmp_path):
    def play(script: Any, **changes: Any) -> Any:
        made = Scene(make, tmp_path, **changes)

        async def run() -> Any:
            result = await asyncio.wait_for(script(made), 30)
            assert "of another pool" in made.balancer.get_all_servers()
            return result

        return asyncio.run(run())

    return play


def test_servers_that_answer_stay_and_nothing_happens(scene, tmp_path):
    async def script(made):
        await made.rounds(30)
        assert made.routed() == ["server 0", "server 1"] and not made.stopped and not made.started

    scene(script)
    assert read_servers(tmp_path).line() == "servers: 2 started, 0 died, 0 of these replaced, 0 starts failed"


@pytest.mark.parametrize("mode", ["dead", "gone", "oom"])
def test_a_dead_server_leaves_is_given_up_and_replaced_and_its_successor_waits_for_weights(scene, tmp_path, mode):
    async def script(made):
        dead, _ = made.replicas
        await made.rounds(3)
        dead.server.mode = mode
        await made.rounds(1)
        assert made.routed() == ["server 1"]
        await made.until(lambda: made.weights.newcomers)
        await made.rounds(5)
        assert dead.server.given_up == 1 and made.stopped == [dead] and made.weights.dead == {dead}
        assert made.hanging == [None]
        (new,) = made.started
        assert new.replica_rank == 2 and made.routed() == ["server 1"]  # it has no weights
        await made.weights.update_weights(global_steps=2)
        await made.rounds(1)
        assert made.routed() == ["server 1", "server 2"]
        await made.rounds(20)
        assert len(made.started) == 1

    scene(script)
    servers = read_servers(tmp_path)
    assert servers.line() == "servers: 3 started, 1 died, 1 of these replaced, 0 starts failed" and not servers.faults()


def test_a_silent_server_gets_no_requests_until_it_answers(scene):
    async def script(made):
        silent = made.replicas[0].server
        silent.mode = "hangs"
        await made.rounds(6)
        assert made.routed() == ["server 1"] and not made.stopped
        made.fleet._servers[0].beat.cancel()
        made.fleet._servers[0].beat, silent.mode = None, "well"
        await made.rounds(2)
        assert made.routed() == ["server 1", "server 0"] and not made.stopped

    scene(script)


def test_a_server_that_hangs_dies_also_where_its_own_process_does_not_answer(scene):
    async def script(made):
        hanging = made.replicas[0]
        await made.rounds(1)
        hanging.server.mode = "hangs"
        hanging.server.give_up = hanging.server._answer
        await made.rounds(12)
        assert made.weights.dead == {hanging} and made.routed() == ["server 1"]
        await made.until(lambda: made.weights.newcomers)
        assert made.stopped == [hanging] and made.hanging == [("node", 123)]

    scene(script)


@pytest.mark.parametrize("mode", ["gone", "hangs"])
def test_a_server_whose_worker_is_gone_or_hangs_is_dead_though_it_answers(scene, mode):
    """No update could give it weights; one that is under way ends with its death."""

    async def script(made):
        made.replicas[0].worker.mode = mode
        await made.until(lambda: made.weights.newcomers)
        assert made.weights.dead == {made.replicas[0]} and made.routed() == ["server 1"]

    scene(script)


def test_a_server_may_compile_at_its_first_requests_however_long_it_waited_for_them(scene):
    async def script(made):
        made.weights.version = None  # the run begins
        await made.rounds(30)
        made.weights.version = 1
        await made.rounds(1)
        first, newcomer = made.replicas[0], Replica(9)
        first.server.mode = "hangs"
        await made.rounds(15)
        assert not made.weights.dead and made.routed() == ["server 0", "server 1"]
        await made.rounds(10)
        assert made.weights.dead == {first}
        made.weights.newcomers.append(newcomer)
        await made.rounds(30)
        await made.weights.update_weights(global_steps=2)
        await made.rounds(1)
        newcomer.server.mode = "hangs"
        await made.rounds(15)
        assert made.weights.dead == {first} and "server 9" in made.routed()

    scene(script, start_s=0.2)


def test_silence_in_an_update_is_no_death(scene):
    async def script(made):
        for each in made.replicas:
            each.server.mode = "hangs"
        made.weights.is_updating = True
        await made.rounds(60)
        assert made.routed() == ["server 0", "server 1"] and not made.weights.dead

    scene(script)


def test_a_well_server_that_a_client_took_for_dead_comes_back(scene):
    async def script(made):
        made.balancer.remove_servers(["server 0"])
        await made.rounds(1)
        assert made.routed() == ["server 1", "server 0"]

    scene(script)


def test_a_server_that_a_client_took_out_comes_back_with_an_answer_alone(scene):
    async def script(made):
        made.replicas[0].server.mode = "hangs"
        await made.rounds(1)
        made.balancer.remove_servers(["server 0"])
        await made.rounds(1)
        assert made.routed() == ["server 1"] and not made.weights.dead

    scene(script)


def test_a_server_that_cannot_be_reached_has_not_answered(scene):
    async def script(made):
        made.replicas[0].server.mode = "unreachable"
        await made.rounds(1)
        made.balancer.remove_servers(["server 0"])
        await made.rounds(1)
        assert made.routed() == ["server 1"] and not made.weights.dead

    scene(script)


def test_a_server_that_an_update_found_dead_is_buried(scene):
    async def script(made):
        made.weights.dead.add(made.replicas[1])
        await made.rounds(1)
        assert made.routed() == ["server 0"]
        await made.until(lambda: made.weights.newcomers)
        assert made.stopped == [made.replicas[1]]

    scene(script)


def test_servers_that_are_added_or_removed_on_purpose_are_followed(scene, tmp_path):
    async def script(made):
        removed, added = made.replicas[0], Replica(9)
        made.balancer.remove_servers([removed.server_address])
        made.weights.replicas = [made.replicas[1], added]
        await made.rounds(1)
        removed.server.mode = "gone"
        await made.rounds(5)
        assert made.routed() == ["server 1", "server 9"] and not made.stopped and not made.started
        added.server.mode = "dead"
        await made.rounds(1)
        assert made.routed() == ["server 1"] and made.weights.dead == {added}

    scene(script)
    servers = read_servers(tmp_path)
    assert servers.started == 3 and servers.died == 1 and not servers.faults()


def test_a_start_that_fails_is_tried_again_and_counts(scene, tmp_path):
    async def script(made):
        made.failing_starts = 1
        made.replicas[0].server.mode = "dead"
        await made.until(lambda: made.weights.newcomers)
        assert [each.replica_rank for each in made.started] == [3]

    scene(script)
    assert read_servers(tmp_path).line() == "servers: 3 started, 1 died, 1 of these replaced, 1 starts failed"


def test_replacements_have_an_end(scene, caplog):
    async def script(made):
        made.failing_starts = 99
        made.replicas[0].server.mode = "dead"
        await made.rounds(1)
        await made.until(lambda: not made.fleet._burials)
        assert made.failing_starts == 97 and not made.weights.newcomers and made.routed() == ["server 1"]

    scene(script, max_replacements=2)
    assert "retool.fleet.health.max_replacements=2 are spent" in caplog.text


@pytest.mark.parametrize(
    ("is_exact", "others_live", "comes_in"), [(True, True, True), (False, True, False), (False, False, True)]
)
def test_a_newcomer_is_let_in_while_the_actor_waits_with_the_weights_of_the_others(
    scene, is_exact, others_live, comes_in
):
    async def script(made):
        for each in made.replicas[: 1 if others_live else 2]:
            each.server.mode = "dead"
        await made.until(lambda: made.weights.newcomers)
        await made.rounds(3)
        assert "server 2" not in made.routed()
        made.fleet.actor_waits(is_exact=is_exact)
        await made.rounds(1)
        if comes_in:
            await made.until(lambda: "server 2" in made.routed())
        else:
            await made.until(lambda: made.fleet._arrival is None)
            await made.rounds(2)
            assert "server 2" not in made.routed()
        assert made.weights.actor_wg.sent == [1] * comes_in
        made.fleet.actor_works()

    scene(script)


def test_the_actor_goes_on_only_when_a_newcomer_has_its_weights(scene):
    async def script(made):
        made.weights.newcomers.append(Replica(7, load="hangs"))
        made.fleet.actor_waits(is_exact=True)
        asyncio.get_running_loop().call_later(0.2, made.weights.dead.add, made.weights.newcomers[0])
        letting_in = asyncio.ensure_future(made.rounds(1))
        await asyncio.sleep(0.1)
        began = time.monotonic()
        await asyncio.to_thread(made.fleet.actor_works)
        assert time.monotonic() - began > 0.05
        await letting_in

    scene(script)


def test_a_newcomer_that_hangs_while_it_is_let_in_does_not_hold_the_actor_for_good(scene):
    async def script(made):
        made.replicas[0].server.mode = "dead"
        await made.until(lambda: made.weights.newcomers)
        made.weights.newcomers[0].at["load"] = "hangs"
        made.fleet.actor_waits(is_exact=True)
        await made.until(lambda: made.weights.is_updating)
        goes_on = asyncio.ensure_future(asyncio.to_thread(made.fleet.actor_works))
        await made.until(goes_on.done)
        assert made.weights.replicas == [made.replicas[1]] and len(made.weights.dead) == 2

    scene(script)


def test_a_fault_of_the_watching_itself_reaches_the_trainer(make, tmp_path):
    made = Scene(make, tmp_path)

    async def wrong() -> None:
        raise ValueError("we erred")

    made.replicas[0].server.beat = wrong
    made.fleet.watch()
    made.fleet._thread.join(10)
    with pytest.raises(RuntimeError, match="not watched any more") as raised:
        made.fleet.actor_works()
    assert "we erred" in str(raised.value.__cause__)


def test_the_watching_begins_and_ends_with_the_run(make, tmp_path):
    made = Scene(make, tmp_path)
    made.fleet.watch()
    time.sleep(0.1)
    made.fleet.close()
    assert not made.fleet._thread.is_alive() and made.routed() == ["server 0", "server 1"]
    made.fleet.actor_works()
