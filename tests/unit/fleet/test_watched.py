"""verl's server around an engine that dies, with vLLM's own bookkeeping of tokens; the engine's process is a sleep."""

import asyncio
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.fleet.remote import Remote
from tests.unit.fleet.server_scene import serving, settle

pytest.importorskip("vllm", reason="vLLM is not installed")
pytestmark = pytest.mark.timeout(180)  # vLLM's import


class Engine:
    """vLLM's AsyncLLM. `step` samples a token of each request: 100, 101, ...; its log-prob is minus the token."""

    add_request = None  # `FleetServer` wraps it; nothing here calls it

    def __init__(self, process: subprocess.Popen):
        from vllm.v1.engine.output_processor import OutputProcessor

        self.process = process
        self.output_processor = OutputProcessor(None, log_stats=False)
        manager = SimpleNamespace(processes=[process])
        self.engine_core = SimpleNamespace(resources=SimpleNamespace(engine_manager=manager), utility_results={})

    @property
    def errored(self) -> bool:
        return self.process.poll() is not None

    async def generate(self, prompt: Any, sampling_params: Any, request_id: str, **_: Any):
        from vllm.v1.engine import EngineCoreRequest
        from vllm.v1.engine.exceptions import EngineDeadError
        from vllm.v1.engine.output_processor import RequestOutputCollector

        if self.errored:
            raise EngineDeadError()
        name = f"{request_id}-inside"
        ids = prompt["prompt_token_ids"]
        request = EngineCoreRequest(name, ids, None, sampling_params, None, 0.0, None, None, None)
        request.external_req_id = request_id
        queue = RequestOutputCollector(sampling_params.output_kind, name)
        self.output_processor.add_request(request, None, queue=queue)
        while True:
            output = await queue.get()
            yield output
            if output.finished:
                return

    def step(self) -> None:
        import numpy
        from vllm.v1.engine import EngineCoreOutput, FinishReason
        from vllm.v1.outputs import LogprobsLists

        outputs = []
        for name, state in self.output_processor.request_states.items():
            token = 100 + state.detokenizer.num_output_tokens()
            row = numpy.array([[token]])
            logprobs = LogprobsLists(row, -row.astype(float), numpy.array([1]))
            is_last = state.detokenizer.num_output_tokens() + 1 == state.max_tokens_param
            reason = FinishReason.LENGTH if is_last else None
            outputs.append(EngineCoreOutput(name, [token], new_logprobs=logprobs, finish_reason=reason))
        self.output_processor.process_outputs(outputs, 0.0, None)

    async def watch(self) -> None:
        """Like vLLM's monitor and output handler: all requests get the error once the process is gone."""
        from vllm.v1.engine.exceptions import EngineDeadError

        while not self.errored:
            await asyncio.sleep(0.01)
        self.output_processor.propagate_error(EngineDeadError())

    async def is_paused(self) -> bool:
        answer = asyncio.get_running_loop().create_future()
        self.engine_core.utility_results[len(self.engine_core.utility_results)] = answer
        return await answer

    def answer(self) -> None:
        for each in self.engine_core.utility_results.values():
            each.set_result(False)
        self.engine_core.utility_results.clear()


@pytest.fixture
def scene(cpu_platform, monkeypatch):
    """Run a coroutine function with a server and its engine, whose process a test may kill."""

    def play(script: Any, name: str = "WatchedServer") -> Any:
        process = subprocess.Popen(["sh", "-c", "sleep 60 & sleep 60"], start_new_session=True)

        async def run() -> Any:
            engine = Engine(process)
            watcher = asyncio.ensure_future(engine.watch())
            try:
                async with serving(monkeypatch, name, engine) as server:
                    return await asyncio.wait_for(script(server, engine), 20)
            finally:
                watcher.cancel()

        try:
            return asyncio.run(run())
        finally:
            process.kill()
            process.wait()

    return play


