"""The overrides of verl's internals that whole checkpoints need, on GPUs and CPUs alike; each names what it replaces.

verl 0.9.1 offers a callback after an RL save, but nothing before one, nothing at a resume and nothing for SFT.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

import torch.distributed as dist
import wrapt

from verl_ext.checkpoints import folder as checkpoints
from verl_ext.checkpoints import manifest
from verl_ext.checkpoints.course import Course, has_other_rows, require_same_rows, warn_of_another_rate
from verl_ext.checkpoints.rolling import Rolling
from verl_ext.runs.lock import own_training_folder
from verl_ext.versions import VERL, Library, require_versions

if TYPE_CHECKING:
    from verl.utils.checkpoint.checkpoint_handler import CheckpointHandler
    from verl.workers.engine import BaseEngine
else:
    CheckpointHandler = object  # verl's module is being imported when `guard_sft` is called

logger = logging.getLogger(__name__)
logger.setLevel(logging.INFO)

_rolling: Rolling | None = None  # of this process's run


def install(verl: ModuleType) -> None:
    """Patch each module when it is imported.

    Args:
        verl: the imported package.
    Raises:
        RuntimeError: its version is not the one that the patches were written for.
    """
    require_versions(VERL, "verl_ext/checkpoints/hooks.py")
    wrapt.register_post_import_hook(guard_sft, "verl.utils.checkpoint.checkpoint_handler")
    wrapt.register_post_import_hook(guard_rl, "verl.trainer.ppo.v1.trainer_base")
    wrapt.register_post_import_hook(sync_shards, "verl.utils.checkpoint.fsdp_checkpoint_manager")
    wrapt.register_post_import_hook("verl_ext.checkpoints.lora:fold_when_merged", "verl.model_merger.base_model_merger")


def _publish(folder: Path, step: int) -> Path:
    checkpoint = checkpoints.publish(folder, step)
    logger.info("Checkpoint of step %s is complete: %s", step, checkpoint)
    return checkpoint


def _remove_old(step: int) -> None:
    """Remove the checkpoints that a run does not keep: last, because it may take minutes, in which a run is killed."""
    if _rolling is not None:
        _rolling.after_save(step)


def sync_shards(module: ModuleType) -> None:
    """verl/utils/checkpoint/fsdp_checkpoint_manager.py (0.9.1): `FSDPCheckpointManager`, of SFT and of RL's workers.

    - :272 `save_checkpoint` returns when the shards are in the memory of their machine. Here it waits for the disk, on
      every rank, so that a checkpoint which rank 0 then names survives a power loss of any node.
    """
    manager = module.FSDPCheckpointManager
    save = manager.save_checkpoint

    def save_checkpoint(self: Any, local_path: str | None, *args: Any, **kwargs: Any) -> None:
        save(self, local_path, *args, **kwargs)
        if local_path is not None:
            manifest.sync_own(Path(local_path), self.rank)

    manager.save_checkpoint = save_checkpoint


def guard_sft(module: Library) -> None:
    """verl/utils/checkpoint/checkpoint_handler.py (0.9.1): put a subclass in the place of `CheckpointHandler`."""
    module.CheckpointHandler = type("CheckpointHandler", (WholeSaves, module.CheckpointHandler), {})


class WholeSaves(CheckpointHandler):
    """SFT's saves and resumes. It stands before verl's `CheckpointHandler`, whose lines are named."""

    @property
    def _has_ranks(self) -> bool:
        """Whether each rank is a process with a handler; in verl's mode RAY there is one handler."""
        return self.mode.name == "SPMD"

    def _wait_for_ranks(self) -> None:
        if self._has_ranks:
            dist.barrier()

    def _num_data_ranks(self) -> int:
        return cast("BaseEngine", self.engine).get_data_parallel_size() if self._has_ranks else 1

    def _course(self) -> Course:
        return Course.of(self.train_dataloader, self._num_data_ranks(), getattr(self.engine, "optimizer_config", None))

    def _is_complete(self, step: int) -> bool:
        return 0 < (self._course().total_training_steps or 0) <= step

    def save_checkpoint(self, step: int) -> None:
        """Save into `.saving/` until all ranks' parts are on the disk.

        verl's (:90): rank 0 writes the tracker (:132) before the other ranks need have saved their data-loader state. A
        kill then leaves a checkpoint whose rank 1 starts its data anew.
        """
        folder = Path(self.default_local_dir)
        if self.rank == 0:
            checkpoints.begin(folder)
        self._wait_for_ranks()
        self.default_local_dir = str(folder / checkpoints.SAVING)
        checkpoint = checkpoints.path_of(folder / checkpoints.SAVING, step)
        try:
            super().save_checkpoint(step)
            if self.rank == 0:
                self._course().write(checkpoint)
            manifest.sync_own(checkpoint, self.rank)  # `data_<rank>.pt`
        finally:
            self.default_local_dir = str(folder)
        self._wait_for_ranks()  # all ranks' parts are on disk
        if self.rank == 0:
            _publish(folder, step)
            _remove_old(step)
        self._wait_for_ranks()

    def load_checkpoint(self) -> int:
        """Load as verl's (:143), and end a complete run, which would train one step more (trainer/sft_trainer.py:371).

        Raises:
            SystemExit: the checkpoint is of the run's last step.
        """
        step = super().load_checkpoint()
        if self._has_ranks and self._is_complete(step):
            if self.rank == 0:
                logger.info("Resume: the run is complete. Step %s is its last one, so there is nothing to train.", step)
            dist.destroy_process_group()
            raise SystemExit(0)
        return step

    def _determine_resume_path(self) -> str | None:
        """Return a whole checkpoint of a folder that no other run uses; verl's (:196) takes what the tracker names.

        Rank 0 decides for all: it may have to put a checkpoint in its place, and reads GBs.
        """
        decided: list[Any] = [None]
        if self.rank == 0:
            try:
                decided = [self._choose()]
            except (ValueError, OSError, checkpoints.NotWhole) as error:
                decided = [error]
        if self._has_ranks:
            dist.broadcast_object_list(decided, src=0)
        (chosen,) = decided
        if isinstance(chosen, Exception):
            raise chosen
        if chosen is None:
            return None
        if self._has_ranks:
            manifest.require_ranks(chosen, dist.get_world_size())
        return str(chosen)

    def _choose(self) -> Path | None:
        folder = Path(self.default_local_dir)
        own_training_folder(folder)
        mode = "resume_path" if self.resume_mode == "auto" and self.resume_from_path else self.resume_mode
        chosen = _chosen(mode, self.resume_from_path, folder)
        if chosen is not None:
            if not self._is_complete(checkpoints.named_step(chosen)):
                require_same_rows(chosen, self._course())
            checkpoints.set_back(folder, chosen)
        return chosen

    def _load_dataloader_state(self, checkpoint_path: str) -> None:
        """Load the place in the data, unless an epoch ended there.

        verl's (:170) starts the data anew with a warning if the file is missing. A state that was saved after the last
        batch of an epoch yields nothing in the next one, which trainer/sft_trainer.py:341 counts all the same: that
        epoch is skipped, and if it is the last one, nothing is trained (verl issues 5725, 7401).
        """
        manifest.require_data_states(Path(checkpoint_path), self._num_data_ranks())
        step, steps_per_epoch = checkpoints.named_step(Path(checkpoint_path)), len(self.train_dataloader)
        if self.rank == 0:
            warn_of_another_rate(Path(checkpoint_path), step, self._course())
        if step % steps_per_epoch == 0:
            if self.rank == 0:
                logger.info("Resume: step %s ended an epoch; the next one starts at its first batch.", step)
            return
        super()._load_dataloader_state(checkpoint_path)


