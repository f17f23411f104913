r"""Save batches that a run trains on, `RUN/recorded_batches/step_<n>.pt`, for the correction lab (correction_lab.py).

    RECORD_EVERY=10 bash recipe/retool/run_tiny_dapo.sh \
      'retool.observers=[scripts/studies/record_batches.py:BatchRecorder]'

A file has 17 bytes per token, and a step that is recorded has two more passes over its batch, before the first update
and after the last one: a run with `bypass_mode` has no log-probs of the trainer, and verl's losses return none.
Training does not change. Responses are stored one after the other without padding.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from verl_ext.episode import ToolUse
from verl_ext.events import Observer, Selected, Updated
from verl_ext.runs.durable import make_folder, sync

_VERSIONS = ("min_global_steps", "max_global_steps")  # tags of a row: versions of the weights that wrote it


class BatchRecorder(Observer):
    """Records the batch of every RECORD_EVERY-th step (10) into the run's folder.

    In the mode `separate_async`, whose steps take `parameter_sync_step` batches each, it records the first of them.

    Args:
        trainer: verl's.
    Raises:
        ValueError: the rollout engine notes no log-probs, or fused kernels keep the sum of squared probabilities.
    """

    def __init__(self, trainer: Any):
        config = trainer.config
        rollout, model = config.actor_rollout_ref.rollout, config.actor_rollout_ref.model
        if not rollout.calculate_log_probs or model.use_fused_kernels:
            raise ValueError(
                f"Recording batches needs actor_rollout_ref.rollout.calculate_log_probs=true and actor_rollout_ref."
                f"model.use_fused_kernels=false; got {rollout.calculate_log_probs} and {model.use_fused_kernels}."
            )
        self._trainer, self._folder = trainer, Path(config.trainer.default_local_dir)
        self._every = int(os.environ.get("RECORD_EVERY", "10"))
        self._temperature = rollout.temperature

    def _is_due(self, event: Selected | Updated) -> bool:
        return event.step % self._every == 0 and event.number == 0

    def on_selected(self, event: Selected) -> None:
        if self._is_due(event):
            self._before = self._log_probs(event.batch)

    def on_updated(self, event: Updated) -> None:
        if self._is_due(event):
            self._save(event, self._before, self._log_probs(event.batch))

    def _log_probs(self, batch: Any) -> dict[str, Sequence[Tensor]]:
        """Return the trainer's current log-probs and sums of squared probabilities, float[tokens] per response."""
        import transfer_queue as tq
        from verl.workers.utils.padding import response_from_nested

        from verl_ext.trainer.advantages import keep_sum_pi_squared
        from verl_ext.trainer.queue import real_keys

        before = dict(batch.extra_info)
        batch.extra_info |= {
            "calculate_entropy": False,
            "compute_loss": False,
            "calculate_sum_pi_squared": True,
            "temperature": self._temperature,
        }
        self._trainer.actor_rollout_wg.compute_log_prob(batch)
        batch.extra_info = before
        keep_sum_pi_squared(batch)
        keys = [*real_keys(batch)]
        fields = ["log_probs", "response_mask", "sum_pi_squared"]
        data = tq.kv_batch_get(keys=keys, partition_id=batch.partition_id, select_fields=fields)
        log_prob = response_from_nested(data["log_probs"], data["response_mask"])
        return {"log_prob": log_prob.unbind(), "sum_pi_squared": data["sum_pi_squared"].unbind()}

    def _save(self, event: Updated, before: dict[str, Sequence[Tensor]], after: dict[str, Sequence[Tensor]]) -> None:
        """Write what `_log_probs` returned before the first and after the last update, and the rest of the batch."""
        import transfer_queue as tq

        from verl_ext.trainer.queue import episodes_of, real_keys

        batch = event.batch
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
            return pad_sequence(chosen, batch_first=True)

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
            updates=event.updates,
        )
        write_batch(path_of(self._folder, event.step), recorded, torch.tensor([len(masks[row]) for row in rows]))


FOLDER = "recorded_batches"


class RecordedBatch(NamedTuple):
    """Responses of B rows and T tokens, padded with 0 after the end of each; T is the longest one's length.

    Copies that fill a group and verl's padding are not included.

    Attributes:
        mask: bool[B, T], tokens that the policy sampled.
        rollout_log_prob: float[B, T], as recorded by the rollout engine.
        old_log_prob: float[B, T], by the trainer before the first update of the batch.
        log_prob: float[B, T], by the trainer after the last update of the batch.
        sum_pi_squared: float[B, T], sum over the vocabulary of squared probabilities, before the first update.
        scores: float[B], from the reward manager.
        acc: float[B], 0 or 1.
        void: bool[B], responses with a turn that has neither code nor an answer.
        calls, failed_calls: int[B], of tools.
        groups: uid of the prompt of each row.
        versions: oldest and newest version of the weights that wrote each row; None if the server does not report it.
        updates: mini-batches that the run split the batch into.
    """

    mask: Tensor
    rollout_log_prob: Tensor
    old_log_prob: Tensor
    log_prob: Tensor
    sum_pi_squared: Tensor
    scores: Tensor
    acc: Tensor
    void: Tensor
    calls: Tensor
    failed_calls: Tensor
    groups: list[str]
    versions: list[tuple[int | None, int | None]]
    updates: int


OF_TOKENS = ("mask", "rollout_log_prob", "old_log_prob", "log_prob", "sum_pi_squared")


def path_of(run: Path, step: int) -> Path:
    return run / FOLDER / f"step_{step}.pt"


def write_batch(path: Path, batch: RecordedBatch, lengths: Tensor) -> None:
    """Write the file, completely or not at all; it outlives a power loss.

    Args:
        lengths: int[B], tokens of each response, including those of tools.
    """
    inside = torch.arange(batch.mask.shape[-1]) < lengths[:, None]
    stored = batch._asdict() | {name: getattr(batch, name)[inside] for name in OF_TOKENS} | {"lengths": lengths}
    make_folder(path.parent)
    part = path.with_name(f"{path.name}.part")
    torch.save(stored, part)
    sync(part)
    os.replace(part, path)
    sync(path.parent)


def read_batch(run: Path, step: int) -> RecordedBatch:
    """Return a step's batch.

    Raises:
        FileNotFoundError: it was not recorded; the message names the recorded steps.
        ValueError: the file is not a recorded batch.
    """
    path = path_of(run, step)
    if not path.is_file():
        there = sorted(int(each.stem.removeprefix("step_")) for each in path.parent.glob("step_*.pt"))
        raise FileNotFoundError(
            f"{path} does not exist. Recorded steps: {', '.join(map(str, there)) or 'none'}. A run records its batches "
            "every RECORD_EVERY steps if retool.observers names scripts/studies/record_batches.py:BatchRecorder."
        )
    try:
        stored = torch.load(path, weights_only=True)
        lengths = stored.pop("lengths").tolist()
        padded = {name: pad_sequence(stored[name].split(lengths), batch_first=True) for name in OF_TOKENS}
        return RecordedBatch(**stored | padded)
    except (KeyError, TypeError, RuntimeError, AttributeError) as error:
        raise ValueError(f"{path} is not a recorded batch of this version: {error}. Record it again.") from error
