"""A resumed run is refused or warned if its data or its learning rate would not continue as they were."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import open_dict

from tests.unit.checkpoints.trainers import EPOCH, Engine, drawn, handler, loader, prompts, rl_trainer
from verl_ext.checkpoints import course, manifest

STEPS = [1, EPOCH - 1, EPOCH, EPOCH + 1, 2 * EPOCH]
ROWS = range(EPOCH * 2)


def train(data: Any, run: Path, step: int) -> None:
    """Train as verl's `fit` does, up to a step that is saved."""
    done = 0
    for epoch in range(9):
        data.sampler.set_epoch(epoch)
        for _ in data:
            done += 1
            if done == step:
                return handler(run, data).save_checkpoint(step)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("batch_size", [1, 4, 8])
def test_sft_with_another_batch_size_is_refused(hooks: Any, tmp_path: Path, step: int, batch_size: int):
    train(loader(), tmp_path, step)
    with pytest.raises(
        ValueError, match=f"train_batch_size is 2; in this run, data.train_batch_size is {batch_size}. The"
    ):
        handler(tmp_path, loader(batch_size=batch_size)).load_checkpoint()


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(
    ("rows", "why"),
    [
        (
            range(EPOCH * 2 + 1),
            "have 8 usable rows; in this run, the training data have 9 usable rows",
        ),  # as long an epoch
        (range(EPOCH), "have 8 usable rows; in this run, the training data have 4 usable rows"),
        (range(1, EPOCH * 2 + 1), "the digest of the training data is"),  # another file
        ([*reversed(ROWS)], "the digest of the training data is"),  # the same rows in another order
    ],
)
def test_sft_with_other_rows_is_refused(hooks: Any, tmp_path: Path, step: int, rows: Any, why: str):
    train(loader(), tmp_path, step)
    with pytest.raises(ValueError, match=why):
        handler(tmp_path, loader(rows)).load_checkpoint()


def test_other_rows_do_not_matter_to_an_sft_run_that_is_complete(hooks: Any, tmp_path: Path, one_process: None):
    from verl.utils.checkpoint import CheckpointHandler

    train(loader(), tmp_path, 12)
    sft = CheckpointHandler(Engine(tmp_path), loader(batch_size=4), default_local_dir=str(tmp_path))
    with pytest.raises(SystemExit) as ended:
        sft.load_checkpoint()
    assert ended.value.code == 0


def test_a_batch_on_more_ranks_and_a_data_set_without_a_digest_are_not_other_rows(tmp_path: Path):
    course.Course.of(loader(), 1, None).write(tmp_path)
    course.require_same_rows(tmp_path, course.Course.of(loader(batch_size=1, ranks=2), 2, None))
    other = SimpleNamespace(dataset=[0] * len(ROWS), batch_size=2)
    course.require_same_rows(tmp_path, course.Course.of(other, 1, None))


