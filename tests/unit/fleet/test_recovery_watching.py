"""The thread that watches: it begins and ends with the run, and its own faults reach the trainer."""

import asyncio
import threading
import time

import pytest

from tests.unit.fleet.fleet_scene import Replica, Scene, wait_until
from verl_ext.fleet.replicas import in_thread
from verl_ext.ledger.servers import read_servers

pytestmark = pytest.mark.timeout(180)  # Ray's and verl's imports


@pytest.fixture
def unwatched(make, tmp_path):
    """A fleet whose watching fails once `is_over` is set."""
    made = Scene(make, tmp_path)
    made.is_over = threading.Event()

    def wrong() -> None:
        assert made.is_over.wait(10)
        raise ValueError("we erred")

    made.balancer.get_all_servers = wrong
    made.fleet.watch()
    yield made
    made.is_over.set()
    made.fleet.close()


def test_a_fault_of_the_watching_itself_reaches_the_trainer(unwatched):
    unwatched.fleet.actor_works()
    unwatched.is_over.set()
    wait_until(lambda: not unwatched.fleet.is_watching)
    for asks in (unwatched.fleet.actor_works, unwatched.weights.check):
        with pytest.raises(RuntimeError, match="no longer watched") as raised:
            asks()
        assert "we erred" in str(raised.value.__cause__)


def test_a_fault_of_the_watching_ends_an_update_of_the_weights(unwatched):
    hanging = Replica(2, load="hangs")
    unwatched.weights.replicas = [unwatched.replicas[0], hanging]
    update = in_thread(unwatched.weights.update_weights)
    wait_until(lambda: ("load", 2) in hanging.log)
    unwatched.is_over.set()
    with pytest.raises(RuntimeError, match="no longer watched"):
        update.result(10)


def test_an_odd_error_that_all_heartbeats_have_is_ours(scene):
    async def script(made):
        async def wrong() -> None:
            raise ValueError("we erred")

        for each in made.replicas:
            each.server.beat = wrong
        with pytest.raises(ValueError, match="we erred"):
            await made.rounds(1)
        assert not made.weights.dead

    scene(script)


@pytest.fixture
def router_is_away(scene, monkeypatch):
    """Play a script with a router that cannot be reached while `away` is not empty."""
    from ray.exceptions import ActorUnavailableError

    from verl_ext.fleet import recovery

    monkeypatch.setattr(recovery, "MAX_UNTOLD", 5)
    away: list[bool] = []

    def play(script):
        async def with_router(made):
            all_servers = made.balancer.get_all_servers

            def unless_away():
                if away:
                    raise ActorUnavailableError("a moment without network", None)
                return all_servers()

            made.balancer.get_all_servers = unless_away
            await script(made, away)
            away.clear()

        scene(with_router)

    return play


def test_a_router_that_cannot_be_reached_for_a_moment_is_updated_in_a_later_round(router_is_away):
    async def script(made, away):
        for _ in range(3):
            away.append(True)
            made.replicas[0].server.mode = "dead"
            await made.rounds(5)
            assert made.weights.dead == {made.replicas[0]}
            away.clear()
            await made.rounds(1)
            assert made.routed() == ["server 1"]

    router_is_away(script)


def test_the_watching_ends_if_the_router_stays_out_of_reach(router_is_away):
    async def script(made, away):
        away.append(True)
        await made.rounds(5)
        with pytest.raises(TimeoutError, match="the router did not answer in 6 rounds in a row"):
            await made.rounds(1)

    router_is_away(script)


def test_a_router_that_never_answers_blocks_no_round_forever(scene, monkeypatch):
    from verl_ext.fleet import recovery

    monkeypatch.setattr(recovery, "ROUTER_S", 0.02)
    monkeypatch.setattr(recovery, "MAX_UNTOLD", 5)

    async def script(made):
        async def never() -> None:
            await asyncio.sleep(3600)

        all_servers, made.balancer.get_all_servers = made.balancer.get_all_servers, never
        made.replicas[0].server.mode = "dead"
        await asyncio.wait_for(made.rounds(5), 5)
        assert made.weights.dead == {made.replicas[0]}
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(made.rounds(1), 5)
        made.balancer.get_all_servers = all_servers

    scene(script)


def test_a_router_that_never_answers_does_not_hide_how_long_a_server_is_silent(scene, monkeypatch):
    from verl_ext.fleet import recovery

    monkeypatch.setattr(recovery, "ROUTER_S", 0.05)

    async def script(made):
        async def never() -> None:
            made.now += recovery.ROUTER_S
            await asyncio.sleep(3600)

        all_servers, made.balancer.get_all_servers = made.balancer.get_all_servers, never
        made.replicas[0].server.mode = "hangs"
        await asyncio.wait_for(made.rounds(3), 5)  # .01, and twice .06: more than dead_s
        assert made.weights.dead == {made.replicas[0]}
        made.balancer.get_all_servers = all_servers
        monkeypatch.setattr(recovery, "ROUTER_S", 10)
        await made.rounds(1)
        made.replicas[1].server.mode = "hangs"
        made.now += 0.09  # the watcher stood still: no wait for the router any more
        await made.rounds(1)
        assert made.replicas[1] not in made.weights.suspected

    scene(script)


