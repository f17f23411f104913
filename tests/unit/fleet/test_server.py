"""verl's server with our modes of a weight update, around an engine whose tokens say which weights sampled them."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.fleet.server_scene import serving, settle
from tests.unit.fleet.versioned_engine import Engine

pytest.importorskip("vllm", reason="vLLM is not installed")
pytestmark = pytest.mark.timeout(180)  # vLLM's import


@pytest.fixture
def scene(cpu_platform, monkeypatch):
    """Run a coroutine function with a server and its engine."""

    def play(name: str, script: Callable[..., Any], **changes: Any) -> Any:
        async def run() -> Any:
            engine = Engine()
            try:
                async with serving(monkeypatch, name, engine, **changes) as server:
                    return await asyncio.wait_for(script(server, engine), 20)
            finally:
                engine.reader.cancel()

        return asyncio.run(run())

    return play


def ask(server: Any, name: str, tokens: int) -> asyncio.Future:
    params = {"max_tokens": tokens, "logprobs": True}
    return asyncio.ensure_future(server.generate([5, 6], params, request_id=name))


async def update(server: Any, engine: Engine, version: int) -> None:
    """Update as verl's checkpoint engine does: pause, load, name the version, resume."""
    await server.abort_all_requests()
    await server.clear_kv_cache()
    engine.weights = version
    await server.set_global_steps(version)
    await server.resume_engine_generation()
    await server.open_submission_gate()


def versions(output: Any) -> list[int]:
    """Return the version of each token, as the server reports it."""
    return [version for tokens, version in output.extra_fields["version_runs"] for _ in range(tokens)]


def test_abort_waits_for_no_output_and_says_which_weights_sampled_the_tokens_so_far(scene):
    """verl's own would wait for a request's first output, which is its last."""

    async def script(server, engine):
        engine.room = 1
        requests = [ask(server, "a", 9), ask(server, "b", 3)]
        await settle()
        engine.step()
        engine.step()
        await settle()
        await update(server, engine, 2)
        again = ask(server, "a", 1)
        await settle()
        engine.step()
        return await asyncio.gather(*requests, again), engine

    (begun, waiting, again), engine = scene("FleetServer", script)
    assert begun.token_ids == versions(begun) == [1, 1] and waiting.token_ids == versions(waiting) == []
    assert [output.stop_reason for output in (begun, waiting, again)] == ["aborted", "aborted", "completed"]
    assert again.token_ids == versions(again) == [2]
    assert engine.pauses == [("abort", True)] and engine.resets == 1


def test_what_a_server_reports_that_decodes_for_this_one_is_kept(scene, monkeypatch):
    from verl.workers.rollout.replica import TokenOutput
    from verl.workers.rollout.vllm_rollout import vllm_async_server

    async def generate(*_, **__):
        return TokenOutput(token_ids=[7], stop_reason="", extra_fields={"version_runs": [(1, 5)]})

    monkeypatch.setattr(vllm_async_server.vLLMHttpServer, "generate", generate)

    async def script(server, engine):
        return await ask(server, "a", 1)

    assert versions(scene("FleetServer", script)) == [5]


def test_keep_says_of_each_token_which_weights_sampled_it(scene):
    async def script(server, engine):
        requests = [ask(server, "a", 9), ask(server, "b", 3)]
        await settle()
        for version in (2, 3):
            engine.step()
            engine.step()  # nothing is read in between: the front end is two tokens behind
            await update(server, engine, version)
        for _ in range(5):
            engine.step()
        return await asyncio.gather(*requests)

    long, short = scene("KeepServer", script)
    assert long.token_ids == [1, 1, 2, 2, 3, 3, 3, 3, 3] and short.token_ids == [1, 1, 2]
    assert long.extra_fields["version_runs"] == [(2, 1), (2, 2), (5, 3)]
    for output in (long, short):
        assert versions(output) == output.token_ids
        assert output.stop_reason == "completed" and len(output.log_probs) == len(output.token_ids)


def test_keep_pauses_with_the_cache_and_salts_it_by_version(scene):
    async def script(server, engine):
        first = ask(server, "a", 4)
        await settle()
        engine.step()
        await update(server, engine, 2)
        second = ask(server, "b", 1)
        await settle()
        for _ in range(3):
            engine.step()
        await asyncio.gather(first, second)
        return engine

    engine = scene("KeepServer", script)
    assert engine.pauses == [("keep", False)] and not engine.resets
    assert engine.salts == ["weights 1", "weights 2"]


def test_a_request_that_waits_for_its_first_token_begins_again_with_the_new_weights(scene):
    async def script(server, engine):
        engine.room = 1
        requests = [ask(server, "a", 4), ask(server, "b", 2)]
        await settle()
        engine.step()
        await update(server, engine, 2)
        for _ in range(5):
            await settle()
            engine.step()
        return await asyncio.gather(*requests), engine.salts

    (first, second), salts = scene("KeepServer", script)
    assert versions(first) == first.token_ids == [1, 2, 2, 2]
    assert versions(second) == second.token_ids == [2, 2] and second.extra_fields["global_steps"] == 2
    assert salts == ["weights 1", "weights 1", "weights 2"]