def ask(server: Any, name: str, tokens: int) -> asyncio.Future:
    from vllm.sampling_params import RequestOutputKind

    params = {"max_tokens": tokens, "logprobs": True, "output_kind": RequestOutputKind.FINAL_ONLY}
    return asyncio.ensure_future(server.generate([5, 6], params, request_id=name))


async def watch(server: Any, engine: Engine) -> None:
    """One heartbeat of it."""
    beat = asyncio.ensure_future(server.beat())
    await settle()
    engine.answer()
    await beat


@pytest.mark.parametrize("name", ["WatchedServer", "FleetServer", "DrainServer", "KeepServer"])
def test_requests_of_a_killed_engine_return_with_their_tokens_and_log_probs(scene, name):
    async def script(server, engine):
        await watch(server, engine)
        requests = [ask(server, "long", 9), ask(server, "short", 2)]
        await settle()
        for _ in range(3):
            engine.step()
        engine.process.kill()
        return await asyncio.gather(*requests)

    long, short = scene(script, name)
    assert long.token_ids == [100, 101, 102] and long.log_probs == [-100.0, -101.0, -102.0]
    assert long.stop_reason == "aborted" and long.extra_fields["server_failed"]
    assert long.extra_fields["global_steps"] == 1
    if name != "WatchedServer":
        assert long.extra_fields["version_runs"] == [(3, 1)]
    assert short.token_ids == [100, 101] and short.stop_reason == "completed"
    assert "server_failed" not in short.extra_fields


@pytest.mark.parametrize("method", ["update_weights_from_ipc", "another"])
def test_a_server_that_could_not_load_its_weights_says_so_in_its_heartbeat(scene, method):
    """vLLM's engine continues, but its worker does not answer the sender of the weights."""

    async def script(server, engine):
        async def collective_rpc(**_: Any) -> None:
            raise ValueError("CUDA out of memory")

        engine.collective_rpc = collective_rpc
        with pytest.raises(ValueError, match="CUDA out of memory"):
            await server.collective_rpc(method, kwargs={})
        if method != "another":
            with pytest.raises(ValueError, match="CUDA out of memory"):
                await server.beat()
        else:
            await watch(server, engine)

    scene(script)


def test_a_server_gives_up_when_its_requests_have_their_answers(scene, monkeypatch):
    """It takes long to build those of thousands of requests."""
    from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer

    generate, may_answer = vLLMHttpServer.generate, asyncio.Event()

    async def slow(self: Any, *args: Any, **kwargs: Any) -> Any:
        answer = await generate(self, *args, **kwargs)
        await may_answer.wait()
        return answer

    monkeypatch.setattr(vLLMHttpServer, "generate", slow)

    async def script(server, engine):
        await watch(server, engine)
        request = ask(server, "long", 9)
        await settle()
        engine.step()
        gives_up = asyncio.ensure_future(server.give_up())
        while not engine.errored:
            await asyncio.sleep(0.01)
        assert not (await asyncio.wait([gives_up], timeout=0.2))[0]
        may_answer.set()
        await gives_up
        assert (await request).token_ids == [100]

    scene(script)


def test_a_request_that_had_no_token_or_comes_too_late_returns_empty(scene):
    async def script(server, engine):
        await watch(server, engine)
        request = ask(server, "early", 9)
        await settle()
        engine.process.kill()
        return await request, await ask(server, "late", 9)

    for output in scene(script):
        assert output.token_ids == [] and output.stop_reason == "aborted" and output.extra_fields["server_failed"]


def test_without_a_watch_verls_own_client_asks_no_dead_engine_again(scene):
    """It takes `aborted` for an update under way, and asks the same server again once a second."""
    from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient
    from verl.workers.rollout.router import GlobalRequestLoadBalancer
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.exceptions import EngineDeadError

    async def script(server, engine):
        rollout = SimpleNamespace(name="vllm", full_determinism=False, response_length=99)
        config = SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=rollout))
        balancer = Remote(GlobalRequestLoadBalancer({"a": Remote(server)}))
        client = FullyAsyncLLMServerClient(config=config, load_balancer_handle=balancer)
        params = {"max_tokens": 9, "logprobs": True, "output_kind": RequestOutputKind.FINAL_ONLY}
        turn = asyncio.ensure_future(client.generate("a", prompt_ids=[5, 6], sampling_params=params))
        await settle()
        engine.step()
        engine.process.kill()
        for asked in (turn, client.generate("b", prompt_ids=[5, 6], sampling_params=params)):
            with pytest.raises(EngineDeadError):
                await asyncio.wait_for(asked, 5)

    scene(script, "FleetServer")