@pytest.mark.parametrize("waits_for", ["a newcomer's weights", "nothing"])
def test_a_watching_that_stands_still_ends_the_run(make, tmp_path, monkeypatch, waits_for):
    """As if Ray's head were gone: a call of Ray does not return."""
    from verl_ext.fleet import recovery, transfer

    monkeypatch.setattr(recovery, "LOCK_S", 0.05)
    made, is_over, is_held = Scene(make, tmp_path), threading.Event(), threading.Event()

    def hold() -> None:
        with made.weights.lock:
            is_held.set()
            is_over.wait(30)

    if waits_for != "nothing":
        threading.Thread(target=hold, daemon=True).start()
        assert is_held.wait(10)
    made.fleet.watch()
    wait_until(lambda: made.weights.check() or made.weights.pulse.rounds > 20)  # it continues without a complaint
    all_servers, hangs = made.balancer.get_all_servers, threading.Event()
    # It holds the thread's loop.
    made.balancer.get_all_servers = lambda: hangs.set() or (is_over.wait(30) and all_servers())
    assert hangs.wait(10)
    monkeypatch.setattr(transfer, "UNWATCHED_S", 0.3)
    with pytest.raises(RuntimeError, match=r"has not finished a round for \d+ s \(is the Ray head gone\?\)"):
        wait_until(made.fleet.actor_works)
    is_over.set()
    made.fleet.close()


def test_a_server_that_dies_as_it_joins_the_ring_costs_neither_router_nor_watching(scene, monkeypatch):
    """The router asks no server that joins for its ranks: a dead one would fail, one that hangs hold all requests."""
    from verl_ext.fleet import balancer

    monkeypatch.setattr(balancer, "ranks_of", lambda handle: 1)

    async def script(made):
        made.weights.newcomers.append(new := Replica(7))
        new.config.data_parallel_size = 2
        await made.weights.update_weights(global_steps=2)
        monkeypatch.setattr(balancer, "ranks_of", lambda handle: pytest.fail("it is asked"))
        add = made.balancer.add_servers

        def add_and_die(servers):
            new.server.mode = "gone"
            add(servers)

        made.balancer.add_servers = add_and_die
        await made.rounds(2)
        slots = [each for each in made.balancer.get_status()["slots"] if each.startswith("server 7")]
        assert slots == ["server 7/0", "server 7/1"]
        await made.rounds(1)
        assert made.routed() == ["server 0", "server 1"] and made.weights.dead == {new}

    scene(script, balancer=lambda servers: balancer.RingLoadBalancer(servers, {}))


def test_a_dead_server_that_cannot_be_stopped_is_still_replaced(scene, caplog):
    async def script(made):
        def stop(replica, hangs=False):
            raise ConnectionError("Ray is busy")

        made.stop = stop
        made.replicas[0].server.mode = "dead"
        await made.until(lambda: made.weights.newcomers)
        await made.rounds(3)
        assert made.routed() == ["server 1"] and not made.weights.starting

    scene(script)
    assert "server 0 is dead, but its GPUs and processes were not freed" in caplog.text


def test_a_full_disk_keeps_no_dead_server_and_its_events_are_written_when_there_is_room(scene, tmp_path, caplog):
    async def script(made):
        made.disk_is_full = True
        made.replicas[0].server.mode = "hangs"
        await made.until(lambda: made.weights.newcomers)
        await made.rounds(5)
        assert made.stopped == [made.replicas[0]] and made.routed() == ["server 1"]
        assert read_servers(tmp_path).died == 0 and caplog.text.count("events of servers could not be written yet") == 2
        made.disk_is_full = False
        await made.rounds(1)

    scene(script)
    servers = read_servers(tmp_path)
    assert (servers.died, servers.replaced) == (1, 1) and not servers.faults()


def test_a_run_without_a_server_ends_if_none_can_be_started(make, tmp_path):
    made = Scene(make, tmp_path, clock=time.monotonic, max_replacements=1)
    made.failing_starts = 9
    for each in made.replicas:
        each.server.mode = "dead"
    made.fleet.watch()
    wait_until(lambda: not made.fleet.is_watching)
    with pytest.raises(RuntimeError, match=r"no server is left, .*max_replacements=1 .*from its newest"):
        made.fleet.actor_works()


def test_a_start_that_never_ends_has_failed_after_wait_s(make, tmp_path):
    made = Scene(make, tmp_path, clock=time.monotonic, max_replacements=1, wait_s=0.2)
    never, late = threading.Event(), Replica(2)
    made.start = lambda number: never.wait(30) and late
    for each in made.replicas:
        each.server.mode = "dead"
    made.fleet.watch()
    wait_until(lambda: not made.fleet.is_watching)
    with pytest.raises(RuntimeError, match="no server is left"):
        made.fleet.actor_works()
    assert read_servers(tmp_path).failed_starts == 1
    assert "did not start in 0.2 s" in (tmp_path / "servers.jsonl").read_text()
    never.set()  # it must be stopped, or its GPUs would be nobody's
    wait_until(lambda: late in made.stopped)


def test_the_watching_begins_and_ends_with_the_run(make, tmp_path):
    made = Scene(make, tmp_path)
    assert not made.fleet.is_watching
    made.fleet.watch()
    wait_until(lambda: made.weights.pulse.rounds > 3)
    made.fleet.close()
    wait_until(lambda: not made.fleet.is_watching)
    assert made.routed() == ["server 0", "server 1"]
    made.fleet.actor_works()


def test_the_run_ends_while_a_replacement_starts_that_never_will(make, tmp_path):
    made, began, never = Scene(make, tmp_path), threading.Event(), threading.Event()
    made.start = lambda number: began.set() or never.wait(30)
    made.replicas[0].server.mode = "dead"
    made.fleet.watch()
    assert began.wait(10)
    made.fleet.close()
    wait_until(lambda: not made.fleet.is_watching)  # within less than the start would take
    never.set()
