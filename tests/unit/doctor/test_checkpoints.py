"""Disk, resume point and steps, in folders that the tests fill."""

import shutil

import pytest
from omegaconf import OmegaConf

from verl_ext.checkpoints import folder as checkpoints
from verl_ext.doctor.checkpoints import check_disk, check_resume, check_steps
from verl_ext.doctor.data import check_files
from verl_ext.doctor.finding import Level
from verl_ext.memory.words import GIB


@pytest.fixture
def rows(tmp_path):
    """A parquet file of so many rows, as an override."""

    def make(number, key="data.train_files"):
        import pandas as pd

        path = tmp_path / f"{number}.parquet"
        pd.DataFrame({"x": range(number)}).to_parquet(path)
        return f"{key}={path}"

    return make


@pytest.fixture
def save(tmp_path):
    """A checkpoint as verl with verl_ext leaves it, small."""

    def make(step, *, world=16, part="actor", states=0):
        folder = tmp_path / "out" / f"global_step_{step}"
        (folder / part).mkdir(parents=True)
        for rank in range(world):
            (folder / part / f"model_world_size_{world}_rank_{rank}.pt").write_bytes(b"x")
        for rank in range(states):  # of SFT's data loaders
            (folder / f"data_{rank}.pt").write_bytes(b"x")
        checkpoints.vouch(folder)
        (tmp_path / "out" / checkpoints.TRACKER).write_text(str(step))
        return folder

    return make


def test_resume_starts_at_zero_or_goes_on(make_run, save, told):
    assert told(check_resume(make_run()), Level.OK)[0].startswith("the run starts from step 0")
    save(30)
    assert told(check_resume(make_run()), Level.OK)[0].startswith("the run continues from global_step_30 of 400")


def test_settings_that_a_checkpoint_overrules_are_told(make_run, save, told, tmp_path):
    """torch restores the learning rate with the optimizer, and a new model's weights are not read."""
    save(30)
    run, key = make_run(), "actor_rollout_ref.actor.optim.lr"
    (tmp_path / "out" / "hydra").mkdir()
    OmegaConf.save(run.config, tmp_path / "out" / "hydra" / "config.yaml")
    assert not [each for each in check_resume(run) if each.level == Level.WARN]
    (text,) = told(check_resume(make_run("qwen2-32b_dapo", f"{key}=5.0e-7")), Level.WARN)
    assert f"{key} was 1e-06 and is 5e-07; but" in text and "continue from global_step_30" in text
    (text,) = told(check_resume(make_run("qwen2-32b_dapo", "actor_rollout_ref.model.path=/new/sft")), Level.WARN)
    assert "actor_rollout_ref.model.path was" in text and "and is /new/sft" in text


def test_data_files_of_domains_have_changed_if_the_table_names_others(make_run, save, told, tmp_path):
    save(30)
    run = make_run("qwen2-32b_dapo", "+retool.domains.math={train: [mine.parquet]}")
    start = run.config.copy()
    start.data.train_files = "rows.parquet"  # as Hydra writes it, before those of the domains replace it
    (tmp_path / "out" / "hydra").mkdir()
    OmegaConf.save(start, tmp_path / "out" / "hydra" / "config.yaml")
    assert not [each for each in check_resume(run) if each.level == Level.WARN]
    other = make_run("qwen2-32b_dapo", "+retool.domains.math={train: [other.parquet]}")
    (text,) = told(check_resume(other), Level.WARN)
    assert "data.train_files was ['mine.parquet'] and is ['other.parquet']" in text


def test_another_run_in_the_folder_is_a_failure_but_not_of_a_validation(make_run, save, told, monkeypatch):
    from verl_ext.doctor import checkpoints as module

    def taken(folder):
        raise module.Taken("Another training run writes there")

    monkeypatch.setattr(module, "check_training_folder", taken)
    save(30)
    assert "Another training run writes there" in told(check_resume(make_run()), Level.FAIL)[0]
    told(check_resume(make_run("qwen2-32b_dapo", "trainer.val_only=true")), Level.OK)


