"""Rollouts for reading: split a dumped response into text, code and interpreter output, and choose which ones to show.

Works on the dump's text, for display only. The dump has no response mask, so an interpreter block that the model itself
forged looks like a real one here; rewards are computed on tokens elsewhere (verl_ext/reward/).
"""

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import NamedTuple

from verl_ext.evaluation.figures import is_ood
from verl_ext.records.samples import Sample

# A block that the response budget cut off has no closing tag and runs to the end. Around a hermes tool reply verl's
# decoded text keeps the bare role names of the chat template ("user", "assistant"); they are no one's words.
BLOCK = re.compile(
    r"<code>(?P<code>.*?)(?:</code>|\Z)"
    r"|<tool_call>(?P<call>.*?)(?:</tool_call>|\Z)"
    r"|<interpreter>(?P<interpreter>.*?)(?:</interpreter>|\Z)"
    r"|(?:\s*\nuser\n)?<tool_response>(?P<reply>.*?)(?:</tool_response>|\Z)(?:\s*\nassistant\n)?",
    re.DOTALL,
)
ERROR = re.compile(r"Traceback \(most recent call last\)|^\s*\w*(?:Error|Exception)\b|\btimed out\b", re.MULTILINE)


class Passage(NamedTuple):
    """A stretch of a response: the model's `text`, `boxed` or `code`, the interpreter's `tool` or `tool_error`."""

    kind: str
    text: str


class ShownRollout(NamedTuple):
    """A rollout to show, and why it was chosen."""

    why: str
    where: str  # Before RL | After RL | Step 30 | RL step 12
    data_source: str
    prompt: str
    output: str
    ground_truth: str
    score: float
    verdict: str  # right | wrong | not judged | "" where the dump does not tell
    facts: str  # calls, errors, how it ended


def split_rollout(output: str) -> list[Passage]:
    r"""Segments of a response in order, tags removed; `<code>` and hermes `<tool_call>` protocols.

    `A <code>print(2)</code><interpreter>2</interpreter>\boxed{2}` ->
    text "A ", code "print(2)", tool "2", boxed "\boxed{2}".
    """
    segments: list[Passage] = []
    end = 0
    for block in BLOCK.finditer(output):
        segments += _split_boxed(output[end : block.start()])
        end = block.end()
        if block["code"] is not None:
            segments.append(Passage("code", block["code"].strip("\n")))
        elif block["call"] is not None:
            segments.append(Passage("code", _called_code(block["call"])))
        else:
            text = block["interpreter"] if block["interpreter"] is not None else block["reply"]
            segments.append(Passage("tool_error" if ERROR.search(text) else "tool", text.strip("\n")))
    return segments + _split_boxed(output[end:])


