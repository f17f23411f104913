"""`retool.fleet.weight_update`: what a server does with running requests while it gets new weights.

abort: They are interrupted, the cache is dropped, and each continues as a new request.
drain: They end with the old weights, except those that vLLM has preempted, which continue with the new weights; the
    update waits for the longest of them.
keep: They pause during the update, keep their KV cache, and continue with the new weights.
In all modes, a request that arrives during an update waits for the new weights.
"""

from collections.abc import Callable, Iterator
from typing import Any

from omegaconf import DictConfig

from verl_ext.fleet import health
from verl_ext.fleet.modes import getter, in_sentences, needs_servers_of_their_own
from verl_ext.versions import VERL, require_versions

KEY = "retool.fleet.weight_update"
_ROLLOUT = "actor_rollout_ref.rollout"
_MODEL = "actor_rollout_ref.model"
_CORRECTION = "algorithm.rollout_correction"


def refusals(get: Callable[..., Any]) -> Iterator[str]:
    """Yield why a run cannot have its mode, `what is wrong -> what to do` each. The start of a run raises them.

    Args:
        get: (dotted key, default) -> value of the run, the default if it is absent or null.
    """
    mode = get(KEY, "abort")
    if mode not in ("drain", "keep"):
        return
    yield from needs_servers_of_their_own(f"{KEY} is {mode}", f"{KEY}=abort", get)
    if mode == "keep":
        yield from _refusals_of_a_mixed_cache(get)


def _refusals_of_a_mixed_cache(get: Callable[..., Any]) -> Iterator[str]:
    """Yield what rules out responses on keys and values of several versions, which no trainer can recompute."""
    if not (get(f"{_CORRECTION}.bypass_mode") or get(f"{_CORRECTION}.rollout_is")):
        yield f"""{KEY} is keep with {_CORRECTION}.bypass_mode=false and rollout_is=null: the trainer would use its own
            log-probs instead of those that the tokens were sampled with, and it cannot recompute the latter because
            the cache holds several versions -> Use an objective that uses the rollout's log-probs, such as
            objective=glm5_async or objective=olmorl, or set {KEY}=abort."""
    if get(f"{_ROLLOUT}.free_cache_engine", True):
        yield f"""{KEY} is keep with {_ROLLOUT}.free_cache_engine=true: verl would free the KV cache at every update
            -> Set {_ROLLOUT}.free_cache_engine=false."""
    if get(f"{_ROLLOUT}.engine_kwargs.vllm.kv_transfer_config"):
        yield f"""{KEY} is keep with {_ROLLOUT}.engine_kwargs.vllm.kv_transfer_config: a store of keys and values
            outside vLLM may return those of older weights -> Remove it, or set {KEY}=abort."""
    adapters = get(f"{_MODEL}.lora_rank", 0) or get(f"{_MODEL}.lora.rank", 0)
    if adapters and not get(f"{_MODEL}.lora.merge"):
        yield f"""{KEY} is keep with LoRA adapters of rank {adapters}: it is untested whether vLLM can exchange an
            adapter under a running request -> Set {_MODEL}.lora.merge=true, or {KEY}=abort."""


def install(config: DictConfig) -> None:
    """Make verl create vLLM servers with the run's mode. Call it before there are servers.

    With trainer.v1.trainer_mode=sync, no request runs while weights change, and verl's own server stays.

    Raises:
        ValueError: the run cannot have its mode, or its servers cannot be watched.
        RuntimeError: verl's version is not the one whose server is extended.
    """
    get = getter(config)
    if found := in_sentences((*refusals(get), *health.refusals(get))):
        raise ValueError(found)
    mode = get(KEY, "abort")
    if get("trainer.v1.trainer_mode", "sync") == "sync" or get(f"{_ROLLOUT}.name") != "vllm":
        return
    require_versions(VERL, "verl_ext/fleet/server.py")
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    def load() -> type:
        from verl_ext.fleet import server  # imports vLLM

        return {"abort": server.FleetReplica, "drain": server.DrainReplica, "keep": server.KeepReplica}[mode]

    RolloutReplicaRegistry.register("vllm", load)
