"""How often a model solves each problem of a data file, from verl's dumps of samples, and which problems to keep."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from verl_ext.evaluation.samples import Sample
from verl_ext.runs import jsonl

PROBES = 64  # samples from which the chat template's part of an input text is learned


@dataclass
class Tally:
    """Samples of one problem. Those with an infrastructure failure (sandbox, verifier) are in neither count."""

    judged: int = 0
    correct: int = 0

    @property
    def pass_rate(self) -> float | None:
        return self.correct / self.judged if self.judged else None


def match_prompts(prompts: Iterable[Sequence[dict[str, str]]], inputs: Iterable[str]) -> dict[str, list[int]]:
    """Rows of a data file that each input text of dumped samples was made from; none where the file does not have it.

    A dump has the prompt as the chat template rendered it, and no number of the row. What the template puts before and
    after the last user message is the same for all prompts of a run: it is learned from a few samples.

    Args:
        prompts: messages of each row.
    """
    rows: dict[str, list[int]] = {}
    for row, messages in enumerate(prompts):
        rows.setdefault(messages[-1]["content"], []).append(row)
    texts = list(dict.fromkeys(inputs))
    frames = _frames(rows, texts[:: max(1, len(texts) // PROBES)])
    matches: dict[str, list[int]] = {text: [] for text in texts}
    for text in texts:
        for before, after in frames:
            if not matches[text] and text.startswith(before) and text.endswith(after):
                matches[text] = rows.get(text[len(before) : len(text) - len(after)], [])
    return matches


def _frames(contents: Iterable[str], texts: Sequence[str]) -> list[tuple[str, str]]:
    """What stands before and after a content in most of the texts; then in most of the others, and so on."""
    possible = []
    for text in texts:
        within = [content for content in contents if content and content in text]
        places = [match.span() for content in within for match in re.finditer(re.escape(content), text)]
        possible.append({(text[:start], text[end:]) for start, end in places})
    frames: list[tuple[str, str]] = []
    while counts := Counter(frame for each in possible for frame in each):
        frame = max(counts, key=lambda frame: (counts[frame], -len(frame[0]) - len(frame[1])))
        if frames and counts[frame] == 1:  # a prompt that happens to stand within the text of another problem
            break
        frames.append(frame)
        possible = [each for each in possible if frame not in each]
    return frames


def tally(samples: Sequence[Sample], prompts: Sequence[Sequence[dict[str, str]]]) -> tuple[list[Tally], int]:
    """(the tally of each prompt, number of samples whose prompt is not among them)."""
    matches = match_prompts(prompts, (sample.input for sample in samples))
    tallies, unknown = [Tally() for _ in prompts], 0
    for sample in samples:
        unknown += not matches[sample.input]
        if sample.failure:
            continue
        for row in matches[sample.input]:
            tallies[row].judged += 1
            tallies[row].correct += int(sample.acc)
    return tallies, unknown


def is_kept(own: Tally, *, max_rate: float, must_be_solved: bool, teacher: Tally | None = None) -> bool:
    """Whether a judged problem is not too easy, and, where `must_be_solved`, solved once at least, if by a teacher."""
    solved = own.correct > 0 or (teacher is not None and teacher.correct > 0)
    return own.pass_rate <= max_rate and (solved or not must_be_solved)


def histogram(tallies: Iterable[Tally], kept: Iterable[bool]) -> str:
    """A line for each pass rate that occurs: how many problems have it, and how many of them are kept."""
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


def record(row: int, extra_info: dict[str, Any], own: Tally, keep: bool) -> str:
    """One JSON line on a problem."""
    rates = {"samples": own.judged, "correct": own.correct, "pass_rate": own.pass_rate, "kept": keep}
    return jsonl.dumps({"row": row, "id": str(extra_info.get("id", extra_info.get("index", row)))} | rates)
