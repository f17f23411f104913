"""verl's managers of two made-up servers, its router, and Ray, for `Members`."""

import asyncio
import threading
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from verl_ext.fleet import commands


def call(function):
    """A method of an actor's handle; `ray.get` of its answer is the answer."""
    return SimpleNamespace(remote=function)


class Replica:
    world_size = 1

    def __init__(self, replica_rank, world, **arguments):
        self.replica_rank, self.world, self.arguments = replica_rank, world, arguments
        self.resource_pool = self.server_address = self.server_handle = None
        self.servers, self.workers = [], []

    async def init_standalone(self):
        self.world.log.append(("start", self.replica_rank))
        self.resource_pool = SimpleNamespace(pgs=[Group(f"gpus {self.replica_rank}")])
        self.workers = [f"worker {self.replica_rank}"]
        assert self.world.may_start.wait(10)
        if self.world.is_broken:
            raise RuntimeError("vLLM says no")
        self.server_address = f"10.0.0.1:{self.replica_rank}"
        server = SimpleNamespace(global_steps=self.world.step, name=f"server {self.replica_rank}")
        self.server_handle = SimpleNamespace(__ray_call__=call(lambda function: function(server)))
        self.servers = [server.name]

    async def abort_all_requests(self, reject_request=False):
        self.world.log.append(("abort", self.replica_rank, reject_request))
        assert self.world.may_leave.wait(10)


class Group(str):
    """A placement group, known by its name."""

    @property
    def id(self):
        return SimpleNamespace(hex=lambda: str(self))


class Router:
    def __init__(self, world):
        self.load = {}
        self.add_servers = call(lambda servers: world.log.append(("join", *servers)) or self.load.update(servers))
        self.remove_servers = call(lambda names: world.log.append(("out", *names)) or [self.load.pop(n) for n in names])
        self.get_status = call(lambda: {"servers": dict.fromkeys(self.load, 3)})


def make_world(monkeypatch):
    """Two servers, with verl's managers, which at first share one list, as in verl."""
    from verl_ext.fleet import members, replicas

    world = SimpleNamespace(log=[], step=7, is_broken=False, free=4, late=[])
    world.may_start, world.may_leave = threading.Event(), threading.Event()
    world.may_start.set()

    def free(group):
        world.log.append(("free", group))
        world.late += [group] * 2  # Ray takes a GPU back some looks later

    def resources():
        held = {f"GPU_group_0_{each}": 1.0 for each in world.late}
        if world.late and world.late.pop() not in world.late:
            world.free += 1
        return held

    fake_ray = SimpleNamespace(
        get=lambda answer, timeout=None: answer,
        kill=lambda actor: world.log.append(("kill", actor)),
        available_resources=lambda: {"GPU": world.free},
        cluster_resources=resources,
        util=SimpleNamespace(remove_placement_group=free),
        exceptions=members.ray.exceptions,
    )
    monkeypatch.setattr(members, "ray", fake_ray)
    monkeypatch.setattr(replicas, "ray", fake_ray)
    monkeypatch.setattr(members, "GRACE_S", 0)
    monkeypatch.setattr(commands, "EVERY_S", 0.02)
    there = [Replica(number, world) for number in range(2)]
    for replica in there:
        asyncio.run(replica.init_standalone())
    world.router = Router(world)
    world.router.load = {each.server_address: each.server_handle for each in there}
    one = dict.fromkeys(("tensor_model_parallel_size", "data_parallel_size", "pipeline_model_parallel_size"), 1)
    engine = {"backend": "shared_file", "engine_kwargs": {}}
    world.servers = SimpleNamespace(
        config=OmegaConf.create({"actor_rollout_ref": {"rollout": {"checkpoint_engine": engine}}}),
        rollout_replicas=there,
        global_load_balancer=world.router,
        rollout_config=SimpleNamespace(n_gpus_per_node=8, **one),
        model_config="model",
        rollout_replica_class=lambda **arguments: Replica(world=world, **arguments),
    )
    world.checkpoints = SimpleNamespace(replicas=there)
    world.log.clear()
    world.members = members.Members(world.servers, world.checkpoints)
    world.ray = fake_ray
    return world


def states(world):
    return {row["server"]: row["state"] for row in world.members.rows()}


def as_the_doctors(settings):
    """`get` of what refuses a run: null is absent."""

    def get(key, default=None):
        value = settings.get(key)
        return default if value is None else value

    return get


def refused(function, *arguments):
    with pytest.raises(commands.Refused) as error:
        function(*arguments)
    return str(error.value)
