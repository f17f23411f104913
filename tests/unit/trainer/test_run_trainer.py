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


def test_a_trajectory_log_that_nothing_would_write_is_refused_when_the_run_starts(make):
    none = "actor_rollout_ref.rollout.agent.agent_loop_manager_class=null"
    with pytest.raises(ValueError, match="agent_loop_manager_class is null.*set retool.trajectory_log.enable=false"):
        make(none)
    make(none, "retool.trajectory_log.enable=false")


def test_a_wrong_setting_of_retool_stops_the_run_at_its_start(make):
    with pytest.raises(ValueError, match=r"retool.sandbox.timeout_s is 0, expected a number in \(0, 86400\]"):
        make("retool.sandbox.timeout_s=0")


def test_the_config_that_verl_hands_on_to_the_agent_loops_has_the_new_path_of_their_yaml(make):
    key = "actor_rollout_ref.rollout.agent.agent_loop_config_path"
    with pytest.warns(FutureWarning, match="is now verl_ext/rollout/agent_loops.yaml"):
        trainer, _ = make(f"{key}=verl_ext/agent_loop/agent_loops.yaml")
    assert OmegaConf.select(trainer.config, key) == "verl_ext/rollout/agent_loops.yaml"


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
    """3 of 8 problems, 2 responses each, of which the first is right and the very last raised and is not there.

    The mean over the problems of what was judged: (1/2 + 1/2 + 1/1) / 3. verl counts 3 of 6.
    """
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
    assert metrics["val-light/tiny/acc/mean@2"] == pytest.approx(2 / 3)
    assert metrics["val-light-aux/failed/raised"] == pytest.approx(1 / 6)
    assert not any(name.startswith("val-core") for name in metrics)


def columns(*samples, source="tiny", uid=None):
    """Arguments of `_val_metrics_update`: samples as (problem, acc, finish reason), 4 asked for of each problem."""
    problems = [problem for problem, _, _ in samples]
    infos = {
        "reward": [2.0 * acc - 1 for _, acc, _ in samples],
        "acc": [float(acc) for _, acc, _ in samples],
        "unverified": [float(reason == "unverified") for _, _, reason in samples],
        "finish_reason": [reason for _, _, reason in samples],
        "pred": ["7" if acc else "" for _, acc, _ in samples],
    }
    expected = {(source, problem): 4 for problem in problems}
    turns = [3 if reason == "answer" else 9 for _, _, reason in samples]
    return [source] * len(samples), problems, infos, turns, expected


def validated(trainer, monkeypatch, arguments):
    """`_validate` of a trainer whose validation ends with these samples."""
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    monkeypatch.setattr(PPOTrainer, "_validate", lambda self: self._val_metrics_update(*arguments))
    return trainer._validate()


RIGHT, DOWN = (1, "answer"), (0, "sandbox_failure")


def test_failed_samples_are_in_no_figure_of_a_validation(make, monkeypatch, caplog):
    """A perfect model, one of 8 samples failed by the sandbox, one by the verifier: verl says acc 0.75."""
    trainer, _ = make()
    samples = [("a", *RIGHT)] * 3 + [("a", *DOWN)] + [("b", *RIGHT)] * 3 + [("b", 0, "unverified")]
    with caplog.at_level(logging.WARNING, logger="verl_ext.trainer.run_trainer"):
        metrics = validated(trainer, monkeypatch, columns(*samples))
    core = {name: value for name, value in metrics.items() if name.startswith("val-core/")}
    assert core == dict.fromkeys(
        [f"val-core/tiny/acc/{n}" for n in ("mean@4", "best@4/mean", "maj@4/mean")]
        + [f"val-core/tiny/acc/{n}" for n in ("best@4/std", "maj@4/std")],
        1.0,
    ) | {"val-core/tiny/acc/best@4/std": 0.0, "val-core/tiny/acc/maj@4/std": 0.0}
    assert metrics["val-aux/tiny/reward/mean@4"] == metrics["val-aux/tiny/acc/worst@4/mean"] == 1.0
    assert metrics["val-aux/num_turns/mean"] == metrics["val-aux/num_turns/max"] == 3.0
    shares = {name: metrics[f"val-aux/failed/{name}"] for name in ("share", "sandbox_failure", "verifier_unknown")}
    assert shares == {"share": 0.25, "sandbox_failure": 0.125, "verifier_unknown": 0.125}
    assert metrics["val-aux/failed/void"] == 0.0  # at the limit, not above it
    assert "2 of 8 samples failed for reasons outside the model (sandbox_failure 1, verifier_unknown 1)" in caplog.text
    assert "They are in no figure" in caplog.text


