"""How the reward of another project's environment becomes a score: the adapters skyrl_gym.py and openenv.py."""

import math
import re
from typing import Any

from verl_ext.episode import Score

# An end token of a chat template, which other projects' environments do not get.
_END = re.compile(r"(?:<\|[^<>|]*\|>|</s>|<end_of_turn>|<eos>)\s*\Z")


def finite(reward: Any, where: str) -> float:
    """Return a reward as a number.

    Args:
        where: which environment gave it, for the message.
    Raises:
        ValueError: it is no finite number. It is neither scored nor taken for 0.
    """
    try:
        value = float(reward)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where} gave the reward {reward!r:.80}; expected a number.") from error
    if not math.isfinite(value):
        raise ValueError(f"{where} gave the reward {value}; expected a finite number. Correct the environment.")
    return value


def check_success(success: float | None, name: str) -> None:
    """Raise ValueError unless `success` is a number above 0, or None."""
    if success is not None and not (isinstance(success, int | float) and 0 < success < math.inf):
        raise ValueError(f"{name}: success is {success!r}; expected the reward of a full success, above 0, or null.")


def score_of(reward: float | None, success: float | None, name: str) -> Score | None:
    """Return the score of an episode: acc is reward / success, within [0, 1].

    Args:
        reward: of its last step; None if it made no step, which counts as a failure.
        success: the reward of a full success; None leaves the score to the verifier of the row's `data_source`.
    """
    if success is None:
        return None
    if reward is None:
        return Score(0.0, "", "no_answer", f"{name}: no step")
    return Score.graded(min(max(reward / success, 0.0), 1.0), "", f"{name}: reward {reward:g}")


def without_end(text: str) -> str:
    """Return a turn without its end token."""
    return _END.sub("", text)
