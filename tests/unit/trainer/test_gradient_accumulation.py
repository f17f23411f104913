"""Weights stay gathered between micro-batches if the run has the memory, and the gradients are the same."""

from types import SimpleNamespace

import pytest


@pytest.mark.parametrize(
    ("reshards", "defers", "gathered"),
    [
        (False, True, [True, True, False]),
        (True, True, [False, False, False]),
        (False, False, [False, False, False]),
    ],
)
def test_only_the_last_micro_batch_gives_the_weights_back(cpu_platform, reshards, defers, gathered):
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

    settings = SimpleNamespace(reshard_after_forward=reshards, use_no_sync_for_gradient_accumulation=defers)
    inputs = torch.randn(3, 4, 2, generator=torch.Generator().manual_seed(0))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
        plain = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
        plain.load_state_dict(model.state_dict())
        for module in (*model, model):
            fully_shard(module, mesh=dist.init_device_mesh("cpu", (1,)), reshard_after_forward=reshards)
        engine = SimpleNamespace(module=model, engine_config=settings)
        for step in range(2):  # the second begins where the first has ended
            found = []
            for number, batch in enumerate(inputs):
                with FSDPEngine._gradient_sync_context(engine, is_last_micro_batch=number == 2):
                    model(batch).square().sum().backward()
                found.append(not isinstance(model[0].weight, DTensor))
                plain(batch).square().sum().backward()
            assert found == gathered, f"step {step}"
        for own, expected in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(own.grad.full_tensor(), expected.grad)
    finally:
        dist.destroy_process_group()
