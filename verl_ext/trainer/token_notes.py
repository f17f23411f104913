"""The loss in the actor's processes: it reports what it received for the recorded responses, and did with them.

`log_prob` is that of the update itself, before its optimiser step, so no additional pass is needed. The ratio follows
from it.
"""

import functools
import time
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl_ext.objectives.ppo import ppo
from verl_ext.objectives.terms import Tokens
from verl_ext.records.recorder import costs_nothing
from verl_ext.records.token_rows import UNKNOWN
from verl_ext.rollout import recorder_actor
from verl_ext.trainer.objective import decisions, noted_decisions, sum_counts
from verl_ext.trainer.run_records import RECORD, STEP_BITS
from verl_ext.versions import VERL, Library, require_versions


def extend_loss(losses: Library) -> None:
    """verl/workers/utils/losses.py (0.9.1): `ppo_loss` reports the marked responses to the recorder.

    - :103 takes the mean of a loss's metrics over micro-batches and ranks, whatever number of tokens they have. Here
      our counts of tokens are added up.
    - :124 divides the sum of the entropies by the tokens of the mini-batch, and 0 / 0 x entropy_coeff is NaN. Here the
      loss of no tokens is 0.
    """
    require_versions(VERL, "verl_ext/trainer/token_notes.py")
    from verl.utils.tensordict_utils import assign_non_tensor

    verls = losses.ppo_loss

    @functools.wraps(verls)
    def ppo_loss(config: Any, model_output: Any, data: Any, dp_group: Any = None) -> tuple[Tensor, dict]:
        records = data.get(RECORD, None)
        if records is not None and not (records >= 0).any():
            records = None
        if data["batch_num_tokens"] == 0:
            data = assign_non_tensor(data.copy(), batch_num_tokens=1)
        with noted_decisions() if records is not None else nullcontext() as noted:
            loss, metrics = verls(config, model_output, data, dp_group)
        sum_counts(losses, metrics, data)
        if records is not None:
            with costs_nothing("made of a loss"):
                log_prob = losses.no_padding_2_padding(model_output["log_probs"], data).detach()
                _tell(config, log_prob, data, records, noted)
        return loss, metrics

    losses.ppo_loss = ppo_loss


def _tell(config: Any, log_prob: Tensor, data: Any, records: Tensor, noted: list[tuple[str, Tensor]] | None) -> None:
    if (actor := _recorder()) is None:
        return
    global _sending_s
    began = time.thread_time()
    rows = torch.nonzero(records >= 0).flatten().tolist()
    name, codes = noted[0] if noted else _verls(config, log_prob, data)
    lengths = [len(data["response_mask"][row]) for row in rows]

    def flat(values: Tensor) -> np.ndarray:
        return torch.cat([values[row, :length] for row, length in zip(rows, lengths, strict=True)]).cpu().numpy()

    chosen = records[rows].cpu().numpy()
    columns = {"record": chosen, "lengths": np.array(lengths), "correction": name}
    columns |= {"log_prob": flat(log_prob.float()), "decision": flat(codes)}
    made = time.thread_time()
    actor.loss.remote(int(chosen[0]) >> STEP_BITS, columns, _sending_s + made - began)
    _sending_s = time.thread_time() - made


def _verls(config: Any, log_prob: Tensor, data: Any) -> tuple[str, Tensor]:
    """Return what verl's own `vanilla` loss does, which objectives/ppo.py also has; unknown for its other losses."""
    if config.policy_loss.get("loss_mode", "vanilla") != "vanilla":
        return "", torch.full_like(log_prob, UNKNOWN, dtype=torch.int8)
    padded = data.select("response_mask", "old_log_probs", "advantages").to_padded_tensor()
    mask = padded["response_mask"].bool()
    low = config.clip_ratio if config.clip_ratio_low is None else config.clip_ratio_low
    high = config.clip_ratio if config.clip_ratio_high is None else config.clip_ratio_high
    tokens = Tokens(log_prob, padded["old_log_probs"], padded["advantages"], mask)
    return "", decisions(ppo(tokens, low=low, high=high, dual_clip=config.clip_ratio_c), mask, mask)


_recorder = functools.cache(recorder_actor.find)
_sending_s = 0.0  # CPU time of the newest message, which the next one reports
