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
    assert isinstance(client._load_balancer, Balancer) and trainer._fleet._router is client._load_balancer
    assert read_servers(tmp_path).alive == {"1.2.3.4:5"}


def test_a_validation_of_the_run_leaves_its_journal_of_servers_as_it_is(started, tmp_path):
    from verl_ext.ledger.servers import read_servers

    trainer = started(*ON, "trainer.val_only=true")
    assert read_servers(tmp_path) is None
    trainer._fleet._events.append(("died", "1.2.3.4:5", "its engine is dead"))
    trainer._fleet._write_events()
    assert read_servers(tmp_path) is None and not trainer._fleet._events


def test_without_it_servers_are_not_watched(started, tmp_path):
    from verl_ext.ledger.servers import read_servers
    from verl_ext.rollout.client import AsyncTurnClient

    trainer = started("retool.fleet.health.enable=false")
    assert type(trainer.get_llm_client()) is AsyncTurnClient and trainer._fleet is None
    assert isinstance(trainer.standalone_checkpoint_manager, SimpleNamespace) and read_servers(tmp_path) is None


def test_a_run_whose_servers_cannot_be_watched_stops_at_its_start(make):
    with pytest.raises(ValueError, match="health.enable is true with trainer.v1.trainer_mode=sync: expected separate"):
        make(*ON)


def test_newcomers_come_in_while_the_trainer_waits_for_rollouts(started):
    trainer = started(*ON)
    fleet, trainer._step_sample_wait_seconds = trainer._fleet, 0.0  # of on_step_begin
    for mini_batch, is_exact in ((0, True), (1, False)):  # at 1 the actor has learned since its weights were sent
        trainer.local_trigger_step = mini_batch
        trainer.on_sample_begin()
        assert (fleet._actor_is_idle, fleet._is_exact) == (True, is_exact)
        trainer.on_sample_end()
        assert not fleet._actor_is_idle


def test_the_wait_for_rollouts_ends_if_the_watching_has_failed(started):
    trainer = started(*ON)
    trainer.standalone_checkpoint_manager.fault = ValueError("we erred")
    with pytest.raises(RuntimeError, match="no longer watched"):
        trainer.replay_buffer._wait_for_next_poll("train", 0.0)


def test_newcomers_come_in_while_a_validation_runs(started, monkeypatch):
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    trainer, seen = started(*ON), []
    monkeypatch.setattr(
        PPOTrainer, "_validate", lambda self: seen.append((self._fleet._actor_is_idle, self._fleet._is_exact)) or {}
    )
    trainer._validate()
    assert seen == [(True, True)] and not trainer._fleet._actor_is_idle


def test_profiling_asks_the_servers_that_are_there(started, monkeypatch):
    trainer = started(*ON)
    manager = trainer.standalone_checkpoint_manager
    manager.replicas, manager.dead = ["a newcomer", "a dead one"], {"a dead one"}  # until the next update
    trainer.llm_server_manager = None
    assert [each.rollout_replicas for each in trainer._rollout_server_managers()] == [["a newcomer"]]
