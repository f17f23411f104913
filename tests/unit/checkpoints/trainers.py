"""Fakes of the slow parts that verl's own save and load code calls: the engine and the worker group."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from verl_ext.checkpoints import folder as checkpoints

EPOCH = 4  # batches of 2


class Engine:
    """The far side of a save: writes one shard, and notes what existed at that time."""

    def __init__(self, run: Path, fails: bool = False):
        self.run, self.fails, self.seen = run, fails, []
        self.optimizer_config = SimpleNamespace(total_training_steps=12, lr_scheduler_type="cosine", lr=1e-5)
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


class Rows(list):
    """A data set with the digest of its rows, as RetoolSFTDataset has one."""

    @property
    def digest(self) -> str:
        return str(hash(tuple(self)))


def loader(rows: Sequence[int] = range(EPOCH * 2), batch_size: int = 2, rank: int = 0, ranks: int = 1) -> Any:
    """Make the loader as verl's SFT trainer does for a rank; its sampler is `.sampler`."""
    from torch.utils.data import DistributedSampler
    from torchdata.stateful_dataloader import StatefulDataLoader

    rows = Rows(rows)
    sampler = DistributedSampler(rows, shuffle=True, num_replicas=ranks, rank=rank, drop_last=True)
    return StatefulDataLoader(rows, batch_size=batch_size, sampler=sampler, drop_last=True)


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


def prompts(number: int = EPOCH, batch_size: int = 1, shuffle: bool = True) -> Any:
    """Make the loader as verl's RL trainer does; with the refill of single prompts, in batches of one."""
    from omegaconf import OmegaConf
    from torchdata.stateful_dataloader import StatefulDataLoader
    from verl.trainer.ppo.utils import create_rl_sampler

    rows = [{"raw_prompt": str(row)} for row in range(number)]
    sampler = create_rl_sampler(OmegaConf.create({"shuffle": shuffle, "seed": 1}), rows)
    return StatefulDataLoader(rows, batch_size=batch_size, sampler=sampler, drop_last=True, collate_fn=collate)


def collate(rows: list[dict[str, str]]) -> dict[str, Any]:
    import numpy as np

    return {"raw_prompt": np.array([row["raw_prompt"] for row in rows], dtype=object)}


def drawn(trainer: Any, number: int) -> list[str]:
    """Return the next prompts, fetched by verl's own `_fetch_one_gen_batch`."""
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    return [PPOTrainer._fetch_one_gen_batch(trainer)["raw_prompt"][0] for _ in range(number)]
