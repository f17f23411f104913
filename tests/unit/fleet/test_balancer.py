"""`retool.fleet.routing`: what verl asks of a router, and which runs can use the ring."""

import asyncio
from functools import partial
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from tests.unit.fleet.members_scene import as_the_doctors
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


def test_the_oldest_rollouts_are_forgotten(asked, monkeypatch):
    monkeypatch.setattr(balancer, "MAX_ROLLOUTS", 2)
    router, ended = make("one"), []
    monkeypatch.setattr(router._router, "end", ended.append)
    for rollout in "abacd":
        router.acquire_server(rollout)
    assert ended == ["b", "a"]
    assert router.clear_sticky_cache() == {"cleared_entries": 2, "server_loads": {"10.0.0.1:one": 5}}
    assert ended == ["b", "a", "c", "d"]


class Handle:
    """The handle of a router that lives in this process."""

    def __init__(self, router, *names):
        async def call(function, **kwargs):
            return function(**kwargs)

        for name in names:
            function = getattr(router, name)
            remote = (lambda f: lambda **kw: asyncio.ensure_future(call(f, **kw)))(function)
            setattr(self, name, SimpleNamespace(remote=remote))


NAMES = ["acquire_server", "release_server", "require_acquire_fields", "require_release_fields"]


def client(router, monkeypatch, *names, watched=False):
    """Return a client over servers that raise what `broken` has; `watched`: that of `retool.fleet.health`."""
    from verl.workers.rollout.replica import TokenOutput

    from verl_ext.fleet.client import FleetClient
    from verl_ext.rollout.client import TurnClient

    broken = {}

    async def generate(handle, **request):
        if handle in broken:
            raise broken[handle]
        return TokenOutput(token_ids=[2], stop_reason="completed")

    config = OmegaConf.create({"actor_rollout_ref": run().actor_rollout_ref})
    made = FleetClient(config, limits=SimpleNamespace(wait_s=5, attempts=3)) if watched else TurnClient(config)
    made._load_balancer = Handle(router, *NAMES, *names)
    for of in router._slots.values():
        for slot, name in of.items():
            of[slot] = SimpleNamespace(generate=SimpleNamespace(remote=partial(generate, name)))
    return made, broken


async def ask(client, rollout):
    await client.generate(rollout, prompt_ids=[1], sampling_params={})
    await asyncio.sleep(0)  # releases are sent, not awaited


async def served(client, router, rollouts):
    """Return how many rollouts got an answer, and what each server was asked for in all."""
    answers = 0
    for rollout in rollouts:
        try:
            await ask(client, rollout)
            answers += 1
        except RuntimeError:
            pass
    return answers


@pytest.mark.parametrize("watched", [False, True])
async def test_a_server_that_fails_at_once_gets_one_request_of_a_hundred(asked, monkeypatch, cpu_platform, watched):
    router = make("one", "two")
    made, broken = client(router, monkeypatch, "failed", watched=watched)
    broken["one"] = RuntimeError("CUDA error")
    assert await served(made, router, map(str, range(100))) == 99
    assert router.get_total_inflight() == 0


async def test_without_being_told_it_gets_half_of_them(asked, monkeypatch, cpu_platform):
    router = make("one", "two")
    made, broken = client(router, monkeypatch)  # a router as verl's, which has no `failed`
    broken["one"] = RuntimeError("CUDA error")
    assert 30 < await served(made, router, map(str, range(100))) < 70


async def test_a_request_that_every_server_would_refuse_is_not_a_failure(asked, monkeypatch, cpu_platform):
    router = make("one", "two")
    made, broken = client(router, monkeypatch, "failed")
    broken["one"] = broken["two"] = ValueError("the prompt leaves no room")
    for rollout in map(str, range(20)):
        with pytest.raises(ValueError, match="no room"):
            await ask(made, rollout)
    assert not router._router._penalties


async def test_an_empty_fleet_is_no_servers_failure(asked, monkeypatch, cpu_platform):
    router = make()
    made, _ = client(router, monkeypatch, "failed")
    with pytest.raises(NoServerError):
        await ask(made, "x")


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
