"""The sampler, with a record of what the trainer then computed: rewards and advantages of every batch, as JSON lines.

For tests, by `trainer.v1.sampler.custom_sampler.path`; the file is `sampler_kwargs.record_to`.
"""

import json
from typing import Any

from verl.trainer.ppo.v1 import trainer_base

from verl_ext.trainer.sampler import DapoReplayBuffer


class RecordingReplayBuffer(DapoReplayBuffer):
    """Wraps the function by which verl's trainer computes advantages, in the trainer's process."""

    def __init__(self, *, sampler_kwargs: Any, **kwargs: Any):
        super().__init__(sampler_kwargs=sampler_kwargs, **kwargs)
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
