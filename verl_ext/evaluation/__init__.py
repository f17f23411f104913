"""Evaluation with tools: problems, servers, sampling, figures, results. `python -m verl_ext.evaluate` runs it.

`figures` also reads verl's validation dumps; its names are importable from here.
"""

from verl_ext.evaluation.figures import (
    NUMBERS,
    POOLED,
    TEXTS,
    Difference,
    Evaluation,
    Sample,
    compare,
    evaluate,
    format_comparison,
    format_estimate,
    format_evaluation,
    is_ood,
    is_shown,
    latest_dump,
    read_dump,
    to_json,
)

__all__ = [
    "NUMBERS",
    "POOLED",
    "TEXTS",
    "Difference",
    "Evaluation",
    "Sample",
    "compare",
    "evaluate",
    "format_comparison",
    "format_estimate",
    "format_evaluation",
    "is_ood",
    "is_shown",
    "latest_dump",
    "read_dump",
    "to_json",
]
