"""What verl's own save and load code meets in these tests: fakes of what is slow, the engine and the worker group."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from verl_ext.checkpoints import folder as checkpoints

EPOCH = 4  # batches of 2


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


class Callback:
    def __init__(self) -> None:
        self.saved = []

    def on_save(self, trainer: Any, global_step: int, checkpoint_dir: str, async_save: bool) -> None:
        assert not async_save, "nothing is written any more"
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
