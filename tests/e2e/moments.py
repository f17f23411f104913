"""Stop a run at a moment that a test names, and say that it is there; the test then kills the run.

`tests.processes.stop_at` loads this file into all of verl's processes. `RETOOL_STOP_AT` is `<moment>:<n>`, the
n-th time in the process, and `RETOOL_STOPPED` the file that then appears:

- rollout: prompts are out, and the sampler waits for responses;
- update: gradients are computed, and the optimizer has not stepped;
- shard: the first half of the last rank's optimizer shard is on the disk;
- data: the shards are saved. RL: `data.pt` is not. SFT: rank 0 is done, and rank 1 has not saved its `data_1.pt`.
"""

import io
import os
import re
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import wrapt

MOMENT, _, NUMBER = os.environ["RETOOL_STOP_AT"].partition(":")
_times = 0


def is_now() -> bool:
    global _times
    _times += 1
    return _times == int(NUMBER)


def stop() -> None:
    Path(os.environ["RETOOL_STOPPED"]).touch()
    time.sleep(3600)


def stop_in_rollout(module: ModuleType) -> None:
    sample = module.DapoReplayBuffer.sample

    def sample_or_stop(self: Any, global_steps: int, partition_id: str, batch_size: int) -> Any:
        if partition_id == "train" and is_now():
            stop()
        return sample(self, global_steps, partition_id, batch_size)

    module.DapoReplayBuffer.sample = sample_or_stop


def stop_in_update(module: ModuleType) -> None:
    step = module.FSDPEngine.optimizer_step

    def step_or_stop(self: Any) -> Any:
        if is_now():
            stop()
        return step(self)

    module.FSDPEngine.optimizer_step = step_or_stop


def stop_in_save() -> None:
    save = torch.save

    def save_or_stop(data: Any, path: Any, *args: Any, **kwargs: Any) -> None:
        name = Path(path).name if isinstance(path, str | os.PathLike) else ""
        found = re.fullmatch(r"optim_world_size_(\d+)_rank_(\d+)\.pt", name)
        if MOMENT == "shard" and found and int(found[2]) == int(found[1]) - 1 and is_now():
            whole = io.BytesIO()
            save(data, whole)
            Path(path).write_bytes(whole.getvalue()[: whole.tell() // 2])
            stop()
        if MOMENT == "data" and name in ("data.pt", "data_1.pt") and is_now():
            if name == "data_1.pt":
                wait_for_tracker(Path(path).parent)
            stop()
        save(data, path, *args, **kwargs)

    torch.save = save_or_stop


def wait_for_tracker(checkpoint: Path) -> None:
    """Wait until verl's `CheckpointHandler` on rank 0 has named the step."""
    tracker, step = checkpoint.parent / "latest_checkpointed_iteration.txt", checkpoint.name.rpartition("_")[2]
    while not (tracker.exists() and tracker.read_text() == step):
        time.sleep(0.01)


if MOMENT == "rollout":
    wrapt.register_post_import_hook(stop_in_rollout, "verl_ext.trainer.sampler")
elif MOMENT == "update":
    wrapt.register_post_import_hook(stop_in_update, "verl.workers.engine.fsdp.transformer_impl")
else:
    stop_in_save()
