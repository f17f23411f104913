"""The hooks in the save and load code of verl: SFT, and what SFT and RL share."""

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.checkpoints.trainers import EPOCH, Engine, handler, loader
from verl_ext.checkpoints import folder as checkpoints
from verl_ext.checkpoints import manifest
from verl_ext.runs import durable


def epochs(data: Any, first: int, last: int) -> list[list[int]]:
    """Return the batches that verl's `fit` would train on, one list for each epoch."""
    trained = []
    for epoch in range(first, last):
        data.sampler.set_epoch(epoch)
        trained.append([batch.tolist() for batch in data])
    return trained


def test_sft_saves_out_of_sight_and_names_the_step_last(hooks: Any, tmp_path: Path):
    run, engine = tmp_path / "run", Engine(tmp_path / "run")
    sft = handler(run, loader(), engine)
    sft.save_checkpoint(2)
    sft.save_checkpoint(4)
    assert engine.seen == [([], None), ([2], 2)]
    assert checkpoints.whole_steps(run) == [2, 4] and checkpoints.tracked_step(run) == 4
    assert (run / "global_step_4" / "data_0.pt").exists() and sft.default_local_dir == str(run)
    assert handler(run, loader()).load_checkpoint() == 4


def test_a_save_that_fails_leaves_what_there_was(hooks: Any, tmp_path: Path):
    handler(tmp_path, loader()).save_checkpoint(2)
    sft = handler(tmp_path, loader(), Engine(tmp_path, fails=True))
    with pytest.raises(OSError, match="No space left"):
        sft.save_checkpoint(4)
    assert sft.default_local_dir == str(tmp_path)
    assert checkpoints.steps(tmp_path) == [2] and checkpoints.tracked_step(tmp_path) == 2


@pytest.mark.parametrize("step", [EPOCH - 1, EPOCH, EPOCH + 1, 2 * EPOCH - 1, 2 * EPOCH, 2 * EPOCH + 1, 3 * EPOCH])
def test_sft_resumed_around_an_epochs_end_trains_what_was_left(hooks: Any, tmp_path: Path, caplog: Any, step: int):
    whole = [batch for epoch in epochs(loader(), 0, 4) for batch in epoch]
    data, done = loader(), []
    for epoch in range(4):
        data.sampler.set_epoch(epoch)
        for batch in data:
            done.append(batch.tolist())
            if len(done) == step:
                handler(tmp_path, data).save_checkpoint(step)
                break
        if len(done) == step:
            break

    data = loader()
    assert handler(tmp_path, data).load_checkpoint() == step
    said = "the next one starts at its first batch" in caplog.text
    assert said == (step % EPOCH == 0)
    left = [batch for epoch in epochs(data, step // EPOCH, 4) for batch in epoch]
    assert done + left == whole


@pytest.mark.parametrize("there", [[], ["data_0.pt", "data_1.pt"]])
def test_data_loader_states_of_other_ranks_are_refused(hooks: Any, tmp_path: Path, there: list[str]):
    checkpoint = tmp_path / "global_step_2"
    checkpoint.mkdir()
    for name in there:
        (checkpoint / name).touch()
    manifest.vouch(checkpoint)
    with pytest.raises(ValueError, match=f"states of {len(there)} data-parallel ranks, but this run has 1"):
        handler(tmp_path, loader()).load_checkpoint()


def test_an_sft_run_that_is_complete_ends_without_another_step(hooks: Any, tmp_path: Path, one_process: None):
    import torch.distributed
    from verl.utils.checkpoint import CheckpointHandler

    engine = Engine(tmp_path)
    sft = CheckpointHandler(engine, loader(), default_local_dir=str(tmp_path))
    sft.save_checkpoint(10)
    assert sft.load_checkpoint() == 10
    sft.save_checkpoint(12)
    with pytest.raises(SystemExit) as ended:
        sft.load_checkpoint()
    assert ended.value.code == 0 and not torch.distributed.is_initialized()


def a_rank(rank: int, run: Path, results: Any) -> None:
    """One of two: saves steps 2 and 4, and resumes when a shard of step 4 has been lost to zeros."""
    import torch.distributed as dist
    from verl.utils.checkpoint import CheckpointHandler

    class Sharded(Engine):
        def save_checkpoint(self, local_path: str, *_: Any, **__: Any) -> None:
            Path(local_path).mkdir(parents=True, exist_ok=True)
            (Path(local_path) / f"model_world_size_2_rank_{rank}.pt").write_bytes(b"weights")

        def get_data_parallel_rank(self) -> int:
            return rank

        def get_data_parallel_size(self) -> int:
            return 2

    dist.init_process_group("gloo", init_method=f"file://{run.parent}/store", rank=rank, world_size=2)
    sft = CheckpointHandler(Sharded(run), loader(), default_local_dir=str(run))
    begin, sync_own, publish = checkpoints.begin, manifest.sync_own, checkpoints.publish
    synced = run.parent / "rank_1_is_on_the_disk"

    def slow_sync(checkpoint: Path, of: int) -> None:
        sync_own(checkpoint, of)
        if rank == 1:
            time.sleep(0.3)
            synced.touch()

    def slow_publish(folder: Path, step: int) -> Path:
        assert synced.exists(), "rank 0 vouches for what rank 1 has not brought to the disk"
        time.sleep(0.3)
        return publish(folder, step)

    manifest.sync_own, checkpoints.publish = slow_sync, slow_publish
    checkpoints.begin = lambda folder: (time.sleep(0.3), begin(folder))[1]
    for step in (2, 4):
        sft.save_checkpoint(step)
        assert checkpoints.tracked_step(run) == step, "it continues before the checkpoint is named"
        synced.unlink(missing_ok=True)
        dist.barrier()
    if rank == 0:
        (run / "global_step_4" / "model_world_size_2_rank_1.pt").write_bytes(bytes(7))
    dist.barrier()
    resumed = sft.load_checkpoint(), sft.engine.loaded
    sft.resume_mode, sft.resume_from_path = "resume_path", str(run / "global_step_4")
    try:
        sft.load_checkpoint()
    except checkpoints.NotWhole as error:
        results.put((rank, *resumed, str(error)))
    dist.barrier()


@pytest.mark.timeout(120)  # two processes more
def test_ranks_wait_for_each_other_and_agree_on_where_they_resume_and_on_what_is_wrong(hooks: Any, tmp_path: Path):
    import multiprocessing

    import verl.utils.checkpoint  # noqa: F401  once, before the ranks are forked

    context = multiprocessing.get_context("fork")
    results = context.Queue()
    ranks = [context.Process(target=a_rank, args=(rank, tmp_path / "run", results), daemon=True) for rank in range(2)]
    for process in ranks:
        process.start()
    found = sorted(results.get(timeout=30) for _ in ranks)
    for process in ranks:
        process.join(10)
    for rank, (number, step, loaded, error) in enumerate(found):
        assert (number, step, loaded) == (rank, 2, str(tmp_path / "run" / "global_step_2"))
        assert "global_step_4 is not a complete checkpoint: model_world_size_2_rank_1.pt has its 7 bytes" in error
    assert sorted(path.name for path in (tmp_path / "run" / "global_step_4").glob("data_*")) == [
        "data_0.pt",
        "data_1.pt",
    ]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, 4),
        ({"resume_mode": "disable"}, None),
        ({"resume_mode": "resume_path", "resume_from_path": "global_step_2"}, 2),
        ({"resume_mode": "auto", "resume_from_path": "global_step_2"}, 2),  # SFT's `auto` also takes a path
    ],
)
def test_sft_resumes_where_resume_mode_says(
    hooks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict, expected: int | None
):
    for step in (2, 4):
        handler(tmp_path, loader()).save_checkpoint(step)
    monkeypatch.chdir(tmp_path)
    assert handler(tmp_path, loader(), **settings).load_checkpoint() == (expected or 0)
    assert checkpoints.tracked_step(tmp_path) == (expected or 4)  # `auto` stays on this course
    with pytest.raises(ValueError, match="resume_mode='newest'; expected auto, resume_path or disable"):
        handler(tmp_path, loader(), resume_mode="newest").load_checkpoint()


