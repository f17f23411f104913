"""Real vLLM servers that die in generation: kill -9 of an engine, SIGSTOP of another. verl's own servers, router and
checkpoint engine; no trainer. All requests end with all their tokens, whose log-probs plain transformers redo in fp32.
"""

import asyncio
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from tests.e2e.versions import SAME, cluster, difference
from tests.e2e.watched_fleet import engine_of, sampling, watched_fleet, written

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
TOKENS = 600  # seconds of generation, in which a signal comes
REQUESTS = 8
LIMITS = {"every_s": 0.5, "suspect_s": 3, "dead_s": 12, "update_s": 30, "start_s": 30, "wait_s": 300}
LIMITS |= {"attempts": 3, "max_replacements": 1}
PROMPTS = [[(7 * i + number) % 400 + 10 for i in range(20)] for number in range(REQUESTS)]


@pytest.fixture(scope="module")
def fleet(models: tuple[Path, list[torch.nn.Module]]) -> Iterator[SimpleNamespace]:
    """Two servers with version 0."""
    from verl_ext.settings import compose_run

    folder, _ = models
    limits = [f"retool.fleet.health.{name}={value}" for name, value in LIMITS.items()]
    config = compose_run(
        "tiny_dapo",
        [
            "hardware=cpu_separate",
            "objective=glm5_async",
            f"actor_rollout_ref.model.path={folder / 'model'}",
            "actor_rollout_ref.rollout.n_gpus_per_node=2",
            f"actor_rollout_ref.rollout.max_num_seqs={REQUESTS}",
            f"data.max_prompt_length={len(PROMPTS[0])}",
            f"data.max_response_length={TOKENS}",
            f"trainer.default_local_dir={folder / 'run'}",
            "retool.fleet.weight_update=keep",
            "retool.fleet.health.enable=true",
            *limits,
        ],
    )
    # Real Pythons: a signal is to meet an engine, not the executable that stands for it. A replacement has only the
    # GPUs of the server that died.
    with cluster(sys.executable, config, num_gpus=2):
        with watched_fleet(config, folder, folder / "run") as fleet:
            yield fleet


async def turns(fleet: SimpleNamespace, hit: Any) -> tuple[list[Any], list[list[tuple[int, int]]], list[float]]:
    """All requests at once, and `hit(handles)` when every server has written a part of some.

    Returns:
        Outputs, the attempts of each, and when each ended, in seconds after the hit.
    """
    from verl_ext.rollout.weight_versions import noted_attempts

    ended: dict[int, float] = {}

    async def turn(number: int) -> tuple[Any, list]:
        with noted_attempts() as attempts:
            name = f"rollout {time.monotonic()} {number}"
            output = await fleet.client.generate(name, prompt_ids=PROMPTS[number], sampling_params=sampling(TOKENS))
        ended[number] = time.monotonic()
        return output, attempts

    running = [asyncio.ensure_future(turn(number)) for number in range(REQUESTS)]
    handles = [each.server_handle for each in fleet.weights.replicas]
    deadline = time.monotonic() + 60
    while True:
        counts = [await handle.__ray_call__.remote(written) for handle in handles]
        if all(each and min(each) > 40 for each in counts):
            break
        assert time.monotonic() < deadline, f"no 40 tokens in a minute: {counts}"
        await asyncio.sleep(0.02)
    began = time.monotonic()
    await hit(handles)
    results = await asyncio.wait_for(asyncio.gather(*running), 120)
    return [*zip(*results, strict=True)] + [[ended[number] - began for number in range(REQUESTS)]]


def check(outputs: list[Any], attempts: list[list[tuple[int, int]]], version: int, model: Any) -> list[int]:
    """All tokens are there, once, with log-probs of the version; returns what each request that was broken off kept."""
    kept = []
    for number, (output, runs) in enumerate(zip(outputs, attempts, strict=True)):
        assert len(output.token_ids) == len(output.log_probs) == TOKENS, runs
        assert sum(tokens for tokens, _ in runs) == TOKENS and {each for _, each in runs} == {version}
        assert difference(model, PROMPTS[number], output, [(TOKENS, version)]) < SAME
        kept += [runs[0][0]] * (len(runs) > 1)
    return kept


def routed(fleet: SimpleNamespace) -> set[str]:
    import ray

    return set(ray.get(fleet.router.get_all_servers.remote()))


def wait_for(what: str, is_so: Any, limit_s: float) -> float:
    began = time.monotonic()
    while not is_so():
        assert time.monotonic() - began < limit_s, f"{what}: not within {limit_s} s"
        time.sleep(0.1)
    return time.monotonic() - began


def test_a_killed_and_a_stopped_engine_lose_no_token_and_are_replaced(fleet, models, capsys):
    from verl_ext.ledger.servers import read_servers

    _, versions = models
    first, second = (each.server_address for each in fleet.weights.replicas)
    assert routed(fleet) == {first, second}

    async def kill(handles: list[Any]) -> None:
        os.kill(await handles[0].__ray_call__.remote(engine_of), signal.SIGKILL)

    outputs, attempts, seconds = asyncio.run(turns(fleet, kill))
    kept = check(outputs, attempts, 0, versions)
    assert len(kept) >= 2 and min(kept) > 40
    assert first not in routed(fleet) and second in routed(fleet)
    start_s = wait_for("a replacement", lambda: fleet.weights.newcomers, 240)
    (new,) = fleet.weights.newcomers
    assert routed(fleet) == {second}
    fleet.weights.update_weights(global_steps=1)
    wait_for("the replacement gets requests", lambda: routed(fleet) == {second, new.server_address}, 10)
    with capsys.disabled():
        print(f"\nkill -9: {len(kept)} of {REQUESTS} requests were broken off and kept {kept} tokens, all ended within")
        print(f"{max(seconds):.1f} s; the replacement took {start_s:.1f} s more to start")

    stopped = []

    async def stop(handles: list[Any]) -> None:
        stopped.append(await handles[0].__ray_call__.remote(engine_of))
        os.kill(stopped[0], signal.SIGSTOP)

    outputs, attempts, seconds = asyncio.run(turns(fleet, stop))
    kept = check(outputs, attempts, 1, versions)
    assert len(kept) >= 1 and min(kept) > 40
    assert not psutil.pid_exists(stopped[0]) or psutil.Process(stopped[0]).status() == psutil.STATUS_ZOMBIE
    with capsys.disabled():
        print(f"SIGSTOP: {len(kept)} of {REQUESTS} requests were broken off and kept {kept} tokens, all ended within")
        print(f"{max(seconds):.1f} s (dead_s is {LIMITS['dead_s']})")

    began = time.monotonic()
    fleet.weights.update_weights(global_steps=2)  # waits for none that is dead
    assert time.monotonic() - began < 20 and routed(fleet) == {new.server_address}
    servers = read_servers(fleet.folder)
    assert servers.faults() == [] and (servers.started, servers.died, servers.replaced) == (3, 2, 1)
    fleet.fleet.actor_works()  # raises what the watching failed of
