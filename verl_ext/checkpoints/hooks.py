"""The overrides of verl's internals that whole checkpoints need, on GPUs and CPUs alike; each names what it replaces.

verl 0.9.1 offers a callback after an RL save, but nothing before one, nothing at a resume and nothing for SFT.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import wrapt

from verl_ext.checkpoints import folder as checkpoints
from verl_ext.checkpoints import manifest
from verl_ext.checkpoints.course import Course, has_other_rows, require_same_rows, warn_of_another_rate
from verl_ext.runs.lock import own_training_folder
from verl_ext.versions import VERL, require_versions

logger = logging.getLogger(__name__)
logger.setLevel(logging.INFO)

_rolling: checkpoints.Rolling | None = None  # of this process's run


def install(verl: ModuleType) -> None:
    """Patch each module when it is imported.

    Args:
        verl: the imported package.
    Raises:
        RuntimeError: its version is not the one that the patches were written for.
    """
    require_versions(VERL, "verl_ext/checkpoints/hooks.py")
    wrapt.register_post_import_hook(_guard_sft, "verl.utils.checkpoint.checkpoint_handler")
    wrapt.register_post_import_hook(_guard_rl, "verl.trainer.ppo.v1.trainer_base")
    wrapt.register_post_import_hook(_sync_shards, "verl.utils.checkpoint.fsdp_checkpoint_manager")
    wrapt.register_post_import_hook("verl_ext.checkpoints.lora:fold_when_merged", "verl.model_merger.base_model_merger")


def _publish(folder: Path, step: int) -> Path:
    checkpoint = checkpoints.publish(folder, step)
    logger.info("Checkpoint of step %s is complete: %s", step, checkpoint)
    if _rolling is not None:
        _rolling.after_save(step)
    return checkpoint


def _sync_shards(module: ModuleType) -> None:
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


def _guard_sft(module: ModuleType) -> None:
    """verl/utils/checkpoint/checkpoint_handler.py (0.9.1): `CheckpointHandler`.

    - :88 `save_checkpoint`: rank 0 writes the tracker before other ranks have saved their data-loader state. A kill
      then leaves a checkpoint whose rank 1 starts its data anew. Here it writes into `.saving/`.
    - :184 `_determine_resume_path` takes what the tracker names, whole or not, and from a folder that another run uses.
    - :157 `_load_dataloader_state`: a missing file starts the data anew with a warning; and a state saved after the
      last batch of an epoch yields nothing in the next one, which trainer/sft_trainer.py:341 counts all the same: that
      epoch is skipped, and if it is the last one, nothing is trained (verl issues 5725, 7401). A step of the checkpoint
      is taken for a step of this run, whatever rows either has (`course.py`).
    - :127 `load_checkpoint`: a complete run would train one more step (trainer/sft_trainer.py:365).
    """
    handler = module.CheckpointHandler
    save, load, load_data = handler.save_checkpoint, handler.load_checkpoint, handler._load_dataloader_state

    def barrier(self: Any) -> None:
        if self.mode == module.OrchestrationMode.SPMD:
            module.torch.distributed.barrier()

    def ranks_of(self: Any) -> int:
        return 1 if self.mode == module.OrchestrationMode.RAY else self.engine.get_data_parallel_size()

    def course_of(self: Any) -> Course:
        return Course.of(self.train_dataloader, ranks_of(self), getattr(self.engine, "optimizer_config", None))

    def is_complete(self: Any, step: int) -> bool:
        return 0 < (course_of(self).total_training_steps or 0) <= step

    def save_checkpoint(self: Any, step: int) -> None:
        folder = Path(self.default_local_dir)
        if self.rank == 0:
            checkpoints.begin(folder)
        barrier(self)
        self.default_local_dir = str(folder / checkpoints.SAVING)
        checkpoint = checkpoints.path_of(folder / checkpoints.SAVING, step)
        try:
            save(self, step)
            if self.rank == 0:
                course_of(self).write(checkpoint)
            manifest.sync_own(checkpoint, self.rank)  # `data_<rank>.pt`
        finally:
            self.default_local_dir = str(folder)
        barrier(self)  # all ranks' parts are on disk
        if self.rank == 0:
            _publish(folder, step)
        barrier(self)

    def _determine_resume_path(self: Any) -> str | None:
        mode = "resume_path" if self.resume_mode == "auto" and self.resume_from_path else self.resume_mode
        decided: list[Any] = [None]  # by rank 0: it may have to put a checkpoint in its place, and reads GBs
        if self.rank == 0:
            try:
                own_training_folder(Path(self.default_local_dir))
                decided = [_chosen(mode, self.resume_from_path, folder := Path(self.default_local_dir))]
                if decided[0] is not None:
                    if not is_complete(self, module.extract_step(str(decided[0]))):
                        require_same_rows(decided[0], course_of(self))
                    checkpoints.set_back(folder, decided[0])
            except (ValueError, OSError, checkpoints.NotWhole) as error:
                decided = [error]
        if self.mode == module.OrchestrationMode.SPMD:
            module.torch.distributed.broadcast_object_list(decided, src=0)
        (chosen,) = decided
        if isinstance(chosen, Exception):
            raise chosen
        if chosen is None:
            return None
        if self.mode == module.OrchestrationMode.SPMD:
            manifest.require_ranks(chosen, module.torch.distributed.get_world_size())
        return str(chosen)

    def _load_dataloader_state(self: Any, checkpoint_path: str) -> None:
        manifest.require_data_states(Path(checkpoint_path), ranks_of(self))
        step, steps_per_epoch = module.extract_step(checkpoint_path), len(self.train_dataloader)
        if self.rank == 0:
            warn_of_another_rate(Path(checkpoint_path), step, course_of(self))
        if step % steps_per_epoch == 0:
            if self.rank == 0:
                logger.info("Resume: step %s ended an epoch; the next one starts at its first batch.", step)
            return
        load_data(self, checkpoint_path)

    def load_checkpoint(self: Any) -> int:
        step = load(self)
        if self.mode == module.OrchestrationMode.SPMD and is_complete(self, step):
            if self.rank == 0:
                logger.info("Resume: the run is complete. Step %s is its last one, so there is nothing to train.", step)
            module.torch.distributed.destroy_process_group()
            raise SystemExit(0)
        return step

    handler.save_checkpoint = save_checkpoint
    handler.load_checkpoint = load_checkpoint
    handler._determine_resume_path = _determine_resume_path
    handler._load_dataloader_state = _load_dataloader_state


def _guard_rl(module: ModuleType) -> None:
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

    def course_of(self: Any) -> Course:
        return Course.of(self.train_dataloader, 1, self.config.actor_rollout_ref.actor.get("optim"))

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
            course_of(self).write(checkpoints.path_of(folder / checkpoints.SAVING, step))
        finally:
            settings.default_local_dir, self.checkpoint_callback = str(folder), callback
        checkpoint = _publish(folder, step)
        callback.on_save(trainer=self, global_step=step, checkpoint_dir=str(checkpoint), async_save=False)

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
            now = course_of(self)
            if has_other_rows(chosen, now):
                self.train_dataloader.load_state_dict(None)
            warn_of_another_rate(chosen, self.global_steps * getattr(self, "parameter_sync_step", 1), now)
            checkpoints.set_back(Path(settings.default_local_dir), chosen)

    trainer._save_checkpoint = _save_checkpoint
    trainer._load_checkpoint = _load_checkpoint


def keep_checkpoints(config: Mapping[str, Any]) -> checkpoints.Rolling | None:
    """Delete from now on what a run's settings do not keep; return whom to tell its validations, None if none count."""
    global _rolling
    _rolling = checkpoints.Rolling.from_config(config)
    return None if config["trainer"].get("val_only") else _rolling


def _chosen(mode: str, path: str | None, folder: Path) -> Path | None:
    """Choose as `checkpoints.choose` does, after moving a copy that a kill left in `.saving/` into its place."""
    if mode == "auto":
        checkpoints.restore(folder)
    elif mode == "resume_path" and (step := checkpoints.step_of(path)) is not None:
        checkpoints.restore(Path(path).parent, step)
    return checkpoints.choose(mode, path, folder)
