"""A sampler that also records what the trainer then computes: rewards and advantages of every batch, as JSON lines.

Tests set it by `trainer.v1.sampler.custom_sampler.path`; the file is `sampler_kwargs.record_to`. Next to it is
`tokens.jsonl`, {key: [ids, log-probs]} of each batch, as the queue had the responses when the sampler chose them.
"""

import json
from pathlib import Path
from typing import Any

import transfer_queue as tq
from verl.trainer.ppo.v1 import trainer_base

from verl_ext.trainer.sampler import DapoReplayBuffer


class RecordingReplayBuffer(DapoReplayBuffer):
    """Sampler that wraps the function by which verl's trainer computes advantages, in the trainer's process."""

    KEYS = DapoReplayBuffer.KEYS | {"record_to"}

    def __init__(self, *, sampler_kwargs: Any, **kwargs: Any):
        super().__init__(sampler_kwargs=sampler_kwargs, **kwargs)
        self._tokens = Path(sampler_kwargs.record_to).with_name("tokens.jsonl")
        compute = trainer_base.compute_advantage_for_multi_trajectories

        def compute_and_record(data: Any, **arguments: Any) -> Any:
            scores = data.batch["token_level_rewards"].sum(dim=-1).tolist()
            data = compute(data, **arguments)
            starts = data.batch["response_mask"].argmax(dim=-1, keepdim=True)
            advantages = data.batch["advantages"].gather(1, starts)[:, 0].tolist()
            with open(sampler_kwargs.record_to, "a") as record:
                record.write(
                    json.dumps({"keys": arguments["batch_keys"], "scores": scores, "advantages": advantages}) + "\n"
                )
            return data

        trainer_base.compute_advantage_for_multi_trajectories = compute_and_record

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[Any, dict[str, float]]:
        batch, metrics = super().sample(global_steps, partition_id, batch_size)
        fields = ["responses", "rollout_log_probs"]
        data = tq.kv_batch_get(keys=batch.keys, partition_id=partition_id, select_fields=fields)
        columns = [[row.tolist() for row in data[field].unbind()] for field in fields]
        with open(self._tokens, "a") as record:
            record.write(json.dumps(dict(zip(batch.keys, zip(*columns, strict=True), strict=True))) + "\n")
        return batch, metrics