def guard_rl(module: ModuleType) -> None:
    """verl/trainer/ppo/v1/trainer_base.py (0.9.1): `PPOTrainer`.

    - :948 `_save_checkpoint` writes actor shards, critic, `data.pt`, the queue of the asynchronous modes, then the
      tracker, not atomically: a kill may leave it empty, which no later start survives. Files of a half-written step
      stay when it is saved again. Here it writes into `.saving/`, and the callback is called once the step is whole.
    - :850 `_load_checkpoint` takes what the tracker or `resume_from_path` names, whole or not; without `data.pt` it
      starts the data anew with a warning. The tracker keeps naming a later step, and `auto` takes that the next time.
      Two runs may write into one folder. A place in the data is applied to whatever data there is: with fewer rows it
      may be past the last one, and torchdata's sampler ends with StopIteration (`course.py`).
    """
    from verl.trainer.ppo.checkpoint_callback import CheckpointCallback

    trainer = module.PPOTrainer
    save, load = trainer._save_checkpoint, trainer._load_checkpoint

    def _save_checkpoint(self: Any) -> None:
        if self.config.actor_rollout_ref.actor.get("checkpoint", {}).get("async_save", False):
            raise ValueError(
                "actor_rollout_ref.actor.checkpoint.async_save=true: verl would continue before a checkpoint is "
                "written, and nothing would show when it is complete. Set it to false."
            )
        settings, callback, step = self.config.trainer, self.checkpoint_callback, self.global_steps
        folder = Path(settings.default_local_dir)
        checkpoints.begin(folder)
        settings.default_local_dir = str(folder / checkpoints.SAVING)
        self.checkpoint_callback = CheckpointCallback()  # a path below .saving/ would be of no use to it
        try:
            save(self)
            _course_of(self).write(checkpoints.path_of(folder / checkpoints.SAVING, step))
        finally:
            settings.default_local_dir, self.checkpoint_callback = str(folder), callback
        checkpoint = _publish(folder, step)
        callback.on_save(trainer=self, global_step=step, checkpoint_dir=str(checkpoint), async_save=False)
        _remove_old(step)

    def _load_checkpoint(self: Any) -> None:
        settings = self.config.trainer
        if not settings.get("val_only", False):
            own_training_folder(Path(settings.default_local_dir))
        given = settings.resume_mode, settings.resume_from_path
        chosen = _chosen(*given, Path(settings.default_local_dir))
        if chosen is not None:
            manifest.require_ranks(chosen / "actor", self.actor_rollout_wg.world_size)
        settings.resume_mode = "disable" if chosen is None else "resume_path"
        settings.resume_from_path = None if chosen is None else str(chosen.absolute())
        try:
            load(self)
        finally:
            settings.resume_mode, settings.resume_from_path = given
        if chosen is not None and not settings.get("val_only", False):
            now = _course_of(self)
            if has_other_rows(chosen, now):
                self.train_dataloader.load_state_dict(None)
            warn_of_another_rate(chosen, self.global_steps * getattr(self, "parameter_sync_step", 1), now)
            checkpoints.set_back(Path(settings.default_local_dir), chosen)

    trainer._save_checkpoint = _save_checkpoint
    trainer._load_checkpoint = _load_checkpoint


def _course_of(trainer: Any) -> Course:
    return Course.of(trainer.train_dataloader, 1, trainer.config.actor_rollout_ref.actor.get("optim"))


def keep_checkpoints(config: Mapping[str, Any]) -> Rolling | None:
    """Delete from now on what a run's settings do not keep; return whom to tell its validations, None if none count."""
    global _rolling
    _rolling = Rolling.from_config(config)
    return None if config["trainer"].get("val_only") else _rolling


def _chosen(mode: str, path: str | None, folder: Path) -> Path | None:
    """Choose as `checkpoints.choose` does, after moving a copy that a kill left in `.saving/` into its place."""
    if mode == "auto":
        checkpoints.restore(folder)
    elif mode == "resume_path" and path is not None and (step := checkpoints.step_of(path)) is not None:
        checkpoints.restore(Path(path).parent, step)
    return checkpoints.choose(mode, path, folder)
