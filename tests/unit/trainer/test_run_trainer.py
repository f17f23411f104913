"""The options in verl's own trainers: constructor and training loop are real, what they call of a cluster is faked."""

import logging
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from tests.unit.test_configs import composed_once

MODES = ["sync", "colocate_async", "separate_async"]
ON = {
    "adaptive_n": "retool.adaptive_n.enable=true",
    "schedule": "retool.validation_schedule.enable=true",
    "light": "retool.light_validation.enable=true",
    "early_stop": "retool.early_stop.enable=true",
}


class FakeCheckpoints:
    """The far side of the calls that free and fill the memory of vLLM."""

    def __init__(self, calls):
        self.calls = calls

    def __getattr__(self, name):
        return lambda *args, **kwargs: self.calls.append(name) or {}


@pytest.fixture
def make(cpu_platform, monkeypatch, tmp_path):
    """A trainer of verl's registry, as its `TaskRunner` makes it; steps, validations and saves are only recorded."""
    import transfer_queue as tq
    from verl.trainer.ppo.v1 import get_trainer_cls, trainer_base
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    def make(*overrides, mode="sync", accs=None, resume_at=0, steps=6):
        """`accs`: step -> what a validation after it measures, 0.5 if not there."""
        settings = [
            *(f"trainer.v1.trainer_mode={mode}", f"trainer.default_local_dir={tmp_path}"),
            *("trainer.val_before_train=false", "trainer.test_freq=2", "trainer.save_freq=4"),
            *("data.train_files=x", "data.val_files=x", "actor_rollout_ref.model.path=x"),
            *("trainer.v1.separate_async.parameter_sync_step=2", "actor_rollout_ref.rollout.nnodes=1"),
            *(
                "actor_rollout_ref.rollout.n_gpus_per_node=1",
                "actor_rollout_ref.rollout.checkpoint_engine.backend=nccl",
            ),
            *overrides,
        ]
        config = OmegaConf.merge(composed_once("tiny_dapo"), OmegaConf.from_dotlist(settings))
        trainer = get_trainer_cls(mode)(config)
        calls = SimpleNamespace(steps=[], validations=[], saves=[], logged={}, memory=[])
        trainer.global_steps = resume_at
        trainer.total_training_steps, trainer.steps_per_epoch = steps, 1000
        trainer.val_dataset = [{"n": i} for i in range(8)]
        trainer.val_dataloader = "all problems"
        trainer.checkpoint_manager = FakeCheckpoints(calls.memory)
        trainer.standalone_checkpoint_manager = FakeCheckpoints([])
        trainer._init_dump_executor()
        trainer.timing_raw = {}

        def validate(self):
            loader = self.val_dataloader
            if loader != "all problems":
                loader = [len(batch["__rollout_n__"]) for batch in loader]
            calls.validations.append((self.global_steps, loader))
            acc = (accs or {}).get(self.global_steps, 0.5)
            return {"val-core/tiny/acc/mean@1": acc, "val-aux/num_turns/mean": 3.0}

        monkeypatch.setattr(PPOTrainer, "_validate", validate)
        monkeypatch.setattr(PPOTrainer, "_save_checkpoint", lambda self: calls.saves.append(self.global_steps))
        monkeypatch.setattr(PPOTrainer, "step", lambda self, *_: calls.steps.append(self.global_steps) or batch)
        monkeypatch.setattr(PPOTrainer, "_compute_metrics", lambda *_, **__: None)
        monkeypatch.setattr(type(trainer), "on_train_begin", lambda self: None)
        monkeypatch.setattr(trainer_base.PPOTrainer, "_reissue_inflight_prompts", lambda self: 0)
        monkeypatch.setattr(tq, "kv_clear", lambda **_: None)
        log = SimpleNamespace(log=lambda data, step: calls.logged.setdefault(step, {}).update(data))
        monkeypatch.setattr(trainer_base, "Tracking", lambda **_: log)
        return trainer, calls

    batch = SimpleNamespace(keys=[], partition_id="train")
    return make


