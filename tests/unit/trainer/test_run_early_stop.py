"""Early stop in verl's loop: when it ends, what it saves, and what a resumed run does."""

import logging

import pytest

from tests.unit.trainer.conftest import ON


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
    assert "early stop: the run ends after step 6 because the mean validation accuracy has not risen" in caplog.text
    assert "early stop: ended at step 6; the last checkpoint is of step 6." in caplog.text


def test_a_checkpoint_that_is_there_is_not_saved_again_and_none_without_save_freq(make):
    trainer, calls = make(ON["early_stop"], accs={2: 0.9, 4: 0.1})  # collapses at a step at which the run saves anyway
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
    assert "early stop: this run ended at step 4 because the mean validation accuracy fell to 0.1" in caplog.text
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
    assert {path.name: path.read_text() for path in tmp_path.glob("*.jsonl")} == before and len(before) == 3


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