def test_a_rank_waits_for_its_own_shards(hooks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Rank 1 of 2, on any machine, before rank 0 may say that the checkpoint is whole."""
    from verl.utils.checkpoint import fsdp_checkpoint_manager

    class Manager:
        rank = 1

        def save_checkpoint(self, local_path: str | None, hdfs_path: Any = None, global_step: int = 0) -> None:
            if local_path is not None:
                (Path(local_path) / "model_world_size_2_rank_1.pt").write_bytes(str(global_step).encode())

    synced: list[str] = []
    monkeypatch.setattr(durable, "sync", lambda path: path.is_dir() or synced.append(path.name))
    hooks.sync_shards(module := SimpleNamespace(FSDPCheckpointManager=Manager))
    (tmp_path / "model_world_size_2_rank_0.pt").touch()
    module.FSDPCheckpointManager().save_checkpoint(str(tmp_path), None, global_step=7)
    assert synced == ["model_world_size_2_rank_1.pt"]
    assert (tmp_path / synced[0]).read_bytes() == b"7"
    module.FSDPCheckpointManager().save_checkpoint(None)
    real = fsdp_checkpoint_manager.FSDPCheckpointManager.save_checkpoint
    assert real.__module__ == "verl_ext.checkpoints.hooks", "verl's own is the patched one"


def test_the_best_is_found_in_what_verl_logs(hooks: Any, tmp_path: Path):
    from verl.utils.tracking import Tracking

    settings = {"keep_last": 1, "best_metric": "val/loss", "best_mode": "min"}
    trainer = {"default_local_dir": str(tmp_path), "save_freq": 2, "test_freq": 2}
    tracking = Tracking("p", "e", [], config={"trainer": trainer, "retool": {"checkpoints": settings}})
    sft = handler(tmp_path, loader())
    for step, loss in ((2, 0.4), (4, 0.2), (6, 0.3), (8, 0.3)):
        tracking.log({"train/loss": loss}, step)
        tracking.log({"val/loss": loss}, step)
        sft.save_checkpoint(step)
    assert checkpoints.steps(tmp_path) == [4, 8]
    looking = Tracking(
        "p", "e", [], config={"trainer": trainer | {"val_only": True}, "retool": {"checkpoints": settings}}
    )
    looking.log({"val/loss": 0.1}, 8)
    values = json.loads((tmp_path / "validation.json").read_text())["values"]
    assert values["8"] == 0.3, "an evaluation is no validation of the run"


def test_another_verl_is_refused(hooks: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(hooks, "VERL", {"verl": "0.10.0"})
    with pytest.raises(RuntimeError, match=r"internals of \{'verl': '0.10.0'\}, but found \{'verl': '0.9.1'\}"):
        hooks.install(None)
