"""Rollouts for reading: split a response into text, code and interpreter output, and choose which ones to show."""

import hashlib
import re
from collections.abc import Callable, Sequence
from itertools import zip_longest
from statistics import fmean
from typing import Any, NamedTuple

from verl_ext.evaluation.figures import is_ood
from verl_ext.evaluation.question import first_words
from verl_ext.evaluation.samples import Sample, plain
from verl_ext.records.blocks import CALL, ERROR, REPLY, code_of

COUNT = 10  # rollouts that a page shows
WORST = 5  # problems that it names
Fits = Callable[[Sample], bool]
Turns = Sequence[tuple[str, str]]  # role ("model" or "tool") and text


class Passage(NamedTuple):
    """A stretch of a response: the model's `text`, `boxed` or `code`, the interpreter's `tool` or `tool_error`."""

    kind: str
    text: str


class ShownRollout(NamedTuple):
    """A rollout to show, and why it was chosen."""

    why: str
    where: str  # Before RL | After RL | Step 30 | RL step 12
    prompt: str
    turns: Turns
    ground_truth: str
    score: float
    data_source: str = ""  # "" of a training rollout, like the next two
    verdict: str = ""  # right | wrong | not judged
    facts: str = ""  # calls, errors, how it ended


def split_rollout(turns: Turns) -> list[Passage]:
    r"""Split a response into its segments in order, without tags, for the `<code>` and hermes `<tool_call>` protocols.

    model `A <code>print(2)</code>`, tool `<interpreter>2</interpreter>`, model `\boxed{2}` ->
    text "A ", code "print(2)", tool "2", boxed "\boxed{2}". What the model wrote between a tool's tags is its text.
    """
    passages: list[Passage] = []
    for role, text in turns:
        text, end = plain(text), 0
        if role == "tool":
            said = [block[block.lastgroup] for block in REPLY.finditer(text)] or [text]
            passages += [Passage("tool_error" if ERROR.search(each) else "tool", each.strip("\n")) for each in said]
            continue
        for block in CALL.finditer(text):
            passages += [*_split_boxed(text[end : block.start()]), Passage("code", code_of(block))]
            end = block.end()
        passages += _split_boxed(text[end:])
    return passages


def pick_rollouts(
    before: Sequence[Sample], after: Sequence[Sample], names: tuple[str, str] = ("before RL", "after RL")
) -> list[ShownRollout]:
    """Pick rollouts of each kind of behaviour: right and wrong, with and without code, repaired, out of distribution.

    Each kind is represented by the rollout whose text has the smallest SHA-256, which favours none; open places are
    filled in that order from both sides alternately. The result depends only on the samples.

    Args:
        names: of the two sides.
    """
    sides = {
        side: sorted(samples, key=lambda s: _digest(s.data_source, s.prompt, s.output, s.uid))
        for side, samples in (("before", before), ("after", after))
    }
    missed = next((s for s in sides["before"] if not is_ood(s.data_source) and s.acc == 0 and not s.tool_calls), None)

    def kind(acc: int, *, ood: bool | None = None, code: bool = False, errors: bool = False) -> Fits:
        return lambda s: (
            (s.acc == acc and not s.failure)
            and (ood is None or is_ood(s.data_source) == ood)
            and (s.tool_calls > 0 or not code)
            and (s.tool_errors > 0 or not errors)
        )

    def is_of_missed(s: Sample) -> bool:
        return missed is not None and s.problem_key() == missed.problem_key()

    kinds: list[tuple[str, str, Fits]] = [
        ("wrong without code", "before", lambda s: s is missed),
        ("the same problem", "after", is_of_missed),
        ("wrong with code", "before", kind(0, ood=False, code=True)),
        ("right with code", "before", kind(1, ood=False, code=True)),
        ("an error, repaired", "before", kind(1, errors=True)),
        ("out of distribution, wrong", "before", kind(0, ood=True)),
        ("right with code", "after", kind(1, ood=False, code=True)),
        ("an error, repaired", "after", kind(1, errors=True)),
        ("out of distribution, right", "after", kind(1, ood=True)),
        ("wrong", "after", kind(0)),
    ]
    picks: dict[int, tuple[str, str, Sample]] = {}
    for why, side, fits in kinds:
        sample = next((s for s in sides[side] if fits(s) and id(s) not in picks), None)
        if sample is not None:
            picks[id(sample)] = (why, side, sample)
    for pair in zip_longest(sides["before"], sides["after"]):
        for side, sample in zip(sides, pair, strict=True):
            if sample is not None and len(picks) < COUNT:
                picks.setdefault(id(sample), ("another", side, sample))
    chosen = sorted(picks.values(), key=lambda pick: pick[1] == "after")
    return [_evaluation_rollout(why, names[side == "after"], sample) for why, side, sample in chosen]


