"""The simulated step against real ones, whose storages are counted on a CPU, and the formula against the simulation."""

import dataclasses
import json
import os
import subprocess
import sys
import textwrap

import pytest

from verl_ext.memory.estimate import Plan, estimate
from verl_ext.memory.shape import ModelShape, read_shape
from verl_ext.settings import REPO

TINY = ModelShape("qwen2", 3, 128, 512, 4, 2, 32, 4096, False)
TIED = ModelShape("qwen3", 4, 192, 384, 6, 2, 32, 512, True)

# Real tensors -------------------------------------------------------------------------------------------------------

REAL = {
    "one-rank": Plan(TINY, tokens=512),
    "two-ranks": Plan(TIED, tokens=512, ranks=2, ulysses=2, fused=False),
    "no-checkpointing": Plan(TIED, tokens=512, ranks=2, checkpointing=False),
    "entropy": Plan(TINY, tokens=512, ranks=2, keeps_logits=True),
}
# With a quarter of these tokens the peak is where the embedding's gradient is sent; there both differ by up to 10%.
# The peaks of two phases, of each plan: bytes of all storages that are alive after an operation. One process imports
# torch and verl, and forks the ranks.
MEASURE = """
    import json, os, sys, weakref, torch, torch.distributed as dist
    from torch.distributed.tensor import DTensor
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves
    import verl.models.transformers.monkey_patch, verl.utils.fsdp_utils
    import transformers.models.qwen2, transformers.models.qwen3
    from verl_ext.memory.estimate import Plan
    from verl_ext.memory.shape import ModelShape
    from verl_ext.memory.simulate import build, forward_backward, update

    class Alive(TorchDispatchMode):
        storages, peak = {}, 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if any(issubclass(kind, DTensor) for kind in types):
                return NotImplemented
            result = func(*args, **(kwargs or {}))
            for each in tree_leaves(result):
                if isinstance(each, torch.Tensor) and each.device.type == "cpu" and type(each) is not DTensor:
                    storage = each.untyped_storage()
                    self.storages[id(storage)] = weakref.ref(storage)
            alive = [storage for each in self.storages.values() if (storage := each()) is not None]
            self.storages = {id(storage): weakref.ref(storage) for storage in alive}
            self.peak = max(self.peak, sum(storage.nbytes() for storage in alive))
            return result

    def measure(name, rank, options):
        plan = Plan(**options | {"shape": ModelShape(**options["shape"])})
        store = f"file://{folder}/{name}.store"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=plan.ranks)
        with Alive() as alive:
            model, optimizer = build(plan)
            forward_backward(model, plan, is_last=True)
            update(model, optimizer)
            alive.peak = 0
            for is_last in (False, True):
                forward_backward(model, plan, is_last=is_last)
            backward, alive.peak = alive.peak, 0
            update(model, optimizer)
        if rank == 0:
            with open(f"{folder}/{name}.json", "w") as file:
                json.dump({"backward": backward, "update": alive.peak}, file)
        dist.destroy_process_group()

    folder, plans = sys.argv[1], json.loads(sys.argv[2])
    torch.set_num_threads(1)
    for name, options in plans.items():
        ranks = []
        for rank in range(options["ranks"]):
            ranks.append(os.fork())
            if not ranks[-1]:
                try:
                    measure(name, rank, options)
                    os._exit(0)
                except BaseException:
                    import traceback
                    traceback.print_exc()
                    os._exit(1)
        assert [os.waitpid(each, 0)[1] for each in ranks] == [0] * len(ranks), name
"""


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Name of a plan -> {phase: bytes of rank 0}."""
    folder = tmp_path_factory.mktemp("measured")
    plans = json.dumps({name: dataclasses.asdict(plan) for name, plan in REAL.items()})
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", textwrap.dedent(MEASURE), str(folder), plans]
    subprocess.run(command, cwd=REPO, env=environment, check=True, timeout=150)
    return {name: json.loads((folder / f"{name}.json").read_text()) for name in REAL}


@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", REAL)
def test_simulation_agrees_with_what_is_allocated_on_a_cpu(name, measured):
    from verl_ext.memory.simulate import simulate

    simulated = simulate(REAL[name])
    assert simulated.backward.total == pytest.approx(measured[name]["backward"], rel=0.03)
    assert simulated.update.total == pytest.approx(measured[name]["update"], rel=0.03)


# The formula --------------------------------------------------------------------------------------------------------

HALF_B = ModelShape("qwen2", 24, 896, 4864, 14, 2, 64, 151936, True)
FOUR_B = read_shape("Qwen/Qwen3-4B-Instruct-2507")
SEVEN_B = read_shape("Qwen/Qwen2.5-7B-Instruct")
BIG = read_shape("Qwen/Qwen2.5-32B-Instruct")
BIGGER = ModelShape("qwen2", 80, 8192, 29568, 64, 8, 128, 152064, False)  # 72B

PLANS = {  # -> where the peak is
    "0.5B": (Plan(HALF_B, tokens=8192), "of the logits"),
    "4B, foreach": (Plan(FOUR_B, tokens=10_240, fused=False), "of the optimizer's step (foreach)"),
    "7B, SP 4": (Plan(SEVEN_B, tokens=18_432, ranks=4, ulysses=4), "of a layer's backward pass"),
    "32B": (Plan(BIG, tokens=18_432, ranks=8), "of a layer's backward pass"),
    "72B, SP 4": (Plan(BIGGER, tokens=16_384, ranks=16, ulysses=4), "of a layer's backward pass"),
    "entropy": (Plan(HALF_B, tokens=8192, keeps_logits=True), "of the logits"),
    "no checkpointing": (Plan(SEVEN_B, tokens=2048, ranks=4, checkpointing=False), "of a layer's backward pass"),
    "few tokens": (Plan(HALF_B, tokens=256, ranks=2), "of the embedding's gradient"),
    "bf16 weights": (Plan(SEVEN_B, tokens=8192, ranks=4, weight_bytes=2), "of a layer's backward pass"),
    "deferred": (Plan(SEVEN_B, tokens=8192, ranks=4, defers_gradients=True), "of a layer's backward pass"),
}


@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", PLANS)
def test_estimate_agrees_with_the_simulation(name):
    from verl_ext.memory.simulate import simulate

    plan, where = PLANS[name]
    simulated, estimated = simulate(plan), estimate(plan)
    held = plan.weight_bytes * plan.shape.parameters / plan.ranks
    assert simulated.peak.weights == pytest.approx(held, rel=1e-3)
    assert simulated.peak.optimizer == pytest.approx(2 * held, rel=1e-3)
    assert (simulated.peak is simulated.update) == where.startswith("of the optimizer")
    assert where in estimated.terms["training"]
    assert estimated.training == pytest.approx(simulated.peak.total, rel=0.03)


@pytest.mark.timeout(120)
def test_foreach_takes_four_bytes_a_parameter_at_the_step_and_fused_none():
    from verl_ext.memory.simulate import simulate

    foreach, fused = (simulate(Plan(TINY, tokens=64, ranks=4, fused=fused)).update for fused in (False, True))
    assert foreach.temporary == pytest.approx(4 * TINY.parameters / 4, rel=0.01)
    assert fused.temporary < 0.01 * foreach.temporary


# AdamW's fused kernel, which all runs of configs/ ask for -------------------------------------------------------------


@pytest.fixture
def one_rank():
    import torch.distributed as dist

    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


@pytest.mark.timeout(120)
def test_fused_adamw_takes_fsdp2_offload_and_resume(one_rank, tmp_path):
    """Real tensors, verl's own functions; what moves between host and GPU stays where it is on a CPU."""
    import torch
    from verl.utils.config import omega_conf_to_dataclass
    from verl.utils.fsdp_utils import load_fsdp_optimizer, offload_fsdp_optimizer
    from verl.workers.config.optimizer import build_optimizer

    from verl_ext.memory.simulate import build
    from verl_ext.settings import compose_run

    config = omega_conf_to_dataclass(compose_run("qwen2-32b_dapo").actor_rollout_ref.actor.optim)

    def fresh(**overrides) -> tuple:
        torch.manual_seed(0)
        model, _ = build(Plan(TINY, tokens=8))
        if overrides:
            return model, torch.optim.AdamW(model.parameters(), config.lr, config.betas, weight_decay=0.01, **overrides)
        return model, build_optimizer(model.parameters(), config)

    def take_step(model, optimizer, number: int) -> None:
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 0.1 * number)
        optimizer.step()

    def weights(model) -> list:
        return [parameter.full_tensor().detach().clone() for parameter in model.parameters()]

    model, optimizer = fresh()
    assert optimizer.defaults["fused"] is True
    for number in (1, 2, 3):
        take_step(model, optimizer, number)
    whole = weights(model)

    model, optimizer = fresh()
    for number in (1, 2):
        take_step(model, optimizer, number)
        offload_fsdp_optimizer(optimizer)
        load_fsdp_optimizer(optimizer, "cpu")
    torch.save((model.state_dict(), optimizer.state_dict()), tmp_path / "checkpoint.pt")
    model, optimizer = fresh()
    of_model, of_optimizer = torch.load(tmp_path / "checkpoint.pt", weights_only=False)
    model.load_state_dict(of_model)
    optimizer.load_state_dict(of_optimizer)
    take_step(model, optimizer, 3)
    assert all(torch.equal(one, other) for one, other in zip(whole, weights(model), strict=True))

    model, optimizer = fresh(foreach=True)
    for number in (1, 2, 3):
        take_step(model, optimizer, number)
    assert all(torch.allclose(one, other, atol=1e-7) for one, other in zip(whole, weights(model), strict=True))
