"""Fixtures over the made-up replicas of `fleet_scene.py` and `members_scene.py`."""

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.fleet.fleet_scene import Actor, Group, Replica, Scene
from tests.unit.fleet.members_scene import make_world


def _after_what_is_ready(wait: Any) -> Any:
    """A slow machine may need more than a round's hundredth of a second even for heartbeats that take no time."""

    async def waits(*args: Any, **kwargs: Any) -> Any:
        for _ in range(50):  # turns of the loop; a heartbeat takes a few
            await asyncio.sleep(0)
        return await wait(*args, **kwargs)

    return waits


@pytest.fixture
def make(cpu_platform, monkeypatch):
    """Make the weight manager of some replicas."""
    from verl_ext.fleet import recovery, replicas, transfer

    monkeypatch.setattr(transfer, "POLL_S", 0.01)
    monkeypatch.setattr(recovery, "GIVE_UP_S", 0.05)
    monkeypatch.setattr(replicas, "GIVE_UP_S", 0.05)
    monkeypatch.setattr(recovery, "ON_THEIR_WAY_S", 0.0)
    monkeypatch.setattr(recovery, "START_PAUSE_S", 0.0)
    monkeypatch.setattr(asyncio, "wait", _after_what_is_ready(asyncio.wait))

    def makes(*replicas: Replica) -> Any:
        engine = SimpleNamespace(backend="shared_file", custom_backend_module="verl_ext.cpu.checkpoint_engine")
        return transfer.FleetCheckpointManager(engine, Actor(), replicas, Group)

    return makes


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


@pytest.fixture
def world(monkeypatch):
    world = make_world(monkeypatch)
    yield world
    world.may_leave.set()
    for thread in threading.enumerate():  # after the test, its Ray would be the real one, and start a cluster
        if thread.name.startswith(("start server", "stop server")):
            thread.join(30)
