"""Servers that come and go: what verl's managers, its router and the commands learn. Actors are fakes."""

import threading
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from tests.unit.fleet.fleet_scene import wait_until
from tests.unit.fleet.members_scene import call, refused, states
from verl_ext.fleet import commands
from verl_ext.fleet.members import Members
from verl_ext.fleet.modes import IN_SERVER


def test_servers_are_listed_with_their_load_and_their_weights(world):
    row = {"server": 1, "address": "10.0.0.1:1", "state": "serves", "ranks": [3], "requests": 3, "version": 7}
    assert world.members.rows()[1] == row
    ranks = {f"10.0.0.1:{server}/{rank}": rank for server in range(2) for rank in range(4)}
    world.router.get_status = call(lambda: {"servers": {}, "slots": ranks})
    assert world.members.rows()[1] == row | {"ranks": [0, 1, 2, 3], "requests": 6}


def test_with_agent_loops_in_the_server_the_router_knows_no_load_and_no_server_may_join(world):
    manager = "actor_rollout_ref.rollout.agent.agent_loop_manager_class"
    OmegaConf.update(world.servers.config, manager, IN_SERVER)
    members = Members(world.servers, world.checkpoints)
    assert [(row["ranks"], row["requests"]) for row in members.rows()] == [([], None)] * 2
    with pytest.raises(commands.Refused, match="never ask a router. Set it to .*LeanAgentLoopManager"):
        members.add()


def test_a_server_that_does_not_answer_is_still_listed(world):
    import ray

    def silent(function):
        raise ray.exceptions.GetTimeoutError("no")

    world.checkpoints.replicas[0].server_handle = SimpleNamespace(__ray_call__=call(silent))
    assert [row["version"] for row in world.members.rows()] == [None, 7]


def test_a_server_that_is_removed_gets_no_request_before_it_is_stopped_and_its_gpus_are_free(world):
    told = world.members.remove(0)
    assert told.startswith("Server 0 gets no more requests")
    assert world.log[0] == ("out", "10.0.0.1:0")
    assert [each.replica_rank for each in world.checkpoints.replicas] == [1]
    assert world.servers.server_addresses == ["10.0.0.1:1"] and world.servers.rollout_replicas[0].replica_rank == 1
    assert states(world) == {0: "leaves", 1: "serves"}
    assert [row["version"] for row in world.members.rows()] == [7, 7]
    assert not [entry for entry in world.log if entry[0] == "kill"]  # its requests have not ended
    world.may_leave.set()
    wait_until(lambda: states(world) == {1: "serves"})
    assert world.log[1:] == [("abort", 0, True), ("kill", "server 0"), ("kill", "worker 0"), ("free", "gpus 0")]
    assert world.free == 5 and not world.late  # only once Ray says so


def test_a_dead_server_is_removed_too(world):
    async def dead(reject_request):
        raise RuntimeError("its engine is dead")

    world.checkpoints.replicas[0].abort_all_requests = dead
    world.members.remove(0)
    wait_until(lambda: states(world) == {1: "serves"})
    assert ("kill", "server 0") in world.log


def test_the_last_server_stays(world):
    world.may_leave.set()
    world.members.remove(0)
    assert refused(world.members.remove, 1).startswith("Server 1 is the only one")
    assert refused(world.members.remove, 0) == "There is no server 0. Expected one of [1]."
    assert "10.0.0.1:1" in world.router.load


def test_a_server_that_is_added_joins_with_the_next_weights_and_not_before(world):
    world.may_start.clear()
    assert world.members.add().startswith("Server 2 is starting.")
    wait_until(lambda: ("start", 2) in world.log)
    assert states(world)[2] == "starts"
    with world.members.weights_change():
        assert len(world.checkpoints.replicas) == 2  # it is not ready
    world.may_start.set()
    wait_until(lambda: states(world)[2] == "waits for weights")
    assert len(world.router.load) == 2
    with world.members.weights_change():
        assert [each.replica_rank for each in world.checkpoints.replicas] == [0, 1, 2]
        assert len(world.router.load) == 2  # it has no weights yet
        assert states(world)[2] == "waits for weights" and len(world.members.rows()) == 3
    assert world.log[-1] == ("join", "10.0.0.1:2")
    assert states(world) == {0: "serves", 1: "serves", 2: "serves"}
    assert world.servers.server_addresses[2] == "10.0.0.1:2" and len(world.servers.server_handles) == 3
    assert world.checkpoints.replicas[2].arguments == {
        "config": world.servers.rollout_config,
        "model_config": "model",
        "gpus_per_node": 8,
    }
    with world.members.weights_change():
        assert len(world.checkpoints.replicas) == 3
    assert world.log.count(("join", "10.0.0.1:2")) == 1


def test_no_number_is_given_twice(world):
    world.may_leave.set()
    world.members.remove(1)
    assert world.members.add().startswith("Server 2 ")
    assert world.members.add().startswith("Server 3 ")


