"""The fleet over made-up replicas: which servers leave, and which ones join."""

import asyncio
import gc
from pathlib import Path

import pytest

from tests.unit.fleet.fleet_scene import Replica
from tests.unit.fleet.remote import Remote
from verl_ext.ledger.servers import read_servers

pytestmark = pytest.mark.timeout(180)  # Ray's and verl's imports


def sums(folder: Path) -> tuple[int, ...]:
    """Servers that started, died and were replaced, and starts that failed."""
    servers = read_servers(folder)
    return servers.started, servers.died, servers.replaced, servers.failed_starts


def test_servers_that_answer_stay_and_nothing_happens(scene, tmp_path):
    async def script(made):
        await made.rounds(30)
        assert made.routed() == ["server 0", "server 1"] and not made.stopped and not made.started

    scene(script)
    assert sums(tmp_path) == (2, 0, 0, 0)


def test_a_run_whose_servers_have_all_died_waits_for_one_that_starts_by_command(scene):
    async def script(made):
        made.weights.starting.add(9)
        for each in made.replicas:
            each.server.mode = "dead"
        await made.until(lambda: made.weights.dead)
        await made.until(lambda: made.weights.starting == {9})
        await made.rounds(5)
        made.weights.starting.clear()
        with pytest.raises(RuntimeError, match="no server is left"):
            await made.rounds(1)

    scene(script, max_replacements=0)


@pytest.mark.parametrize("mode", ["dead", "gone", "oom"])
def test_a_dead_server_leaves_is_given_up_and_replaced_and_its_successor_waits_for_weights(scene, tmp_path, mode):
    async def script(made):
        dead, _ = made.replicas
        await made.rounds(3)
        dead.server.mode = mode
        await made.rounds(1)
        assert made.routed() == ["server 1"]
        assert made.weights.starting == {dead.replica_rank}, "an `add` meanwhile would take its GPU"
        await made.until(lambda: made.weights.newcomers)
        await made.rounds(5)
        assert made.weights.starting == set()
        assert dead.server.given_up == 1 and made.stopped == [dead] and made.weights.dead == {dead}
        assert made.hanging == []
        (new,) = made.started
        assert new.replica_rank == 2 and made.routed() == ["server 1"]  # it has no weights
        await made.weights.update_weights(global_steps=2)
        await made.until(lambda: made.routed() == ["server 1", "server 2"])
        await made.rounds(20)
        assert len(made.started) == 1

    scene(script)
    servers = read_servers(tmp_path)
    assert (
        servers.line() == "servers: 3 started, 1 died, 1 of these replaced, 0 removed, 0 failed to start"
        and not servers.faults()
    )


def test_a_silent_server_gets_no_requests_until_it_answers(scene):
    async def script(made):
        silent = made.replicas[0].server
        silent.mode = "hangs"
        await made.rounds(6)
        assert made.routed() == ["server 1"] and not made.stopped
        silent.wake()
        await made.rounds(2)
        assert made.routed() == ["server 1", "server 0"] and not made.stopped

    scene(script)


def test_a_server_that_hangs_is_killed_even_if_its_process_does_not_answer(scene):
    async def script(made):
        hanging = made.replicas[0]
        hanging.server.mode = "hangs"  # it never answered
        hanging.server.give_up = hanging.server.answer
        await made.rounds(12)
        assert made.weights.dead == {hanging} and made.routed() == ["server 1"]
        await made.until(lambda: made.weights.newcomers)
        assert made.stopped == [hanging] and made.hanging == [hanging]

    scene(script)


def test_the_heartbeat_of_a_server_that_was_buried_may_fail_unread(scene):
    """A hanging server's is open when the server is declared dead, and fails when its process is killed."""

    async def script(made):
        complaints = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: complaints.append(context["message"]))
        hanging = made.replicas[0].server
        killed = asyncio.Event()

        async def never() -> None:
            await killed.wait()
            raise OSError("its process was killed")

        hanging.answer = never
        await made.until(lambda: made.weights.newcomers)
        assert made.weights.dead == {made.replicas[0]}
        killed.set()
        await made.rounds(2)
        gc.collect()
        assert complaints == []

    scene(script)


@pytest.mark.parametrize("mode", ["gone", "hangs"])
def test_a_server_whose_worker_is_gone_or_hangs_is_dead_though_it_answers(scene, mode):
    """No update could give it weights; an update that is under way ends when it dies."""

    async def script(made):
        made.replicas[0].worker.mode = mode
        await made.until(lambda: made.weights.newcomers)
        assert made.weights.dead == {made.replicas[0]} and made.routed() == ["server 1"]

    scene(script)


def test_a_heartbeat_asks_what_the_worker_of_a_vllm_server_can_answer(scene):
    from verl.checkpoint_engine.base import CheckpointEngineWorker
    from verl.workers.rollout.vllm_rollout.vllm_rollout import ServerAdapter

    class Adapter(ServerAdapter):
        def __init__(self):
            self.replica_rank = 3

    class Worker(CheckpointEngineWorker):
        def __init__(self):  # joins no process group
            self.server_adapter, self.asked = Adapter(), 0

        def get_replica_rank(self):
            self.asked += 1
            return super().get_replica_rank()

    async def script(made):
        worker = Worker()
        made.replicas[0].workers = [Remote(worker)]
        await made.rounds(3)
        assert worker.asked == 3 and made.routed() == ["server 0", "server 1"]

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


