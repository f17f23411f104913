"""The thread that watches: it begins and ends with the run, and its own faults reach the trainer."""

import time

import pytest

from tests.unit.fleet.fleet_scene import Scene

pytestmark = pytest.mark.timeout(180)  # Ray's and verl's imports


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