@pytest.mark.parametrize("source_of_the_failed", ["tiny", "other"])
def test_a_validation_that_lost_too_much_is_void_and_moves_nothing(
    make, monkeypatch, caplog, tmp_path, source_of_the_failed
):
    """2 of 4 samples of one data source, beside 8 good ones of another: 50% of that source is above 25%."""
    from verl_ext.checkpoints.folder import Rolling

    good = columns(*[(problem, *RIGHT) for problem in "abcdefgh" for _ in range(4)])
    bad = columns(*[("z", *RIGHT)] * 2, *[("z", *DOWN)] * 2, source=source_of_the_failed)
    both = [bad[i] + good[i] for i in (0, 1, 3)]
    infos = {name: bad[2][name] + good[2][name] for name in good[2]}
    arguments = [*both[:2], infos, both[2], bad[4] | good[4]]
    trainer, _ = make(ON["early_stop"])
    trainer.global_steps = 2
    with caplog.at_level(logging.WARNING, logger="verl_ext.trainer.run_trainer"):
        metrics = validated(trainer, monkeypatch, arguments)
    if source_of_the_failed == "tiny":  # 2 of 36
        assert metrics["val-core/tiny/acc/mean@4"] == 1.0 and metrics["early_stop/value"] == 1.0
        return
    assert {name: value for name, value in metrics.items() if value} == {
        "val-aux/failed/void": 1.0,
        "val-aux/failed/share": 2 / 36,
        "val-aux/failed/sandbox_failure": 2 / 36,
    }
    assert all(name.startswith("val-aux/failed/") for name in metrics)
    assert not (tmp_path / "early_stop.jsonl").exists()
    rolling = Rolling(tmp_path, keep_last=1, best_metric="val-core/*/acc/mean@*")
    rolling.record(metrics, 2)
    assert rolling.values == {}
    assert "50.0% of those of other. That is more than retool.validation.max_failed_share=0.25" in caplog.text
    assert "moves neither the best checkpoint nor early stop. Start the sandbox" in caplog.text


def test_the_share_that_voids_a_validation_is_a_setting(make, monkeypatch):
    samples = [("a", *RIGHT), *[("a", *DOWN)] * 3]
    trainer, _ = make("retool.validation.max_failed_share=0.75")
    assert validated(trainer, monkeypatch, columns(*samples))["val-core/tiny/acc/mean@4"] == 1.0
    trainer, _ = make("retool.validation.max_failed_share=0.74")
    assert validated(trainer, monkeypatch, columns(*samples))["val-aux/failed/void"] == 1.0
    with pytest.raises(ValueError, match="expected 0 <= max_failed_share < 1 and retries >= 0"):
        make("retool.validation.max_failed_share=1")


def test_void_validations_do_not_end_a_run_and_one_that_counts_is_compared_with_those_that_did(make, monkeypatch):
    trainer, calls = make(ON["early_stop"], "retool.early_stop.patience=2", "trainer.val_before_train=true", steps=14)
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    accs = {0: 0, 2: 1, 12: 1, 14: 1}  # void at 4 to 10

    def validate(self):
        acc = accs.get(self.global_steps)
        samples = [("a", *DOWN)] * 4 if acc is None else [("a", acc, "answer")] * 4
        return self._val_metrics_update(*columns(*samples))

    monkeypatch.setattr(PPOTrainer, "_validate", validate)
    trainer.fit(None)
    assert calls.steps == list(range(1, 15))  # its best is of step 2; 12 and 14 are the first two without progress
    assert [step for step in calls.logged if "early_stop/value" in calls.logged[step]] == [0, 2, 12, 14]
    assert [step for step in calls.logged if calls.logged[step].get("val-aux/failed/void")] == [4, 6, 8, 10]


