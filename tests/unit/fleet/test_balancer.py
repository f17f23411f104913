"""`retool.fleet.routing`: what verl asks of a router, and which runs can use the ring."""

import asyncio
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from tests.unit.fleet.members_scene import as_the_doctors
from tests.unit.fleet.remote import Remote
from verl_ext.fleet import balancer, modes
from verl_ext.fleet.balancer import RING, RingLoadBalancer, install, refusals
from verl_ext.fleet.ranks import RankHandle
from verl_ext.fleet.routing import NoServerError

RING_RUN = {"retool.fleet.routing": "ring", "actor_rollout_ref.rollout.name": "vllm"}
ROLLOUT = "actor_rollout_ref.rollout"
RANKS = {"one": 1, "two": 1, "wide": 4}


@pytest.fixture
def asked(monkeypatch):
    """Handles are names; the servers whose ranks were asked for."""
    asked = []
    monkeypatch.setattr(balancer, "ranks_of", lambda handle: asked.append(handle) or RANKS[handle])
    return asked


def make(*names):
    return RingLoadBalancer({f"10.0.0.1:{name}": name for name in names}, {})


def test_it_has_all_that_verl_asks_of_a_router(asked):
    from verl.workers.rollout.router import GlobalRequestLoadBalancer, RequestLoadBalancer

    for protocol in (RequestLoadBalancer, GlobalRequestLoadBalancer):
        names = {name for name in vars(protocol) if not name.startswith("_")}
        assert len(names) > 8 and names <= set(dir(RingLoadBalancer))
    theirs = set(GlobalRequestLoadBalancer({"a": None}).get_status())
    assert theirs < set(make("one").get_status())


def test_requests_are_counted_until_they_are_released(asked):
    router = make("one", "two")
    server, handle = router.acquire_server("rollout")
    assert server == f"10.0.0.1:{handle}" and handle in ("one", "two")
    assert router.acquire_server("rollout") == (server, handle)
    assert router.get_inflight_count(server) == router.get_total_inflight() == 2
    assert (router.require_acquire_fields(), router.require_release_fields()) == ([], ["request_id"])
    for _ in range(2):
        router.release_server(server, request_id="rollout")
    assert router.get_total_inflight() == 0


def test_a_server_that_left_gets_nothing_and_one_that_comes_back_is_not_asked_again(asked):
    router = make("one", "two")
    router.remove_servers(["10.0.0.1:one", "unknown"])
    assert {router.acquire_server(str(n))[1] for n in range(20)} == {"two"} and asked == ["one", "two"]
    router.add_servers({"10.0.0.1:one": "one"})
    assert router.get_all_servers() == ["10.0.0.1:two", "10.0.0.1:one"] and asked == ["one", "two"]
    assert "one" in {router.acquire_server(f"new {n}")[1] for n in range(20)}


def test_a_server_whose_ranks_were_told_is_not_asked(asked):
    router = make("one")
    router.tell_ranks({"10.0.0.1:new": 2})
    router.add_servers({"10.0.0.1:new": "new"})
    assert list(router.get_status()["slots"]) == ["10.0.0.1:one", "10.0.0.1:new/0", "10.0.0.1:new/1"]
    assert asked == ["one"]


def test_an_empty_fleet_is_refused_with_the_words_of_verl(asked):
    with pytest.raises(NoServerError, match="No available servers in load balancer"):
        make().acquire_server("rollout")


def test_the_ranks_of_a_server_are_slots_and_leave_with_it(asked):
    router = make("wide", "one")
    status = router.get_status()
    assert list(status["slots"]) == [*(f"10.0.0.1:wide/{rank}" for rank in range(4)), "10.0.0.1:one"]
    got = [router.acquire_server(str(number)) for number in range(100)]
    ranks = [handle.rank for slot, handle in got if isinstance(handle, RankHandle)]
    assert set(ranks) == {0, 1, 2, 3} and all(slot.endswith(f"/{h.rank}") for slot, h in got if h != "one")
    status = router.get_status()
    assert status["servers"]["10.0.0.1:wide"] == len(ranks) and status["total_inflight"] == 100
    router.remove_servers(["10.0.0.1:wide"])
    assert {router.acquire_server(str(number))[1] for number in range(100)} == {"one"}


def test_a_failure_of_one_rank_is_that_of_its_server(asked):
    router = make("wide", "one")
    router.failed("10.0.0.1:wide/2")
    router.failed("10.0.0.1:gone")
    assert {router.acquire_server(str(number))[1] for number in range(100)} == {"one"}


def test_a_request_for_a_rank_says_so():
    sent = []
    server = SimpleNamespace(generate=SimpleNamespace(remote=lambda **kwargs: sent.append(kwargs)))
    RankHandle(server, 3).generate.remote(request_id="x", prompt_ids=[1])
    assert sent == [{"request_id": "x", "prompt_ids": [1], "data_parallel_rank": 3}]


def test_a_clear_forgets_where_the_rollouts_were(asked):
    router = make("one")
    for rollout in "aba":
        router.acquire_server(rollout)
    assert router.clear_sticky_cache() == {"cleared_entries": 2, "server_loads": {"10.0.0.1:one": 3}}
    assert router.clear_sticky_cache()["cleared_entries"] == 0


class Server(str):
    """A server by its name. It raises what `broken` has for it."""

    broken = {}

    async def generate(self, **request):
        from verl.workers.rollout.replica import TokenOutput

        if self in self.broken:
            raise self.broken[self]
        return TokenOutput(token_ids=[2], stop_reason="completed")


