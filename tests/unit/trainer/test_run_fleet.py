"""A run whose servers are watched: who watches, which client rollouts ask through, and when newcomers can join."""

from types import SimpleNamespace

import pytest

ON = [
    "retool.fleet.health.enable=true",
    "actor_rollout_ref.hybrid_engine=false",
    "actor_rollout_ref.rollout.checkpoint_engine.backend=shared_file",
    "actor_rollout_ref.rollout.agent.agent_loop_manager_class=verl_ext.rollout.workers.LeanAgentLoopManager",
]


pytestmark = pytest.mark.timeout(180)  # Ray's and verl's imports


class Balancer: ...


class Replica:
    replica_rank, server_address = 0, "1.2.3.4:5"


@pytest.fixture
def started(make, cpu_platform, monkeypatch, tmp_path):
    """A trainer after verl's `_setup`, which is faked; its watcher never starts."""
    from verl.trainer.ppo.v1.trainer_separate_async import PPOTrainerSeparateAsync
    from verl.workers.rollout.llm_server import LLMServerManager
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    from verl_ext.fleet.recovery import Fleet

    monkeypatch.setattr(RolloutReplicaRegistry, "_registry", dict(RolloutReplicaRegistry._registry))
    monkeypatch.setattr(Fleet, "watch", lambda self: None)

    def setup(self):
        self.train_dataloader = SimpleNamespace(next_iter_state=None)
        engine = SimpleNamespace(backend="shared_file", custom_backend_module="verl_ext.cpu.checkpoint_engine")
        self.standalone_checkpoint_manager = SimpleNamespace(config=engine, actor_wg="actor", replicas=[Replica()])
        self.standalone_server_manager = object.__new__(LLMServerManager)
        self.standalone_server_manager.config = self.config
        self.standalone_server_manager.global_load_balancer = Balancer()

    monkeypatch.setattr(PPOTrainerSeparateAsync, "_setup", setup)

    def start(*overrides):
        trainer, _ = make(*overrides, mode="separate_async")
        trainer._setup()
        return trainer

    return start


def test_servers_are_watched_and_asked_by_a_client_that_continues_elsewhere(started, tmp_path):
    from verl_ext.fleet.client import FleetClient
    from verl_ext.fleet.recovery import FleetCheckpointManager
    from verl_ext.ledger.servers import read_servers

    trainer = started(*ON)
    assert isinstance(trainer.standalone_checkpoint_manager, FleetCheckpointManager)
    client = trainer.get_llm_client()
    assert type(client) is FleetClient and client.limits.attempts == 5
    assert read_servers(tmp_path).alive == {"1.2.3.4:5"}


def test_a_validation_of_the_run_leaves_its_journal_of_servers_as_it_is(started, tmp_path):
    from verl_ext.ledger.servers import read_servers

    started(*ON, "trainer.val_only=true")
    assert read_servers(tmp_path) is None


def test_without_it_servers_are_not_watched(started, tmp_path):
    from verl_ext.ledger.servers import read_servers
    from verl_ext.rollout.client import AsyncTurnClient

    trainer = started("retool.fleet.health.enable=false")
    assert type(trainer.get_llm_client()) is AsyncTurnClient and trainer.fleet is None
    assert isinstance(trainer.standalone_checkpoint_manager, SimpleNamespace) and read_servers(tmp_path) is None


def test_a_run_whose_servers_cannot_be_watched_stops_at_its_start(make):
    with pytest.raises(ValueError, match="health.enable is true with trainer.v1.trainer_mode=sync: expected separate"):
        make(*ON)


@pytest.fixture
def told(monkeypatch):
    """What the trainer tells the watcher of servers: whether newcomers would get exact weights, and its work."""
    from verl_ext.fleet.recovery import Fleet

    told = []
    monkeypatch.setattr(Fleet, "actor_waits", lambda self, *, is_exact: told.append(is_exact))
    monkeypatch.setattr(Fleet, "actor_works", lambda self: told.append("works"))
    return told


def test_newcomers_come_in_while_the_trainer_waits_for_rollouts(started, told):
    trainer = started(*ON)
    trainer._step_sample_wait_seconds = 0.0  # of on_step_begin
    for mini_batch, is_exact in ((0, True), (1, False)):  # at 1 the actor has learned since its weights were sent
        trainer.local_trigger_step = mini_batch
        trainer.on_sample_begin()
        assert told == [is_exact]
        trainer.on_sample_end()
        assert told.pop() == "works" and told.pop() is is_exact


def test_the_wait_for_rollouts_ends_if_the_watching_has_failed(started):
    trainer = started(*ON)
    trainer.standalone_checkpoint_manager.fault = ValueError("we erred")
    with pytest.raises(RuntimeError, match="no longer watched"):
        trainer.replay_buffer._wait_for_next_poll("train", 0.0)


def test_newcomers_come_in_while_a_validation_runs(started, told, monkeypatch):
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    trainer = started(*ON)
    monkeypatch.setattr(PPOTrainer, "_validate", lambda self: told.append("validates") or {})
    trainer._validate()
    assert told == [True, "validates", "works"]


def test_profiling_asks_the_servers_that_are_there(started, monkeypatch):
    trainer = started(*ON)
    manager = trainer.standalone_checkpoint_manager
    manager.replicas, manager.dead = ["a newcomer", "a dead one"], {"a dead one"}  # until the next update
    trainer.llm_server_manager = None
    assert [each.rollout_replicas for each in trainer._rollout_server_managers()] == [["a newcomer"]]
