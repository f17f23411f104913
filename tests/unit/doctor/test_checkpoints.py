"""Disk, resume point and steps, over folders that the tests fill."""

import shutil

import pytest

from verl_ext.doctor.checkpoints import TRACKER, check_disk, check_resume, check_steps, count_rows
from verl_ext.doctor.data import check_files
from verl_ext.doctor.finding import Level
from verl_ext.doctor.run import GIB


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
    """A checkpoint as verl leaves it, small."""

    def make(step, *, world=16, part="actor", without=(), tracker=True):
        folder = tmp_path / "out" / f"global_step_{step}" / part
        folder.mkdir(parents=True)
        for kind in ("model", "optim", "extra_state"):
            for rank in range(world):
                name = f"{kind}_world_size_{world}_rank_{rank}.pt"
                if name not in without:
                    (folder / name).write_bytes(b"x")
        for name in ["data.pt"] if part else [f"data_{rank}.pt" for rank in range(world)]:
            if name not in without:
                (tmp_path / "out" / f"global_step_{step}" / name).write_bytes(b"x")
        if tracker:
            (tmp_path / "out" / TRACKER).write_text(str(step))
        return folder

    return make


def test_resume_starts_at_zero_or_goes_on(make_run, save, told):
    assert "step 0: no checkpoint is there" in told(check_resume(make_run()), Level.OK)[0]
    save(30)
    assert "the run goes on from global_step_30 of 400" in told(check_resume(make_run()), Level.OK)[0]


@pytest.mark.parametrize("without", ["optim_world_size_16_rank_3.pt", "extra_state_world_size_16_rank_15.pt"])
def test_a_checkpoint_that_is_not_whole(without, make_run, save, told):
    save(30, without=[without])
    text = told(check_resume(make_run()), Level.FAIL)[0]
    assert "is not whole: 1 of 48 shards are missing or empty" in text and "resume_mode=resume_path" in text


def test_an_empty_shard_is_missing(make_run, save, told):
    (save(30) / "model_world_size_16_rank_0.pt").write_bytes(b"")
    assert "(model, rank 0)" in told(check_resume(make_run()), Level.FAIL)[0]


def test_a_checkpoint_of_another_number_of_gpus(make_run, save, told):
    save(30, world=8)
    assert "is of 8 ranks, the run has 16" in told(check_resume(make_run()), Level.FAIL)[0]


def test_a_checkpoint_without_the_state_of_the_data(make_run, save, told):
    save(30, without=["data.pt"])
    assert "the data begin anew" in told(check_resume(make_run()), Level.WARN)[0]


def test_a_run_that_is_at_its_end(make_run, save, told):
    save(400)
    assert "step 400 of 400 is reached" in told(check_resume(make_run()), Level.WARN)[0]


@pytest.mark.parametrize(
    ("text", "level", "message"),
    [
        ("", Level.FAIL, "has '', expected a step"),
        ("60", Level.FAIL, "names step 60, which is not there; verl would start from step 0"),
        (None, Level.WARN, f"holds global_step_30, but no {TRACKER}: the save was cut off"),
    ],
)
def test_the_tracker_of_a_save_that_was_cut_off(text, level, message, make_run, save, told, tmp_path):
    save(30, tracker=False)
    if text is not None:
        (tmp_path / "out" / TRACKER).write_text(text)
    assert message in told(check_resume(make_run()), level)[0]


def test_resume_modes(make_run, save, told, tmp_path):
    save(30)
    disabled = make_run("qwen2-32b_dapo", "trainer.resume_mode=disable")
    assert "holds checkpoints up to step 30" in told(check_resume(disabled), Level.WARN)[0]
    path = make_run(
        "qwen2-32b_dapo", "trainer.resume_mode=resume_path", f"trainer.resume_from_path={tmp_path}/out/global_step_30"
    )
    assert "goes on from global_step_30" in told(check_resume(path), Level.OK)[0]
    wrong = make_run("qwen2-32b_dapo", "trainer.resume_mode=resume_path", f"trainer.resume_from_path={tmp_path}/out")
    assert "is no folder global_step_N" in told(check_resume(wrong), Level.FAIL)[0]
    other = make_run("qwen2-32b_dapo", "trainer.resume_mode=never")
    assert "Set it to auto, disable or resume_path." in told(check_resume(other), Level.FAIL)[0]


