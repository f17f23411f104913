"""Kill real vLLM servers: kill -9 for one engine, SIGSTOP for another. Two die in generation, two while their rollouts
wait for their tools, and two during weight updates.

The servers, router and checkpoint engine are verl's; there is no trainer. All requests end with all their tokens, whose
log-probs plain transformers recompute in fp32.
"""

import asyncio
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from tests.e2e.versions import SAME, cluster, difference, redone
from tests.e2e.watched_fleet import engine_of, sampling, watched_fleet, written

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]
TOKENS = 2000  # seconds of generation, in which a signal comes
REQUESTS = 8
LIMITS = {"every_s": 0.5, "suspect_s": 3, "dead_s": 12, "update_s": 30, "start_s": 30, "wait_s": 300}
LIMITS |= {"attempts": 3, "max_replacements": 1}
REPLY = [*range(100, 140)]  # of a tool
PROMPTS = [[(7 * i + number) % 400 + 10 for i in range(20)] for number in range(REQUESTS)]


@contextmanager
def servers(folder: Path, number: int) -> Iterator[SimpleNamespace]:
    """Start `number` watched servers with version 0."""
    from verl_ext.settings import compose_run

    limits = [f"retool.fleet.health.{name}={value}" for name, value in LIMITS.items()]
    config = compose_run(
        "tiny_dapo",
        [
            "hardware=cpu_separate",
            "objective=glm5_async",
            f"actor_rollout_ref.model.path={folder / 'model'}",
            f"actor_rollout_ref.rollout.n_gpus_per_node={number}",
            f"actor_rollout_ref.rollout.max_num_seqs={REQUESTS}",
            f"data.max_prompt_length={len(PROMPTS[0])}",
            f"data.max_response_length={TOKENS}",
            f"trainer.default_local_dir={folder / f'run of {number}'}",
            "retool.fleet.weight_update=keep",
            "retool.fleet.health.enable=true",
            *limits,
        ],
    )
    # Real Pythons: a signal must hit an engine, not the executable that stands for it. A replacement has only the
    # GPUs of the server that died.
    with (
        cluster(sys.executable, config, num_gpus=number),
        watched_fleet(config, folder, folder / f"run of {number}") as fleet,
    ):
        yield fleet


async def until_written(handles: list[Any], tokens: int) -> None:
    """Wait until all requests run, some on every server, and have so many tokens each."""
    deadline = time.monotonic() + 60
    while True:
        counts = [await handle.__ray_call__.remote(written) for handle in handles]
        if all(each and min(each) > tokens for each in counts) and sum(map(len, counts)) == REQUESTS:
            return
        assert time.monotonic() < deadline, f"no {tokens} tokens of {REQUESTS} requests in a minute: {counts}"
        await asyncio.sleep(0.02)


async def ask(fleet: SimpleNamespace, rollout: str, prompt: list[int], tokens: int = TOKENS) -> tuple[Any, Any]:
    """Run a turn of a rollout; return its output and its `TurnRequests`."""
    output = await fleet.client.generate(rollout, prompt_ids=prompt, sampling_params=sampling(tokens))
    return output, output.extra_fields["turn"]


async def turns(fleet: SimpleNamespace, hit: Any) -> tuple[list[Any], list[list[tuple[int, int]]], list[float]]:
    """Send all requests at once, and call `hit(handles)` when every server has written a part of some.

    Returns:
        Outputs, the attempts of each, and when each ended, in seconds after the hit.
    """
    ended: dict[int, float] = {}

    async def turn(number: int) -> tuple[Any, list]:
        result = await ask(fleet, f"rollout {time.monotonic()} {number}", PROMPTS[number])
        ended[number] = time.monotonic()
        return result

    running = [asyncio.ensure_future(turn(number)) for number in range(REQUESTS)]
    handles = [each.server_handle for each in fleet.weights.replicas]
    await until_written(handles, 40)
    began = time.monotonic()
    await hit(handles)
    results = await asyncio.wait_for(asyncio.gather(*running), 300)
    outputs, requests = zip(*results, strict=True)
    return [outputs, [each.written for each in requests], [ended[number] - began for number in range(REQUESTS)]]


