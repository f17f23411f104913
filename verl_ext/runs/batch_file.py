"""Store each batch that a run trained on as one file per step: `RUN/recorded_batches/step_<n>.pt`.

The trainer writes it (trainer/batch_recorder.py), the correction lab reads it (analysis/correction_lab.py). Responses
are stored one after the other without padding.
"""

import os
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from verl_ext.runs.durable import make_folder, sync

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
            "every `every` steps if retool.record_batches.enable=true."
        )
    try:
        stored = torch.load(path, weights_only=True)
        lengths = stored.pop("lengths").tolist()
        padded = {name: pad_sequence(stored[name].split(lengths), batch_first=True) for name in OF_TOKENS}
        return RecordedBatch(**stored | padded)
    except (KeyError, TypeError, RuntimeError, AttributeError) as error:
        raise ValueError(f"{path} is not a recorded batch of this version: {error}. Record it again.") from error
