"""What LeanAgentLoopWorker leaves out of verl's work; its rollouts themselves are tested end to end."""

import pytest
from omegaconf import OmegaConf


@pytest.mark.parametrize(
    ("nodes", "gpus", "tensor_parallel", "expected"),
    [(1, 1, 1, 1), (1, 8, 4, 2), (2, 8, 4, 4), (1, 8, 8, 1)],  # nodes x GPUs / GPUs per server
)
def test_number_of_replicas(nodes: int, gpus: int, tensor_parallel: int, expected: int) -> None:
    from verl_ext.agent_loop.manager import number_of_replicas

    rollout = {"tensor_model_parallel_size": tensor_parallel, "data_parallel_size": 1}
    trainer = {"nnodes": nodes, "n_gpus_per_node": gpus}
    assert (
        number_of_replicas(OmegaConf.create({"trainer": trainer, "actor_rollout_ref": {"rollout": rollout}}))
        == expected
    )


async def test_the_load_balancer_is_asked_once() -> None:
    from verl_ext.agent_loop.manager import skip_load_balancer

    class Client:
        asked: list[str] = []

        async def _acquire_server(self, request_id: str, **extra: object) -> tuple[str, str]:
            self.asked.append(request_id)
            return "server_0", "handle"

        def _release_server(self, server_id: str, request_id: str | None = None) -> None:
            raise AssertionError("nothing was acquired that could be released")

    client = Client()
    skip_load_balancer(client)
    for request_id in "abc":
        assert await client._acquire_server(request_id, prompt_ids=[1]) == ("server_0", "handle")
        client._release_server("server_0", request_id=request_id)
    assert client.asked == ["a"]
