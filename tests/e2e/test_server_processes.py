"""Test what ends with a server's process, whose GPUs become free: a real Ray actor with a sleep as engine; no vLLM."""

import asyncio
import os
import signal
import subprocess
import time
from types import SimpleNamespace

import psutil
import pytest

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def server_class():
    """Return the class of an actor with an engine, and with the shell that `WatchedServer` starts next to it."""
    import ray

    from verl_ext.cpu.warm_python import ENVIRONMENT
    from verl_ext.fleet.watched import start_reaper

    ray.init(
        num_cpus=4,
        num_gpus=1,
        include_dashboard=False,
        object_store_memory=100_000_000,
        runtime_env={"env_vars": ENVIRONMENT},
    )

    @ray.remote(max_concurrency=10, num_gpus=1)
    class Server:
        def __init__(self) -> None:
            self.engine = subprocess.Popen(["sleep", "600"])
            self.reaper = start_reaper([self.engine.pid])

        async def pids(self) -> tuple[int, int]:
            return os.getpid(), self.engine.pid

        async def generate(self) -> None:
            await asyncio.sleep(600)

    yield Server
    ray.shutdown()


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("signal_number", [signal.SIGSTOP, signal.SIGKILL])
def test_a_server_that_hangs_or_is_gone_ends_with_its_engine_and_its_callers_learn_of_it(server_class, signal_number):
    import ray
    from ray.exceptions import ActorDiedError
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    from verl_ext.fleet.replicas import stop_replica

    group = ray.util.placement_group([{"CPU": 1, "GPU": 1}])
    server = server_class.options(scheduling_strategy=PlacementGroupSchedulingStrategy(group)).remote()
    pid, engine = ray.get(server.pids.remote())
    request = server.generate.remote()
    time.sleep(0.5)
    os.kill(pid, signal_number)
    assert not ray.available_resources().get("GPU")
    pool = SimpleNamespace(pgs=[group])
    replica = SimpleNamespace(servers=[server], workers=[], server_handle=server, resource_pool=pool)
    stop_replica(replica, hangs=signal_number == signal.SIGSTOP)  # ray.kill by itself leaves such a process
    assert ray.available_resources()["GPU"] == 1  # at once: verl raises if a starting server finds none
    with pytest.raises(ActorDiedError):
        ray.get(request, timeout=30)
    deadline = time.monotonic() + 30
    while is_alive(pid) or is_alive(engine):
        assert time.monotonic() < deadline, f"alive: server {is_alive(pid)}, engine {is_alive(engine)}"
        time.sleep(0.1)