def worst_problems(before: Sequence[Sample], after: Sequence[Sample]) -> list[dict[str, Any]]:
    """Return the WORST problems that are not always right, by mean acc after, or before if there is nothing after.

    Among equal ones, those that fell most come first, then a hash decides. Each has `question` (its first words), `id`,
    `data_source`, `samples` (judged ones), `acc`, and `before`, which is None if unknown.
    """
    means: list[dict[tuple[str, ...], float]] = []
    judged: dict[tuple[str, ...], list[Sample]] = {}
    for side in (before, after) if after else ([], before):
        judged = {}
        for sample in side:
            if not sample.failure:
                judged.setdefault(sample.problem_key(), []).append(sample)
        means.append({key: fmean(sample.acc for sample in samples) for key, samples in judged.items()})
    then, now = means
    wrong = [key for key in now if now[key] < 1]
    wrong.sort(key=lambda key: (now[key], now[key] - then.get(key, now[key]), _digest(*key)))
    return [
        {
            "question": first_words(next((each.prompt for each in judged[key] if each.prompt), "")) or key[1],
            "id": key[2],
        }
        | {"data_source": key[0], "samples": len(judged[key]), "acc": now[key], "before": then.get(key)}
        for key in wrong[:WORST]
    ]


def pick_training_rollouts(rollouts: Sequence[tuple[int, Sample]]) -> list[ShownRollout]:
    """Return the first of some training rollouts, with their steps, by SHA-256, in order of their steps."""
    ordered = sorted(rollouts, key=lambda each: _digest(str(each[0]), each[1].prompt, each[1].output))[:COUNT]
    return [
        ShownRollout(
            why="training",
            where=f"RL step {step}",
            prompt=_question(sample.prompt),
            turns=sample.turns,
            ground_truth=sample.ground_truth,
            score=sample.score,
        )
        for step, sample in sorted(ordered, key=lambda each: each[0])
    ]


def _evaluation_rollout(why: str, where: str, sample: Sample) -> ShownRollout:
    calls, errors = sample.tool_calls, sample.tool_errors
    ran = f"{calls} call{'s' * (calls != 1)}, {errors} error{'s' * (errors != 1)}"
    return ShownRollout(
        why=why,
        where=where[:1].upper() + where[1:],
        prompt=_question(sample.prompt),
        turns=sample.turns,
        ground_truth=sample.ground_truth,
        score=sample.score,
        data_source=sample.data_source,
        verdict="not judged" if sample.failure else "right" if sample.acc else "wrong",
        facts=f"{ran}, ended: {sample.end_reason}",
    )


def _split_boxed(text: str) -> list[Passage]:
    """Split text around each `\\boxed{...}`, braces balanced; an unclosed box stays text."""
    opened, boxes = [], []  # both in order; boxes within other boxes are left out
    for token in re.finditer(r"\\boxed\{|[{}]", text):
        if token[0] != "}":
            opened.append(token)
        elif opened and (start := opened.pop())[0] != "{":
            while boxes and boxes[-1][0] > start.start():
                boxes.pop()
            boxes.append((start.start(), token.end()))
    segments, end = [], 0
    for start, stop in boxes:
        segments += [Passage("text", text[end:start]), Passage("boxed", text[start:stop])]
        end = stop
    return [segment for segment in [*segments, Passage("text", text[end:])] if segment.text.strip()]


def _question(prompt: str) -> str:
    """Return the prompt without the role names that the chat template's tokens leave around a lone user message."""
    return prompt.strip().removeprefix("user\n").removesuffix("\nassistant")


def _digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()
