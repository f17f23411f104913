"""Save the batch of a step for the correction lab: `retool.record_batches` (scripts/studies/correction_lab.py).

The trainer's log-probs are computed in separate passes, before the first update and after the last one: a run with
`bypass_mode` has none of these, and verl's losses return none. Training does not change.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transfer_queue as tq
from omegaconf import DictConfig
from torch import Tensor
from transfer_queue import KVBatchMeta
from verl.workers.utils.padding import response_from_nested

from verl_ext.episode import ToolUse
from verl_ext.runs.batch_file import RecordedBatch, path_of, write_batch
from verl_ext.settings import RecordBatches
from verl_ext.trainer.advantages import keep_sum_pi_squared
from verl_ext.trainer.queue import episodes_of, real_keys

_VERSIONS = ("min_global_steps", "max_global_steps")  # tags of a row: versions of the weights that wrote it


class BatchRecorder:
    """Records the batch of every `settings.every`-th step into the run's folder.

    In the mode `separate_async`, whose steps take `parameter_sync_step` batches each, it records the first of them.

    Raises:
        ValueError: the rollout engine notes no log-probs, or fused kernels keep the sum of squared probabilities.
    """

    def __init__(self, settings: RecordBatches, config: DictConfig):
        rollout, model = config.actor_rollout_ref.rollout, config.actor_rollout_ref.model
        if not rollout.calculate_log_probs or model.use_fused_kernels:
            raise ValueError(
                "retool.record_batches needs actor_rollout_ref.rollout.calculate_log_probs=true and actor_rollout_ref."
                f"model.use_fused_kernels=false; got {rollout.calculate_log_probs} and {model.use_fused_kernels}."
            )
        self._every, self._folder = settings.every, Path(config.trainer.default_local_dir)
        self._temperature = rollout.temperature

    def is_due(self, step: int, number: int) -> bool:
        """Tell whether a step's batch is recorded. `number`: of the batch within the step, from 0."""
        return step % self._every == 0 and number == 0

    def log_probs(self, workers: Any, batch: KVBatchMeta) -> dict[str, Sequence[Tensor]]:
        """Return the trainer's current log-probs and sums of squared probabilities, float[tokens] per response."""
        before = dict(batch.extra_info)
        batch.extra_info |= {
            "calculate_entropy": False,
            "compute_loss": False,
            "calculate_sum_pi_squared": True,
            "temperature": self._temperature,
        }
        workers.compute_log_prob(batch)
        batch.extra_info = before
        keep_sum_pi_squared(batch)
        keys = [*real_keys(batch)]
        fields = ["log_probs", "response_mask", "sum_pi_squared"]
        data = tq.kv_batch_get(keys=keys, partition_id=batch.partition_id, select_fields=fields)
        log_prob = response_from_nested(data["log_probs"], data["response_mask"])
        return {"log_prob": log_prob.unbind(), "sum_pi_squared": data["sum_pi_squared"].unbind()}

    def save(
        self,
        step: int,
        batch: KVBatchMeta,
        before: dict[str, Sequence[Tensor]],
        after: dict[str, Sequence[Tensor]],
        updates: int,
    ) -> None:
        """Write what `log_probs` returned before the first and after the last update, and the rest of the batch."""
        keys, tags = real_keys(batch), dict(zip(batch.keys, batch.tags, strict=True))
        fields = ["response_mask", "rollout_log_probs", "rm_scores", "extra_fields"]
        data = tq.kv_batch_get(keys=[*keys], partition_id=batch.partition_id, select_fields=fields)
        last = {key.original: (row, key) for row, key in enumerate(keys.values())}  # one row of each episode
        rows, chosen = zip(*sorted(last.values()), strict=True)
        columns = [data["extra_fields"][row] for row in rows]
        episodes = episodes_of([key.original for key in chosen], columns)
        uses = [episode.use or ToolUse() for episode in episodes]
        masks, scores = data["response_mask"].unbind(), data["rm_scores"].unbind()

        def padded(values: Any) -> Tensor:
            chosen = [values[row].float() for row in rows]
            return torch.nn.utils.rnn.pad_sequence(chosen, batch_first=True)

        recorded = RecordedBatch(
            mask=padded(masks).bool(),
            rollout_log_prob=padded(data["rollout_log_probs"].unbind()),
            old_log_prob=padded(before["log_prob"]),
            log_prob=padded(after["log_prob"]),
            sum_pi_squared=padded(before["sum_pi_squared"]),
            scores=torch.stack([scores[row].float().sum() for row in rows]),
            acc=torch.tensor([episode.reward.acc for episode in episodes]),
            void=torch.tensor([bool(use.void_turns) for use in uses]),
            calls=torch.tensor([use.calls for use in uses]),
            failed_calls=torch.tensor([use.failed for use in uses]),
            groups=[key.uid for key in chosen],
            versions=[tuple(tags[str(key)].get(name) for name in _VERSIONS) for key in chosen],
            updates=updates,
        )
        write_batch(path_of(self._folder, step), recorded, torch.tensor([len(masks[row]) for row in rows]))
