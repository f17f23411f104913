"""A sampler that also records the tokens it hands to the trainer: `step_<n>_<batch>.pt` in a folder.

Tests set it by `trainer.v1.sampler.custom_sampler.path`; the folder is `sampler_kwargs.record_to`. Each file is a list
of responses: `key`, `prompt` and `response` (token ids), `mask` (1: sampled by the policy), `log_probs` (as the rollout
engine noted them) and `version_spans`. Copies that fill a group are left out.
"""

from pathlib import Path
from typing import Any

import torch
import transfer_queue as tq

from verl_ext.episode import EpisodeKey
from verl_ext.trainer.queue import episodes_of
from verl_ext.trainer.sampler import DapoReplayBuffer

FIELDS = {"prompt": "prompts", "response": "responses", "mask": "response_mask", "log_probs": "rollout_log_probs"}


class TokenRecordingReplayBuffer(DapoReplayBuffer):
    KEYS = DapoReplayBuffer.KEYS | {"record_to"}

    def __init__(self, *, sampler_kwargs: Any, **kwargs: Any):
        super().__init__(sampler_kwargs=sampler_kwargs, **kwargs)
        self._folder, self._files = Path(sampler_kwargs.record_to), 0

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[Any, dict[str, float]]:
        batch, metrics = super().sample(global_steps, partition_id, batch_size)
        keys = [key for key in batch.keys if not EpisodeKey.parse(key).copy]
        data = tq.kv_batch_get(keys=keys, partition_id=partition_id, select_fields=[*FIELDS.values(), "extra_fields"])
        columns = {name: data[field].unbind() for name, field in FIELDS.items()}
        rows = [{"key": key} | {name: column[i] for name, column in columns.items()} for i, key in enumerate(keys)]
        for row, episode in zip(rows, episodes_of(map(EpisodeKey.parse, keys), data["extra_fields"]), strict=True):
            row["version_spans"] = episode.row.version_spans
        self._folder.mkdir(parents=True, exist_ok=True)
        torch.save(rows, self._folder / f"step_{global_steps}_{self._files}.pt")
        self._files += 1
        return batch, metrics