def test_a_void_validation_before_training_and_in_light_form_is_survived(make, monkeypatch):
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    trainer, calls = make(ON["light"], "trainer.val_before_train=true", "retool.light_validation.full_every=3")
    monkeypatch.setattr(PPOTrainer, "_validate", lambda self: self._val_metrics_update(*columns(*[("a", *DOWN)] * 4)))
    trainer.fit(None)
    assert calls.logged[0]["val-aux/failed/void"] == 1.0  # verl asserts that there are metrics
    assert calls.logged[2]["val-light-aux/failed/void"] == 1.0
    assert not any("acc" in name for data in calls.logged.values() for name in data)


@pytest.mark.parametrize(("option", "group"), [("early_stop", "val-aux"), ("light", "val-light-aux")])
def test_a_validation_whose_rollouts_all_raised_is_void(make, monkeypatch, option, group):
    from transfer_queue import KVBatchMeta
    from verl.trainer.ppo.v1.replay_buffer import ReplayBufferAsync
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    nothing = KVBatchMeta(partition_id="val", keys=[], tags=[])
    monkeypatch.setattr(ReplayBufferAsync, "sample", lambda self, *_: (nothing, {}))
    trainer, _ = make(ON[option], resume_at=2)
    monkeypatch.setattr(PPOTrainer, "_validate", lambda self: self.replay_buffer.sample(2, "val", 3))
    assert trainer._validate() == {f"{group}/failed/{name}": 1.0 for name in ("raised", "share", "void")}


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


@pytest.fixture
def advantages(make, monkeypatch):
    """What verl's `_compute_advantage` and ours write for one batch, by key."""
    import torch
    import transfer_queue as tq
    from verl.utils import tensordict_utils as tu

    def advantages(rewards, fillers, estimator):
        """`rewards`: key -> reward of a response of three tokens, the second of which a tool wrote."""
        trainer, _ = make(f"algorithm.adv_estimator={estimator}", "algorithm.use_kl_in_reward=false")
        trainer.replay_buffer.fillers = set(fillers)
        mask = torch.tensor([1, 0, 1])
        columns = {
            "uid": [key.split("_")[0] for key in rewards],
            "response_mask": [mask for _ in rewards],
            "rm_scores": [torch.tensor([0.0, 0.0, reward]) for reward in rewards.values()],
        }
        stored = {key: {name: values[i] for name, values in columns.items()} for i, key in enumerate(rewards)}

        def get(keys, partition_id, select_fields):
            data = {name: [stored[key][name] for key in keys] for name in select_fields if name in stored[keys[0]]}
            for name in data.keys() - {"uid"}:
                data[name] = torch.nested.as_nested_tensor(data[name], layout=torch.jagged)
            return tu.get_tensordict(data)

        def put(keys, partition_id, fields):
            for name, values in fields.items():
                for key, value in zip(keys, values.unbind(), strict=True):
                    stored[key][name] = value
            return batch

        monkeypatch.setattr(tq, "kv_batch_get", get)
        monkeypatch.setattr(tq, "kv_batch_put", put)
        batch = tq.KVBatchMeta(partition_id="train", keys=[*rewards], tags=[{} for _ in rewards])
        trainer._compute_advantage(batch, {})
        return {key: row["advantages"].tolist() for key, row in stored.items()}

    return advantages


# Four right answers of 9,000, 9,000, 9,550 and 12,400 tokens, with `length_penalty: piecewise`; and a useful group.
ALL_RIGHT = {"f_0_0": 0.99, "f_1_0": 0.99, "f_2_0": 0.9845, "f_3_0": 0.94}
USEFUL = {"u_0_0": 1.0, "u_1_0": -1.0, "u_2_0": 1.0, "u_3_0": -1.0}


