"""Test `retool.fleet.weight_update` on a real vLLM server, with verl's replica and checkpoint engine but no trainer.

With `keep` requests run through two updates. Plain transformers in fp32 recompute their log-probs over a cache that is
mixed in the same way: each position is computed with the weights that sampled the token after it.
"""

import asyncio
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.e2e.versions import SAME, Actor, cluster, difference, moved
from tests.e2e.watched_fleet import gaps, sampling, stop_watching, watch

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
OTHER = 1e-2  # a boundary off by one changes some log-prob by more, unless both weights make the token equally likely
TOKENS = 2000  # seconds of generation, in which an update comes
SEATS = 4  # requests that run at once
PROMPT = 100  # tokens: three blocks of the cache, and part of another
PROMPTS = [[(7 * i + number) % 400 + 10 for i in range(PROMPT)] for number in range(SEATS + 2)]


@pytest.fixture(scope="module")
def fleet(python: str, models: tuple[Path, list[torch.nn.Module]], request: pytest.FixtureRequest) -> SimpleNamespace:
    """Start a server in the mode that the test names: `server`, verl's `manager` of its weights, `ask`."""
    import verl  # noqa: F401
    from verl.checkpoint_engine.base import CheckpointEngineManager
    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    from verl_ext.settings import compose_run

    folder, _ = models
    config = compose_run(
        "tiny_dapo",
        [
            "hardware=cpu_separate",
            "objective=glm5_async",
            f"actor_rollout_ref.model.path={folder / 'model'}",
            f"actor_rollout_ref.rollout.max_num_seqs={SEATS}",
            f"data.max_prompt_length={PROMPT}",
            f"data.max_response_length={TOKENS}",
            f"retool.fleet.weight_update={request.param}",
        ],
    )
    with cluster(python, config, num_gpus=1):
        rollout, model = config.actor_rollout_ref.rollout, config.actor_rollout_ref.model
        replica = RolloutReplicaRegistry.get("vllm")(
            replica_rank=0, config=rollout, model_config=model, gpus_per_node=1
        )
        asyncio.run(replica.init_standalone())
        engine = omega_conf_to_dataclass(rollout.checkpoint_engine)
        manager = CheckpointEngineManager(config=engine, actor_wg=Actor(folder), replicas=[replica])
        manager.update_weights(global_steps=0)
        server = replica._server_handle

        def ask(prompt: list[int], name: str, tokens: int) -> Any:
            return server.generate.remote(prompt_ids=prompt, sampling_params=sampling(tokens), request_id=name)

        yield SimpleNamespace(server=server, manager=manager, ask=ask)


def wait_until_written(server: Any, requests: list[Any], tokens: int) -> bool:
    """Return whether `SEATS` of the requests were seen with so many tokens each; False if all have ended unseen."""
    import ray

    while len(ray.wait(requests, num_returns=len(requests), timeout=0.01)[0]) < len(requests):
        _, written = ray.get(server.__ray_call__.remote(lambda server: (server.seen or [(0, {})])[-1]))
        if sum(each >= tokens for each in written.values()) >= SEATS:
            return True
    return False


def running_requests(fleet: SimpleNamespace, tokens: int) -> list[Any]:
    """Start watched requests, of which `SEATS` have so many tokens. A loaded machine may need several tries."""
    import ray

    for _ in range(5):
        ray.get(fleet.server.__ray_call__.remote(watch))
        requests = [fleet.ask(prompt, f"request {number}", TOKENS) for number, prompt in enumerate(PROMPTS)]
        if wait_until_written(fleet.server, requests, tokens):
            return requests
        ray.get(requests)  # raises the error that ended them
    raise AssertionError(f"five times, all requests ended before {SEATS} of them were seen with {tokens} tokens")