@pytest.mark.parametrize("mode", MODES)
def test_every_trainer_of_verls_registry_is_extended_once(cpu_platform, mode):
    from verl.trainer.ppo import v1
    from verl.trainer.ppo.v1 import get_trainer_cls

    from verl_ext.trainer import extend_trainers
    from verl_ext.trainer.run_trainer import RunTrainer

    trainer_class = get_trainer_cls(mode)
    assert issubclass(trainer_class, RunTrainer) and trainer_class.__mro__[2].__module__.endswith(f"trainer_{mode}")
    extend_trainers(v1)
    assert get_trainer_cls(mode) is trainer_class


def test_another_version_of_verl_is_refused(monkeypatch):
    from verl_ext import trainer

    monkeypatch.setattr(trainer, "VERL", {"verl": "0.9.2"})
    with pytest.raises(RuntimeError, match=r"internals of \{'verl': '0.9.2'\}, but found \{'verl': '0.9.1'\}"):
        trainer.extend_trainers(None)


def test_with_all_options_off_the_loop_is_verls(make):
    trainer, calls = make(accs={2: 0.5, 4: 0.0, 6: 0.0})
    trainer.fit(None)
    assert calls.steps == [1, 2, 3, 4, 5, 6] and calls.saves == [4, 6]
    assert calls.validations == [(2, "all problems"), (4, "all problems"), (6, "all problems")]
    assert trainer._get_required_batch_multiple(3) == 192  # lcm(3, mini-batch of 8 prompts x 8 responses)


def test_the_schedule_decides_when_verls_loop_validates(make):
    trainer, calls = make(ON["schedule"], "retool.validation_schedule.phases=[[0,1],[3,4]]", steps=9)
    trainer.fit(None)
    assert [step for step, _ in calls.validations] == [1, 2, 4, 8, 9]


def test_the_schedule_makes_up_for_a_frequency_that_is_off(make):
    trainer, calls = make(ON["schedule"], "trainer.test_freq=-1", "retool.validation_schedule.phases=[[0,5]]")
    trainer.fit(None)
    assert [step for step, _ in calls.validations] == [5, 6]


def test_light_validations_have_fewer_problems_and_names_of_their_own(make):
    trainer, calls = make(ON["light"], "retool.light_validation.problems=3", "retool.light_validation.full_every=3")
    trainer.config.trainer.val_before_train = True
    trainer.fit(None)
    every, some = "all problems", [3]
    assert calls.validations == [(0, every), (2, some), (3, every), (4, some), (6, every)]
    assert calls.logged[2] == {"val-light/tiny/acc/mean@1": 0.5, "val-light-aux/num_turns/mean": 3.0}
    assert "val-core/tiny/acc/mean@1" in calls.logged[3]
    assert trainer.val_dataloader == "all problems"


