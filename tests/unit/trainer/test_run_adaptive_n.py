"""Adaptive n in verl's trainers: the numbers that the agent loops get, and mini-batches of unequal groups."""

import pytest

from tests.unit.trainer.conftest import ON
from verl_ext.events import Ended


def prompts(*texts, **columns):
    from verl.utils import tensordict_utils as tu

    uids = [f"uid-{i}" for i in range(len(texts))]
    raw_prompt = [[{"role": "user", "content": text}] for text in texts]
    return tu.get_tensordict({"uid": uids, "raw_prompt": raw_prompt, **columns})


ADAPTIVE = (ON["adaptive_n"], "retool.adaptive_n.phases=[[0,6],[5,10]]")


@pytest.mark.parametrize("mode", ["sync", "colocate_async"])
def test_the_prompts_carry_their_number_of_responses_to_the_agent_loops(make, submitted, mode):
    trainer, _ = make(*ADAPTIVE, mode=mode)
    trainer.agent_loop_manager = submitted.manager
    trainer.global_steps = 1
    trainer._submit_batch_to_rollout(prompts("a", "b", "c", pass_rate=[0.25, None, 1.0]))
    assert submitted.numbers == [12, 6, 4]
    trainer.observers.tell(Ended(1, accs={"uid-1": [0.0, 0.0, 1.0]}))
    trainer._submit_batch_to_rollout(prompts("b"))  # one by one, as the sampler asks for them
    trainer.global_steps = 5
    trainer._submit_batch_to_rollout(prompts("x", "x"))
    assert submitted.numbers[3:] == [12, 10, 10]


def test_without_the_option_no_number_is_given(make, submitted):
    trainer, _ = make()
    trainer.agent_loop_manager = submitted.manager
    trainer.global_steps = 1
    trainer._submit_batch_to_rollout(prompts("a", "b"))
    assert submitted.numbers == [None, None]


@pytest.mark.parametrize("option", [ADAPTIVE, ()], ids=["adaptive n", "episodes of several rows"])
@pytest.mark.parametrize("dp_size", [1, 3])
def test_a_step_has_as_many_updates_whatever_its_rows(make, monkeypatch, dp_size, option):
    """16 prompts, mini-batches of 8: 2 updates. 130 rows on 3 ranks: 132 of them with padding, 66 an update."""
    from transfer_queue import KVBatchMeta
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    trainer, _ = make(*option)
    padded = 130 if dp_size == 1 else 132
    if option:
        assert trainer._get_required_batch_multiple(dp_size) == 2 * dp_size
    keys = [f"u{i}_0_0" if option else f"u{i // 2}_0_{i % 2}" for i in range(padded)]
    batch = KVBatchMeta(partition_id="train", keys=keys, tags=[{}] * padded)
    seen = []

    def update_actor(self, batch, metrics):
        actor, rollout = self.config.actor_rollout_ref.actor, self.config.actor_rollout_ref.rollout
        seen.append(actor.ppo_mini_batch_size * rollout.n)  # as verl's trainer computes the mini-batch
        raise RuntimeError("out of memory")

    monkeypatch.setattr(PPOTrainer, "_update_actor", update_actor)
    with pytest.raises(RuntimeError, match="out of memory"):
        trainer._update_actor(batch, {})
    assert seen == [{1: 65, 3: 66}[dp_size]] and seen[0] % dp_size == 0
    config = trainer.config.actor_rollout_ref
    assert (config.actor.ppo_mini_batch_size, config.rollout.n) == (8, 8)


ACTOR = "actor_rollout_ref.actor"
FIXED = (f"{ACTOR}.use_dynamic_bsz=false", f"{ACTOR}.ppo_micro_batch_size_per_gpu=4")


@pytest.mark.parametrize("dp_size", [1, 3])
def test_micro_batches_of_a_fixed_size_are_whole(make, dp_size):
    """The sizes of the update, the old log-probs and the reference's: 4, 6 and 9."""
    key = "log_prob_micro_batch_size_per_gpu"
    sizes = f"actor_rollout_ref.rollout.{key}=6", f"actor_rollout_ref.ref.{key}=9"
    trainer, _ = make(*ADAPTIVE, *FIXED, *sizes, f"{ACTOR}.ppo_mini_batch_size=16")
    assert trainer._get_required_batch_multiple(dp_size) == 36 * dp_size


def test_micro_batches_of_a_fixed_size_go_with_one_update(make):
    """The second one could consist only of padding."""
    with pytest.raises(ValueError, match="use_dynamic_bsz=false allows one update per step, got 2"):
        make(*ADAPTIVE, *FIXED, "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4")


def test_what_was_learned_is_written_with_the_step_and_logged(make, submitted, tmp_path, monkeypatch):
    from verl_ext.records.problem import problem_of

    trainer, _calls = make(*ADAPTIVE, "trainer.test_freq=-1", steps=1)
    trainer.agent_loop_manager = submitted.manager
    trainer.global_steps = 1
    golds = [{"ground_truth": gold} for gold in "12"]
    trainer._submit_batch_to_rollout(prompts("a", "a", pass_rate=[0.25, None], reward_model=golds))
    monkeypatch.setattr(type(trainer.replay_buffer), "take_ended", lambda *_: Ended(1, accs={"uid-0": [1.0, 0.0]}))
    metrics = {}
    trainer.step(metrics, {})
    assert metrics == {
        f"rollout_n/{k}": v for k, v in [("mean", 9), ("min", 6), ("max", 12), ("easy", 0), ("hard", 0.5)]
    }
    row = {"raw_prompt": [{"role": "user", "content": "a"}]}
    problem, other = (problem_of(row | {"reward_model": gold}) for gold in golds)
    assert problem != other
    assert (tmp_path / "pass_rates.jsonl").read_text() == (
        f'{{"step": 1, "rates": [["{problem}", 0.5]], "in_flight": {{"uid-1": "{other}"}}}}\n'
    )


def test_adaptive_n_refuses_a_sampler_that_reports_nothing(make):
    with pytest.raises(ValueError, match="adaptive_n needs .* a sampler that reports .* ReplayBuffer. Set verl_ext"):
        make(ON["adaptive_n"], "trainer.v1.sampler.custom_sampler.path=null")
