"""Scoring of answers (`score_answer`) and its adapter to verl (manager.py, imported only where verl asks for it)."""

from verl_ext.reward.score import Score, score_answer

__all__ = ["Score", "score_answer"]