class Untold:
    """A router like verl's own, which has no `failed`."""

    def __init__(self, router):
        names = ("acquire_server", "release_server", "require_acquire_fields", "require_release_fields")
        for name in names:
            setattr(self, name, getattr(router, name))


@pytest.fixture
def client(asked, monkeypatch, cpu_platform):
    """Make the router of some servers and a client that asks it, and note what is broken; `told`: of failures."""
    from verl_ext.fleet.client import FleetClient
    from verl_ext.rollout.client import TurnClient

    monkeypatch.setattr(balancer, "ranks_of", lambda handle: RANKS[handle.actor])
    monkeypatch.setattr(Server, "broken", {})

    def makes(*names, told=True, watched=False):
        router = RingLoadBalancer({f"10.0.0.1:{name}": Remote(Server(name)) for name in names}, {})
        more = {"limits": SimpleNamespace(wait_s=5, attempts=3)} if watched else {}
        config = OmegaConf.create({"actor_rollout_ref": run().actor_rollout_ref})
        kind = FleetClient if watched else TurnClient
        made = kind(config, load_balancer_handle=Remote(router if told else Untold(router)), **more)
        return router, made, Server.broken

    return makes


async def served(client, rollouts):
    """Return how many rollouts got an answer."""
    answers = 0
    for rollout in rollouts:
        try:
            await client.generate(rollout, prompt_ids=[1], sampling_params={})
            answers += 1
        except (RuntimeError, ValueError):
            pass
        for _ in range(5):
            await asyncio.sleep(0)  # releases are sent, not awaited
    return answers


@pytest.mark.parametrize("watched", [False, True])
async def test_a_server_that_fails_at_once_gets_one_request_of_a_hundred(client, watched):
    router, made, broken = client("one", "two", watched=watched)
    broken["one"] = RuntimeError("CUDA error")
    assert await served(made, map(str, range(100))) == 99
    assert router.get_total_inflight() == 0


async def test_without_being_told_it_gets_half_of_them(client):
    _, made, broken = client("one", "two", told=False)
    broken["one"] = RuntimeError("CUDA error")
    assert 30 < await served(made, map(str, range(100))) < 70


async def test_a_request_that_every_server_would_refuse_is_not_a_failure(client):
    _, made, broken = client("one", "two")
    broken["one"] = ValueError("the prompt leaves no room")
    assert 30 < await served(made, map(str, range(100))) < 70, "it still gets its half of them"


async def test_an_empty_fleet_is_no_servers_failure(client):
    _, made, _ = client()
    with pytest.raises(NoServerError):
        await made.generate("x", prompt_ids=[1], sampling_params={})


def refused(changes):
    return [*refusals(as_the_doctors(RING_RUN | changes))]


@pytest.mark.parametrize("mode", ["sync", "colocate_async", "separate_async"])
def test_every_mode_can_have_the_ring(mode):
    assert not refused({"trainer.v1.trainer_mode": mode, f"{ROLLOUT}.data_parallel_size": 4})
    assert not refused({f"{ROLLOUT}.name": "sglang", f"{ROLLOUT}.router_config_path": str(RING)})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({f"{ROLLOUT}.router_config_path": "mine.yaml"}, "router_config_path=mine.yaml"),
        ({f"{ROLLOUT}.full_determinism": True}, "no two runs would be equal"),
        ({f"{ROLLOUT}.data_parallel_size": 2, f"{ROLLOUT}.name": "sglang"}, "data_parallel_size=2, name=sglang"),
        ({f"{ROLLOUT}.data_parallel_size": 2, f"{ROLLOUT}.disaggregation.enabled": True}, "both prefill and decode"),
        (
            {f"{ROLLOUT}.agent.agent_loop_manager_class": "verl_ext.rollout.workers.InServerAgentLoopManager"},
            "never ask a router",
        ),
        (  # as it was called before
            {f"{ROLLOUT}.agent.agent_loop_manager_class": "verl_ext.agent_loop.manager.InServerAgentLoopManager"},
            "never ask a router",
        ),
    ],
)
def test_what_the_ring_cannot_route_is_refused(changes, message):
    (text,) = refused(changes)
    assert message in " ".join(text.split()) and text.startswith("retool.fleet.routing is ring") and " -> " in text
    assert not refused(changes | {"retool.fleet.routing": "verl"})


def run(**changes):
    rollout = {"name": "vllm", "router_config_path": None} | changes
    return OmegaConf.create({"retool": {"fleet": {"routing": "ring"}}, "actor_rollout_ref": {"rollout": rollout}})


def test_the_name_of_the_manager_that_never_asks_a_router_is_right():
    from verl_ext.rollout import workers

    module, name = modes.IN_SERVER.rsplit(".", 1)
    assert module == workers.__name__ and hasattr(workers, name)


def test_verl_makes_the_ring_from_what_the_run_names(asked):
    from verl.workers.rollout.router import _load_router_yaml, _resolve_router_class

    config = run()
    install(config)
    install(config)  # a second trainer over the same config
    settings = _load_router_yaml(config.actor_rollout_ref.rollout.router_config_path)
    router = _resolve_router_class(settings["router_class"])({"10.0.0.1:one": "one"}, settings)
    assert router.acquire_server("x") == ("10.0.0.1:one", "one")


def test_verls_own_router_stays_if_it_is_named():
    config = run(router_config_path="mine.yaml")
    config.retool.fleet.routing = "verl"
    install(config)
    assert config.actor_rollout_ref.rollout.router_config_path == "mine.yaml"


def test_the_start_of_a_run_says_what_is_wrong_and_what_to_do():
    with pytest.raises(ValueError, match=r"no two runs would be equal\. Set retool.fleet.routing=verl"):
        install(run(full_determinism=True))
