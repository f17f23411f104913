"""The table of schema.TOKENS, made from what trainer and loss report of recorded responses."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from verl_ext.records.schema import TOKENS

MASKED, KEPT, CLIPPED_LOW, CLIPPED_HIGH, DROPPED, NOT_FINITE, UNKNOWN, REJECTED = range(8)  # codes of `decision`
_REJECTED = "dropped:rollout_correction"  # a token of the model, before the loss
_Told = dict[int, tuple[np.ndarray, np.ndarray]]  # record -> log-probs and decisions


@dataclass
class TokenParts:
    """What was reported of a step: arrays over the tokens of responses, one after the other without padding.

    A response is a row of an episode.

    Attributes:
        batches: `record` (int64, a name of each response within the run), `lengths` (int64), `uid`, `session`, `row` of
            each; of each token `id`, `mask`, `sampled` (whether the model wrote it), `turn`, `version` (-1: none),
            `rollout_log_prob` and `old_log_prob` (NaN: none), `advantage`; `spelled`, place -> text of tokens that are
            not whole characters.
        losses: `record`, `lengths` of each response; of each token `log_prob` and `decision` (a code); `correction`,
            the name of what drops tokens. If a response comes twice (epochs, or ranks), the last one counts.
    """

    batches: list[Mapping[str, Any]] = field(default_factory=list)
    losses: list[Mapping[str, Any]] = field(default_factory=list)


def token_table(step: int, parts: TokenParts, texts: Mapping[int, str]) -> pa.Table:
    """Return the rows of a step; a column that nobody reported is null.

    Args:
        texts: token id -> text.
    """
    told: _Told = {}
    correction = "correction"
    for part in parts.losses:
        places, correction = np.cumsum(part["lengths"])[:-1], part["correction"]
        pairs = zip(np.split(part["log_prob"], places), np.split(part["decision"], places), strict=True)
        told |= dict(zip(part["record"].tolist(), pairs, strict=True))
    dropped = (f"dropped:{correction}", "dropped:not_finite", None, _REJECTED)
    names = pa.array(("masked", "kept", "clipped_low", "clipped_high", *dropped), pa.string())
    tables = (_of_batch(step, batch, told, names, texts) for batch in parts.batches)
    return pa.concat_tables([TOKENS.empty_table(), *tables])


def _of_batch(step: int, batch: Mapping[str, Any], told: _Told, names: pa.Array, texts: Mapping[int, str]) -> pa.Table:
    lengths = batch["lengths"]
    total, ends = int(lengths.sum()), np.cumsum(lengths)
    log_prob, decision = np.full(total, np.nan, np.float32), np.full(total, UNKNOWN, np.int8)
    for record, start, end in zip(batch["record"].tolist(), ends - lengths, ends, strict=True):
        if record in told and len(told[record][0]) == end - start:
            log_prob[start:end], decision[start:end] = told[record]
    decision[~batch["mask"]] = MASKED
    decision[batch["sampled"] & ~batch["mask"]] = REJECTED
    log_prob[~batch["mask"] & ~batch["sampled"]] = np.nan  # the loss has a number there that means nothing
    with np.errstate(over="ignore"):
        ratio = np.exp(log_prob - batch["old_log_prob"])
    unique, place = np.unique(batch["id"], return_inverse=True)
    text = np.array([texts.get(each) for each in unique.tolist()], object)[place]
    text[[*batch["spelled"]]] = [*batch["spelled"].values()]
    columns = dict(batch) | {
        "uid": pa.array(batch["uid"], pa.string()).take(pa.array(np.repeat(np.arange(len(lengths)), lengths))),
        "session": np.repeat(batch["session"], lengths),
        "row": np.repeat(batch["row"], lengths),
        "step": np.full(total, step),
        "position": np.arange(total) - np.repeat(ends - lengths, lengths),
        "text": text,
        "version": np.where(batch["version"] < 0, np.nan, batch["version"]),
        "log_prob": log_prob,
        "ratio": ratio,
        "decision": names.take(pa.array(decision)),
    }  # NaN is null
    return pa.table([pa.array(columns[each.name], each.type, from_pandas=True) for each in TOKENS], schema=TOKENS)
