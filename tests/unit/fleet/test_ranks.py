"""A request for a data-parallel rank reaches vLLM's engine with it, through verl's server as it is."""

from types import SimpleNamespace

import pytest

from verl_ext.fleet.ranks import obey_rank, ranks_of

VLLM_S = 180  # vLLM's import


class Engine:
    def __init__(self):
        self.asked = []

    async def add_request(self, request_id, prompt, params, **kwargs):
        self.asked.append((request_id, prompt, params, kwargs))


def servers():
    """A module with a server that does the parts of verl's server that matter here."""

    class Server:
        async def run_server(self, args):
            self.engine = Engine()

        async def generate(self, prompt_ids, sampling_params, request_id, image_data=None, priority=0):
            await self.engine.add_request(
                request_id, prompt_ids, sampling_params, priority=priority, data_parallel_rank=None
            )
            if not prompt_ids:
                raise ValueError("empty")
            return f"answer to {request_id}"

    return SimpleNamespace(vLLMHttpServer=Server)


async def test_the_engine_gets_the_rank_of_the_request_and_of_no_other():
    module = servers()
    obey_rank(module)
    server = module.vLLMHttpServer()
    await server.run_server(None)
    assert await server.generate([1], {}, "a", data_parallel_rank=2, priority=7) == "answer to a"
    assert await server.generate(prompt_ids=[1], sampling_params={}, request_id="a") == "answer to a"
    with pytest.raises(ValueError, match="empty"):
        await server.generate([], {}, "b", None, data_parallel_rank=0)
    await server.generate([1], {}, "b")
    assert [kwargs for *_, kwargs in server.engine.asked] == [
        {"priority": 7, "data_parallel_rank": 2},
        {"priority": 0, "data_parallel_rank": None},
        {"priority": 0, "data_parallel_rank": 0},
        {"priority": 0, "data_parallel_rank": None},
    ]


@pytest.mark.timeout(VLLM_S)
def test_verls_server_and_vllms_engine_have_the_arguments_that_this_uses(cpu_platform):
    import inspect

    pytest.importorskip("vllm", reason="vLLM is not installed")
    from verl.workers.rollout.vllm_rollout import vllm_async_server
    from vllm.v1.engine.async_llm import AsyncLLM

    server = vllm_async_server.vLLMHttpServer
    assert "data_parallel_rank" in inspect.signature(server.generate).parameters  # the hook of verl_ext/__init__.py
    assert "self.config = self._init_config(config)" in inspect.getsource(server.__init__)
    for method in (AsyncLLM.generate, AsyncLLM.add_request):
        assert "data_parallel_rank" in inspect.signature(method).parameters
    source = inspect.getsource(AsyncLLM.generate)
    assert (
        "self.add_request(\n                request_id," in source and "data_parallel_rank=data_parallel_rank" in source
    )


def test_a_server_is_asked_how_many_ranks_it_has(monkeypatch):
    import ray

    config = SimpleNamespace(data_parallel_size=4)
    server = SimpleNamespace(__ray_call__=SimpleNamespace(remote=lambda call: call(SimpleNamespace(config=config))))
    monkeypatch.setattr(ray, "get", lambda answer, timeout: answer)
    assert ranks_of(server) == 4


def test_another_version_of_verl_is_refused(monkeypatch):
    from verl_ext.fleet import ranks

    monkeypatch.setattr(ranks, "VERL", {"verl": "0.9.2"})
    with pytest.raises(RuntimeError, match="0.9.2"):
        obey_rank(servers())