def test_silence_in_an_update_is_not_a_death(scene):
    async def script(made):
        for each in made.replicas:
            each.server.mode = "hangs"
        made.weights.updating = frozenset(made.replicas)
        await made.rounds(60)
        assert made.routed() == ["server 0", "server 1"] and not made.weights.dead

    scene(script)


def test_a_well_server_that_a_client_took_for_dead_comes_back(scene):
    async def script(made):
        made.balancer.remove_servers(["server 0"])
        await made.rounds(2)
        assert made.routed() == ["server 1", "server 0"]

    scene(script)


def test_a_server_that_dies_after_its_answer_does_not_come_back_by_it(scene):
    """A client notices the death before the next heartbeat does, and takes the server out of the router."""

    async def script(made):
        dying = made.replicas[0].server

        async def answer_and_die() -> None:
            dying.mode = "gone"
            made.balancer.remove_servers(["server 0"])
            del dying.beat

        for _ in range(3):
            await made.rounds(1)
        dying.beat = answer_and_die
        await made.rounds(1)
        assert made.routed() == ["server 1"] and not made.weights.dead
        await made.rounds(1)
        assert made.routed() == ["server 1"] and made.weights.dead == {made.replicas[0]}

    scene(script)


def test_an_odd_error_of_one_heartbeat_is_that_servers_death(scene, tmp_path, caplog):
    async def script(made):
        async def wrong() -> None:
            raise ValueError("CUDA error: an illegal memory access")

        made.replicas[0].server.beat = wrong
        await made.until(lambda: made.weights.newcomers)
        assert made.stopped == [made.replicas[0]] and made.routed() == ["server 1"]

    scene(script)
    assert "the heartbeat of server 0 failed" in caplog.text and "illegal memory access" in caplog.text
    assert "illegal memory access" in (tmp_path / "servers.jsonl").read_text()


def test_the_only_server_that_fails_in_an_update_is_replaced_and_its_message_kept(scene, tmp_path):
    async def script(made):
        failing = made.replicas[0]

        async def fail(name: str) -> None:
            raise ValueError("CUDA error: out of memory")

        failing.call = fail
        await made.weights.update_weights(global_steps=2)
        await made.until(lambda: made.weights.newcomers)
        assert made.stopped == [failing] and made.routed() == ["server 1"]

    scene(script)
    assert "CUDA error: out of memory" in (tmp_path / "servers.jsonl").read_text()


def test_a_server_that_a_client_removed_comes_back_only_with_an_answer(scene):
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
    assert (servers.started, servers.died, servers.removed) == (3, 1, 1) and not servers.faults()


def test_a_server_may_have_the_address_of_one_that_was_removed(scene, tmp_path):
    async def script(made):
        removed, again = made.replicas[0], Replica(0)
        made.weights.replicas = [made.replicas[1]]
        await made.rounds(1)  # the round that sees it also takes it out of the router
        assert made.routed() == ["server 1"]
        again.replica_rank = 2
        made.weights.newcomers.append(again)
        await made.rounds(2)
        assert again.server_address == removed.server_address and made.routed() == ["server 1"]
        await made.weights.update_weights(global_steps=2)
        await made.until(lambda: made.routed() == ["server 1", "server 0"])

    scene(script)
    assert not read_servers(tmp_path).faults()


def test_a_start_that_fails_is_tried_again_and_counts(scene, tmp_path):
    async def script(made):
        made.failing_starts = 1
        made.replicas[0].server.mode = "dead"
        await made.until(lambda: made.weights.newcomers)
        assert [each.replica_rank for each in made.started] == [3]

    scene(script)
    assert sums(tmp_path) == (3, 1, 1, 1)


def test_replacements_have_an_end(scene, caplog):
    async def script(made):
        made.failing_starts = 99
        made.replicas[0].server.mode = "dead"
        await made.rounds(1)
        await made.until(lambda: not made.weights.starting)
        assert made.failing_starts == 97 and not made.weights.newcomers and made.routed() == ["server 1"]

    scene(script, max_replacements=2)
    assert "retool.fleet.health.max_replacements=2 replacements are used" in caplog.text


def test_tries_to_start_one_get_rarer(scene, monkeypatch):
    """A lost GPU must not use up the run's replacements within a minute."""
    from verl_ext.fleet import recovery

    pauses, sleep = [], asyncio.sleep
    monkeypatch.setattr(recovery, "START_PAUSE_S", 0.011)
    monkeypatch.setattr(recovery, "MAX_START_PAUSE_S", 0.033)
    monkeypatch.setattr(asyncio, "sleep", lambda seconds: pauses.append(seconds) or sleep(seconds))

    async def script(made):
        made.failing_starts = 99
        made.replicas[0].server.mode = "dead"
        await made.rounds(1)
        await made.until(lambda: not made.weights.starting)

    scene(script, max_replacements=5)
    assert [each for each in pauses if each in (0.011, 0.022, 0.033)] == [
        0.011,
        0.022,
        0.033,
        0.033,
    ]  # and none after the last
