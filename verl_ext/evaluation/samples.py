"""Judged samples, one per row: of records, and of the files of `trainer.validation_data_dir` and `python -m
verl_ext.evaluation`.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

from verl_ext.episode import EpisodeKey
from verl_ext.outcome import UNVERIFIED, Fault, RolloutEnd, evaluation_failure
from verl_ext.records import store
from verl_ext.records.problem import canonical
from verl_ext.runs import jsonl


@dataclass(frozen=True)
class Sample:
    """One response to one problem: a row of the dump, `uid` = "{prompt uid}_{session}_{output index}"."""

    uid: str
    input: str
    output: str
    gts: Any
    pred: str  # "" when the response gave no answer
    data_source: str
    finish_reason: str
    acc: float | None  # in [0, 1], 1 is right; None if there is no verdict
    score: float
    tool_calls: float
    tool_errors: float
    tool_timeouts: float
    model_turns: float
    response_tokens: float
    truncated: float
    unverified: float
    sandbox_failure: float
    id: str = ""  # `extra_info.id` of the data; problems made from one template share it
    problem: str = ""  # by `problem_of` (records/problem.py), in older files its text; "" if none is noted
    normalised: str = ""  # `pred` in the spelling that was compared; "" if the verifier has none

    @property
    def failure(self) -> str | None:
        """Return which of EVALUATION_FAILURES kept this sample from being judged; None if it was judged."""
        info = {"finish_reason": self.finish_reason, "sandbox_failure": self.sandbox_failure}
        info[UNVERIFIED] = self.unverified or self.acc is None
        return evaluation_failure(info)

    def problem_key(self, *, by_input: bool = False) -> tuple[str, str, str, str]:
        """Return the sample's problem: data source, name, id and ground truth. The name is the input's text with
        `by_input`, or if the sample notes no other.

        All four count: an input's text, and the name in older files, do not distinguish rows of other ids or answers.
        """
        name = self.input if by_input or not self.problem else self.problem
        return self.data_source, name, self.id, canonical(self.gts)


# Columns that every row has, besides `acc` and `gts`.
NUMBERS = tuple(each.name for each in fields(Sample) if each.type is float)
TEXTS = tuple(each.name for each in fields(Sample) if each.type is str and each.default is MISSING)
OPTIONAL = tuple(each.name for each in fields(Sample) if each.default is not MISSING)  # texts that a row may lack


def plain(text: str) -> str:
    """Return a text as verl's dumps have it: without the template's special tokens."""
    return re.sub(r"<\|(?:im_start|im_end|endoftext)\|>", "", text)


def read_dump(path: Path) -> list[Sample]:
    """Return the samples of a JSONL file, or of a file of records.

    If a session has several outputs, only the last counts, as in verl's own metrics; if an output has several rows,
    which are attempts at it, the last counts.

    Raises:
        ValueError: a row is not JSON, lacks a key, or has a value of the wrong kind; the message names file and line.
        Unreadable: a file of records is cut short.
    """
    if path.suffix == ".parquet":
        return [sample_of(row) for row in store.read(path).to_pylist()]
    last: dict[EpisodeKey, tuple[int, Sample]] = {}
    expected = (
        "a row of verl's validation dump with the keys of verl_ext/reward/rewarder.py (made by "
        "`trainer.validation_data_dir` and that reward manager)"
    )
    for sample in jsonl.read(path, sample_of_dump, expected):
        key = key_of(sample.uid)
        if key.episode not in last or key.row >= last[key.episode][0]:
            last[key.episode] = (key.row, sample)
    return [sample for _, sample in last.values()]


def key_of(uid: str) -> EpisodeKey:
    """Return the key that a dump has as `uid`; a text of another form is that of a prompt's only response."""
    try:
        return EpisodeKey.parse(uid)
    except ValueError:
        return EpisodeKey(uid, 0)


def share_of(acc: float | None) -> float | None:
    """Return `acc` of records; None if it is not between 0 and 1, as every verdict of a verifier is."""
    return acc if acc is not None and 0 <= acc <= 1 else None


def sample_of(row: Mapping[str, Any]) -> Sample:
    """Return a row of records as the sample that an evaluation has for the same response."""
    turns = row["turns"] or ()
    ran = [call for call in row["calls"] or () if call["attempts"] is not None]
    verdict, end, acc = row["verdict"] or {}, row["end_reason"], share_of(row["acc"])
    return Sample(
        uid=str(EpisodeKey(row["uid"], row["session"] or 0)),
        input=plain(row["prompt"] or ""),
        output=plain("".join(turn.get("text") or "" for turn in turns)),
        gts=row["ground_truth"],
        pred=verdict.get("extracted") or "",
        data_source=row["domain"] or "",
        finish_reason=end,
        acc=acc,
        score=row["score"] or 0.0,
        tool_calls=len(ran),
        tool_errors=sum(call["fault"] == Fault.MODEL for call in ran),
        tool_timeouts=sum(call["status"] == "timeout" for call in ran),
        model_turns=sum(turn["role"] == "model" for turn in turns),
        response_tokens=row["model_tokens"] or 0,
        truncated=end == RolloutEnd.MAX_TOKENS,
        unverified=acc is None,
        sandbox_failure=end == RolloutEnd.SANDBOX_FAILURE,
        id=row["id"] or "",
        problem=row["problem"] or "",
        normalised=verdict.get("normalised") or "",
    )


def sample_of_dump(row: Mapping[str, Any]) -> Sample:
    """Return a row of a dump, or of `samples.jsonl`, as a sample.

    Raises:
        ValueError: the row lacks a key, or has a value of the wrong kind.
    """
    missing = [key for key in (*TEXTS, *NUMBERS, "acc", "gts") if key not in row]
    if missing:
        raise ValueError(f"no key {', '.join(missing)}; the row has {', '.join(row)}")
    for key in TEXTS:
        if not isinstance(row[key], str):
            raise ValueError(f"{key} is {row[key]!r}, not a string")
    numbers = {}
    for key in NUMBERS:
        if not isinstance(row[key], int | float) or not math.isfinite(row[key]):
            raise ValueError(f"{key} is {row[key]!r}, not a finite number")
        numbers[key] = float(row[key])
    if row["acc"] is not None and not (isinstance(row["acc"], int | float) and 0 <= row["acc"] <= 1):
        raise ValueError(f"acc is {row['acc']!r}, not a number from 0 to 1 or null")
    acc = None if row["acc"] is None else float(row["acc"])
    texts = {key: row[key] for key in TEXTS} | {key: str(row.get(key) or "") for key in OPTIONAL}
    return Sample(**texts, **numbers, acc=acc, gts=row["gts"])
