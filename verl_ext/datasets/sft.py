"""SFT on ReTool traces: the tokens that a rollout would have, with the loss only on what the model wrote.

Tool output stays as the trace has it; a rollout would cut it (`retool.max_tool_response_tokens`, `retool.traceback`).

Used by `data.custom_cls` of configs/shared/sft.yaml. verl's own MultiTurnSFTDataset renders message by message
through the chat template. It would put the interpreter's answer into a separate turn, and would train on an answer
that stands inside the assistant's text.
"""

import hashlib
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, ListConfig
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from verl_ext.datasets.rows import progress_bar
from verl_ext.protocols.base import SegmentEncoder, checked_kwargs
from verl_ext.protocols.by_name import make_protocol
from verl_ext.protocols.trace import ANY_NUMBER, Segment, rendered_trace
from verl_ext.runs import parquet
from verl_ext.settings import SftData
from verl_ext.settings.checks import check

logger = logging.getLogger(__name__)


class RetoolSFTDataset(Dataset):
    """One item per trace: `input_ids`, `position_ids` and `loss_mask`, int64[tokens], not padded.

    Args:
        parquet_files: files with a column `data.messages_key`, see verl_ext/protocols/trace.py, and optionally one
            `data.tools_key`.
        tokenizer: the model's.
        config: verl's `data` section. It reads `messages_key`, `tools_key`, `max_length` (tokens), `truncation` (for a
            longer trace: error | right, which cuts it | drop), and our keys `retool.protocol` (code | hermes) and
            `retool.bad_rows` (error | drop).
        processor: unused; part of verl's interface.
        max_samples: use only the first rows, at most this many; -1 for all.
    Attributes:
        dropped: (row number, reason) of each row that is left out.
        digest: hash of what the model wrote in all other rows, in order; `checkpoints/course.py` compares it.
    Raises:
        ValueError: a setting is unknown, missing or has an invalid value; or a row is not a trace or is too long, and
            is not to be dropped. The message names the row's number and the reason. Long rows come first.
    """

    def __init__(
        self,
        parquet_files: str | list[str],
        tokenizer: PreTrainedTokenizerBase,
        config: DictConfig,
        processor: Any = None,
        max_samples: int = -1,
    ):
        files = list(parquet_files) if isinstance(parquet_files, list | ListConfig) else [parquet_files]
        self.tokenizer = tokenizer
        self.max_length = config.max_length
        self.truncation = config.truncation
        if self.truncation not in ("error", "right", "drop"):
            raise ValueError(
                f"data.truncation is {self.truncation!r}; expected 'error', 'right' or 'drop' for traces that are too "
                "long; truncating on the left would remove the question."
            )
        check(config.retool, SftData, "data.retool")
        self.bad_rows = config.retool.bad_rows
        self._template_kwargs = checked_kwargs(tokenizer, config.get("apply_chat_template_kwargs"))
        self._encoder = SegmentEncoder(tokenizer)
        self._protocol = make_protocol(
            config.retool.protocol, tokenizer, self._template_kwargs, max_parallel_calls=ANY_NUMBER
        )
        columns = config.messages_key, config.get("tools_key", "tools")
        rows = list(islice(_rows(files, *columns), max_samples if max_samples > 0 else None))
        self.dropped: list[tuple[int, str]] = []
        # The longest rows first, so that a row that is too long ends the run at once, and not after minutes.
        order = sorted(range(len(rows)), key=lambda number: len(str(rows[number])), reverse=True)
        is_shown = os.environ.get("RANK", "0") == "0"
        traces = {}
        for number in progress_bar(order, desc="SFT rows", unit=" rows", disable=not is_shown):
            if (segments := self._segments(number, *rows[number])) is not None:
                traces[number] = segments
        self.dropped.sort()
        self.segments = [traces[number] for number in sorted(traces)]
        digest = hashlib.blake2b(digest_size=16)
        for trace in self.segments:
            own = [segment.parts for segment in trace if segment.own]  # a prompt may hold the date
            digest.update(repr(own).encode("utf-8", "backslashreplace"))
        self.digest = digest.hexdigest()
        if self.dropped:
            logger.warning(
                "left out %d of %d SFT rows: %s%s",
                *(len(self.dropped), len(rows), "; ".join(f"row {n}: {why}" for n, why in self.dropped[:5])),
                "; ..." if len(self.dropped) > 5 else "",
            )
        if not self.segments:
            raise ValueError(f"None of {len(rows)} SFT rows in {files} can be used: {self.dropped[:3]}.")

    def _segments(self, number: int, messages: Any, tools: Any) -> list[Segment] | None:
        """Return prompt and response of one row; None if it is left out."""
        try:
            trace = rendered_trace(messages, tools, self._protocol, self.tokenizer, self._template_kwargs)
        except ValueError as error:
            return self._leave_out(
                number,
                str(error),
                self.bad_rows,
                "is not a ReTool trace: {}. Correct it, or set data.retool.bad_rows=drop",
            )
        if reason := self._too_long(trace):
            how = "error" if self.truncation == "error" else "drop"
            return self._leave_out(number, reason, how, "{}. Raise max_length, or set data.truncation to right or drop")
        return trace

    def _leave_out(self, number: int, reason: str, how: str, refusal: str) -> None:
        """Note a row that is left out, or end the run if `how` is "error".

        Raises:
            ValueError: see there. A rank of torchrun exits with the same sentence: with a traceback of each rank, and
                torchrun's own, nobody would find it.
        """
        if how == "drop":
            self.dropped.append((number, reason))
            return
        sentence = f"SFT row {number} {refusal.format(reason)}."
        if "TORCHELASTIC_RUN_ID" in os.environ:
            sys.exit(sentence)
        raise ValueError(sentence)

    def _too_long(self, trace: list[Segment]) -> str:
        """Return why a trace is too long, as `data.truncation` says; "" if it is not.

        A trace that would be cut is left out only if its prompt takes all of the length: a batch without a token to
        train on has no loss.
        """
        is_cut = self.truncation == "right"
        counted = trace[:1] if is_cut else trace
        most = self.max_length - 1 if is_cut else self.max_length
        # No text has more tokens than bytes, so most traces are known to fit without being tokenised.
        if sum(len(part.encode()) for segment in counted for part in segment.parts) <= most:
            return ""
        length = len(tokens_of(counted, self._encoder)[0])
        if length <= most:
            return ""
        if is_cut:
            return f"has a prompt of {length} tokens: data.max_length={self.max_length} leaves no room to answer"
        return f"has {length} tokens, more than data.max_length={self.max_length}"

    def __len__(self) -> int:
        return len(self.segments)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids, mask = (torch.tensor(each)[: self.max_length] for each in tokens_of(self.segments[index], self._encoder))
        return {"input_ids": ids, "position_ids": torch.arange(len(ids)), "loss_mask": mask}


def tokens_of(segments: Sequence[Segment], encoder: SegmentEncoder) -> tuple[list[int], list[int]]:
    """Return token ids and loss mask (1: written by the model) of a trace."""
    encoded = [(encoder.encode(segment.parts), int(segment.own)) for segment in segments]
    return [token for ids, _ in encoded for token in ids], [own for ids, own in encoded for _ in ids]


def _rows(files: Sequence[str], messages_key: str, tools_key: str) -> Iterator[tuple[Any, Any]]:
    """Yield messages and tools of each row, read by Arrow: pandas would turn integers next to a null into floats.

    Raises:
        KeyError: a file has no column `messages_key`.
    """
    for file in files:
        table = parquet.read(Path(file), [messages_key, tools_key])
        if messages_key not in table.column_names:
            raise KeyError(messages_key)
        yield from ((row[messages_key], row.get(tools_key)) for row in table.to_pylist())
