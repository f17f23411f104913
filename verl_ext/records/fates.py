"""The fate of a rollout's prompt, in the words of the records: `outcome` and `outcome_why` of a row."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from verl_ext.outcome import INFRASTRUCTURE_FAILURES, PromptEnd, RolloutEnd

_NOT_JUDGED = (*INFRASTRUCTURE_FAILURES, RolloutEnd.RAISED)
_WHY = {
    PromptEnd.STALE: "useful, but its weights were too old by the time a batch had room",
    PromptEnd.SURPLUS: "useful, but the batch was full",
}


def why(end: PromptEnd, rows: Sequence[Mapping[str, Any]], *, is_filler: bool = False) -> str | None:
    """Return why a group has this end; None if the end says it all.

    Args:
        rows: of all its rollouts.
        is_filler: whether a batch has taken it because it lacked useful groups.
    """
    text = _WHY.get(end)
    if end is PromptEnd.EQUAL:
        values = {row.get("acc") for row in rows if row["end_reason"] not in _NOT_JUDGED}
        text = "all right" if values == {1.0} else "all wrong" if values == {0.0} else "all equal to the filter"
    elif end is PromptEnd.FAILED:
        lost = Counter(row["end_reason"] for row in rows if row["end_reason"] in _NOT_JUDGED)
        causes = ", ".join(f"{number} {cause}" for cause, number in lost.most_common())
        text = f"{lost.total()} of {len(rows)} rollouts failed outside the model: {causes or 'unknown'}"
    elif end is PromptEnd.VOID:
        text = f"most of its {len(rows)} rollouts have a turn without code and answer"
    return f"{text}; fills the batch with advantage 0" if is_filler else text


def why_left_out(row: Mapping[str, Any]) -> str:
    """Return why a rollout of a trained group is not in the batch."""
    end = row["end_reason"]
    return f"left out of the batch: {end}" if end in _NOT_JUDGED else "left out of the batch by the sampler's rules"