def test_sft_that_would_resume_at_the_end_of_an_epoch(make_run, save, rows, told):
    # 2,000 rows / 4 data-parallel ranks = 500; batches of 32 / 4 = 8: 62 steps
    gpus = {"nnodes": 2, "nproc_per_node": 8}
    save(62, part="")
    text = told(check_resume(make_run("qwen2-32b_sft", rows(2000), **gpus)), Level.FAIL)[0]
    assert "is at the end of epoch 1: verl 0.9.1 resumes into nothing" in text
    save(100, part="")
    assert (
        "goes on from global_step_100 of 372"
        in told(check_resume(make_run("qwen2-32b_sft", rows(2000), **gpus)), Level.OK)[0]
    )


def test_sft_that_would_save_at_the_end_of_an_epoch(make_run, rows, told):
    gpus = {"nnodes": 2, "nproc_per_node": 8}
    run = make_run("qwen2-32b_sft", rows(2000), "trainer.save_freq=31", **gpus)
    assert "a checkpoint of step 62 is at the end of an epoch (62 steps)" in told(check_steps(run), Level.WARN)[0]
    assert list(check_steps(make_run("qwen2-32b_sft", rows(2000), **gpus))) == []


def test_data_that_are_too_few(make_run, rows, told):
    few = make_run("qwen2-32b_dapo", rows(500))
    assert "500 rows are less than a batch of 512: no step" in told(check_steps(few), Level.FAIL)[0]
    # 1,024 / 512 = 2 steps an epoch; 100 epochs are 200
    run = make_run("qwen2-32b_dapo", rows(1024))
    text = told(check_steps(run), Level.WARN)[0]
    assert "100 epoch(s) of 2 steps end at 200" in text and "Set trainer.total_epochs to 200" in text


def test_rows_are_counted_from_the_footers(rows, tmp_path):
    path = tmp_path / "7.parquet"
    rows(7)
    assert count_rows([path, path]) == 14
    (tmp_path / "broken.parquet").write_text("no parquet")
    assert count_rows([tmp_path / "broken.parquet"]) is count_rows([tmp_path / "none.parquet"]) is None


def test_disk(make_run, monkeypatch, told):
    def free(gib):
        monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1, 1, int(gib * GIB)))

    # 12 x 32.76e9 bytes = 366.16 GiB; 400 steps / 30 -> 14 checkpoints; logs 256 MB x 4 x 8 = 7.63 GiB
    free(300)
    assert "a checkpoint takes 366.2 GiB" in told(check_disk(make_run()), Level.FAIL)[0]
    free(2000)
    text = told(check_disk(make_run()), Level.WARN)[0]
    assert "all 14 are kept (every 30 steps)" in text and "the disk is full after 5, at step 150" in text
    kept = make_run("qwen2-32b_dapo", "trainer.max_actor_ckpt_to_keep=3")
    assert "the last 3 are kept" in told(check_disk(kept), Level.OK)[0]
    free(6000)
    assert "5,133.9 GiB with the trajectory logs" in told(check_disk(make_run()), Level.OK)[0]


def test_missing_files(make_run, told, rows):
    run = make_run("qwen2-32b_dapo", rows(3), "data.val_files=/nowhere/val.parquet")
    assert "data.val_files: /nowhere/val.parquet does not exist" in told(check_files(run), Level.FAIL)[0]
    assert list(check_files(make_run("qwen2-32b_dapo", rows(3), rows(3, "data.val_files")))) == []
