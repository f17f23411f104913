"""Which checkpoints are kept: the last ones, the best one by validation, and any that must not be deleted."""

from pathlib import Path

import pytest

from tests.unit.checkpoints.saves import save
from verl_ext.checkpoints import manifest
from verl_ext.checkpoints.folder import SAVING, TRACKER, steps, tracked_step, whole_steps
from verl_ext.checkpoints.manifest import checksum
from verl_ext.checkpoints.rolling import Rolling, kept_steps


def test_a_good_checkpoint_is_not_deleted_for_a_newer_one_that_is_damaged(run: Path):
    """Step 10, of an earlier start, has the right size but holds zeros; 4 would be deleted in its favour."""
    path = run / "global_step_10" / "data.pt"
    path.write_bytes(bytes(7))
    save(run, 12)
    Rolling(run, keep_last=2).after_save(12)
    assert steps(run) == [4, 10, 12] and whole_steps(run) == [4, 12]


def test_a_checkpoint_of_this_process_is_compared_once(run: Path, monkeypatch: pytest.MonkeyPatch):
    read = []
    monkeypatch.setattr(manifest, "checksum", lambda path, *_: read.append(path.parts[-2:]) or checksum(path))
    rolling = Rolling(run, keep_last=3)
    rolling.after_save(10)
    assert {name for name, _ in read} >= {"global_step_2", "global_step_4"} and rolling.sound == {2, 4, 10}
    read.clear()
    rolling.delete_others()
    assert read == []


@pytest.mark.parametrize(
    "content", ['{"metric": "val/lo', "", "[]", '{"metric": "a", "mode": "max", "values": {"2": null}}']
)
def test_values_that_cannot_be_read_are_not_forgotten_in_silence(tmp_path: Path, content: str):
    """Without them, the best checkpoint would be deleted."""
    (tmp_path / "validation.json").write_text(content)
    with pytest.raises(ValueError, match=r"validation.json cannot be read.*Restore it, or delete it"):
        Rolling.from_config(config(tmp_path, **ACCURACY))


def test_what_is_kept():
    """Steps 10, 20, ... 60."""
    whole = range(10, 70, 10)
    assert kept_steps(whole, keep_last=3, best=20, tracked=60) == {20, 40, 50, 60}
    assert kept_steps(whole, keep_last=3, best=50, tracked=60) == {40, 50, 60}
    assert kept_steps(whole, keep_last=1, best=None, tracked=30) == {30, 60}
    assert kept_steps(whole, keep_last=None, best=None, tracked=None) == set(whole)
    assert kept_steps(whole, keep_last=9, best=70, tracked=80) == set(whole)  # 70, 80: not there


def config(folder: Path, trainer: dict | None = None, **settings: object) -> dict:
    trainer = {"default_local_dir": str(folder), "save_freq": 2, "test_freq": 2} | (trainer or {})
    return {"trainer": trainer, "retool": {"checkpoints": settings}}


ACCURACY = {"keep_last": 2, "best_metric": "val-core/*/acc/mean@*"}


def train(folder: Path, values: dict[int, float], validate_first: bool = False, **settings: object) -> None:
    """Start a run that saves each step and logs its validation: RL after the save, SFT before it."""
    rolling = Rolling.from_config(config(folder, **(settings or ACCURACY)))
    for step, value in values.items():
        data = {"val/loss": value, "val-core/aime/acc/mean@8": value, "val-aux/aime/acc/std@8": 9.0}
        if validate_first:
            rolling.record(data, step)
        save(folder, step)
        rolling.after_save(step)
        if not validate_first:
            rolling.record(data, step)


@pytest.mark.parametrize("validate_first", [False, True])
def test_the_last_and_the_best_are_kept_across_resumes(tmp_path: Path, validate_first: bool):
    train(tmp_path, {2: 0.1, 4: 0.5}, validate_first)
    train(tmp_path, {6: 0.3, 8: 0.2}, validate_first)  # started again: 4 is the best, of the earlier start
    assert steps(tmp_path) == [4, 6, 8]
    train(tmp_path, {10: 0.2}, validate_first)
    assert steps(tmp_path) == [4, 8, 10]
    train(tmp_path, {12: 0.5, 14: 0.4}, validate_first)  # as good as 4, and newer
    assert steps(tmp_path) == [12, 14]
    assert whole_steps(tmp_path) == [12, 14] and not (tmp_path / SAVING).exists()


def test_the_lowest_loss_can_be_the_best(tmp_path: Path):
    train(tmp_path, {2: 0.1, 4: 0.5, 6: 0.3, 8: 0.2}, keep_last=1, best_metric="val/loss", best_mode="min")
    assert steps(tmp_path) == [2, 8]


