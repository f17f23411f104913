"""Mathematics: `score_answer`, as a verifier."""

import asyncio
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from verl_ext.reward.score import Score, score_answer
from verl_ext.reward.verifiers import problem_text

MAX_WAITING = 256  # answers that one process scores at a time; nearly all slow ones only wait


class MathVerifier:
    """Compares the boxed answer with the ground truth, in a thread because computer algebra may take seconds."""

    def __init__(self, config: Mapping[str, Any], *, unfinished_thinking: bool = False):
        """
        Args:
            unfinished_thinking: a box after a `<think>` that is never closed is an answer as well.
        """
        self._score = partial(score_answer, unfinished_thinking=unfinished_thinking)
        # asyncio's own threads are too few: answers in the slow lane would hold up all others.
        self._threads = ThreadPoolExecutor(MAX_WAITING, thread_name_prefix="score_answer")

    async def verify(self, response_text: str, ground_truth: Any, sample: Mapping[str, Any]) -> Score:
        is_text = isinstance(ground_truth, str)
        if not is_text and (hasattr(ground_truth, "__len__") or ground_truth != ground_truth):  # a list, NaN
            raise ValueError(
                f"The ground truth is {str(ground_truth)[:200]!r}, of type {type(ground_truth).__name__}: expected "
                "text or a number; write several values as one text, such as '1, 2'. Check the data row."
            )
        loop = asyncio.get_running_loop()
        score = partial(self._score, response_text, str(ground_truth), problem=problem_text(sample))
        return await loop.run_in_executor(self._threads, score)

    @staticmethod
    def gold(ground_truth: Any) -> str:
        """Return a response that is right, for the doctor."""
        return f"\\boxed{{{ground_truth}}}"