def test_a_request_that_comes_during_an_update_waits_for_the_new_weights(scene):
    async def script(server, engine):
        await server.abort_all_requests()
        request = ask(server, "a", 2)
        await settle()
        assert not engine.added
        engine.weights = 2
        await server.set_global_steps(2)
        await server.resume_engine_generation()
        await server.open_submission_gate()
        await settle()
        engine.step(), engine.step()
        return await request, engine.salts

    output, salts = scene("KeepServer", script)
    assert versions(output) == output.token_ids == [2, 2] and salts == ["weights 2"]


def test_an_update_waits_for_requests_on_their_way_into_the_engine(scene):
    """A request that came in after the pause would have the old version's salt, but tokens of the new one."""

    async def script(server, engine):
        request = ask(server, "a", 2)
        await asyncio.sleep(0)  # admitted, not added
        assert not engine.added
        await server.abort_all_requests()
        assert engine.added == 1
        request.cancel()

    scene("KeepServer", script)


def test_a_request_that_never_lands_stops_the_update(scene, monkeypatch):
    from verl_ext.fleet import server as servers

    monkeypatch.setattr(servers, "LANDING_TIMEOUT_S", 0.01)

    async def script(server, engine):
        engine.takes_requests.clear()
        request = ask(server, "a", 2)
        await settle()
        with pytest.raises(TimeoutError, match="1 admitted requests did not reach"):
            await server.abort_all_requests()
        request.cancel()

    scene("KeepServer", script)


def test_drain_lets_requests_end_with_their_weights_and_those_that_wait_begin_with_the_new_ones(scene):
    async def script(server, engine):
        engine.room = 2
        requests = [ask(server, "a", 5), ask(server, "b", 3), ask(server, "c", 2)]
        await settle()
        engine.step()
        await update(server, engine, 2)
        for _ in range(3):
            await settle()
            engine.step()
        return await asyncio.gather(*requests), engine

    outputs, engine = scene("DrainServer", script)
    assert [output.token_ids for output in outputs] == [[1] * 5, [1] * 3, [2] * 2]
    assert [versions(output) for output in outputs] == [[1] * 5, [1] * 3, [2] * 2]
    assert engine.pauses == [("wait", True)] and engine.resets == 1 and set(engine.salts) == {None}


@pytest.mark.parametrize("name", ["FleetServer", "DrainServer", "KeepServer"])
def test_a_server_that_leaves_interrupts_its_requests_and_rejects_others(scene, name):
    async def script(server, engine):
        request = ask(server, "a", 5)
        await settle()
        await server.abort_all_requests(reset_prefix_cache=False, reject_request=True)
        late = await ask(server, "b", 5)
        return [(await request).stop_reason, late.stop_reason], engine

    stops, engine = scene(name, script)
    assert stops == ["aborted", "aborted"] and engine.pauses == [("abort", False)] and engine.added == 1


@pytest.mark.parametrize("where", ["on its way", "in the engine", "as it begins again"])
def test_a_request_that_is_cancelled_leaves_nothing_behind(scene, where):
    async def script(server, engine):
        if where == "on its way":
            engine.takes_requests.clear()
        request = ask(server, "a", 5)
        await settle()
        if where == "as it begins again":
            await server.abort_all_requests()
            await server.set_global_steps(2)
            await server.resume_engine_generation()  # the engine has aborted it, which it has not learned yet
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)
        engine.takes_requests.set()
        assert not len(server.boundaries)
        await update(server, engine, 3)  # waits for no request that is on its way
        again = ask(server, "a", 1)
        await settle()
        engine.step()
        return await again

    output = scene("KeepServer", script)
    assert versions(output) == output.token_ids == [3]


def test_a_dead_engine_does_not_hang_the_update(scene):
    async def script(server, engine):
        engine.reader.cancel()
        engine.errored, engine.dead_error = True, RuntimeError("dead")
        with pytest.raises(RuntimeError, match="dead"):
            await server.resume_engine_generation()

    scene("KeepServer", script)


IMAGES = SimpleNamespace(hf_config=SimpleNamespace(max_position_embeddings=64), processor="images")


@pytest.mark.parametrize("changes", [{"rollout_mode": "hybrid"}, {"model_config": IMAGES}])
def test_a_server_of_another_replica_mode_or_with_images_is_refused(scene, changes):
    with pytest.raises(ValueError, match="Set retool.fleet.weight_update=abort"):
        scene("KeepServer", None, **changes)


def test_ray_can_send_the_servers_to_their_process(cpu_platform):
    import ray

    from verl_ext.fleet import server as servers

    for each in (servers.DrainServer, servers.KeepServer):
        ray.cloudpickle.dumps(ray.remote(each).__ray_metadata__.modified_class)


def test_reward_models_keep_verls_server(cpu_platform, monkeypatch):
    from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMReplica

    from verl_ext.fleet import server as servers

    def init(self, is_reward_model):
        self.is_reward_model, self.is_teacher_model, self.server_class = is_reward_model, False, "verl's"

    monkeypatch.setattr(vLLMReplica, "__init__", init)
    monkeypatch.setattr(vLLMReplica, "__abstractmethods__", frozenset(), raising=False)
    assert servers.KeepReplica(True).server_class == "verl's"
    classes = [each(False).server_class for each in (servers.KeepReplica, servers.DrainReplica)]
    assert [each.__ray_metadata__.class_name for each in classes] == ["KeepServer", "DrainServer"]
