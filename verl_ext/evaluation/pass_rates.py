"""Compute how often a model solves each problem of a data file, from samples of past runs, and choose which to keep."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from verl_ext.evaluation.samples import NoSamples, Sample
from verl_ext.records.problem import canonical, id_of, problem_of
from verl_ext.runs import jsonl

PROBES = 64  # samples from which the chat template's part of an input text is learned
_GAP = "\0"  # in a frame: a message before the last one
Others = tuple[str, ...]  # the messages of a prompt before the last one


@dataclass
class Tally:
    """Samples of one problem. Those with an infrastructure failure (sandbox, verifier) are in neither count."""

    judged: int = 0
    correct: int = 0

    @property
    def pass_rate(self) -> float | None:
        return self.correct / self.judged if self.judged else None


def match_prompts(prompts: Iterable[Sequence[dict[str, str]]], inputs: Iterable[str]) -> dict[str, list[int]]:
    """Return, for each prompt text of samples, the rows of a data file it was made from; none if not in the file.

    A sample has the prompt as the chat template rendered it. What the template puts around the messages is the same for
    all prompts of a run: it is learned from a few samples. A template may leave out messages before the last one, which
    then do not distinguish rows.

    Args:
        prompts: messages of each row.
    """
    rows: dict[str, dict[Others, list[int]]] = {}
    for row, messages in enumerate(prompts):
        *others, last = (message["content"] for message in messages)
        rows.setdefault(last, {}).setdefault(tuple(others), []).append(row)
    texts = list(dict.fromkeys(inputs))
    frames = _frames(rows, texts[:: max(1, len(texts) // PROBES)])
    frames.sort(key=lambda frame: -frame[0].count(_GAP))
    known = {others for of_last in rows.values() for others in of_last}
    return {text: next(filter(None, (_framed(text, frame, rows, known) for frame in frames)), []) for text in texts}


def _framed(
    text: str, frame: tuple[str, str], rows: Mapping[str, Mapping[Others, list[int]]], known: Iterable[Others]
) -> list[int]:
    """Return the rows whose messages stand in the frame in a text."""
    before, after = frame
    parts = before.split(_GAP)
    for others in known if len(parts) > 1 else [()]:
        if len(others) != len(parts) - 1:
            continue
        start = "".join(map("".join, zip_longest(parts, others, fillvalue="")))
        if text.startswith(start) and text.endswith(after):
            found = rows.get(text[len(start) : len(text) - len(after)], {})
            # Without a gap the template leaves other messages out.
            if rows_of := found.get(others) or (sum(found.values(), []) if not others else None):
                return rows_of
    return []


def _frames(rows: Mapping[str, Iterable[Others]], texts: Sequence[str]) -> list[tuple[str, str]]:
    """Return what stands before and after the last message in most of the texts, with gaps for the messages before it;
    then in most of the others, and so on."""
    possible = []
    for text in texts:
        within = [content for content in rows if content and content in text]
        places = [(content, match.span()) for content in within for match in re.finditer(re.escape(content), text)]
        possible.append(
            {(_with_gaps(text[:start], others), text[end:]) for last, (start, end) in places for others in rows[last]}
        )
    frames: list[tuple[str, str]] = []
    while counts := Counter(frame for each in possible for frame in each):
        frame = max(counts, key=lambda frame: (counts[frame], -len(frame[0]) - len(frame[1])))
        if frames and counts[frame] == 1:  # a prompt that happens to stand within the text of another problem
            break
        frames.append(frame)
        possible = [each for each in possible if frame not in each]
    return frames


def _with_gaps(before: str, others: Others) -> str:
    """Return a text with a gap for each message, or unchanged if it does not have them."""
    found, rest = "", before
    for other in others:
        start, there, rest = rest.partition(other) if other else (rest, "", "")
        if not there:
            return before
        found += start + _GAP
    return found + rest


def tally(samples: Sequence[Sample], rows: Sequence[Mapping[str, Any]]) -> tuple[list[Tally], int]:
    """Return (the tally of each row's problem, number of samples whose problem is in no row).

    Args:
        rows: those of a data file in verl's columns; rows of the same problem share its samples.
    """
    matches = match_prompts((row["prompt"] for row in rows), (sample.prompt for sample in samples))
    tallies, unknown = [Tally() for _ in rows], 0
    names = [""] * len(rows)
    for sample in samples:
        found = _of_its_problem(sample, matches[sample.prompt], rows, names)
        unknown += not found
        if sample.failure:
            continue
        for row in found:
            tallies[row].judged += 1
            tallies[row].correct += int(sample.acc)
    return tallies, unknown


def check_match(unknown: int, samples: Sequence[Sample], sources: Sequence[Path], data: Path) -> None:
    """Raise if no sample is of a problem of the data file.

    Raises:
        NoSamples: the message shows what a prompt of the samples looks like.
    """
    if samples and unknown == len(samples):
        shown = " ".join(samples[0].prompt.split())[:160]
        named = ", ".join(map(str, sources))
        raise NoSamples(
            f"None of the {len(samples):,} samples in {named} belongs to a problem of {data}. The text "
            "of a problem must be the same in both: the same data, with the same instructions around the problem. The "
            f"first sample's prompt: {shown!r}"
        )


def _of_its_problem(sample: Sample, found: list[int], rows: Sequence[Mapping[str, Any]], names: list[str]) -> list[int]:
    """Return those of the rows with a sample's last message that are its problem, as far as both sides identify it.

    Args:
        names: cache of `problem_of` for each row that was looked up before.
    """
    for i in found if sample.problem else ():
        names[i] = names[i] or problem_of({**rows[i], "raw_prompt": rows[i]["prompt"]})
    if same := [i for i in found if names[i] == sample.problem != ""]:
        return same
    for i, value in enumerate((sample.data_source, sample.id, sample.ground_truth)):
        found = [row for row in found if not value or _said(rows[row])[i] in ("", value)]
    return found


def _said(row: Mapping[str, Any]) -> tuple[str, str, str]:
    """Return data source, id and ground truth of a row; "" for what it lacks."""
    truth = (row.get("reward_model") or {}).get("ground_truth")
    return row.get("data_source") or "", id_of(row), "" if truth is None else canonical(truth)


def is_kept(own: Tally, *, max_rate: float, must_be_solved: bool, teacher: Tally | None = None) -> bool:
    """Return whether a judged problem is not too easy and, if `must_be_solved`, was solved once (a teacher counts)."""
    solved = own.correct > 0 or (teacher is not None and teacher.correct > 0)
    return own.pass_rate <= max_rate and (solved or not must_be_solved)


def histogram(tallies: Iterable[Tally], kept: Iterable[bool]) -> str:
    """Return a line for each pass rate that occurs: how many problems have it, and how many of them are kept."""
    counts: dict[float, list[int]] = {}
    for each, keep in zip(tallies, kept, strict=True):
        if each.judged:
            bin_ = counts.setdefault(each.pass_rate, [0, 0])
            bin_[0] += 1
            bin_[1] += keep
    most = max((count for count, _ in counts.values()), default=1)
    lines = ["pass rate  problems     kept"]
    for rate, (count, keep) in sorted(counts.items()):
        lines.append(f"{rate:9.3f} {count:9,} {keep:8,}  {'#' * round(40 * count / most)}")
    return "\n".join(lines)


def rate_line(row: int, extra_info: dict[str, Any], own: Tally, keep: bool) -> str:
    """Return one JSON line about a problem."""
    rates = {"samples": own.judged, "correct": own.correct, "pass_rate": own.pass_rate, "kept": keep}
    return jsonl.dumps({"row": row, "id": str(extra_info.get("id", extra_info.get("index", row)))} | rates)
