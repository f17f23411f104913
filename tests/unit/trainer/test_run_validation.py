"""When verl's loop validates, on what, and what a validation with failed samples says and moves."""

import logging
from types import SimpleNamespace

import pytest

from tests.unit.trainer.conftest import ON


def test_the_schedule_decides_when_verls_loop_validates(make):
    trainer, calls = make(ON["schedule"], "retool.validation_schedule.phases=[[0,1],[3,4]]", steps=9)
    trainer.fit(None)
    assert [step for step, _ in calls.validations] == [1, 2, 4, 8, 9]


def test_the_schedule_makes_up_for_a_frequency_that_is_off(make):
    trainer, calls = make(ON["schedule"], "trainer.test_freq=-1", "retool.validation_schedule.phases=[[0,5]]")
    trainer.fit(None)
    assert [step for step, _ in calls.validations] == [5, 6]


def test_light_validations_have_fewer_problems_and_separate_names(make):
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
    """Return arguments of `_val_metrics_update`: samples as (problem, acc, finish reason), 4 asked for per problem."""
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
    assert "They count in no metric" in caplog.text


@pytest.mark.parametrize("source_of_the_failed", ["tiny", "other"])
def test_a_validation_that_lost_too_much_is_void_and_moves_nothing(
    make, monkeypatch, caplog, tmp_path, source_of_the_failed
):
    """2 of 4 samples of one data source, next to 8 good ones of another: 50% of that source is above 25%."""
    from verl_ext.checkpoints.rolling import Rolling

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
    assert "affects neither the best checkpoint nor early stop. Start the sandbox" in caplog.text


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