def test_verls_own_validation_takes_the_light_problems_and_their_number_of_responses(make, monkeypatch, submitted):
    """3 of 8 problems, 2 responses each, of which the first is right and the very last is lost: verl counts 3 of 6."""
    import torch
    import transfer_queue as tq
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer
    from verl.utils import tensordict_utils as tu

    validate = PPOTrainer._validate
    trainer, _ = make(ON["light"], "retool.light_validation.problems=3", "retool.light_validation.n=2")
    monkeypatch.setattr(PPOTrainer, "_validate", validate)
    trainer.val_dataset = [
        {"raw_prompt": [{"role": "user", "content": str(i)}], "data_source": "tiny", "index": i} for i in range(8)
    ]
    trainer.tokenizer = SimpleNamespace(pad_token_id=0, decode=lambda ids, **_: "text")
    trainer.reward_loop_manager = SimpleNamespace(reward_loop_worker_handles=["a worker"])
    trainer.agent_loop_manager = submitted.manager
    queue = []
    monkeypatch.setattr(tq, "kv_batch_put", lambda keys, **_: queue.append(keys))

    def sample(global_steps, partition_id, batch_size):
        keys = [f"{uid}_{session}_0" for uid in queue[-1] for session in range(submitted.numbers[-1])][:-1]
        return tq.KVBatchMeta(partition_id=partition_id, keys=keys, tags=[{} for _ in keys]), {}

    def kv_batch_get(keys, partition_id, select_fields):
        nested = torch.nested.as_nested_tensor([torch.ones(1) for _ in keys], layout=torch.jagged)
        accs = [float(key.split("_")[1] == "0") for key in keys]
        extra_fields = [{"reward_extra_info": {"acc": acc}} for acc in accs]
        columns = {
            "prompts": nested,
            "responses": nested,
            "rm_scores": nested,
            "num_turns": torch.full((len(keys),), 2),
        }
        columns |= {"uid": [key.split("_")[0] for key in keys], "data_source": ["tiny"] * len(keys)}
        columns |= {"reward_model": [{"ground_truth": "1"}] * len(keys), "extra_fields": extra_fields}
        return tu.get_tensordict({name: columns[name] for name in select_fields})

    monkeypatch.setattr(trainer.replay_buffer, "sample", sample)
    monkeypatch.setattr(tq, "kv_batch_get", kv_batch_get)
    trainer.global_steps = 2
    metrics = trainer._validate()
    assert submitted.numbers == [2, 2, 2]
    assert metrics["val-light/tiny/acc/mean@2"] == 0.5 and not any(name.startswith("val-core") for name in metrics)


def test_dumps_of_light_validations_and_no_others_go_to_their_own_folder(make, monkeypatch):
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    folders = []
    monkeypatch.setattr(PPOTrainer, "_dump_generations", lambda self, *, dump_path: folders.append(dump_path))
    trainer, _ = make(ON["light"])
    monkeypatch.setattr(PPOTrainer, "_validate", lambda self: self._dump_generations(dump_path="validation") or {})
    trainer.global_steps = 2
    trainer._validate()
    trainer._dump_generations(dump_path="rollouts")  # of the same step
    trainer.global_steps = 12
    trainer._validate()
    assert folders == ["validation_light", "rollouts", "validation"]


@pytest.mark.parametrize(
    ("mode", "memory"),
    [("sync", ["sleep_replicas"]), ("colocate_async", ["abort_replicas", "sleep_replicas"]), ("separate_async", [])],
)
def test_a_run_without_progress_ends_with_a_checkpoint(make, mode, memory, caplog):
    from verl.trainer.ppo.v1.trainer_separate_async import HybridEngineMode

    trainer, calls = make(ON["early_stop"], "retool.early_stop.patience=2", mode=mode, steps=40)
    if mode == "separate_async":
        trainer.current_mode = HybridEngineMode.TRAINER
        trainer.on_step_end = lambda: None
        trainer.on_validate_begin = lambda: None
    with caplog.at_level(logging.WARNING, logger="verl_ext.trainer.run_trainer"):
        trainer.fit(None)
    assert calls.steps == [1, 2, 3, 4, 5, 6]  # validations at 2, 4, 6: the second and third without progress
    assert calls.saves == [4, 6] and calls.memory[-len(memory) :] == memory
    assert calls.logged[6] == {
        "val-core/tiny/acc/mean@1": 0.5,
        "val-aux/num_turns/mean": 3.0,
        "early_stop/value": 0.5,
        "early_stop/best": 0.5,
    }
    assert "early stop: the run ends after step 6, because the mean validation accuracy has not risen" in caplog.text
    assert "early stop: ended at step 6; the last checkpoint is of step 6." in caplog.text


def test_a_checkpoint_that_is_there_is_not_saved_again_and_none_without_save_freq(make):
    trainer, calls = make(ON["early_stop"], accs={2: 0.9, 4: 0.1})  # collapses where the run saves anyway
    trainer.fit(None)
    assert calls.steps == [1, 2, 3, 4] and calls.saves == [4]
    trainer, calls = make(ON["early_stop"], "trainer.save_freq=-1", accs={2: 0.9, 4: 0.1})
    trainer.fit(None)
    assert calls.saves == []


