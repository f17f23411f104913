"""A request for one data-parallel rank of a vLLM server: how the client names it, and how the server obeys.

verl 0.9.1 leaves the rank to vLLM, which takes the least loaded one, where a rollout's next turn may find no cache.
"""

from dataclasses import dataclass
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

from verl_ext.versions import VERL, require_versions


@dataclass(frozen=True)
class RankHandle:
    """A server's actor handle as far as verl's client uses it (llm_server.py:133), for one rank."""

    server: Any
    rank: int

    @property
    def generate(self) -> SimpleNamespace:
        return SimpleNamespace(remote=partial(self.server.generate.remote, data_parallel_rank=self.rank))


def ranks_of(server: Any) -> int:
    """Return the number of data-parallel ranks of an actor handle's server. Its whole config would import verl here.

    Raises:
        ray.exceptions.RayError: it does not answer within a minute.
    """
    import ray

    return ray.get(server.__ray_call__.remote(lambda server: server.config.data_parallel_size), timeout=60)


def obey_rank(servers: ModuleType) -> None:
    """Pass the rank on in verl/workers/rollout/vllm_rollout/vllm_async_server.py, `run_server`, `generate` (0.9.1)."""
    require_versions(VERL, "verl_ext/fleet/ranks.py")
    server = servers.vLLMHttpServer
    run_server, generate = server.run_server, server.generate

    async def run_server_of_ranks(self: Any, args: Any) -> None:
        await run_server(self, args)
        self._rank_of = {}  # request -> rank
        add_request = self.engine.add_request

        async def add_request_on_rank(request_id: str, *rest: Any, **more: Any) -> Any:
            if request_id in self._rank_of:
                more["data_parallel_rank"] = self._rank_of[request_id]
            return await add_request(request_id, *rest, **more)

        self.engine.add_request = add_request_on_rank

    async def generate_on_rank(
        self: Any,
        prompt_ids: Any,
        sampling_params: Any,
        request_id: str,
        *rest: Any,
        data_parallel_rank: int | None = None,
        **more: Any,
    ) -> Any:
        if data_parallel_rank is None:
            return await generate(self, prompt_ids, sampling_params, request_id, *rest, **more)
        self._rank_of[request_id] = data_parallel_rank
        try:
            return await generate(self, prompt_ids, sampling_params, request_id, *rest, **more)
        finally:
            self._rank_of.pop(request_id, None)

    server.run_server, server.generate = run_server_of_ranks, generate_on_rank
