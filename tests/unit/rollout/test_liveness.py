"""A dead process of the agent loops is noticed while the trainer waits; the actors are Ray's real ones."""

import os
import signal
import time
from types import SimpleNamespace

import pytest

from verl_ext.rollout import liveness

pytestmark = pytest.mark.timeout(180)  # Ray's start


@pytest.fixture
def actors(monkeypatch):
    """Two actors of a separate Ray, which answer one call at a time."""
    import ray

    class Loop:
        async def pid(self) -> int:
            return os.getpid()

        async def work(self, seconds: float) -> None:
            time.sleep(seconds)  # the event loop stands still

    monkeypatch.setattr(liveness, "LOOK_S", 0.05)
    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False)
    try:
        made = [ray.remote(Loop).options(num_cpus=0).remote() for _ in range(2)]
        yield made, [ray.get(each.pid.remote()) for each in made]
    finally:
        ray.shutdown()


def look(loops: liveness.AgentLoops, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        loops.check()
        time.sleep(0.01)


def test_one_that_is_killed_ends_the_wait_and_one_that_is_busy_does_not(actors):
    made, pids = actors
    loops = liveness.AgentLoops(made)
    made[0].work.remote(2.0)
    look(loops, 1.0)
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(
        RuntimeError, match=r"(?s)A process of the agent loops is gone.*continues from the newest checkpoint"
    ):
        look(loops, 30.0)


def test_one_that_rays_memory_monitor_killed_ends_the_wait(monkeypatch):
    """Its error is no RayActorError."""
    import ray
    from ray.exceptions import OutOfMemoryError

    def get(answer):
        raise OutOfMemoryError("killed by the kernel")

    monkeypatch.setattr(liveness, "LOOK_S", 0.0)
    monkeypatch.setattr(ray, "wait", lambda answers, timeout: (answers, []))
    monkeypatch.setattr(ray, "get", get)
    loops = liveness.AgentLoops([SimpleNamespace(__ray_ready__=SimpleNamespace(remote=lambda: None))])
    with pytest.raises(RuntimeError, match="gone, and its rollouts with it: killed by the kernel"):
        loops.check()


def test_one_that_cannot_be_reached_for_a_moment_does_not_end_the_wait(monkeypatch):
    import ray
    from ray.exceptions import ActorUnavailableError

    monkeypatch.setattr(liveness, "LOOK_S", 0.0)
    asked = []

    def get(answer):
        raise ActorUnavailableError("no route", None)

    monkeypatch.setattr(ray, "wait", lambda answers, timeout: (answers, []))
    monkeypatch.setattr(ray, "get", get)
    actor = SimpleNamespace(__ray_ready__=SimpleNamespace(remote=lambda: asked.append(1)))
    loops = liveness.AgentLoops([actor])
    loops.check()
    loops.check()
    assert len(asked) == 3, "it is asked again"
