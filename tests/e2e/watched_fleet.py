"""Start watched rollout servers without a trainer, behind their config's router, and an actor that reads files."""

import itertools
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from omegaconf import DictConfig


@contextmanager
def watched_fleet(config: DictConfig, folder: Path, run: Path) -> Iterator[SimpleNamespace]:
    """Start the servers of `config` with version 0 in `cluster`: `weights`, `fleet`, `router`, `client`, `folder`.

    Args:
        folder: has the weights of all versions (versions.py).
    """
    import verl  # noqa: F401
    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.rollout.llm_server import LLMServerManager

    from tests.e2e.versions import Actor
    from verl_ext.fleet import balancer
    from verl_ext.fleet.client import FleetClient
    from verl_ext.fleet.recovery import Fleet, FleetCheckpointManager
    from verl_ext.settings import HealthSettings
    from verl_ext.settings.checks import read_settings

    balancer.install(config)
    manager = LLMServerManager.create(config=config)
    engine = omega_conf_to_dataclass(config.actor_rollout_ref.rollout.checkpoint_engine)
    weights = FleetCheckpointManager(engine, Actor(folder), manager.get_replicas())
    weights.update_weights(global_steps=0)
    settings = read_settings(config, "fleet.health", HealthSettings)
    fleet = Fleet.of_run(run, settings, weights, manager)
    fleet.watch()
    try:
        client = manager.get_client(client_cls=FleetClient, limits=settings)
        router = manager.global_load_balancer
        yield SimpleNamespace(weights=weights, fleet=fleet, router=router, client=client, folder=run)
    finally:
        fleet.close()


def engine_of(server: Any) -> int:
    """Return the pid of the server's engine core; runs in the server's process."""
    return server.engine.engine_core.resources.engine_manager.processes[0].pid


def written(server: Any) -> list[int]:
    """Return the tokens of the server's requests so far; runs in the server's process."""
    return [each.detokenizer.num_output_tokens() for each in server.engine.output_processor.request_states.values()]


def sampling(tokens: int) -> dict[str, Any]:
    """Make parameters of a request that writes so many tokens and outputs at its end, as in our agent loop."""
    from vllm.sampling_params import RequestOutputKind

    kind = RequestOutputKind.FINAL_ONLY
    return {"max_tokens": tokens, "ignore_eos": True, "logprobs": True, "output_kind": kind}


def watch(server: Any) -> None:
    """Note (time, tokens of each running request) a thousand times a second, in a thread of the server's process."""
    server.is_watched, server.seen = True, (seen := [])

    def look() -> None:
        while server.is_watched and server.seen is seen:  # watched anew, it has another list
            states = list(server.engine.output_processor.request_states.values())
            written = {each.external_req_id: each.detokenizer.num_output_tokens() for each in states}
            seen.append((time.monotonic(), written))
            time.sleep(0.001)

    threading.Thread(target=look, daemon=True).start()


def stop_watching(server: Any) -> list[tuple[float, dict[str, int]]]:
    server.is_watched = False
    return server.seen


def gaps(seen: list[tuple[float, dict[str, int]]], request: str) -> list[float]:
    """Return the seconds from each token of a request to its next, longest first."""
    times, before = [], 0
    for at, written in seen:
        if written.get(request, 0) > before:
            times.append(at)
            before = written[request]
    return sorted((b - a for a, b in itertools.pairwise(times)), reverse=True)
