"""verl's own save and load code, patched, with fakes for what is slow: the engine and the worker group."""

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from verl_ext.checkpoints import folder as checkpoints
from verl_ext.checkpoints import manifest
from verl_ext.records import durable

EPOCH = 4  # batches of 2


@pytest.fixture
def rolling(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The patches' module, its memory of the run reset afterwards."""
    from verl_ext.checkpoints import hooks as checkpoint_patches

    monkeypatch.setattr(checkpoint_patches, "_rolling", None)
    return checkpoint_patches


class Engine:
    """The far side of a save: writes one shard, and notes what there was at that time."""

    def __init__(self, run: Path, fails: bool = False):
        self.run, self.fails, self.seen = run, fails, []
        self.optimizer_config = SimpleNamespace(total_training_steps=12)
        self.world_size = 1

    def save_checkpoint(self, local_path: str, *_: Any, **__: Any) -> None:
        self.seen.append((checkpoints.steps(self.run), checkpoints.tracked_step(self.run)))
        Path(local_path).mkdir(parents=True)
        (Path(local_path) / "model_world_size_1_rank_0.pt").write_bytes(b"weights")
        if self.fails:
            raise OSError("No space left on device")

    def load_checkpoint(self, local_path: str, **_: Any) -> None:
        self.loaded = local_path

    def is_mp_src_rank_with_outputs(self) -> bool:
        return True

    def get_data_parallel_rank(self) -> int:
        return 0

    def get_data_parallel_size(self) -> int:
        return 1


def loader() -> Any:
    """As verl's SFT trainer makes it, over 8 rows; its sampler is `.sampler`."""
    from torch.utils.data import DistributedSampler
    from torchdata.stateful_dataloader import StatefulDataLoader

    rows = list(range(EPOCH * 2))
    sampler = DistributedSampler(rows, shuffle=True, num_replicas=1, rank=0, drop_last=True)
    return StatefulDataLoader(rows, batch_size=2, sampler=sampler, drop_last=True)


def handler(run: Path, data: Any, engine: Engine | None = None, **settings: Any) -> Any:
    from verl.utils.checkpoint import CheckpointHandler, OrchestrationMode

    engine = engine or Engine(run)
    return CheckpointHandler(engine, data, default_local_dir=str(run), mode=OrchestrationMode.RAY, **settings)


def epochs(data: Any, first: int, last: int) -> list[list[int]]:
    """The batches that verl's `fit` would train in the epochs, one list each."""
    trained = []
    for epoch in range(first, last):
        data.sampler.set_epoch(epoch)
        trained.append([batch.tolist() for batch in data])
    return trained


def test_sft_saves_out_of_sight_and_names_the_step_last(rolling: Any, tmp_path: Path):
    run, engine = tmp_path / "run", Engine(tmp_path / "run")
    sft = handler(run, loader(), engine)
    sft.save_checkpoint(2)
    sft.save_checkpoint(4)
    assert engine.seen == [([], None), ([2], 2)]
    assert checkpoints.whole_steps(run) == [2, 4] and checkpoints.tracked_step(run) == 4
    assert (run / "global_step_4" / "data_0.pt").exists() and sft.default_local_dir == str(run)
    assert handler(run, loader()).load_checkpoint() == 4


def test_a_save_that_fails_leaves_what_there_was(rolling: Any, tmp_path: Path):
    handler(tmp_path, loader()).save_checkpoint(2)
    sft = handler(tmp_path, loader(), Engine(tmp_path, fails=True))
    with pytest.raises(OSError, match="No space left"):
        sft.save_checkpoint(4)
    assert sft.default_local_dir == str(tmp_path)
    assert checkpoints.steps(tmp_path) == [2] and checkpoints.tracked_step(tmp_path) == 2


@pytest.mark.parametrize("step", [EPOCH - 1, EPOCH, EPOCH + 1, 2 * EPOCH - 1, 2 * EPOCH, 2 * EPOCH + 1, 3 * EPOCH])
def test_sft_resumed_around_an_epochs_end_trains_what_was_left(rolling: Any, tmp_path: Path, step: int):
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
    left = [batch for epoch in epochs(data, step // EPOCH, 4) for batch in epoch]
    assert done + left == whole


@pytest.mark.parametrize("there", [[], ["data_0.pt", "data_1.pt"]])
def test_data_loader_states_of_other_ranks_are_refused(rolling: Any, tmp_path: Path, there: list[str]):
    checkpoint = tmp_path / "global_step_2"
    checkpoint.mkdir()
    for name in there:
        (checkpoint / name).touch()
    manifest.vouch(checkpoint)
    with pytest.raises(ValueError, match=f"states of {len(there)} data-parallel ranks, but this run has 1"):
        handler(tmp_path, loader()).load_checkpoint()


@pytest.fixture
def one_process() -> Any:
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def test_an_sft_run_that_is_complete_ends_without_another_step(rolling: Any, tmp_path: Path, one_process: None):
    from verl.utils.checkpoint import CheckpointHandler

    engine = Engine(tmp_path)
    sft = CheckpointHandler(engine, loader(), default_local_dir=str(tmp_path))
    sft.save_checkpoint(10)
    assert sft.load_checkpoint() == 10
    sft.save_checkpoint(12)
    with pytest.raises(SystemExit) as ended:
        sft.load_checkpoint()
    assert ended.value.code == 0


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
        assert checkpoints.tracked_step(run) == step, "it goes on before the checkpoint is named"
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
def test_ranks_wait_for_each_other_and_agree_on_where_they_resume_and_on_what_is_wrong(rolling: Any, tmp_path: Path):
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
        assert "global_step_4 is not a whole checkpoint: model_world_size_2_rank_1.pt has its 7 bytes, but not" in error
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
        ({"resume_mode": "auto", "resume_from_path": "global_step_2"}, 2),  # SFT's `auto` takes a path too
    ],
)
def test_sft_resumes_where_resume_mode_says(
    rolling: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict, expected: int | None
):
    for step in (2, 4):
        handler(tmp_path, loader()).save_checkpoint(step)
    monkeypatch.chdir(tmp_path)
    assert handler(tmp_path, loader(), **settings).load_checkpoint() == (expected or 0)
    with pytest.raises(ValueError, match="resume_mode='newest'; expected auto, resume_path or disable"):
        handler(tmp_path, loader(), resume_mode="newest").load_checkpoint()


class Callback:
    def __init__(self) -> None:
        self.saved = []

    def on_save(self, trainer: Any, global_step: int, checkpoint_dir: str, async_save: bool) -> None:
        self.saved.append((global_step, checkpoint_dir, checkpoints.problem(Path(checkpoint_dir))))


def rl_trainer(run: Path, engine: Engine, **settings: Any) -> Any:
    """What `PPOTrainer._save_checkpoint` and `_load_checkpoint` of verl touch, in the mode `sync`."""
    from omegaconf import OmegaConf

    trainer = {"default_local_dir": str(run), "default_hdfs_dir": None, "del_local_ckpt_after_load": False}
    trainer |= {"resume_mode": "auto", "resume_from_path": None} | settings
    config = OmegaConf.create({"trainer": trainer, "actor_rollout_ref": {"actor": {"checkpoint": {}}}})
    OmegaConf.set_struct(config, True)
    return SimpleNamespace(
        config=config,
        checkpoint_callback=Callback(),
        actor_rollout_wg=engine,
        train_dataloader=loader(),
        trainer_mode="sync",
        use_critic=False,
        global_steps=0,
    )


def test_rl_saves_out_of_sight_and_resumes_from_what_is_whole(rolling: Any, tmp_path: Path):
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


def prompts(shuffle: bool = True) -> Any:
    """As verl's RL trainer makes its loader, with the refill of single prompts: 4 rows."""
    from omegaconf import OmegaConf
    from torchdata.stateful_dataloader import StatefulDataLoader
    from verl.trainer.ppo.utils import create_rl_sampler

    rows = [{"raw_prompt": str(row)} for row in range(EPOCH)]
    sampler = create_rl_sampler(OmegaConf.create({"shuffle": shuffle, "seed": 1}), rows)
    return StatefulDataLoader(rows, batch_size=1, sampler=sampler, drop_last=True, collate_fn=collate)


def collate(rows: list[dict[str, str]]) -> dict[str, Any]:
    import numpy as np

    return {"raw_prompt": np.array([row["raw_prompt"] for row in rows], dtype=object)}


def drawn(trainer: Any, number: int) -> list[str]:
    """The next prompts, by verl's own `_fetch_one_gen_batch`."""
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    return [PPOTrainer._fetch_one_gen_batch(trainer)["raw_prompt"][0] for _ in range(number)]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("step", [EPOCH - 1, EPOCH, EPOCH + 1, 2 * EPOCH, 2 * EPOCH + 1, 3 * EPOCH])
def test_rl_resumed_around_an_epochs_end_draws_what_was_left(rolling: Any, tmp_path: Path, step: int, shuffle: bool):
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    def trainer() -> Any:
        made = rl_trainer(tmp_path, Engine(tmp_path))
        made.train_dataloader, made.train_dataloader_it = prompts(shuffle), None
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


def test_a_rank_waits_for_its_own_shards(rolling: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Rank 1 of 2, on any machine, before rank 0 may say that the checkpoint is whole."""
    from verl.utils.checkpoint import fsdp_checkpoint_manager

    class Manager:
        rank = 1

        def save_checkpoint(self, local_path: str | None, hdfs_path: Any = None, global_step: int = 0) -> None:
            if local_path is not None:
                (Path(local_path) / "model_world_size_2_rank_1.pt").write_bytes(str(global_step).encode())

    synced: list[str] = []
    monkeypatch.setattr(durable, "sync", lambda path: path.is_dir() or synced.append(path.name))
    rolling._sync_shards(module := SimpleNamespace(FSDPCheckpointManager=Manager))
    (tmp_path / "model_world_size_2_rank_0.pt").touch()
    module.FSDPCheckpointManager().save_checkpoint(str(tmp_path), None, global_step=7)
    assert synced == ["model_world_size_2_rank_1.pt"]
    assert (tmp_path / synced[0]).read_bytes() == b"7"
    module.FSDPCheckpointManager().save_checkpoint(None)
    real = fsdp_checkpoint_manager.FSDPCheckpointManager.save_checkpoint
    assert real.__module__ == "verl_ext.checkpoints.hooks", "verl's own is the patched one"


def test_a_copy_that_a_kill_left_out_of_place_is_put_there_at_a_resume(rolling: Any, tmp_path: Path):
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


def test_another_number_of_gpus_is_refused(rolling: Any, tmp_path: Path, one_process: None):
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


def test_rl_refuses_to_save_behind_its_back(rolling: Any, tmp_path: Path):
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    trainer = rl_trainer(tmp_path, Engine(tmp_path))
    trainer.config.actor_rollout_ref.actor.checkpoint = {"async_save": True}
    with pytest.raises(ValueError, match="async_save=true"):
        PPOTrainer._save_checkpoint(trainer)


def test_the_best_is_found_in_what_verl_logs(rolling: Any, tmp_path: Path):
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
    assert rolling._rolling.values[8] == 0.3, "an evaluation is no validation of the run"


def test_another_verl_is_refused(rolling: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rolling, "VERL", {"verl": "0.10.0"})
    with pytest.raises(RuntimeError, match=r"internals of \{'verl': '0.10.0'\}, but found \{'verl': '0.9.1'\}"):
        rolling.install(None)