def test_a_stopped_run_stays_stopped_until_its_settings_change(make, caplog):
    trainer, calls = make(ON["early_stop"], accs={2: 0.9, 4: 0.1})
    trainer.fit(None)
    again, calls = make(ON["early_stop"], resume_at=4)
    with caplog.at_level(logging.WARNING, logger="verl_ext.trainer.run_trainer"):
        again.fit(None)
    assert calls.steps == [] and calls.validations == [] and calls.saves == []
    assert "early stop: this run ended at step 4, because the mean validation accuracy fell to 0.1" in caplog.text
    for setting in ("retool.early_stop.max_drop=null", "retool.early_stop.enable=false"):
        on, calls = make(ON["early_stop"], setting, resume_at=4)
        on.fit(None)
        assert calls.steps == [5, 6]


def test_validating_an_older_checkpoint_leaves_what_the_run_learned_as_it_is(make, tmp_path):
    trainer, _ = make(ON["early_stop"], ON["adaptive_n"], accs={2: 0.9, 4: 0.1})
    trainer.fit(None)
    before = {path.name: path.read_text() for path in tmp_path.glob("*.jsonl")}
    only, calls = make(ON["early_stop"], ON["adaptive_n"], "trainer.val_only=true", resume_at=2)
    only.config.trainer.val_before_train = True
    only.fit(None)
    assert calls.validations == [(2, "all problems")] and calls.steps == []
    assert {path.name: path.read_text() for path in tmp_path.glob("*.jsonl")} == before and len(before) == 2


def test_a_collapse_that_a_resumed_run_measures_before_training_ends_it(make):
    """Killed between a checkpoint and its validation: verl saves first."""
    trainer, _ = make(ON["early_stop"], accs={2: 0.9}, steps=2)
    trainer.fit(None)
    resumed, calls = make(ON["early_stop"], "trainer.val_before_train=true", accs={4: 0.1}, resume_at=4)
    resumed.fit(None)
    assert calls.validations == [(4, "all problems")] and calls.steps == [] and calls.saves == []


def test_a_run_that_resumes_before_the_stop_trains_on(make):
    trainer, _ = make(ON["early_stop"], accs={2: 0.9, 4: 0.1})
    trainer.fit(None)
    earlier, calls = make(ON["early_stop"], accs={4: 0.9, 6: 0.9}, resume_at=2)
    earlier.fit(None)
    assert calls.steps == [3, 4, 5, 6]


def prompts(*texts, **columns):
    from verl.utils import tensordict_utils as tu

    uids = [f"uid-{i}" for i in range(len(texts))]
    raw_prompt = [[{"role": "user", "content": text}] for text in texts]
    return tu.get_tensordict({"uid": uids, "raw_prompt": raw_prompt, **columns})


@pytest.fixture
def submitted(monkeypatch):
    """What verl's trainer hands to the agent loops: of each prompt, the number of responses that the worker reads."""
    import transfer_queue as tq

    monkeypatch.setattr(tq, "kv_batch_put", lambda **_: None)
    numbers = []

    def generate_sequences(batch):
        for chunk in batch.chunk(min(2, len(batch))):  # as AgentLoopManagerTQ; the loop is AgentLoopWorkerTQ's
            for i in range(len(chunk)):
                value = dict(chunk.items()).get("__rollout_n__")
                value = value[i] if hasattr(value, "__getitem__") else value
                numbers.append(getattr(value, "data", value))

    return SimpleNamespace(numbers=numbers, manager=SimpleNamespace(generate_sequences=generate_sequences))


ADAPTIVE = (ON["adaptive_n"], "retool.adaptive_n.phases=[[0,6],[5,10]]")


