"""Settings with which a run works, but probably not as intended: the doctor and the start of a run warn of them."""

from collections.abc import Callable, Iterator
from typing import Any

_ROLLOUT = "actor_rollout_ref.rollout"
_REWARD = "reward.reward_kwargs"
_SAMPLER = "trainer.v1.sampler.sampler_kwargs"
_GROUPS = "algorithm.filter_groups.enable"
WITHOUT_GROUPS = ("gae", "reinforce_plus_plus", "remax")  # algorithm.adv_estimator: those that do not compare responses


def cautions(get: Callable[..., Any]) -> Iterator[str]:
    """Yield `what is wrong -> what to do` for each caution of an RL run.

    Args:
        get: (dotted key, default) -> value of the run, the default if it is absent or null.
    """
    yield from _equal_groups(get)
    yield from _cut_distribution(get)
    yield from _own_agent(get)


def _equal_groups(get: Callable[..., Any]) -> Iterator[str]:
    if get(_GROUPS) or get("algorithm.adv_estimator") in WITHOUT_GROUPS:
        return
    shaping = [f"{_REWARD}.length_penalty=null"] * bool(get(f"{_REWARD}.length_penalty"))
    shaping += [f"{_REWARD}.overlong_buffer_cfg.enable=false"] * bool(get(f"{_REWARD}.overlong_buffer_cfg.enable"))
    if shaping:
        yield (
            "Dynamic sampling is off while the reward counts length: a group whose answers are all right, or all "
            f"wrong, trains on length only -> Set {_GROUPS}=true on the command line, or {' and '.join(shaping)}."
        )


def _cut_distribution(get: Callable[..., Any]) -> Iterator[str]:
    top_p, top_k = get(f"{_ROLLOUT}.top_p", 1.0), get(f"{_ROLLOUT}.top_k", -1)
    cut = [f"top_p={top_p}"] * (_is_number(top_p) and top_p < 1) + [f"top_k={top_k}"] * (
        _is_number(top_k) and top_k > 0
    )
    if cut:
        whole = " and ".join(f"{_ROLLOUT}.{each.partition('=')[0]}={1.0 if 'p=' in each else -1}" for each in cut)
        yield (
            f"{_ROLLOUT} samples with {' and '.join(cut)} from a part of the distribution, but the actor computes "
            "probabilities of the whole one: the importance weights of every objective are biased, on average below 1 "
            f"-> Set {whole}. Validation has its own values, in val_kwargs."
        )


def _own_agent(get: Callable[..., Any]) -> Iterator[str]:
    """Only an agent knows which of its turns are void."""
    if get("retool.agent.run") is not None and get(f"{_SAMPLER}.void_turn_filter"):
        yield (
            f"retool.agent.run is set, so {_SAMPLER}.void_turn_filter finds nothing: which of its turns are void, only "
            f"the agent knows -> Set {_SAMPLER}.void_turn_filter=false."
        )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
