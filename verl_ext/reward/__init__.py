"""Scoring of answers (`score_answer`) and its adapter to verl (manager.py, imported only where verl asks for it)."""

from typing import Any

__all__ = ["Score", "score_answer"]


def __getattr__(name: str) -> Any:
    """`Score` and `score_answer`, imported when asked for: `python -m verl_ext.reward.score` would warn otherwise."""
    if name in __all__:
        from verl_ext.reward import score

        return getattr(score, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
