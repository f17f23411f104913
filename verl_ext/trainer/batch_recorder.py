"""Save the batch of a step for the correction lab: `retool.record_batches` (verl_ext/analysis/correction_lab.py).

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

from verl_ext.runs.batch_file import RecordedBatch, path_of, write_batch
from verl_ext.settings import RecordBatches
from verl_ext.trainer.advantages import keep_sum_pi_squared
from verl_ext.trainer.queue import real_keys


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
        keys = real_keys(batch)
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
        keys = real_keys(batch)
        fields = ["response_mask", "rollout_log_probs", "rm_scores", "extra_fields"]
        data = tq.kv_batch_get(keys=keys, partition_id=batch.partition_id, select_fields=fields)
        rows = sorted({key.rpartition("_")[0]: row for row, key in enumerate(keys)}.values())  # one of each session
        extras = [getattr(value, "data", value) for value in data["extra_fields"]]
        extras = [extras[row] for row in rows]
        uses = [extra.get("tool_use", {"ok": 0, "errors": {}}) for extra in extras]
        failed = [sum(use["errors"].values()) for use in uses]
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
            acc=torch.tensor([float(extra["reward_extra_info"]["acc"]) for extra in extras]),
            void=torch.tensor([bool(use.get("void_turns")) for use in uses]),
            calls=torch.tensor([use["ok"] + lost for use, lost in zip(uses, failed, strict=True)]),
            failed_calls=torch.tensor(failed),
            groups=[keys[row].split("_")[0] for row in rows],
            versions=[(extra.get("min_global_steps"), extra.get("max_global_steps")) for extra in extras],
            updates=updates,
        )
        write_batch(path_of(self._folder, step), recorded, torch.tensor([len(masks[row]) for row in rows]))