def pick_rollouts(
    before: Sequence[Sample],
    after: Sequence[Sample],
    names: tuple[str, str] = ("before RL", "after RL"),
    count: int = 10,
) -> list[ShownRollout]:
    """Rollouts that show each kind of behaviour: right and wrong, with and without code, repaired, out of distribution.

    Of each kind the one whose text has the smallest SHA-256, which favours none; open places are filled in that order
    from both sides in turn. The result depends on nothing but the samples.

    Args:
        names: of the two sides.
    """
    where = {side: name[:1].upper() + name[1:] for side, name in zip(("before", "after"), names, strict=True)}
    sides = {
        side: sorted(samples, key=lambda s: _digest(s.data_source, s.input, s.output, s.uid))
        for side, samples in (("before", before), ("after", after))
    }
    missed = next((s for s in sides["before"] if not is_ood(s.data_source) and s.acc == 0 and not s.tool_calls), None)

    def right(s: Sample) -> bool:
        return s.acc == 1 and not s.failure

    def wrong(s: Sample) -> bool:
        return s.acc == 0 and not s.failure

    kinds: list[tuple[str, str, Callable[[Sample], bool]]] = [
        ("wrong without code", "before", lambda s: s is missed),
        (
            "the same problem",
            "after",
            lambda s: missed is not None and (s.data_source, s.input) == (missed.data_source, missed.input),
        ),
        ("wrong with code", "before", lambda s: not is_ood(s.data_source) and wrong(s) and s.tool_calls > 0),
        ("right with code", "before", lambda s: not is_ood(s.data_source) and right(s) and s.tool_calls > 0),
        ("an error, repaired", "before", lambda s: right(s) and s.tool_errors > 0),
        ("out of distribution, wrong", "before", lambda s: is_ood(s.data_source) and wrong(s)),
        ("right with code", "after", lambda s: not is_ood(s.data_source) and right(s) and s.tool_calls > 0),
        ("an error, repaired", "after", lambda s: right(s) and s.tool_errors > 0),
        ("out of distribution, right", "after", lambda s: is_ood(s.data_source) and right(s)),
        ("wrong", "after", wrong),
    ]
    picks: dict[int, tuple[str, str, Sample]] = {}
    for why, side, fits in kinds:
        sample = next((s for s in sides[side] if fits(s) and id(s) not in picks), None)
        if sample is not None:
            picks[id(sample)] = (why, side, sample)
    for pair in zip_longest(sides["before"], sides["after"]):
        for side, sample in zip(sides, pair, strict=True):
            if sample is not None and len(picks) < count:
                picks.setdefault(id(sample), ("another", side, sample))
    chosen = sorted(list(picks.values())[:count], key=lambda pick: pick[1] == "after")
    return [_evaluation_rollout(why, where[side], sample) for why, side, sample in chosen]


def pick_training_rollouts(rows: Sequence[dict], count: int = 10) -> list[ShownRollout]:
    """The first `count` rows by SHA-256 of verl rollout dumps (`trainer.rollout_data_dir`), in order of their steps."""
    ordered = sorted(rows, key=lambda row: _digest(str(row["step"]), row["input"], row["output"]))[:count]
    return [
        ShownRollout(
            why="training",
            where=f"RL step {row['step']}",
            data_source="",
            prompt=_question(row["input"]),
            output=row["output"],
            ground_truth=str(row["gts"]),
            score=row["score"],
            verdict="",
            facts="",
        )
        for row in sorted(ordered, key=lambda row: row["step"])
    ]


def _evaluation_rollout(why: str, where: str, sample: Sample) -> ShownRollout:
    verdict = "not judged" if sample.failure else "right" if sample.acc else "wrong"
    calls, errors = int(sample.tool_calls), int(sample.tool_errors)
    ran = f"{calls} call{'s' * (calls != 1)}, {errors} error{'s' * (errors != 1)}"
    return ShownRollout(
        why=why,
        where=where,
        data_source=sample.data_source,
        prompt=_question(sample.input),
        output=sample.output,
        ground_truth=str(sample.gts),
        score=sample.score,
        verdict=verdict,
        facts=f"{ran}, ended: {sample.finish_reason}",
    )


def _split_boxed(text: str) -> list[Passage]:
    """Text around each `\\boxed{...}`, braces balanced; an unclosed box stays text."""
    segments, end = [], 0
    for match in re.finditer(r"\\boxed\{", text):
        depth, close = 1, match.end()
        while close < len(text) and depth:
            depth += {"{": 1, "}": -1}.get(text[close], 0)
            close += 1
        if match.start() >= end and not depth:
            segments += [Passage("text", text[end : match.start()]), Passage("boxed", text[match.start() : close])]
            end = close
    return [segment for segment in [*segments, Passage("text", text[end:])] if segment.text.strip()]


def _question(prompt: str) -> str:
    """The prompt without the role names that verl's decoding leaves of the chat template around a lone user message."""
    return prompt.strip().removeprefix("user\n").removesuffix("\nassistant")


def _called_code(call: str) -> str:
    """The `code` argument of a hermes call; the call as written when it is no such JSON (the model's own mistake)."""
    try:
        code = json.loads(call)["arguments"]["code"]
    except (ValueError, KeyError, TypeError):
        return call.strip("\n")
    return code if isinstance(code, str) else call.strip("\n")


def _digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()
