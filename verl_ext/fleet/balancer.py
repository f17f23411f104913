"""`retool.fleet.routing`: which server a request goes to.

verl: verl's own. A first turn goes to the server with the fewest requests, and later turns follow it.
ring: `routing.Router` in verl's registry of routers. It avoids failing servers and routes to data-parallel ranks.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from verl_ext.fleet.modes import getter, in_sentences, needs_loops_that_ask_for_servers
from verl_ext.fleet.ranks import RankHandle, ranks_of
from verl_ext.fleet.routing import Router, server_of

KEY = "retool.fleet.routing"
_ROLLOUT = "actor_rollout_ref.rollout"


class RingLoadBalancer:
    """verl's `RequestLoadBalancer` (workers/rollout/router.py:32) over a `Router`; verl makes a Ray actor of it.

    Args:
        servers: address -> actor handle.
        config: of ring.yaml, which only names this class.
    """

    def __init__(self, servers: Mapping[str, Any], config: Mapping[str, Any]):
        self._router = Router()
        self._ranks: dict[str, int] = {}  # of every server ever added: a hybrid one comes back each step
        self._slots: dict[str, dict[str, Any]] = {}  # server -> slot -> handle
        self.add_servers(servers)

    def acquire_server(self, request_id: str) -> tuple[str, Any]:
        """Return the slot for a rollout's next request, and the handle to ask.

        Raises:
            NoServerError: there is no server.
        """
        slot = self._router.acquire(request_id)
        return slot, self._slots[server_of(slot)][slot]

    def release_server(self, server_id: str, request_id: str | None = None) -> None:
        self._router.release(server_id)

    def failed(self, server_id: str) -> None:
        """Note that a request failed at a server or one of its ranks; all its ranks are avoided for a while."""
        for slot in self._slots.get(server_of(server_id), ()):
            self._router.failed(slot)

    def tell_ranks(self, ranks: Mapping[str, int]) -> None:
        """Note the ranks of servers about to join. Other servers are asked, and a hanging one delays all requests."""
        self._ranks.update(ranks)

    def add_servers(self, servers: Mapping[str, Any]) -> None:
        for address, handle in servers.items():
            if address not in self._ranks:
                self._ranks[address] = ranks_of(handle)
            ranks = self._ranks[address]
            slots = {f"{address}/{rank}": RankHandle(handle, rank) for rank in range(ranks)}
            self._slots[address] = slots if ranks > 1 else {address: handle}
            for slot in self._slots[address]:
                self._router.add(slot)

    def remove_servers(self, server_ids: Sequence[str]) -> None:
        for address in server_ids:
            for slot in self._slots.pop(address, ()):
                self._router.remove(slot)

    def get_all_servers(self) -> list[str]:
        return list(self._slots)

    def get_status(self) -> dict[str, Any]:
        """Return verl's status, with the load of each slot added."""
        slots = {slot: self._router.load(slot) for slot in self._router.slots}
        servers = {address: sum(slots[slot] for slot in of) for address, of in self._slots.items()}
        return {
            "servers": servers,
            "total_inflight": sum(servers.values()),
            "active_servers": len(servers),
            "registered_handles": list(servers),
            "slots": slots,
        }

    def clear_sticky_cache(self) -> dict[str, Any]:
        cleared = len(self._router.rollouts)
        self._router.forget_rollouts()
        return {"cleared_entries": cleared, "server_loads": self.get_status()["servers"]}

    def get_inflight_count(self, server_id: str) -> int:
        return self.get_status()["servers"].get(server_id, 0)

    def get_total_inflight(self) -> int:
        return self.get_status()["total_inflight"]

    def require_acquire_fields(self) -> list[str]:
        return []

    def require_release_fields(self) -> list[str]:
        return ["request_id"]


def refusals(get: Callable[..., Any]) -> Iterator[str]:
    """Yield why a run cannot have its routing, `what is wrong -> what to do` each. The start of a run raises them.

    Args:
        get: (dotted key, default) -> value of the run, the default if it is absent or null.
    """
    if get(KEY, "verl") != "ring":
        return
    if (path := get(f"{_ROLLOUT}.router_config_path")) and Path(path) != RING:
        yield f"""{KEY} is ring with {_ROLLOUT}.router_config_path={path}: a run can have only one router -> Set
            {KEY}=verl, or router_config_path=null."""
    if get(f"{_ROLLOUT}.full_determinism"):
        yield f"""{KEY} is ring with {_ROLLOUT}.full_determinism=true: which server takes a rollout depends on the
            load at that moment, so no two runs would be equal -> Set {KEY}=verl."""
    yield from needs_loops_that_ask_for_servers(f"{KEY} is ring", f"{KEY}=verl", get)
    ranks, name = get(f"{_ROLLOUT}.data_parallel_size", 1), get(f"{_ROLLOUT}.name")
    if ranks > 1 and (name != "vllm" or get(f"{_ROLLOUT}.disaggregation.enabled")):
        yield f"""{KEY} is ring with {_ROLLOUT}.data_parallel_size={ranks}, name={name} and disaggregation.enabled=
            {bool(get(f"{_ROLLOUT}.disaggregation.enabled"))}: only vLLM servers that both prefill and decode
            accept a request for one rank -> Set {KEY}=verl."""


RING = Path(__file__).with_name("ring.yaml")


def install(config: DictConfig) -> None:
    """Make verl create the run's router; `verl` keeps verl's own. Call it before there are servers.

    Raises:
        ValueError: the run cannot have its routing.
    """
    get = getter(config)
    if found := in_sentences(refusals(get)):
        raise ValueError(found)
    if get(KEY, "verl") == "ring":
        config.actor_rollout_ref.rollout.router_config_path = str(RING)
