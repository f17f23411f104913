"""Reports from the actor's processes: what the loss received for the recorded responses, and what it did with them.

`log_prob` is that of the update itself, before its optimiser step, so no additional pass is needed. The ratio follows
from it.
"""

import functools
import time
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl_ext.objectives.ppo import ppo
from verl_ext.objectives.terms import Tokens
from verl_ext.records import recorder
from verl_ext.records.token_rows import UNKNOWN
from verl_ext.trainer.objective import decisions, noted_decisions
from verl_ext.trainer.run_records import RECORD, STEP_BITS
from verl_ext.versions import VERL, require_versions


def note_losses(losses: ModuleType) -> None:
    """verl/workers/utils/losses.py:58 (0.9.1): `ppo_loss` reports the marked responses to the recorder."""
    require_versions(VERL, "verl_ext/trainer/token_notes.py")
    verls = losses.ppo_loss

    @functools.wraps(verls)
    def ppo_loss(config: Any, model_output: Any, data: Any, dp_group: Any = None) -> tuple[Tensor, dict]:
        records = data.get(RECORD, None)
        if records is None or not bool((records >= 0).any()):
            return verls(config, model_output, data, dp_group)
        with noted_decisions() as noted:
            result = verls(config, model_output, data, dp_group)
        with recorder.costs_nothing("made of a loss"):
            _tell(config, losses.no_padding_2_padding(model_output["log_probs"], data).detach(), data, records, noted)
        return result

    losses.ppo_loss = ppo_loss


def _tell(config: Any, log_prob: Tensor, data: Any, records: Tensor, noted: list[tuple[str, Tensor]]) -> None:
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


_recorder = functools.cache(recorder.find)
_sending_s = 0.0  # CPU time of the newest message, which the next one reports