@pytest.mark.parametrize("mode", ["sync", "colocate_async"])
def test_the_prompts_carry_their_number_of_responses_to_the_agent_loops(make, submitted, mode):
    trainer, _ = make(*ADAPTIVE, mode=mode)
    trainer.agent_loop_manager = submitted.manager
    trainer.global_steps = 1
    trainer._submit_batch_to_rollout(prompts("a", "b", "c", pass_rate=[0.25, None, 1.0]))
    assert submitted.numbers == [12, 6, 4]
    trainer.replay_buffer.on_group_end("uid-1", [0.0, 0.0, 1.0])
    trainer._submit_batch_to_rollout(prompts("b"))  # one by one, as the sampler asks for them
    trainer.global_steps = 5
    trainer._submit_batch_to_rollout(prompts("x", "x"))
    assert submitted.numbers[3:] == [12, 10, 10]


def test_without_the_option_no_number_is_given(make, submitted):
    trainer, _ = make()
    trainer.agent_loop_manager = submitted.manager
    trainer.global_steps = 1
    trainer._submit_batch_to_rollout(prompts("a", "b"))
    assert submitted.numbers == [None, None] and trainer.replay_buffer.on_group_end is None


@pytest.mark.parametrize("dp_size", [1, 3])
def test_a_step_has_as_many_updates_whatever_its_responses(make, monkeypatch, dp_size):
    """16 prompts, mini-batches of 8: 2 updates. 130 responses on 3 ranks: 132 of them with padding, 66 an update."""
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    trainer, _ = make(*ADAPTIVE)
    multiple = trainer._get_required_batch_multiple(dp_size)
    assert multiple == 2 * dp_size
    padded = -(-130 // multiple) * multiple
    seen = []

    def update_actor(self, batch, metrics):
        actor, rollout = self.config.actor_rollout_ref.actor, self.config.actor_rollout_ref.rollout
        seen.append(actor.ppo_mini_batch_size * rollout.n)  # as verl's trainer computes the mini-batch
        raise RuntimeError("out of memory")

    monkeypatch.setattr(PPOTrainer, "_update_actor", update_actor)
    with pytest.raises(RuntimeError, match="out of memory"):
        trainer._update_actor([None] * padded, {})
    assert seen == [{1: 65, 3: 66}[dp_size]] and seen[0] % dp_size == 0
    config = trainer.config.actor_rollout_ref
    assert (config.actor.ppo_mini_batch_size, config.rollout.n) == (8, 8)


def test_what_was_learned_is_written_with_the_step_and_logged(make, submitted, tmp_path):
    from verl_ext.trainer.adaptive_n import problem_id

    trainer, calls = make(*ADAPTIVE, "trainer.test_freq=-1", steps=1)
    trainer.agent_loop_manager = submitted.manager
    trainer.global_steps = 1
    trainer._submit_batch_to_rollout(prompts("a", "b", pass_rate=[0.25, None]))
    trainer.replay_buffer.on_group_end("uid-0", [1.0, 0.0])
    metrics = {}
    trainer.step(metrics, {})
    assert metrics == {
        f"rollout_n/{k}": v for k, v in [("mean", 9), ("min", 6), ("max", 12), ("easy", 0), ("hard", 0.5)]
    }
    problem = problem_id([{"role": "user", "content": "a"}])
    assert (tmp_path / "pass_rates.jsonl").read_text() == f'{{"step": 1, "rates": [["{problem}", 0.5]]}}\n'


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([ON["adaptive_n"], "algorithm.adv_estimator=rloo"], "adaptive_n needs GRPO's baselines .*=rloo"),
        ([ON["light"], "trainer.test_freq=0"], "trainer.test_freq is 0, so that the run never validates"),
        ([ON["early_stop"], "trainer.test_freq=-1"], "trainer.test_freq is -1, so that the run never validates"),
        ([ON["adaptive_n"], "retool.adaptive_n.phases=[[0,1]]"], "retool.adaptive_n.phases is"),
    ],
)
def test_an_option_that_could_have_no_effect_is_refused(make, overrides, message):
    with pytest.raises(ValueError, match=message):
        make(*overrides)


def test_adaptive_n_refuses_a_sampler_that_tells_nothing(make):
    with pytest.raises(ValueError, match="adaptive_n needs .* a sampler that tells .* ReplayBuffer. Name verl_ext"):
        make(ON["adaptive_n"], "trainer.v1.sampler.custom_sampler.path=null")