def test_a_checkpoint_that_is_not_whole(make_run, save, told):
    (save(30) / "actor" / "model_world_size_16_rank_3.pt").unlink()
    text = told(check_resume(make_run()), Level.FAIL)[0]
    assert "model_world_size_16_rank_3.pt is missing" in text and "retool checkpoints" in text
    save(60)
    assert "global_step_30 is not complete" in told(check_resume(make_run()), Level.WARN)[0]
    assert told(check_resume(make_run()), Level.OK)[0].startswith("the run continues from global_step_60 of 400")


def test_a_tracker_that_names_nothing(make_run, save, told, tmp_path):
    save(30)
    (tmp_path / "out" / checkpoints.TRACKER).write_text("60")
    assert "names step 60, which is missing" in told(check_resume(make_run()), Level.WARN)[0]
    assert told(check_resume(make_run()), Level.OK)[0].startswith("the run continues from global_step_30 of 400")


def test_a_checkpoint_of_another_number_of_gpus(make_run, save, told):
    save(30, world=8)
    assert "was saved by 8 ranks, but this run has 16" in told(check_resume(make_run()), Level.FAIL)[0]
    sft = make_run("qwen2-32b_sft", nnodes=2, nproc_per_node=8)
    save(60, world=8, part="")
    assert "was saved by 8 ranks, but this run has 16" in told(check_resume(sft), Level.FAIL)[0]


def test_sft_resumes_with_as_many_data_parallel_ranks_only(make_run, save, told):
    save(30, part="", states=4)  # 16 GPUs, of which 4 share a sequence
    assert told(check_resume(make_run("qwen2-32b_sft", nnodes=2, nproc_per_node=8)), Level.OK)
    other = make_run("qwen2-32b_sft", "engine.ulysses_sequence_parallel_size=2", nnodes=2, nproc_per_node=8)
    text = told(check_resume(other), Level.FAIL)[0]
    assert "holds the data-loader states of 4 data-parallel ranks, but this run has 8: some traces would be" in text


def test_sft_that_resumes_at_the_end_of_an_epoch(make_run, save, rows, told):
    # 320 rows / 32 = 10 steps an epoch
    run = make_run("qwen2-32b_sft", rows(320), nnodes=2, nproc_per_node=8)
    save(15, part="", states=4)
    assert "the end of epoch" not in told(check_resume(run), Level.OK)[0]
    save(20, part="", states=4)
    assert "global_step_20 of 60, at the end of epoch 2, and" in told(check_resume(run), Level.OK)[0]


def test_a_run_that_is_at_its_end(make_run, save, told):
    save(400)
    assert "the run has reached step 400 of 400" in told(check_resume(make_run()), Level.WARN)[0]


def test_resume_modes(make_run, save, told, tmp_path):
    save(30)
    disabled = make_run("qwen2-32b_dapo", "trainer.resume_mode=disable")
    assert "has checkpoints up to step 30" in told(check_resume(disabled), Level.WARN)[0]
    path = make_run(
        "qwen2-32b_dapo", "trainer.resume_mode=resume_path", f"trainer.resume_from_path={tmp_path}/out/global_step_30"
    )
    assert "continues from global_step_30" in told(check_resume(path), Level.OK)[0]
    (tmp_path / "out" / ".saving").mkdir()  # as a kill between the two renames of a step that is saved again leaves it
    (tmp_path / "out" / "global_step_30").rename(tmp_path / "out" / ".saving" / "global_step_30")
    assert "continues from global_step_30" in told(check_resume(path), Level.OK)[0]
    wrong = make_run("qwen2-32b_dapo", "trainer.resume_mode=resume_path", f"trainer.resume_from_path={tmp_path}/out")
    assert "Expected the folder of a checkpoint" in told(check_resume(wrong), Level.FAIL)[0]


def test_data_that_are_too_few(make_run, rows, told):
    few = make_run("qwen2-32b_dapo", rows(500))
    assert "500 rows are fewer than a batch of 512, so no step" in told(check_steps(few), Level.FAIL)[0]
    # 1,024 / 512 = 2 steps an epoch; 100 epochs are 200
    run = make_run("qwen2-32b_dapo", rows(1024))
    text = told(check_steps(run), Level.WARN)[0]
    assert "100 epoch(s) of 2 steps end at step 200" in text and "Set trainer.total_epochs to 200" in text


