"""Servers that are watched, or fail, while they come and go."""

import asyncio
import itertools
import threading

import pytest
from omegaconf import OmegaConf

from tests.unit.fleet.fleet_scene import wait_until
from tests.unit.fleet.members_scene import call, refused, states
from verl_ext.fleet import members
from verl_ext.fleet.members import Members
from verl_ext.fleet.replicas import in_thread


def test_a_removed_server_that_hangs_returns_its_requests_and_is_killed_on_its_node(world, monkeypatch):
    stopped = []
    monkeypatch.setattr(members, "LEAVE_S", 0.05)
    world.checkpoints.newcomers = []  # it is watched
    watched = Members(world.servers, world.checkpoints, lambda *arguments: stopped.append(arguments))
    replica = world.checkpoints.replicas[1]

    async def hang(reject_request):
        await asyncio.sleep(3600)

    async def give_up():
        stopped.append("handed back")

    replica.abort_all_requests = hang
    replica.server_handle.give_up = call(give_up)
    watched.remove(1)
    wait_until(lambda: len(stopped) == 2)
    assert stopped == ["handed back", (replica, True)]


def test_a_server_that_dies_while_it_is_removed_is_left_to_the_watch(world):
    """The watch stops it and starts another; nothing else may do so as well."""
    replica, world.checkpoints.dead = world.checkpoints.replicas[1], set()
    out = world.router.remove_servers.remote
    world.router.remove_servers = call(lambda names: out(names) and world.checkpoints.dead.add(replica))
    assert refused(world.members.remove, 1).startswith("Server 1 has just died")
    assert replica in world.checkpoints.replicas and world.members.rows()


def test_a_removed_server_that_cannot_be_stopped_is_not_listed_forever(world, caplog):
    def stop(*arguments):
        raise ConnectionError("Ray is busy")

    world.members = Members(world.servers, world.checkpoints, stop)
    world.may_leave.set()
    world.members.remove(0)
    wait_until(lambda: states(world) == {1: "serves"})
    assert "server 0 gets no requests, but its GPUs and processes were not freed" in caplog.text


def test_a_server_stays_if_the_router_does_not_answer(world):
    """Half removed, it would get no requests, and nobody would stop it. The router may act on the request later."""
    asked, get = [], world.ray.get

    def get_in_time(answer, timeout=None):
        asked.append(timeout)
        if len(asked) == 1:
            raise TimeoutError("the router does not answer")
        return get(answer, timeout)

    world.ray.get = get_in_time
    with pytest.raises(TimeoutError):
        world.members.remove(0)
    assert len(world.checkpoints.replicas) == 2 and "10.0.0.1:0" in world.router.load
    world.may_leave.set()
    world.members.remove(0)
    world.members.rows()
    with world.members.weights_change():
        pass
    assert None not in asked


def test_the_only_server_that_answers_stays(world):
    silent, _well = world.checkpoints.replicas
    world.checkpoints.suspected = {silent}
    assert refused(world.members.remove, 1).startswith("Server 1 is the only one that answers")
    world.may_leave.set()
    assert world.members.remove(0).startswith("Server 0 gets no more")


def test_two_servers_that_are_added_at_once_do_not_get_the_same_gpu(world):
    world.free = 1
    world.may_start.clear()
    world.members.add()
    told = refused(world.members.add)
    assert told.startswith("A server needs 1 GPUs, but Ray has 1 free, and 1 starting servers")
    world.may_start.set()
    wait_until(lambda: states(world)[2] == "waits for weights")
    assert world.members.add().startswith("Server 3 is starting")


def test_an_added_server_that_does_not_start_in_time_has_failed(world):
    """The watch says that no server is left only if none is starting."""
    OmegaConf.update(world.servers.config, "retool.fleet.health.wait_s", 0.05)
    world.may_start.clear()
    world.members.add()
    wait_until(lambda: states(world)[2].startswith("did not start: TimeoutError('the server did not start in 0.05 s"))
    world.may_start.set()
    wait_until(lambda: ("free", "gpus 2") in world.log)  # nobody would have it
    with world.members.weights_change():
        assert len(world.checkpoints.replicas) == 2


def test_if_servers_are_watched_a_new_one_joins_like_a_replacement(world):
    """It must not count as having weights before it has them: the watch would route requests to it."""
    watched = world.checkpoints
    watched.lock, watched.numbers, watched.newcomers = threading.RLock(), itertools.count(5), []
    watched.starting = set()
    world.members = Members(world.servers, watched)
    world.may_start.clear()
    world.members.add()
    assert watched.starting == {5}
    world.may_start.set()
    wait_until(lambda: watched.newcomers)
    wait_until(lambda: not watched.starting)
    assert states(world) == {0: "serves", 1: "serves", 5: "waits for weights"}
    # Also one that sits an update out: its address and its weights are reported.
    watched.newcomers.append(sits_out := watched.replicas.pop())
    row = world.members.rows()[1]
    assert (row["state"], row["address"]) == ("waits for weights", sits_out.server_address)
    watched.replicas.append(watched.newcomers.pop())
    with world.members.weights_change():
        assert [each.replica_rank for each in watched.replicas] == [0, 1]
        watched.replicas = [*watched.replicas, watched.newcomers.pop()]  # as FleetCheckpointManager's update
    assert states(world) == {0: "serves", 1: "serves", 5: "serves"}
    assert [each.replica_rank for each in world.servers.rollout_replicas] == [0, 1, 5]
    assert ("join", "10.0.0.1:5") not in world.log, "the watch tells the router"


def test_a_server_that_dies_before_its_first_weights_does_not_stay_in_the_list(world):
    watched = world.checkpoints
    watched.lock, watched.numbers, watched.newcomers, watched.dead = threading.RLock(), itertools.count(5), [], set()
    world.members = Members(world.servers, watched)
    world.members.add()
    wait_until(lambda: watched.newcomers)
    watched.dead.add(watched.newcomers[0])
    assert states(world) == {0: "serves", 1: "serves", 5: "dead"}
    watched.newcomers.clear()  # as FleetCheckpointManager's update, which it does not live to
    assert states(world) == {0: "serves", 1: "serves"}


def test_no_server_leaves_while_the_watch_gives_weights(world):
    world.checkpoints.lock, world.checkpoints.numbers = threading.RLock(), itertools.count(2)
    world.checkpoints.newcomers = []
    world.members = Members(world.servers, world.checkpoints)
    with world.checkpoints.lock:
        removal = in_thread(world.members.remove, 1)
        with pytest.raises(TimeoutError):
            removal.result(0.1)
        assert len(world.checkpoints.replicas) == 2
    assert removal.result(10) and len(world.checkpoints.replicas) == 1
    world.may_leave.set()


def test_a_dead_server_is_listed_as_dead_and_counts_for_nothing(world):
    dead, living = world.checkpoints.replicas
    world.checkpoints.dead = {dead}
    assert states(world) == {0: "dead", 1: "serves"}
    assert refused(world.members.remove, living.replica_rank).startswith("Server 1 is the only one")
    assert refused(world.members.remove, dead.replica_rank) == "There is no server 0. Expected one of [1]."


def test_a_server_can_be_added_after_all_have_died(world):
    world.checkpoints.replicas = []
    world.servers.rollout_config.tensor_model_parallel_size = 8
    assert refused(world.members.add).startswith("A server needs 8 GPUs, but Ray has 4 free.")
    world.free = 8
    assert world.members.add().startswith("Server 2 is starting.")
