"""The log-probs that training takes from the rollout server. No other value may take the place of one.

If verl asks the server for no log-probs, its trainer either fails (`bypass_mode`) or silently leaves its correction out
(`rollout_is`, `rollout_rs`): trainer/ppo/v1/trainer_base.py:1641 and 1768, 0.9.1.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf

_NEEDS = ("bypass_mode", "rollout_is", "rollout_rs")  # in algorithm.rollout_correction


def wants_log_probs(params: Mapping[str, Any]) -> bool:
    """Return whether `params` ask for log-probs: verl does by True, vLLM's callers also by 0 (sampled tokens only)."""
    wanted = params.get("logprobs")
    return wanted is not None and wanted is not False


def checked_log_probs(log_probs: Sequence[float | None] | None, ids: Sequence[int]) -> list[float]:
    """Return the log-probs that a server sent for the tokens `ids`.

    Raises:
        ValueError: there are none, there is not one for each token, or one is not a finite number. Training would use
            whatever stood in its place: 0.0 means that the policy was certain of the token.
    """
    found = [] if log_probs is None else list(log_probs)
    if len(found) != len(ids):
        raise ValueError(
            f"The server sent {len(found)} log-probs for {len(ids)} tokens; expected one for each, even if a turn "
            "was aborted and resumed. Use a server that sends them, such as vLLM."
        )
    if wrong := [each for each in found if each is None or not math.isfinite(each)]:
        raise ValueError(
            f"{len(wrong)} of the {len(ids)} log-probs that the server sent are not finite, such as {wrong[0]}. "
            "See the server's log: weights or logits may be NaN."
        )
    return [each for each in found if each is not None]


def check_log_probs_are_sent(config: DictConfig) -> None:
    """Raise if the trainer needs the server's log-probs but verl would not ask for them; called when a run starts.

    Args:
        config: the run's config.
    Raises:
        ValueError: `rollout.calculate_log_probs` is false, and `algorithm.rollout_correction` uses them.
    """
    correction = OmegaConf.select(config, "algorithm.rollout_correction") or {}
    needs = [f"{name}={correction[name]}" for name in _NEEDS if correction.get(name)]
    if needs and OmegaConf.select(config, "actor_rollout_ref.rollout.calculate_log_probs") is False:
        raise ValueError(
            f"algorithm.rollout_correction has {', '.join(needs)}, which needs the rollout server's log-probs, but "
            "actor_rollout_ref.rollout.calculate_log_probs is false. Set it to true."
        )