@pytest.mark.parametrize("fleet", ["keep"], indirect=True)
def test_running_requests_continue_over_their_cache_and_each_token_has_its_version(fleet, models, capsys):
    import ray

    (first,) = ray.get([fleet.ask(PROMPTS[0], "warm", 2)])
    (second,) = ray.get([fleet.ask(PROMPTS[0], "warm again", 2)])
    assert (first.extra_fields["num_cached_tokens"], second.extra_fields["num_cached_tokens"]) == (0, 96)

    requests = running_requests(fleet, 100)
    updates = []
    for version in (1, 2):
        assert wait_until_written(fleet.server, requests, 100 * version)
        began = time.monotonic()
        fleet.manager.update_weights(global_steps=version)
        updates.append(time.monotonic() - began)
    new = ray.get(fleet.ask(PROMPTS[0], "new", 20))  # version 0 computed its prompt before, and 2 only here
    again = ray.get(fleet.ask(PROMPTS[0], "again", 20))
    outputs = ray.get(requests)
    seen = ray.get(fleet.server.__ray_call__.remote(stop_watching))

    _, versions = models
    crossing = [output for output in outputs if len(output.extra_fields["version_runs"]) > 1]
    assert len(crossing) == SEATS
    with capsys.disabled():
        print(f"\nupdates: {', '.join(f'{seconds:.3f} s' for seconds in updates)}")
    boundaries_off = []
    for number, output in enumerate(outputs):
        runs = output.extra_fields["version_runs"]
        assert sum(tokens for tokens, _ in runs) == len(output.token_ids) == TOKENS
        own = difference(versions, PROMPTS[number], output, runs)
        assert own < SAME
        if len(runs) == 1:  # waited for a seat (Ray decides which), and began with the weights of its first token
            assert runs[0][1] > 0
            continue
        assert [version for _, version in runs] == [0, 1, 2]
        off = [difference(versions, PROMPTS[number], output, moved(runs, by)) for by in (-1, 1)]
        fresh = difference(versions, PROMPTS[number], output, [(TOKENS, 2)])
        times = gaps(seen, f"request {number}")
        with capsys.disabled():
            print(
                f"request {number}: runs {runs}; log-probs within {own:.1e}, boundary off by one: "
                f"{off[0]:.1e}, {off[1]:.1e}, computed anew with the last weights: {fresh:.1e}; "
                f"gaps {times[0]:.3f} and {times[1]:.3f} s, median {times[len(times) // 2]:.4f} s"
            )
        boundaries_off += off
        assert fresh > OTHER
        assert times[0] < max(updates) + 5  # a loaded machine may be slow at any token
    assert sum(each > OTHER for each in boundaries_off) >= 5  # of 8
    cached = [output.extra_fields["num_cached_tokens"] for output in (new, again)]
    assert cached == [0, 96], "blocks of older weights were reused, or those of its own version were not"
    for output in (new, again):
        assert output.extra_fields["version_runs"] == [(20, 2)]
        assert difference(versions, PROMPTS[0], output, [(20, 2)]) < SAME


@pytest.mark.nightly
@pytest.mark.parametrize("fleet", ["abort"], indirect=True)
def test_an_update_interrupts_requests_at_once_and_waits_for_no_output(fleet, models, capsys):
    import ray

    requests = running_requests(fleet, 50)
    began = time.monotonic()
    fleet.manager.update_weights(global_steps=1)
    with capsys.disabled():
        print(f"\nupdate: {time.monotonic() - began:.3f} s")
    written = []
    for prompt, output in zip(PROMPTS, ray.get(requests), strict=True):
        written.append(len(output.token_ids))
        assert output.stop_reason == "aborted" and written[-1] < TOKENS
        assert output.extra_fields["version_runs"] == ([(written[-1], 0)] if written[-1] else [])
        assert not written[-1] or difference(models[1], prompt, output, [(written[-1], 0)]) < SAME
    assert sorted(each >= 50 for each in written) == [False] * 2 + [True] * SEATS
    after = ray.get(fleet.ask(PROMPTS[0], "after", 20))
    assert after.extra_fields["version_runs"] == [(20, 1)] and after.extra_fields["num_cached_tokens"] == 0


@pytest.mark.nightly
@pytest.mark.parametrize("fleet", ["drain"], indirect=True)
def test_running_requests_end_before_an_update_and_others_begin_after_it(fleet, models):
    import ray

    requests = running_requests(fleet, 50)
    fleet.manager.update_weights(global_steps=1)
    runs = []
    for prompt, output in zip(PROMPTS, ray.get(requests), strict=True):
        runs.append(output.extra_fields["version_runs"])
        assert difference(models[1], prompt, output, runs[-1]) < SAME
    assert sorted(runs) == [[(TOKENS, 0)]] * SEATS + [[(TOKENS, 1)]] * 2
