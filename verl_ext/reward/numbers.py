"""Checks that a verifier or a reward gives a number to train on. Anything else is our error: the run stops.

A NaN would make every advantage of its group NaN, and verl would skip the update; an `acc` of 5 would be trained on.
"""

import math
from collections.abc import Mapping, MutableMapping
from decimal import Decimal
from numbers import Real
from typing import Any


class BrokenReward(ValueError):
    """A row, a verifier or a reward is broken: no response is at fault. The run stops with this sentence."""


def finite(value: Any) -> float | None:
    """Return `value` as a float, None if it is not finite. A bool is 0 or 1; an array or tensor has one element."""
    if hasattr(value, "item"):  # of numpy or torch
        try:
            value = value.item()
        except (ValueError, RuntimeError):  # of several elements
            return None
    if not isinstance(value, Real | Decimal):
        return None
    try:
        number = float(value)
    except (OverflowError, ValueError):  # 10**400; a signalling NaN
        return None
    return number if math.isfinite(number) else None


def checked_reward(reward: Any, info: MutableMapping[str, Any] | None, sample: Mapping[str, Any]) -> float | None:
    """Return the reward of a rollout, from any reward manager, as a float; convert `acc` and `score` in `info` as well.

    Args:
        reward: None if verl's trainer scores later.
        info: `reward_extra_info`, whose other terms may be texts.
        sample: the row, which messages name.
    Raises:
        BrokenReward: the reward, `acc` or `score` is no finite number, or another term is a number that is not finite.
    """
    info = {} if info is None else info
    given = {} if reward is None else {"reward": reward}
    given |= {name: value for name, value in info.items() if name in ("acc", "score") or isinstance(value, Real)}
    found = {name: finite(value) for name, value in given.items()}
    for name, number in found.items():
        if number is None:
            raise BrokenReward(
                f"The reward of row {sample.get('index')} of data_source {str(sample.get('data_source', ''))!r} has "
                f"{name}={given[name]!r:.200}, expected a finite number. Correct the reward function."
            )
    info.update({name: number for name, number in found.items() if name in ("acc", "score") and name in info})
    return found.get("reward")