def test_an_engine_ends_with_the_process_of_its_server(scene):
    async def script(server, engine):
        server.reaper.stdin.close()  # as if the process were killed
        assert await asyncio.to_thread(engine.process.wait, 10) == -9

    scene(script)


def test_a_process_with_the_pid_of_an_ended_engine_is_not_killed(cpu_platform, monkeypatch):
    from verl_ext.fleet import watched

    engine, stranger = (subprocess.Popen(["sleep", "60"]) for _ in range(2))
    read = Path.read_text  # the engine was another process, which began at 17 ticks

    def began_earlier(self: Path, *args: Any) -> str:
        text = read(self, *args)
        return text if str(stranger.pid) not in str(self) else f"{stranger.pid} (a) b) S {'0 ' * 18}17 0"

    monkeypatch.setattr(Path, "read_text", began_earlier)
    reaper = watched.start_reaper([stranger.pid, engine.pid])
    try:
        reaper.stdin.close()
        assert engine.wait(10) == -9 and reaper.wait(10) == 0 and stranger.poll() is None
    finally:
        for each in (engine, stranger):
            each.kill()
            each.wait()


def test_the_heartbeat_goes_through_the_core_and_tells_a_dead_engine(scene):
    from vllm.v1.engine.exceptions import EngineDeadError

    async def script(server, engine):
        beat = asyncio.ensure_future(server.beat())
        await settle()
        assert not beat.done()  # an engine that was stopped leaves it so
        engine.answer()
        await beat
        engine.process.kill()
        engine.process.wait()
        with pytest.raises(EngineDeadError):
            await server.beat()

    scene(script)


def test_a_heartbeat_under_way_ends_when_the_engine_dies_under_it(scene):
    from vllm.v1.engine.exceptions import EngineDeadError

    async def script(server, engine):
        beat = asyncio.ensure_future(server.beat())
        await settle()
        engine.process.kill()
        with pytest.raises(EngineDeadError):
            await asyncio.wait_for(beat, 5)

    scene(script)


def test_a_server_that_is_given_up_kills_its_engine_and_all_below_it_and_returns_every_request(scene):
    import psutil

    async def script(server, engine):
        running = ask(server, "running", 9)
        await settle()
        engine.step()
        server._submission_paused = True  # an update is under way
        server._resume_event.clear()
        waiting, hanging = ask(server, "waiting", 9), asyncio.ensure_future(server.beat())
        await settle()
        async with asyncio.timeout(20):  # its shell may be slow to start them
            while len(below := psutil.Process(engine.process.pid).children()) < 2:
                await asyncio.sleep(0.01)
        engine.process.send_signal(19)  # SIGSTOP: it hangs
        await server.give_up()
        outputs = await asyncio.gather(running, waiting)
        with pytest.raises(Exception, match="EngineCore encountered an issue"):
            await hanging
        _, alive = psutil.wait_procs(below, timeout=5)
        assert not alive and engine.errored
        return outputs

    running, waiting = scene(script)
    assert running.token_ids == [100] and running.extra_fields["server_failed"]
    assert waiting.token_ids == [] and waiting.extra_fields["server_failed"]


def test_an_abort_of_a_server_that_lives_is_verls(scene):
    from vllm.v1.engine import FinishReason

    async def script(server, engine):
        request = ask(server, "a", 9)
        await settle()
        engine.step()
        (state,) = engine.output_processor.request_states.values()
        state.queue.put(state.make_request_output([], None, FinishReason.ABORT, None))
        return await request

    output = scene(script)
    assert output.stop_reason == "aborted" and "server_failed" not in output.extra_fields
