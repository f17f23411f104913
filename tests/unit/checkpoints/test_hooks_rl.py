"""The hooks in the save and load code of verl: RL, and what RL and SFT refuse alike."""

from pathlib import Path
from typing import Any

import pytest

from tests.unit.checkpoints.trainers import EPOCH, Engine, drawn, handler, loader, prompts, rl_trainer
from verl_ext.checkpoints import folder as checkpoints
from verl_ext.checkpoints import manifest


def test_rl_saves_out_of_sight_and_resumes_from_what_is_whole(hooks: Any, tmp_path: Path):
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    run, engine = tmp_path / "run", Engine(tmp_path / "run")
    trainer = rl_trainer(run, engine)
    PPOTrainer._load_checkpoint(trainer)
    assert trainer.global_steps == 0
    for trainer.global_steps in (2, 4):
        PPOTrainer._save_checkpoint(trainer)
    assert engine.seen == [([], None), ([2], 2)]
    assert trainer.checkpoint_callback.saved == [
        (2, str(run / "global_step_2"), None),
        (4, str(run / "global_step_4"), None),
    ]
    assert trainer.config.trainer.default_local_dir == str(run)

    (run / "global_step_4" / "data.pt").unlink()
    trainer = rl_trainer(run, engine)
    PPOTrainer._load_checkpoint(trainer)
    assert trainer.global_steps == 2 and engine.loaded == str(run / "global_step_2" / "actor")
    assert (trainer.config.trainer.resume_mode, trainer.config.trainer.resume_from_path) == ("auto", None)
    trainer = rl_trainer(run, engine, resume_mode="resume_path", resume_from_path=str(run / "global_step_4"))
    with pytest.raises(checkpoints.NotWhole, match="data.pt is missing"):
        PPOTrainer._load_checkpoint(trainer)


def test_old_checkpoints_are_removed_when_all_know_of_the_new_one(hooks: Any, tmp_path: Path):
    """Removing takes minutes, and a run that is killed meanwhile has recorded the step that it resumes from."""
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    hooks.keep_checkpoints(
        {"trainer": {"default_local_dir": str(tmp_path)}, "retool": {"checkpoints": {"keep_last": 1}}}
    )
    trainer, there = rl_trainer(tmp_path, Engine(tmp_path)), []
    on_save = trainer.checkpoint_callback.on_save

    def noted(**event: Any) -> None:
        there.append(checkpoints.steps(tmp_path))
        on_save(**event)

    trainer.checkpoint_callback.on_save = noted
    for trainer.global_steps in (2, 4):
        PPOTrainer._save_checkpoint(trainer)
    assert there == [[2], [2, 4]] and checkpoints.steps(tmp_path) == [4]


@pytest.mark.parametrize(("val_only", "later"), [(False, 2), (True, 4)])
def test_a_run_that_goes_back_leaves_later_checkpoints_behind(hooks: Any, tmp_path: Path, val_only: bool, later: int):
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    run, engine = tmp_path / "run", Engine(tmp_path / "run")
    trainer = rl_trainer(run, engine)
    for trainer.global_steps in (2, 4):
        PPOTrainer._save_checkpoint(trainer)
    back = {"resume_mode": "resume_path", "resume_from_path": str(run / "global_step_2"), "val_only": val_only}
    PPOTrainer._load_checkpoint(rl_trainer(run, engine, **back))
    trainer = rl_trainer(run, engine)  # killed before it saved, and started again with `auto`
    PPOTrainer._load_checkpoint(trainer)
    assert trainer.global_steps == later


@pytest.mark.parametrize("val_only", [False, True])
def test_a_run_keeps_its_folder_and_a_validation_does_not(hooks: Any, tmp_path: Path, monkeypatch: Any, val_only: bool):
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    kept: list[Path] = []
    monkeypatch.setattr(hooks, "own_training_folder", kept.append)
    PPOTrainer._load_checkpoint(rl_trainer(tmp_path, Engine(tmp_path), val_only=val_only))
    assert kept == [tmp_path] * (not val_only)
    kept.clear()
    handler(tmp_path, loader()).load_checkpoint()
    assert kept == [tmp_path]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("step", [EPOCH - 1, EPOCH, EPOCH + 1, 2 * EPOCH, 2 * EPOCH + 1, 3 * EPOCH])
def test_rl_resumed_around_an_epochs_end_draws_what_was_left(hooks: Any, tmp_path: Path, step: int, shuffle: bool):
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    def trainer() -> Any:
        made = rl_trainer(tmp_path, Engine(tmp_path))
        made.train_dataloader, made.train_dataloader_it = prompts(shuffle=shuffle), None
        PPOTrainer._load_checkpoint(made)
        return made

    whole = drawn(trainer(), 4 * EPOCH)
    assert all(sorted(whole[i : i + EPOCH]) == list("0123") for i in range(0, 4 * EPOCH, EPOCH))
    first = trainer()
    done = drawn(first, step)
    first.global_steps = step
    PPOTrainer._save_checkpoint(first)
    second = trainer()
    assert second.global_steps == step
    assert done + drawn(second, 4 * EPOCH - step) == whole


def test_a_copy_that_a_kill_left_out_of_place_is_put_there_at_a_resume(hooks: Any, tmp_path: Path):
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    trainer = rl_trainer(tmp_path, Engine(tmp_path))
    trainer.global_steps = 2
    PPOTrainer._save_checkpoint(trainer)
    step, copy = tmp_path / "global_step_2", checkpoints.begin(tmp_path) / "global_step_2"
    for settings in ({}, {"resume_mode": "resume_path", "resume_from_path": str(step)}):
        step.rename(copy)
        trainer = rl_trainer(tmp_path, engine := Engine(tmp_path), **settings)
        PPOTrainer._load_checkpoint(trainer)
        assert trainer.global_steps == 2 and engine.loaded == str(step / "actor")
        assert step.is_dir() and not copy.exists()
    step.rename(copy)
    assert handler(tmp_path, loader())._determine_resume_path() == str(step)


def test_another_number_of_gpus_is_refused(hooks: Any, tmp_path: Path, one_process: None):
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer
    from verl.utils.checkpoint import CheckpointHandler

    for folder in (tmp_path / "global_step_2", tmp_path / "global_step_2" / "actor"):
        folder.mkdir()
        for rank in range(2):
            (folder / f"model_world_size_2_rank_{rank}.pt").touch()
    manifest.vouch(tmp_path / "global_step_2")
    with pytest.raises(ValueError, match="global_step_2 was saved by 2 ranks, but this run has 1"):
        CheckpointHandler(Engine(tmp_path), loader(), default_local_dir=str(tmp_path)).load_checkpoint()
    with pytest.raises(ValueError, match="actor was saved by 2 ranks, but this run has 1"):
        PPOTrainer._load_checkpoint(rl_trainer(tmp_path, Engine(tmp_path)))


def test_rl_refuses_to_save_behind_its_back(hooks: Any, tmp_path: Path):
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    trainer = rl_trainer(tmp_path, Engine(tmp_path))
    trainer.config.actor_rollout_ref.actor.checkpoint = {"async_save": True}
    with pytest.raises(ValueError, match="async_save=true"):
        PPOTrainer._save_checkpoint(trainer)