def test_a_checkpoint_of_an_older_release_resumes_and_says_what_is_unknown(
    hooks: Any, tmp_path: Path, caplog: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(course.Course, "write", lambda *_: None)
    train(loader(), tmp_path, 3)
    assert handler(tmp_path, loader()).load_checkpoint() == 3
    assert "has no course.json" in caplog.text and "If data.train_batch_size or the rows differ" in caplog.text


def optimizer(total: int | None = 12, schedule: str = "cosine", lr: float = 1e-5) -> Any:
    return SimpleNamespace(total_training_steps=total, lr_scheduler_type=schedule, lr=lr)


@pytest.mark.parametrize(
    ("step", "before", "now", "told"),
    [
        (
            12,
            {},
            {"total": 24},
            ["cosine over 12 steps and is now cosine over 24 steps", "its step 12. It had reached its end"],
        ),
        (4, {}, {"total": 24}, ["so the rate jumps at its step 4. To keep"]),
        (12, {"schedule": "wsd"}, {"schedule": "wsd", "total": 24}, ["wsd over 12 steps", "It had reached its end"]),
        (4, {}, {"schedule": "constant"}, ["cosine over 12 steps and is now constant over 12 steps"]),
        (4, {"schedule": "constant"}, {}, ["constant over 12 steps and is now cosine"]),
        (4, {}, {"lr": 2e-5}, ["optim.lr=2e-05 has no effect, because a resumed optimizer keeps its own, 1e-05"]),
        (4, {}, {}, []),
        (12, {"schedule": "constant"}, {"schedule": "constant", "total": 24}, []),
    ],
)
@pytest.mark.parametrize("kind", ["sft", "rl"])
def test_a_rate_that_does_not_continue_as_it_was_is_reported_at_the_start(
    hooks: Any, tmp_path: Path, caplog: Any, kind: str, step: int, before: dict, now: dict, told: list[str]
):
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    def run(settings: dict, *, saves: bool) -> None:
        if kind == "sft":
            sft = handler(tmp_path, loader(), engine := Engine(tmp_path))
            engine.optimizer_config = optimizer(**settings)
            return sft.save_checkpoint(step) if saves else sft.load_checkpoint()
        trainer = rl_trainer(tmp_path, Engine(tmp_path))
        with open_dict(trainer.config):
            trainer.config.actor_rollout_ref.actor.optim = vars(optimizer(**settings))
        trainer.global_steps = step
        PPOTrainer._save_checkpoint(trainer) if saves else PPOTrainer._load_checkpoint(trainer)

    run(before, saves=True)
    caplog.clear()
    run(now, saves=False)
    warnings = [record.getMessage() for record in caplog.records if record.name == course.logger.name]
    assert len(warnings) == (1 if told else 0)
    for words in told:
        assert words in warnings[0] and "start a run from the merged model" in warnings[0]


@pytest.mark.parametrize("rows", [EPOCH - 2, EPOCH + 2])
def test_rl_with_other_rows_begins_an_epoch_and_says_so(hooks: Any, tmp_path: Path, caplog: Any, rows: int):
    """torchdata would raise StopIteration after the last of fewer rows, and with more rows would draw other ones."""
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    def trainer(number: int) -> Any:
        made = rl_trainer(tmp_path, Engine(tmp_path))
        made.train_dataloader, made.train_dataloader_it = prompts(number), None
        PPOTrainer._load_checkpoint(made)
        return made

    first = trainer(EPOCH)
    drawn(first, EPOCH - 1)
    first.global_steps = EPOCH - 1
    PPOTrainer._save_checkpoint(first)
    again = trainer(rows)
    assert sorted(drawn(again, rows)) == [str(row) for row in range(rows)]
    assert f"had {EPOCH} rows when" in caplog.text and f"has {rows} now" in caplog.text
    assert again.global_steps == EPOCH - 1


@pytest.mark.parametrize("batch_size", [1, 3])
def test_rl_with_another_batch_size_continues_by_rows(hooks: Any, tmp_path: Path, caplog: Any, batch_size: int):
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    def trainer(of: int) -> Any:
        made = rl_trainer(tmp_path, Engine(tmp_path))
        made.train_dataloader, made.train_dataloader_it = prompts(8, of), None
        PPOTrainer._load_checkpoint(made)
        return made

    first = trainer(2)
    done = [*first_of(first), *first_of(first)]
    first.global_steps = 2
    PPOTrainer._save_checkpoint(first)
    assert not set(done) & set(first_of(trainer(batch_size))) and len(set(done)) == 4
    assert course.logger.name not in {record.name for record in caplog.records}


def first_of(trainer: Any) -> list[str]:
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    return [*PPOTrainer._fetch_one_gen_batch(trainer)["raw_prompt"]]


def test_the_course_is_a_part_of_a_whole_checkpoint(hooks: Any, tmp_path: Path):
    train(loader(), tmp_path, 2)
    (tmp_path / "global_step_2" / course.FILE).unlink()
    assert manifest.problem(tmp_path / "global_step_2") == "course.json is missing"


def test_steps_of_several_updates_are_as_many_of_the_schedule(hooks: Any, tmp_path: Path, caplog: Any):
    """verl counts updates in `total_training_steps` of `separate_async`: 6 steps of 2 end a schedule of 12."""
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    for total in (12, 24):
        trainer = rl_trainer(tmp_path, Engine(tmp_path))
        with open_dict(trainer.config):
            trainer.config.actor_rollout_ref.actor.optim = vars(optimizer(total))
        trainer.parameter_sync_step, trainer.global_steps = 2, 6
        PPOTrainer._save_checkpoint(trainer) if total == 12 else PPOTrainer._load_checkpoint(trainer)
    assert "jumps at its step 12. It had reached its end" in caplog.text