def test_what_is_deleted_is_logged_with_the_best(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO")
    train(tmp_path / "a", {2: 0.1, 4: 0.5, 6: 0.3}, keep_last=1, best_metric="val/loss", best_mode="min")
    assert "Checkpoints: kept [2, 6] (best: 2, val/loss 0.1), deleted [4]." in caplog.text
    train(tmp_path / "b", {2: 0.1, 4: 0.5}, keep_last=1)
    assert "Checkpoints: kept [4], deleted [2]." in caplog.text


def test_a_validation_before_the_first_save_is_recorded(tmp_path: Path):
    Rolling.from_config(config(tmp_path / "new", **ACCURACY)).record({"val-core/aime/acc/mean@8": 0.5}, 0)
    assert Rolling.from_config(config(tmp_path / "new", **ACCURACY)).values == {0: 0.5}


def test_several_validation_sets_count_by_their_mean(tmp_path: Path):
    rolling = Rolling.from_config(config(tmp_path, **ACCURACY))
    rolling.record({"val-core/a/acc/mean@4": 0.2, "val-core/b/acc/mean@4": 0.6, "val-core/a/acc/maj@4": 1.0}, 2)
    rolling.record({"val-core/a/acc/mean@4": float("nan")}, 4)
    rolling.record({"actor/pg_loss": 1.0}, 6)
    assert rolling.values == {2: pytest.approx(0.4)}


def test_without_a_best_metric_the_last_are_kept(tmp_path: Path):
    train(tmp_path, {2: 0.9, 4: 0.5, 6: 0.3}, keep_last=1)
    assert steps(tmp_path) == [6]
    train(tmp_path, {8: 0.9, 10: 0.5, 12: 0.3}, keep_last=None)
    assert steps(tmp_path) == [6, 8, 10, 12]


def test_the_one_that_the_tracker_names_stays_and_a_broken_one_is_not_touched(run: Path):
    path = run / "global_step_2" / "data.pt"
    path.unlink()
    rolling = Rolling.from_config(config(run, keep_last=1))
    (run / TRACKER).write_text("4")
    rolling.after_save(10)
    assert steps(run) == [2, 4, 10]
    (run / TRACKER).write_text("10")
    rolling.after_save(10)
    assert steps(run) == [2, 10]


def test_a_run_set_back_keeps_later_steps_until_it_saves_them(run: Path):
    train(run, {3: 0.1, 4: 0.2}, keep_last=2)
    assert steps(run) == [3, 4, 10] and tracked_step(run) == 4
    train(run, {10: 0.1, 12: 0.1}, keep_last=2)
    assert steps(run) == [10, 12]


def test_the_value_of_a_step_that_is_trained_again_is_forgotten(tmp_path: Path):
    train(tmp_path, {2: 0.3, 4: 0.9, 6: 0.8})
    save(tmp_path, 2)
    rolling = Rolling.from_config(config(tmp_path, **ACCURACY))  # resumed from 2
    save(tmp_path, 4)
    rolling.after_save(4)
    assert rolling.values == {2: 0.3} and rolling.best([2, 4, 6]) == 2
    rolling.record({"val-core/aime/acc/mean@8": 0.4}, 4)
    assert rolling.best([2, 4, 6]) == 4


def test_a_validation_without_a_save_deletes_nothing(run: Path):
    Rolling.from_config(config(run, keep_last=1, best_metric="val/loss")).record({"val/loss": 1.0}, 4)
    assert steps(run) == [2, 4, 10]


def test_values_of_another_metric_are_forgotten(tmp_path: Path):
    train(tmp_path, {2: 0.9, 4: 0.5})
    rolling = Rolling.from_config(config(tmp_path, keep_last=1, best_metric="val/loss", best_mode="min"))
    assert rolling.values == {}
    assert Rolling.from_config(config(tmp_path, **ACCURACY)).values == {2: 0.9, 4: 0.5}


@pytest.mark.parametrize(
    ("trainer", "settings", "message"),
    [
        ({"max_actor_ckpt_to_keep": 2}, {}, r"max_actor_ckpt_to_keep=2.*Set it to null and retool.checkpoints"),
        ({"max_ckpt_to_keep": 1}, {"keep_last": 1}, "max_ckpt_to_keep=1"),
        ({}, {"keep_last": 0}, "retool.checkpoints.keep_last is 0, expected a whole number"),
        ({}, {"keep_last": True}, "keep_last is True"),
        ({}, {"keep_lst": 3}, "keep_lst is not a setting .* Did you mean retool.checkpoints.keep_last"),
        ({}, {"best_mode": "highest"}, "best_mode is 'highest'; expected one of max, min"),
    ],
)
def test_settings_that_cannot_be_are_refused(tmp_path: Path, trainer: dict, settings: dict, message: str):
    with pytest.raises(ValueError, match=message):
        Rolling.from_config(config(tmp_path, trainer, **settings))


def test_a_metric_that_no_validation_has_is_refused(tmp_path: Path):
    rolling = Rolling.from_config(config(tmp_path, **ACCURACY | {"best_metric": "val-core/aime/acc/mean@16"}))
    with pytest.raises(ValueError, match=r"step 5: val-core/aime/acc/mean@8\. Set it to one of these"):
        rolling.record({"val-core/aime/acc/mean@8": 0.5}, 5)


@pytest.mark.parametrize(("test_freq", "warns"), [(20, True), (-1, True), (15, False), (1, False)])
def test_validations_that_miss_checkpoints_are_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, test_freq: int, warns: bool
):
    Rolling.from_config(config(tmp_path, {"save_freq": 30, "test_freq": test_freq}, **ACCURACY))
    assert (f"save_freq=30 is not a multiple of trainer.test_freq={test_freq}" in caplog.text) is warns


@pytest.mark.parametrize(
    ("options", "missed"),
    [
        ({"light_validation": {"enable": True, "full_every": 20}}, "light_validation.full_every=20"),
        ({"light_validation": {"enable": True, "full_every": 30}}, None),
        ({"validation_schedule": {"enable": True, "phases": [[0, 10], [50, 20]]}}, "validation_schedule.phases=10, 20"),
        ({"validation_schedule": {"enable": False, "phases": [[0, 20]]}}, None),
    ],
)
def test_options_that_replace_the_validations_are_looked_at(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, options: dict, missed: str | None
):
    settings = config(tmp_path, {"save_freq": 30, "test_freq": 5}, **ACCURACY)
    settings["retool"] |= options
    Rolling.from_config(settings)
    assert (missed in caplog.text) if missed else not caplog.text


def test_a_config_without_our_keys_keeps_all(tmp_path: Path):
    assert Rolling.from_config({"trainer": {"default_local_dir": str(tmp_path)}}) == Rolling(tmp_path)