def check(outputs: list[Any], attempts: list[list[tuple[int, int]]], version: int, model: Any) -> list[int]:
    """Check that each token is there once, with the version's log-probs; return what each interrupted request kept."""
    kept = []
    for number, (output, runs) in enumerate(zip(outputs, attempts, strict=True)):
        assert len(output.token_ids) == len(output.log_probs) == TOKENS, runs
        assert sum(tokens for tokens, _ in runs) == TOKENS and {each for _, each in runs} == {version}
        assert difference(model, PROMPTS[number], output, [(TOKENS, version)]) < SAME
        kept += [runs[0][0]] * (len(runs) > 1)
    return kept


def living(fleet: SimpleNamespace) -> list[Any]:
    """Return the living servers. A dead one leaves verl's list only with the next update."""
    return [each for each in fleet.weights.replicas if each not in fleet.weights.dead]


def routed(fleet: SimpleNamespace) -> set[str]:
    import ray

    return set(ray.get(fleet.router.get_all_servers.remote()))


def wait_for(what: str, is_so: Any, limit_s: float) -> float:
    began = time.monotonic()
    while not is_so():
        assert time.monotonic() - began < limit_s, f"{what}: not within {limit_s} s"
        time.sleep(0.1)
    return time.monotonic() - began


def wait_until_routed(fleet: SimpleNamespace, expected: set[str]) -> None:
    """Wait until the watcher's next round has notified the router."""
    wait_for(f"{expected} get requests, and no others", lambda: routed(fleet) == expected, 10)


def test_a_killed_and_a_stopped_engine_lose_no_token_and_are_replaced(models, capsys):
    folder, versions = models
    with servers(folder, 2) as fleet:
        check_deaths_in_generation(fleet, versions, capsys)


def check_deaths_in_generation(fleet: SimpleNamespace, versions: list[torch.nn.Module], capsys: Any) -> None:
    from verl_ext.ledger.servers import read_servers

    first, second = (each.server_address for each in fleet.weights.replicas)
    assert routed(fleet) == {first, second}

    async def kill(handles: list[Any]) -> None:
        os.kill(await handles[0].__ray_call__.remote(engine_of), signal.SIGKILL)

    outputs, attempts, seconds = asyncio.run(turns(fleet, kill))
    kept = check(outputs, attempts, 0, versions)
    assert len(kept) >= 2 and min(kept) > 40
    wait_until_routed(fleet, {second})
    start_s = wait_for("a replacement", lambda: fleet.weights.newcomers, 600)
    (new,) = fleet.weights.newcomers
    assert new.server_address not in routed(fleet)
    fleet.weights.update_weights(global_steps=1)
    wait_until_routed(fleet, {second, new.server_address})
    with capsys.disabled():
        print(f"\nkill -9: {len(kept)} of {REQUESTS} requests were interrupted, kept {kept} tokens, all ended within")
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
        print(f"SIGSTOP: {len(kept)} of {REQUESTS} requests were interrupted, kept {kept} tokens, all ended within")
        print(f"{max(seconds):.1f} s (dead_s is {LIMITS['dead_s']})")

    began = time.monotonic()
    fleet.weights.update_weights(global_steps=2)  # does not wait for dead servers
    assert time.monotonic() - began < 20
    wait_until_routed(fleet, {new.server_address})
    servers = read_servers(fleet.folder)
    assert servers.faults() == [] and (servers.started, servers.died, servers.replaced) == (3, 2, 1)
    fleet.fleet.actor_works()  # raises if the watcher failed


def test_engines_die_while_their_rollouts_wait_for_tools_and_in_updates(models, capsys):
    folder, versions = models
    with servers(folder, 4) as fleet:
        for sign in (signal.SIGKILL, signal.SIGSTOP):
            before = routed(fleet)
            victim, moved, seconds = asyncio.run(tool_calls(fleet, versions, sign))
            assert 0 < moved < REQUESTS
            wait_until_routed(fleet, before - {victim})
            with capsys.disabled():
                print(f"\n{sign.name} in a tool call: {moved} of {REQUESTS} rollouts went on elsewhere; all next turns")
                print(f"had ended {seconds:.1f} s later")
            # By then start_s is over, during which a server silent for dead_s does not count as dead yet.
            wait_for("a replacement of the first", lambda: fleet.weights.newcomers, 600)

        for version, sign in ((1, signal.SIGSTOP), (2, signal.SIGKILL)):
            victim = living(fleet)[0].server_address
            update_s, lost = asyncio.run(update_hit_by(fleet, versions, version, sign))
            limit_s = LIMITS["update_s"] if sign == signal.SIGSTOP else 0
            assert limit_s <= update_s < limit_s + 20
            wait_for("the victim leaves", lambda victim=victim: victim not in routed(fleet), 10)
            with capsys.disabled():
                print(f"{sign.name} in an update: it took {update_s:.1f} s; {lost} of {REQUESTS} requests lost their")
                print("server, and went on elsewhere")
        wait_for("one is left of four; one of the dead was replaced", lambda: len(routed(fleet)) == 1, 10)
        fleet.fleet.actor_works()  # raises if the watcher failed