def test_disk(make_run, monkeypatch, told):
    def free(gib):
        monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1, 1, int(gib * GIB)))

    # 12 x 32.76e9 bytes = 366.16 GiB; 400 steps / 30 -> 14 checkpoints; records 8 GiB
    free(300)
    assert "a checkpoint takes 366.2 GiB" in told(check_disk(make_run()), Level.FAIL)[0]
    free(2000)
    kept = told(check_disk(make_run()), Level.OK)[0]
    assert "the last 3 and the best are kept, so there are 5 while one is written, which takes 1,838.8 GiB with" in kept
    everything = make_run("qwen2-32b_dapo", "retool.checkpoints.keep_last=null")
    text = told(check_disk(everything), Level.WARN)[0]
    assert "all 14 are kept (every 30 steps)" in text and "the disk would be full after 5 more, at step 150" in text
    free(6000)
    assert "5,134.3 GiB with the records" in told(check_disk(everything), Level.OK)[0]


@pytest.mark.parametrize(
    ("free_gib", "best", "level", "message"),
    [
        # 366.16 GiB each and records of 8: the last, the next and the best take 1,106.5 GiB, without the best 740.3
        (1110, True, Level.WARN, "-> Set retool.checkpoints.keep_last=1, or save less often."),
        (1000, True, Level.WARN, "even keep_last=1 needs 1,106.5 GiB for 3 checkpoint(s) at once -> Free that much"),
        (1000, True, Level.WARN, "best_metric=null, which needs one fewer, or set trainer.default_local_dir"),
        (1110, False, Level.WARN, "-> Set retool.checkpoints.keep_last=2, or save less often."),
        (735, False, Level.WARN, "even keep_last=1 needs 740.3 GiB for 2 checkpoint(s) at once -> Free that much"),
        (400, True, Level.FAIL, "even keep_last=1 needs 1,106.5 GiB"),
        (400, False, Level.FAIL, "even keep_last=1 needs 740.3 GiB"),
    ],
)
def test_a_disk_too_small_for_fewer_checkpoints(free_gib, best, level, message, make_run, monkeypatch, told):
    usage = shutil._ntuple_diskusage(1, 1, int(free_gib * GIB))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    run = make_run("qwen2-32b_dapo", *([] if best else ["retool.checkpoints.best_metric=null"]))
    texts = told(check_disk(run), level)
    assert message in texts[0], texts
    assert level is Level.WARN or "keep_last=1," not in texts[0]


def test_sft_that_saves_only_at_its_end_needs_room_for_one_checkpoint(make_run, monkeypatch, told):
    usage = shutil._ntuple_diskusage(1, 1, 400 * GIB)  # for one of 366.16 GiB, not for the last 3 and the next
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    run = make_run("qwen2-32b_sft", "trainer.save_freq=-1", nnodes=2, nproc_per_node=8)
    (text,) = told(check_disk(run), Level.OK)
    assert "which takes 366.2 GiB" in text


def test_room_for_a_model_of_unknown_size_is_no_ok(make_run, told, tmp_path):
    for name, key in (("qwen2-32b_dapo", "actor_rollout_ref.model.path"), ("qwen2-32b_sft", "model.path")):
        (tmp_path / "empty").mkdir(exist_ok=True)
        text = told(check_disk(make_run(name, f"{key}={tmp_path}/empty")), Level.WARN)[0]
        assert f"the size of a checkpoint is unknown: {tmp_path}/empty has no config.json" in text
        assert "-> Set MODEL_PATH of the launcher" in text
    never = make_run("qwen2-32b_dapo", "actor_rollout_ref.model.path=empty", "trainer.save_freq=-1")
    assert "no checkpoints are saved (trainer.save_freq=-1)" in told(check_disk(never), Level.OK)[0]


def test_missing_files(make_run, told, rows):
    run = make_run("qwen2-32b_dapo", rows(3), "data.val_files=/nowhere/val.parquet")
    assert "data.val_files: /nowhere/val.parquet does not exist" in told(check_files(run), Level.FAIL)[-1]
    assert list(check_files(make_run("qwen2-32b_dapo", rows(3), rows(3, "data.val_files"), "data.prompt_key=x"))) == []
