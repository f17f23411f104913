"""Judged samples: one response each, from the records of a run or an evaluation."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_ext.episode import EpisodeKey
from verl_ext.outcome import UNVERIFIED, Fault, RolloutEnd, evaluation_failure
from verl_ext.records import store
from verl_ext.runs.folder import judged_files

# Columns of a sample: without its turns, calls and answer, and all of them.
NAMES = ("uid", "session", "prompt", "ground_truth", "domain", "id", "problem", "end_reason", "acc", "score")
COLUMNS = (*NAMES, "turns", "calls", "verdict", "model_tokens")


class NoSamples(ValueError):
    """There is no file of samples, or nothing in it that could be judged."""


@dataclass(frozen=True)
class Sample:
    """One response to one problem: a row of the records."""

    uid: str  # of its `EpisodeKey`
    prompt: str  # without the template's special tokens
    turns: tuple[tuple[str, str], ...]  # role ("model" or "tool") and text
    ground_truth: str
    pred: str  # "" if the response gave no answer
    data_source: str
    end_reason: str
    acc: float | None  # in [0, 1], 1 is right; None if there is no verdict
    score: float
    tool_calls: int
    tool_errors: int
    tool_timeouts: int
    response_tokens: int  # the model's
    id: str = ""  # `extra_info.id` of the data; problems made from one template share it
    problem: str = ""  # by `problem_of` (records/problem.py); "" if none is noted
    normalised: str = ""  # `pred` in the spelling that was compared; "" if the verifier has none

    @property
    def failure(self) -> str | None:
        """Return which of EVALUATION_FAILURES kept this sample from being judged; None if it was judged."""
        return evaluation_failure({"finish_reason": self.end_reason, UNVERIFIED: self.acc is None})

    @property
    def model_turns(self) -> int:
        return sum(role == "model" for role, _ in self.turns)

    @property
    def is_truncated(self) -> bool:
        return self.end_reason == RolloutEnd.MAX_TOKENS

    @property
    def output(self) -> str:
        """Return the whole response, without the template's special tokens."""
        return plain("".join(text for _, text in self.turns))

    def problem_key(self, *, by_prompt: bool = False) -> tuple[str, str, str, str]:
        """Return the sample's problem: data source, name, id and ground truth. The name is the prompt's text with
        `by_prompt`, or if the sample notes no other.

        All four count: a prompt's text does not distinguish rows of other ids or answers.
        """
        name = self.prompt if by_prompt or not self.problem else self.problem
        return self.data_source, name, self.id, self.ground_truth


def plain(text: str) -> str:
    """Return a text without the chat template's special tokens."""
    return re.sub(r"<\|(?:im_start|im_end|endoftext)\|>", "", text)


def find_samples(path: Path) -> Path:
    """Return the file of records that a path means: itself, or an evaluation's samples.

    For a run's folder they are the last validation, or else the last evaluation; for the quickstart's folder those
    after RL, or before, or those of its RL run.

    Raises:
        NoSamples: there are none of these.
    """
    if path.is_file() and path.suffix == ".parquet":
        return path
    if not (found := judged_files(path)):
        raise NoSamples(
            f"No samples at {path}. Expected a file of records, or the folder of an evaluation or of a run with "
            "validations or evaluations. `retool records import` makes records of verl's dumps."
        )
    return found[-1]


def read_samples(path: Path, columns: Sequence[str] = COLUMNS) -> list[Sample]:
    """Return the samples of a file of records. What the columns do not say is empty.

    Raises:
        Unreadable: the file is no file of records, or is cut short.
    """
    return [sample_of(row) for row in store.read(path, columns).to_pylist()]


def failure_of(row: Mapping[str, Any]) -> str | None:
    """Return `Sample.failure` of a row of records."""
    return evaluation_failure({"finish_reason": row["end_reason"], UNVERIFIED: _share(row["acc"]) is None})


def sample_of(row: Mapping[str, Any]) -> Sample:
    """Return a row of records as a sample. What the columns that the row lacks would say is empty."""
    ran = [call for call in row.get("calls") or () if call["attempts"] is not None]
    verdict = row.get("verdict") or {}
    return Sample(
        uid=str(EpisodeKey(row["uid"], row["session"] or 0)),
        prompt=plain(row["prompt"] or ""),
        turns=tuple((turn["role"], turn.get("text") or "") for turn in row.get("turns") or ()),
        ground_truth=row["ground_truth"] or "",
        pred=verdict.get("extracted") or "",
        data_source=row["domain"] or "",
        end_reason=row["end_reason"] or "",
        acc=_share(row["acc"]),
        score=row["score"] or 0.0,
        tool_calls=len(ran),
        tool_errors=sum(call["fault"] == Fault.MODEL for call in ran),
        tool_timeouts=sum(call["status"] == "timeout" for call in ran),
        response_tokens=row.get("model_tokens") or 0,
        id=row["id"] or "",
        problem=row["problem"] or "",
        normalised=verdict.get("normalised") or "",
    )


def _share(acc: float | None) -> float | None:
    """Return `acc`; None if it is not between 0 and 1, as every verdict of a verifier is."""
    return acc if acc is not None and 0 <= acc <= 1 else None
