"""How an answer is scored.

`score.py` decides (`score_answer`), with `maths/` and `guards.py`; `verifiers/` judge other domains, one of them by a
language model through `openai_endpoint.py`; `rewarder.py` turns a score into a reward, with a run's own `terms.py`;
`numbers.py` refuses what is not a number; `grade.py` grades files and runs; `votes.py` says which answers count as the
same in a majority vote.
In: a response and its ground truth. Out: a `Score`.
"""

from verl_ext.reward.score import Score, score_answer

__all__ = ["Score", "score_answer"]
