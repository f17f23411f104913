"""How long the ranks of an RL run wait for each other, which no setting of verl 0.9.1 changes."""

import functools
from types import ModuleType
from typing import Any

from verl_ext.versions import VERL, require_versions


def obey_nccl_timeout(workers: ModuleType) -> None:
    """verl/workers/engine_workers.py (0.9.1): RL's ranks wait for each other as `actor_rollout_ref.nccl_timeout` says.

    - :89 `TrainingWorker` makes the process group without a time-out, whatever is set, unless there already is a group
      (utils/distributed.py:89). torch then uses 30 minutes for the backend `cpu:gloo,cuda:nccl`
      (torch/distributed/distributed_c10d.py, `_get_default_timeout`). SFT has 10 hours (utils/distributed.py:62).
      Ranks wait in this group while rank 0 reads the weights (workers/engine/fsdp/transformer_impl.py:606) and while
      a checkpoint is saved (utils/checkpoint/fsdp_checkpoint_manager.py:420). Groups within it keep torch's time-out.
    """
    require_versions(VERL, "verl_ext/trainer/limits.py")
    worker = workers.ActorRolloutRefWorker
    init_model = worker.init_model

    @functools.wraps(init_model)  # with what `register` has noted on it
    def init_model_in_group(self: Any) -> Any:
        workers.initialize_global_process_group_ray(timeout_second=self.config.nccl_timeout)
        return init_model(self)

    worker.init_model = init_model_in_group
