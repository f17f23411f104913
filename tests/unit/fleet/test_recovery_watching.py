"""The thread that watches: it begins and ends with the run, and its own faults reach the trainer."""

import threading
import time
from types import SimpleNamespace

import pytest

from tests.unit.fleet.fleet_scene import Replica, Scene
from verl_ext.ledger.servers import read_servers

pytestmark = pytest.mark.timeout(180)  # Ray's and verl's imports


@pytest.fixture
def unwatched(make, tmp_path):
    """A fleet whose watching fails in a tenth of a second."""
    made = Scene(make, tmp_path)

    async def wrong() -> None:
        time.sleep(0.1)
        raise ValueError("we erred")

    made.replicas[0].server.beat = wrong
    made.fleet.watch()
    yield made
    made.fleet.close()


def test_a_fault_of_the_watching_itself_reaches_the_trainer(unwatched):
    unwatched.fleet._thread.join(10)
    with pytest.raises(RuntimeError, match="not watched any more") as raised:
        unwatched.fleet.actor_works()
    assert "we erred" in str(raised.value.__cause__)


def test_a_fault_of_the_watching_ends_the_wait_for_rollouts(unwatched):
    """No rollout comes: a server hangs that nobody declares dead."""
    queue = SimpleNamespace(_wait_for_next_poll=lambda partition, last: time.sleep(0.01) or last)
    unwatched.fleet.ends_waiting(queue)
    deadline = time.monotonic() + 10
    with pytest.raises(RuntimeError, match="not watched any more"):
        while time.monotonic() < deadline:
            assert queue._wait_for_next_poll("train", 7.0) == 7.0


def test_a_fault_of_the_watching_ends_an_update_of_the_weights(unwatched):
    unwatched.weights.replicas = [unwatched.replicas[0], Replica(2, load="hangs")]
    update = threading.Thread(target=unwatched.weights.update_weights, daemon=True)
    update.start()
    update.join(10)
    assert not update.is_alive()


def test_a_full_disk_keeps_no_dead_server_and_its_events_are_written_when_there_is_room(scene, tmp_path, caplog):
    async def script(made):
        made.disk_is_full = True
        made.replicas[0].server.mode = "hangs"
        await made.until(lambda: made.weights.newcomers)
        await made.rounds(5)
        assert made.stopped == [made.replicas[0]] and made.routed() == ["server 1"]
        assert read_servers(tmp_path).died == 0 and caplog.text.count("events of servers wait for the disk") == 2
        made.disk_is_full = False
        await made.rounds(1)

    scene(script)
    servers = read_servers(tmp_path)
    assert (servers.died, servers.replaced) == (1, 1) and not servers.faults()


def test_a_run_without_a_server_ends_where_none_can_be_started(make, tmp_path):
    made = Scene(make, tmp_path, max_replacements=1)
    made.failing_starts = 9
    made.fleet._clock = time.monotonic
    for each in made.replicas:
        each.server.mode = "dead"
    made.fleet.watch()
    made.fleet._thread.join(10)
    with pytest.raises(RuntimeError, match=r"no server is left, and \S+max_replacements=1 are spent.*from its newest"):
        made.fleet.actor_works()


def test_a_start_that_never_ends_has_failed_after_wait_s(make, tmp_path):
    made, never = Scene(make, tmp_path, max_replacements=1, wait_s=0.2), threading.Event()
    made.fleet._start_replica = lambda number: never.wait(30)
    made.fleet._clock = time.monotonic
    for each in made.replicas:
        each.server.mode = "dead"
    made.fleet.watch()
    made.fleet._thread.join(10)
    never.set()
    with pytest.raises(RuntimeError, match="no server is left"):
        made.fleet.actor_works()
    assert read_servers(tmp_path).failed_starts == 1


def test_the_watching_begins_and_ends_with_the_run(make, tmp_path):
    made = Scene(make, tmp_path)
    made.fleet.watch()
    time.sleep(0.1)
    made.fleet.close()
    assert not made.fleet._thread.is_alive() and made.routed() == ["server 0", "server 1"]
    made.fleet.actor_works()


def test_the_run_ends_while_a_replacement_starts_that_never_will(make, tmp_path):
    made, never = Scene(make, tmp_path, every_s=0.01), threading.Event()
    began = threading.Event()
    made.fleet._start_replica = lambda number: began.set() or never.wait(30)
    made.replicas[0].server.mode = "dead"
    made.fleet.watch()
    assert began.wait(10)
    made.fleet.close()
    is_alive = made.fleet._thread.is_alive()
    never.set()
    assert not is_alive