def test_right_answers_that_differ_in_length_penalties_train_by_verl_and_not_as_fillers(advantages):
    """Mean .9761, sample std .0242. The useful group: 1 and -1, mean 0, sample std 2 / sqrt 3."""
    verls = advantages(ALL_RIGHT | USEFUL, (), "grpo")
    assert [round(verls[key][0], 2) for key in ALL_RIGHT] == [0.57, 0.57, 0.35, -1.49]
    ours = advantages(ALL_RIGHT | USEFUL, "f", "grpo")
    assert {key: ours[key] for key in ALL_RIGHT} == dict.fromkeys(ALL_RIGHT, [0.0, 0.0, 0.0])
    assert {key: ours[key] for key in USEFUL} == {key: verls[key] for key in USEFUL}
    assert ours["u_0_0"] == pytest.approx([0.866, 0.0, 0.866], abs=1e-3)


@pytest.mark.parametrize("estimator", ["rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "opo"])
def test_fillers_have_advantage_0_with_every_estimator(advantages, estimator):
    ours = advantages(ALL_RIGHT | USEFUL, "f", estimator)
    assert all(ours[key] == [0.0, 0.0, 0.0] for key in ALL_RIGHT)
    assert all(ours[key][0] != 0.0 for key in USEFUL)


def test_the_tokens_of_fillers_stay_in_the_denominator_of_the_token_mean(advantages):
    """Two tokens of each of 8 responses: half of the 16 are fillers'. The useful half alone would give twice this."""
    import torch
    from verl.trainer.ppo.core_algos import agg_loss

    ours = torch.tensor([*advantages(ALL_RIGHT | USEFUL, "f", "grpo").values()])
    mask = torch.tensor([[1.0, 0.0, 1.0]] * 8)
    log_prob = torch.zeros(8, 3, requires_grad=True)

    def gradient(rows):
        loss = agg_loss(-ours[rows] * log_prob[rows], mask[rows], "token-mean")
        return torch.autograd.grad(loss, log_prob)[0]

    both, useful = gradient(slice(0, 8)), gradient(slice(4, 8))
    assert both[:4].abs().sum() == 0.0
    assert torch.allclose(2 * both[4:], useful[4:]) and both[4, 0] == pytest.approx(-0.866 / 16, abs=1e-4)


def test_a_step_submits_as_many_prompts_less_as_groups_wait_for_it(make, monkeypatch):
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    trainer, _ = make()  # 16 prompts a step
    submitted = []
    monkeypatch.setattr(PPOTrainer, "_add_prompts_to_generate", lambda self, count: submitted.append(count))
    monkeypatch.setattr(PPOTrainer, "_add_batch_to_generate", lambda self: submitted.append("a batch"))
    for waiting in (0, 3, 16, 20):
        monkeypatch.setattr(type(trainer.replay_buffer), "num_kept", waiting)
        trainer.prepare_step()
    assert submitted == ["a batch", 13]


def test_exclusions_are_logged_per_step_and_per_run_and_follow_a_resume(make, caplog, tmp_path):
    from collections import Counter

    from verl_ext.trainer.exclusions import Ended

    trainer, calls = make("trainer.test_freq=-1", steps=3)
    excluded = {1: 0, 2: 1, 3: 60}
    trainer.replay_buffer.take_ended = lambda: Ended(
        rollouts=100, groups=10, excluded=Counter(verifier_unknown=excluded[trainer.global_steps])
    )
    with caplog.at_level(logging.WARNING, logger="verl_ext.trainer.exclusions"):
        trainer.fit(None)
    shares = {step: data["failure/share_verifier_unknown"] for step, data in calls.logged.items()}
    assert shares == {1: 0.0, 2: 0.01, 3: 0.6}
    assert calls.logged[3]["failure/run_share_verifier_unknown"] == pytest.approx(61 / 300)
    assert [calls.logged[step]["failure/alarm"] for step in (1, 2, 3)] == [0, 0, 1]
    assert "step 3: verifier_unknown kept 60.0% of 100 rollouts out of training (0.5% of 200" in caplog.text

    resumed, calls = make("trainer.test_freq=-1", steps=3, resume_at=2)
    resumed.replay_buffer.take_ended = lambda: Ended(rollouts=100, groups=10)
    resumed.fit(None)
    assert calls.logged[3]["failure/run_share_verifier_unknown"] == pytest.approx(1 / 300)