def test_a_server_for_which_there_is_no_gpu_is_refused(world):
    world.free = 0
    assert refused(world.members.add).startswith("A server needs 1 GPUs, but Ray has 0 free.")
    assert states(world) == {0: "serves", 1: "serves"}


def test_a_server_that_does_not_start_is_reported_and_holds_nothing(world):
    world.is_broken = True
    world.members.add()
    wait_until(lambda: states(world)[2].startswith("did not start: RuntimeError('vLLM says no')"))
    assert world.log == [("start", 2), ("kill", "worker 2"), ("free", "gpus 2")]
    with world.members.weights_change():
        assert len(world.checkpoints.replicas) == 2


def test_servers_do_not_leave_while_weights_change(world):
    world.may_leave.set()
    with world.members.weights_change():
        thread = threading.Thread(target=world.members.remove, args=(0,))
        thread.start()
        thread.join(0.2)
        assert thread.is_alive() and len(world.checkpoints.replicas) == 2 and world.log == []
    thread.join()
    assert len(world.checkpoints.replicas) == 1


def test_commands_are_obeyed_while_the_run_continues_and_failures_are_reported(world, tmp_path):
    world.may_leave.set()
    (tmp_path / commands.FOLDER).mkdir()
    (tmp_path / commands.FOLDER / "1.request.json").write_text('["remove", "1"]')  # to an earlier start of the run
    with world.members.obeying(tmp_path):
        assert [row["server"] for row in commands.ask(tmp_path, ["list"])] == [0, 1]
        assert commands.ask(tmp_path, ["remove", "0"]).startswith("Server 0 gets no more")
        for words, why in (
            (["remove", "0"], "There is no server 0"),
            (["dance"], "Expected list, add, or remove with a number; got"),
            (["remove", "all"], "failed: ValueError"),
        ):
            with pytest.raises(commands.Refused, match=why):
                commands.ask(tmp_path, words)
        assert commands.ask(tmp_path, ["add"]).startswith("Server 2 is starting")
    with pytest.raises(commands.NoAnswer):
        commands.ask(tmp_path, ["list"], take_s=0.2)


def test_a_command_that_waits_for_an_update_delays_no_other(world, tmp_path):
    world.may_leave.set()
    with world.members.obeying(tmp_path), world.members.weights_change():
        with pytest.raises(commands.NoAnswer, match="did not answer"):
            commands.ask(tmp_path, ["remove", "0"], answer_s=0.2)
        assert [row["server"] for row in commands.ask(tmp_path, ["list"], answer_s=30)] == [0, 1]
    wait_until(lambda: [*states(world)] == [1])  # done after the update, although nobody waits


def test_commands_are_obeyed_after_one_whose_answer_a_full_disk_refused(world, tmp_path, monkeypatch, caplog):
    write, is_full = commands.durable.write_text, [True]

    def write_text(path, text):
        if is_full[0] and path.name.endswith(".answer.json"):
            raise OSError(28, "No space left on device")
        write(path, text)

    monkeypatch.setattr(commands.durable, "write_text", write_text)
    with world.members.obeying(tmp_path):
        with pytest.raises(commands.NoAnswer, match="did not answer"):
            commands.ask(tmp_path, ["list"], answer_s=1.5)
        assert "the answer to ['list'] could not be written" in caplog.text
        is_full[0] = False
        assert len(commands.ask(tmp_path, ["list"])) == 2


def test_what_this_takes_of_verl_is_there(cpu_platform):
    import inspect

    from verl.checkpoint_engine import CheckpointEngineManager
    from verl.workers.rollout.llm_server import LLMServerManager
    from verl.workers.rollout.replica import RolloutReplica

    assert "self.rollout_replica_class(" in inspect.getsource(LLMServerManager._initialize_llm_servers)
    assert "gpus_per_node=self.rollout_config.n_gpus_per_node" in inspect.getsource(LLMServerManager)
    assert "for replica in self.replicas" in inspect.getsource(CheckpointEngineManager.update_weights)
    assert hasattr(RolloutReplica, "init_standalone") and hasattr(RolloutReplica, "server_handle")


@pytest.mark.parametrize(
    ("backend", "kwargs", "why"),
    [
        ("nccl", {}, "nccl keeps the group of its first update"),
        ("nccl", {"nccl": {"rebuild_group": True}}, None),
        ("delta_sharded", {"delta_sharded": {"rebuild_group": True}}, "lacks the weights"),
    ],
)
def test_no_server_joins_or_leaves_if_weights_would_not_follow(world, backend, kwargs, why):
    from verl_ext.fleet.members import Members

    engine = {"backend": backend, "engine_kwargs": kwargs}
    world.servers.config = OmegaConf.create({"actor_rollout_ref": {"rollout": {"checkpoint_engine": engine}}})
    world.members = Members(world.servers, world.checkpoints)
    world.may_leave.set()
    if why:
        assert why in refused(world.members.add) and why in refused(world.members.remove, 0)
        assert states(world) == {0: "serves", 1: "serves"} and not world.log
    else:
        assert world.members.add().startswith("Server 2 is starting") and world.members.remove(0)