async def tool_calls(
    fleet: SimpleNamespace, versions: list[torch.nn.Module], sign: signal.Signals
) -> tuple[str, int, float]:
    """Run rollouts of two turns; between them the engine of the server with the most rollouts gets a signal.

    Returns:
        The address of the server, its rollouts, and the seconds in which all second turns ended.
    """
    tokens = 100

    async def turn(number: int, prompt: list[int]) -> tuple[Any, Any]:
        output, attempts = await ask(fleet, f"{sign.name} {number}", prompt, tokens)  # the router knows it by its name
        assert len(output.token_ids) == tokens
        assert difference(versions, prompt, output, [(tokens, 0)]) < SAME
        return output, attempts

    before = await asyncio.gather(*(turn(number, PROMPTS[number]) for number in range(REQUESTS)))
    servers = [attempts.server for _, attempts in before]
    dead = max(servers, key=servers.count)
    (victim,) = (each for each in living(fleet) if each.server_address == dead)
    os.kill(await victim.server_handle.__ray_call__.remote(engine_of), sign)
    prompts = [PROMPTS[number] + list(before[number][0].token_ids) + REPLY for number in range(REQUESTS)]
    began = time.monotonic()
    after = await asyncio.gather(*(turn(number, prompts[number]) for number in range(REQUESTS)))
    seconds = time.monotonic() - began
    assert dead not in [attempts.server for _, attempts in after]
    for (_, first), (_, second) in zip(before, after, strict=True):  # the others' rollouts stay
        assert first.server == dead or first.server == second.server
    return dead, servers.count(dead), seconds


async def update_hit_by(
    fleet: SimpleNamespace, versions: list[torch.nn.Module], version: int, sign: signal.Signals
) -> tuple[float, int]:
    """Signal the first server's engine, under running requests, when the actor is about to send the weights.

    Returns:
        Seconds of the update, and requests that lost their server.
    """
    handles = [each.server_handle for each in living(fleet)]
    engine = await handles[0].__ray_call__.remote(engine_of)
    requests = [ask(fleet, f"update {version} {number}", PROMPTS[number]) for number in range(REQUESTS)]
    running = [*map(asyncio.ensure_future, requests)]
    await until_written(handles, 40)
    actor = fleet.weights.actor_wg
    send = actor.update_weights

    def hit_and_send(**arguments: Any) -> list[Any]:
        os.kill(engine, sign)
        return send(**arguments)

    actor.update_weights, began = hit_and_send, time.monotonic()
    try:
        await asyncio.to_thread(fleet.weights.update_weights, global_steps=version)
    finally:
        actor.update_weights = send
    update_s = time.monotonic() - began
    lost = 0
    for prompt, (output, attempts) in zip(PROMPTS, await asyncio.wait_for(asyncio.gather(*running), 300), strict=True):
        assert len(output.token_ids) == len(output.log_probs) == TOKENS
        if not attempts.lost:
            assert difference(versions, prompt, output, attempts.written) < SAME
            continue
        lost += 1
        (kept, old), (more, new), *rest = attempts.written  # of the dead server, and of the next: a separate cache
        assert (old, new) == (version - 1, version)
        for runs, begin, end in (([(TOKENS, old)], 0, kept), ([(kept + more, new), *rest], kept, TOKENS)):
            own = redone(versions, prompt, list(output.token_ids), runs)[begin:end]
            assert max(abs(a - b) for a, b in zip(own, output.log_probs[begin:end], strict=True)) < SAME
    assert 0 < lost < REQUESTS
    return update_s, lost
