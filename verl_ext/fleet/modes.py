"""Which runs have only servers on dedicated GPUs (verl's replica mode `standalone`), which can add and remove servers,
and which have agent loops that can turn to another server.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from omegaconf import DictConfig, OmegaConf

_ROLLOUT = "actor_rollout_ref.rollout"
IN_SERVER = "verl_ext.rollout.workers.InServerAgentLoopManager"  # matched by class name only: the module was renamed


def getter(config: DictConfig) -> Callable[..., Any]:
    """Return `get` of the functions below for a run that starts; the doctor has its own."""

    def get(key: str, default: Any = None) -> Any:
        value = OmegaConf.select(config, key)
        return default if value is None else value

    return get


def in_sentences(refusals: Iterable[str]) -> str:
    """Join refusals, `what is wrong -> what to do` each, into the text of an error."""
    return " ".join(" ".join(each.split()).replace(" -> ", ". ") for each in refusals)


def needs_servers_of_their_own(setting: str, instead: str, get: Callable[..., Any]) -> Iterator[str]:
    """Yield why a run cannot have a setting that needs all its vLLM servers on dedicated GPUs.

    Args:
        setting: as the message spells it, such as `retool.fleet.weight_update is keep`.
        instead: what to set instead.
        get: (dotted key, default) -> value of the run, the default if it is absent or null.
    """
    trainer_mode, name = get("trainer.v1.trainer_mode"), get(f"{_ROLLOUT}.name")
    if trainer_mode != "separate_async":
        yield f"""{setting} with trainer.v1.trainer_mode={trainer_mode}: expected separate_async. Servers on the
            actor's GPUs give it their memory while weights change, so no request can be running -> Set
            trainer.v1.trainer_mode=separate_async, or {instead}."""
    elif get("actor_rollout_ref.hybrid_engine", True):
        yield f"""{setting} with actor_rollout_ref.hybrid_engine=true: some servers would be on the actor's GPUs,
            and those interrupt their requests -> Set actor_rollout_ref.hybrid_engine=false, or {instead}."""
    if name != "vllm" or get(f"{_ROLLOUT}.disaggregation.enabled"):
        yield f"""{setting} with {_ROLLOUT}.name={name} and disaggregation.enabled=
            {bool(get(f"{_ROLLOUT}.disaggregation.enabled"))}: only vLLM servers that both prefill and decode
            support it -> Set {_ROLLOUT}.name=vllm and disaggregation.enabled=false, or {instead}."""


def needs_servers_that_may_change(setting: str, instead: str, get: Callable[..., Any]) -> Iterator[str]:
    """Yield why weights would reach only the servers of the first update; the arguments are as above.

    verl 0.9.1, checkpoint_engine/nccl_checkpoint_engine.py:297, hccl_:215, kimi_:303.
    """
    backend = str(get(f"{_ROLLOUT}.checkpoint_engine.backend"))
    rebuild = f"{_ROLLOUT}.checkpoint_engine.engine_kwargs.{backend}.rebuild_group"
    if backend.startswith("delta"):
        yield f"""{setting} with checkpoint_engine.backend={backend}, which sends differences: a new server lacks the
            weights that they apply to -> Use a backend that sends whole weights, such as nccl, or {instead}."""
    elif backend in ("nccl", "hccl", "kimi_ckpt_engine") and not get(rebuild):
        yield f"""{setting} with {rebuild}=false: {backend} keeps the group of its first update, which no server
            can leave or join -> Set ++{rebuild}=true, or {instead}."""


def needs_loops_that_ask_for_servers(setting: str, instead: str, get: Callable[..., Any]) -> Iterator[str]:
    """Yield why agent loops would stay with the server that they have; the arguments are as above."""
    manager = str(get(key := f"{_ROLLOUT}.agent.agent_loop_manager_class"))
    if manager.rpartition(".")[2] == IN_SERVER.rpartition(".")[2]:
        yield f"""{setting} with {key}={manager}: its agent loops run inside the only server and never ask a router
            -> Set it to verl_ext.rollout.workers.LeanAgentLoopManager, or {instead}."""
