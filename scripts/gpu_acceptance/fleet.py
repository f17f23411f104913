"""Rollout servers on a GPU of their own: weights that change under running requests, and an engine that is killed."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any

from scripts.gpu_acceptance.stage import Context, Row

REQUESTS = 4
TOKENS = 800
UPDATES_AT = (150, 400)  # tokens of each request
KILLED_AT = 150  # tokens
PROMPTS = [[(7 * i + number) % 400 + 10 for i in range(100)] for number in range(REQUESTS)]
SAME = {"cuda": 3e-3, "cpu": 1e-4}  # log-probs of one version, by vLLM and by transformers; Triton multiplies in TF32
OTHER = 1e-2  # a boundary that is off by one changes some log-prob by more, but for a token as likely with both weights
LIMIT_S = 240.0  # for requests, and for a replacement to start
ROLLOUT = "actor_rollout_ref.rollout"
ON_GPU = (  # configs/hardware/cpu_separate.yaml without its CPU
    "~hardware",
    "trainer.v1.trainer_mode=separate_async",
    "trainer.v1.separate_async.parameter_sync_step=2",
    "trainer.n_gpus_per_node=1",
    "trainer.nnodes=1",
    "actor_rollout_ref.hybrid_engine=false",
    f"{ROLLOUT}.nnodes=1",
    f"{ROLLOUT}.n_gpus_per_node=1",
    f"{ROLLOUT}.tensor_model_parallel_size=1",
    f"{ROLLOUT}.gpu_memory_utilization=0.3",
    f"{ROLLOUT}.free_cache_engine=false",
    f"{ROLLOUT}.dtype=float32",
    f"{ROLLOUT}.checkpoint_engine.backend=shared_file",  # NCCL refuses two ranks on one GPU
    f"{ROLLOUT}.checkpoint_engine.custom_backend_module=verl_ext.cpu.checkpoint_engine",
    f"{ROLLOUT}.agent.num_workers=1",
    "retool.fleet.routing=ring",
)


def compose(context: Context) -> Any:
    from verl_ext.settings import compose_run

    shared = [
        "objective=glm5_async",
        f"actor_rollout_ref.model.path={context.folder / 'model'}",
        f"{ROLLOUT}.max_num_seqs={REQUESTS}",
        f"data.max_prompt_length={len(PROMPTS[0])}",
        f"data.max_response_length={TOKENS}",
        f"trainer.default_local_dir={context.folder / 'run'}",
        "retool.fleet.weight_update=keep",
        "retool.fleet.health.enable=true",
    ]
    return compose_run("tiny_dapo", [*(ON_GPU if context.is_cuda else ["hardware=cpu_separate"]), *shared])


def check_fleet(context: Context) -> Iterator[Row]:
    """One server, no trainer: two updates by `keep`, then kill -9 of its engine, and a replacement on the same GPU.

    Plain transformers redo all log-probs on the CPU in fp32, over a cache that is mixed in the same way.
    """
    import torch

    from tests.e2e.versions import build_versions, cluster
    from tests.e2e.watched_fleet import watched_fleet
    from verl_ext.cpu.warm_python import ENVIRONMENT

    versions = build_versions(context.folder)
    versions.append(versions[0])  # version 3
    torch.save(versions[0].state_dict(), context.folder / "3.pt")
    config = compose(context)
    environment = {} if context.is_cuda else ENVIRONMENT
    start = time.monotonic()
    with (
        cluster(sys.executable, config, num_gpus=1, environment=environment),
        watched_fleet(config, context.folder, context.folder / "run") as fleet,
    ):
        yield Row("a server, with its first weights", "", f"{time.monotonic() - start:.0f} s")
        asyncio.run(turns(fleet, 1, at=(), act=None))  # compiles
        yield from _updates(context, fleet, versions)
        yield from _death(context, fleet, versions)


async def turns(fleet: Any, tokens: int, at: tuple[int, ...], act: Any) -> list[tuple[Any, list[tuple[int, int]]]]:
    """All requests at once; `act(number)` in a thread each time when all have so many tokens.

    Returns:
        Output of each, and (tokens, version) of its runs.
    """
    from tests.e2e.watched_fleet import sampling, written

    async def turn(number: int) -> tuple[Any, list[tuple[int, int]]]:
        name = f"rollout {time.monotonic()} {number}"
        output = await fleet.client.generate(name, prompt_ids=PROMPTS[number], sampling_params=sampling(tokens))
        return output, output.extra_fields["turn"].written

    running = [asyncio.ensure_future(turn(number)) for number in range(REQUESTS)]
    handle = fleet.weights.replicas[0].server_handle
    for number, least in enumerate(at):
        deadline = time.monotonic() + LIMIT_S
        while len(counts := await handle.__ray_call__.remote(written)) < REQUESTS or min(counts) < least:
            if time.monotonic() > deadline:
                raise TimeoutError(f"the requests have {counts} tokens, expected {least} within {LIMIT_S:g} s")
            await asyncio.sleep(0.002)
        await asyncio.to_thread(act, number)
    return await asyncio.wait_for(asyncio.gather(*running), LIMIT_S)


def _updates(context: Context, fleet: Any, versions: list[Any]) -> Iterator[Row]:
    import ray

    from tests.e2e.versions import difference, moved
    from tests.e2e.watched_fleet import gaps, stop_watching, watch

    handle, seconds = fleet.weights.replicas[0].server_handle, []

    def update(number: int) -> None:
        began = time.monotonic()
        fleet.weights.update_weights(global_steps=number + 1)
        seconds.append(time.monotonic() - began)

    ray.get(handle.__ray_call__.remote(watch))
    results = asyncio.run(turns(fleet, TOKENS, UPDATES_AT, update))
    seen = ray.get(handle.__ray_call__.remote(stop_watching))
    orders = [[version for _, version in runs] for _, runs in results]
    yield Row("versions of each request's tokens", "0, 1, 2", str(orders[0]), orders == [[0, 1, 2]] * REQUESTS)
    counts = [len(output.token_ids) for output, _ in results]
    yield Row("tokens of each request", f"{TOKENS}", str(sorted({*counts})), {*counts} == {TOKENS})
    same, own, off = SAME[context.device], [], []
    for prompt, (output, runs) in zip(PROMPTS, results, strict=True):
        own.append(difference(versions, prompt, output, runs))
        off += [difference(versions, prompt, output, moved(runs, by)) for by in (-1, 1)]
    yield Row("log-probs redone with each token's version", f"< {same:g}", f"{max(own):.2g}", max(own) < same)
    clear = sum(each > OTHER for each in off)
    text = f"{clear} of {len(off)}, the median {sorted(off)[len(off) // 2]:.2g}"
    yield Row(f"with a boundary off by one: above {OTHER:g}", f">= {len(off) // 2}", text, clear >= len(off) // 2)
    longest = [gaps(seen, name) for name in {name for _, each in seen for name in each}]
    yield Row("updates", "", ", ".join(f"{each:.3f} s" for each in seconds))
    text = f"{max(each[0] for each in longest):.3f} s, the median {longest[0][len(longest[0]) // 2] * 1000:.2f} ms"
    yield Row("longest gap between two tokens of a request", "", text)


def _death(context: Context, fleet: Any, versions: list[Any]) -> Iterator[Row]:
    import ray

    from tests.e2e.versions import redone
    from tests.e2e.watched_fleet import engine_of
    from verl_ext.ledger.servers import read_servers

    pid, times = ray.get(fleet.weights.replicas[0].server_handle.__ray_call__.remote(engine_of)), {}

    def kill(_: int) -> None:
        began = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        while not fleet.weights.newcomers:
            if time.monotonic() > began + LIMIT_S:
                raise TimeoutError(f"no replacement started within {LIMIT_S:g} s; its log is Ray's")
            fleet.fleet.actor_works()  # raises what the watching failed of
            time.sleep(0.1)
        times["start"] = time.monotonic() - began
        fleet.weights.update_weights(global_steps=3)
        times["update"] = time.monotonic() - began - times["start"]

    results = asyncio.run(turns(fleet, TOKENS, (KILLED_AT,), kill))
    text = f"{times['start']:.1f} s, and {times['update']:.2f} s for its weights"
    yield Row("kill -9 of the engine: a replacement on its GPU", "", text)
    kept = [runs[0][0] for _, runs in results]
    ended = all([version for _, version in runs] == [2, 3] for _, runs in results) and min(kept) >= KILLED_AT
    yield Row("requests went on there with their tokens", f">= {KILLED_AT}", ", ".join(map(str, kept)), ended)
    worst = 0.0
    for prompt, (output, ((first, old), (rest, new))) in zip(PROMPTS, results, strict=True):
        ids = list(output.token_ids)
        again = redone(versions, prompt, ids[:first], [(first, old)])
        again += redone(versions, prompt + ids[:first], ids[first:], [(rest, new)])
        worst = max(worst, *(abs(a - b) for a, b in zip(again, output.log_probs, strict=True)))
    same = SAME[context.device]
    yield Row("log-probs redone, the rest over a new cache", f"< {same:g}", f"{worst:.2g}", worst < same)
    servers = read_servers(fleet.folder)
    text = f"{servers.started}, {servers.died}, {servers.replaced}"
    yield Row("servers started, died, replaced", "2, 1, 1", text, text == "2, 1, 1" and not servers.faults())
