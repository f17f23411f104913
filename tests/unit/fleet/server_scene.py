"""A server of ours as verl makes it, around an engine that stands in for vLLM's."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest


@asynccontextmanager
async def serving(patch: pytest.MonkeyPatch, name: str, engine: Any, **changes: Any) -> AsyncIterator[Any]:
    """Yield a server that has weights of step 1 and runs `engine`.

    Args:
        name: of its class.
        changes: of the arguments of verl's `__init__`.
    """
    import ray
    from verl.utils.device import get_visible_devices_keyword
    from verl.workers.config import RolloutConfig
    from verl.workers.rollout.replica import RolloutMode
    from verl.workers.rollout.vllm_rollout import vllm_async_server

    from verl_ext.fleet import server as servers

    async def run_server(self: Any, args: Any) -> None:
        self.engine = engine

    for variable in (get_visible_devices_keyword(), "VERL_REPLICA_RANK", "VERL_RAY_JOB_ID"):
        patch.setenv(variable, "")  # verl sets them
    context = SimpleNamespace(get_job_id=lambda: "01", get_node_id=lambda: "node")
    patch.setattr(ray, "get_runtime_context", lambda: context)
    patch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    patch.setattr(vllm_async_server.vLLMHttpServer, "run_server", run_server)
    length = SimpleNamespace(max_position_embeddings=64)
    arguments = {
        "config": RolloutConfig(name="vllm", max_model_len=64, response_length=32, prompt_length=32),
        "model_config": SimpleNamespace(hf_config=length, processor=None, lora_rank=0, lora={}),
        "rollout_mode": RolloutMode.STANDALONE,
        "replica_rank": 0,
        "node_rank": 0,
        "gpus_per_node": 1,
        "nnodes": 1,
        "workers": [],
        "cuda_visible_devices": "",
    }
    server = getattr(servers, name)(**arguments | changes)
    await server.set_global_steps(1)
    await server.run_server(None)
    try:
        yield server
    finally:
        server.reaper.stdin.close()
        server.reaper.wait()


async def settle() -> None:
    """Let every task continue as far as it can."""
    for _ in range(200):
        await asyncio.sleep(0)
