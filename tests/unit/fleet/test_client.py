"""A turn on servers that die during it: verl's own client and load balancer, with made-up servers."""

import asyncio
from types import SimpleNamespace

import pytest

from tests.unit.fleet.remote import Remote
from verl_ext.settings import HealthSettings

pytestmark = pytest.mark.timeout(180)  # Ray's and verl's imports

LIMITS = HealthSettings(
    every_s=1, suspect_s=2, dead_s=3, update_s=4, start_s=5, attempts=3, wait_s=0.05, max_replacements=1
)
TEXT = list(range(100, 110))  # what the model says to any prompt, token for token


class Server:
    """Says `TEXT`; a token's log-prob is minus its number, and its version is the server's."""

    def __init__(self, version: int, dies_after: int | None = None, loses: str = ""):
        self.version, self.dies_after, self.loses, self.asked = version, dies_after, loses, []

    async def generate(self, *, prompt_ids, sampling_params, request_id, **_):
        from ray import exceptions
        from verl.workers.rollout.replica import TokenOutput

        self.asked.append((list(prompt_ids), sampling_params["max_tokens"]))
        await asyncio.sleep(0)
        done = len(prompt_ids) - 1
        end = min(len(TEXT), done + sampling_params["max_tokens"])
        died = self.dies_after is not None
        if died and self.loses:
            rest = (None, "") if issubclass(getattr(exceptions, self.loses), exceptions.ObjectLostError) else ()
            raise getattr(exceptions, self.loses)("its process is gone", *rest)
        ids = TEXT[done : min(end, done + self.dies_after) if died else end]
        return TokenOutput(
            token_ids=ids,
            log_probs=[-float(each) for each in ids],
            stop_reason="aborted" if died else "completed",
            extra_fields={"global_steps": self.version} | ({"server_failed": True} if died else {}),
        )


@pytest.fixture
def ask(cpu_platform, monkeypatch):
    """Ask for one turn; return (its output, its requests, the load balancer)."""
    from verl.workers.rollout import llm_server, router

    from verl_ext.fleet import client as clients

    sleep = asyncio.sleep
    monkeypatch.setattr(llm_server.asyncio, "sleep", lambda seconds: sleep(min(seconds, 0.01)))

    def asks(servers, **changes):
        async def turn():
            rollout = SimpleNamespace(name="vllm", full_determinism=False, response_length=99)
            balancer = router.GlobalRequestLoadBalancer({name: Remote(each) for name, each in servers.items()})
            client = clients.FleetClient(
                config=SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=rollout)),
                load_balancer_handle=Remote(balancer),
                limits=HealthSettings(**vars(LIMITS) | changes),
            )
            output = await client.generate("rollout", prompt_ids=[1], sampling_params={"max_tokens": 8})
            for _ in range(50):
                await sleep(0)  # releases are still being sent
            return output, output.extra_fields["turn"], balancer

        return asyncio.run(asyncio.wait_for(turn(), 20))

    return asks


def test_a_turn_continues_elsewhere_with_its_tokens_log_probs_and_versions(ask, monkeypatch):
    first, second = Server(3, dies_after=5), Server(4)
    monkeypatch.setattr("random.choice", lambda names: names[0])
    output, turn, _balancer = ask({"a": first, "b": second})
    assert output.token_ids == TEXT[:8] and output.log_probs == [-float(each) for each in TEXT[:8]]
    assert turn.written == [(5, 3), (3, 4)] and turn.lost == ["a"]
    assert first.asked == [([1], 8)] and second.asked == [([1, *TEXT[:5]], 3)]
    assert output.stop_reason in ("completed", "length")


def test_a_dead_server_gets_no_further_request(ask, monkeypatch):
    monkeypatch.setattr("random.choice", lambda names: names[0])
    _, _, balancer = ask({"a": Server(3, dies_after=0), "b": Server(3)})
    assert balancer.get_all_servers() == ["b"] and balancer.get_total_inflight() == 0


@pytest.mark.parametrize(
    "error", ["RayActorError", "OutOfMemoryError", "NodeDiedError", "ObjectLostError", "OwnerDiedError"]
)
def test_a_server_whose_process_is_gone_takes_the_tokens_of_its_request_with_it(ask, monkeypatch, error):
    monkeypatch.setattr("random.choice", lambda names: names[0])
    output, turn, balancer = ask({"a": Server(3, dies_after=5, loses=error), "b": Server(4)})
    assert output.token_ids == TEXT[:8] and len(output.log_probs) == 8 and turn.written == [(8, 4)]
    assert balancer.get_all_servers() == ["b"]


class OutOfReach(Server):
    """Ray cannot reach the server for its first requests, but it is alive."""

    def __init__(self, times: int):
        super().__init__(3)
        self.times = times

    async def generate(self, **kwargs):
        from ray.exceptions import ActorUnavailableError

        if len(self.asked) < self.times:
            self.asked.append(None)
            raise ActorUnavailableError("a moment without network", None)
        return await super().generate(**kwargs)


def test_a_server_that_cannot_be_reached_for_a_moment_stays_and_the_turn_loses_none(ask):
    server = OutOfReach(5)
    output, turn, balancer = ask({"a": server}, attempts=1)
    assert output.token_ids == TEXT[:8] and output.stop_reason in ("completed", "length")
    assert turn.written == [(8, 3)] and turn.lost == [] and balancer.get_all_servers() == ["a"]
    assert server.asked == [None] * 5 + [([1], 8)] and balancer.get_total_inflight() == 0


def test_a_server_that_is_out_of_reach_for_long_is_a_loss(ask, monkeypatch):
    from verl_ext.fleet import client as clients

    monkeypatch.setattr(clients, "MAX_UNREACHED", 2)
    monkeypatch.setattr("random.choice", lambda names: names[0])
    away = OutOfReach(99)
    output, turn, balancer = ask({"a": away, "b": Server(4)})
    assert output.token_ids == TEXT[:8] and turn.lost == ["a"] and balancer.get_all_servers() == ["b"]
    assert len(away.asked) == 3


@pytest.mark.parametrize("loses", ["", "OutOfMemoryError"])
def test_a_turn_that_loses_a_server_too_often_is_a_failure_of_infrastructure(ask, loses):
    from verl_ext.rollout.sampled import FAILED_STOPS

    servers = {name: Server(3, dies_after=1, loses=loses) for name in "abcd"}
    output, turn, balancer = ask(servers)
    assert output.stop_reason in FAILED_STOPS and len(balancer.get_all_servers()) == 1
    kept = 0 if loses else 3
    assert output.token_ids == TEXT[:kept] and len(output.log_probs) == kept == sum(
        tokens for tokens, _ in turn.written
    )


def test_a_turn_waits_for_a_server_if_none_is_left_and_fails_if_none_comes(ask):
    from verl_ext.rollout.sampled import FAILED_STOPS

    output, _, _ = ask({"a": Server(3, dies_after=2)})
    assert output.stop_reason in FAILED_STOPS and output.token_ids == TEXT[:2]


def test_a_turn_that_an_update_interrupts_is_not_a_loss(ask):
    """verl's own reason to try again: it does not count as an attempt, and the server stays."""

    class Aborting(Server):
        async def generate(self, **kwargs):
            output = await super().generate(**kwargs)
            if len(self.asked) < 6:
                output.token_ids, output.log_probs, output.stop_reason = [], [], "aborted"
            return output

    output, _, balancer = ask({"a": Aborting(3)})
    assert output.token_ids == TEXT[:8] and balancer.get_all_servers() == ["a"]


@pytest.mark.parametrize("times", [3, 10**6])
def test_a_turn_waits_for_a_router_that_cannot_be_reached_as_for_a_server(ask, monkeypatch, times):
    from ray.exceptions import ActorUnavailableError
    from verl.workers.rollout.router import GlobalRequestLoadBalancer

    from verl_ext.rollout.sampled import FAILED_STOPS

    acquire, calls = GlobalRequestLoadBalancer.acquire_server, []

    def acquire_or_not(self, request_id):
        calls.append(request_id)
        if len(calls) <= times:
            raise ActorUnavailableError("a moment without network", None)
        return acquire(self, request_id)

    monkeypatch.setattr(GlobalRequestLoadBalancer, "acquire_server", acquire_or_not)
    output, _, balancer = ask({"a": Server(3)}, wait_s=10 if times == 3 else 0.1)
    assert (output.stop_reason in FAILED_STOPS) == (times > 3) and balancer.get_all_servers() == ["a"]
    assert output.token_ids == (TEXT[:8] if times == 3 else [])


@pytest.mark.parametrize("times", [2, 99])
def test_a_router_that_cannot_be_reached_as_a_server_is_lost_costs_no_turn(ask, monkeypatch, times):
    """The router is notified again; if it stays out of reach the watch notifies it, and the turn continues."""
    from ray.exceptions import ActorUnavailableError
    from verl.workers.rollout.router import GlobalRequestLoadBalancer

    remove, calls = GlobalRequestLoadBalancer.remove_servers, []

    def remove_or_not(self, server_ids):
        calls.append(server_ids)
        if len(calls) <= times:
            raise ActorUnavailableError("a moment without network", None)
        remove(self, server_ids)

    class Dying(Server):
        async def generate(self, **kwargs):
            output = await super().generate(**kwargs)
            self.dies_after = None
            return output

    monkeypatch.setattr(GlobalRequestLoadBalancer, "remove_servers", remove_or_not)
    monkeypatch.setattr("random.choice", lambda names: names[0])
    output, turn, balancer = ask({"a": Dying(3, dies_after=5), "b": Server(4)})
    assert output.token_ids == TEXT[:8] and turn.lost == ["a"]
    assert balancer.get_all_servers() == (["b"] if times == 2 else ["a", "b"])
    assert calls == [["a"]] * (3 if times == 2 else 20)


@pytest.mark.parametrize("dies", ["before the first request", "with a server"])
def test_a_router_that_is_gone_is_a_failure_of_infrastructure_not_of_servers(ask, monkeypatch, dies):
    from ray.exceptions import RayActorError
    from verl.workers.rollout.router import GlobalRequestLoadBalancer

    from verl_ext.rollout.sampled import FAILED_STOPS

    acquire, calls = GlobalRequestLoadBalancer.acquire_server, []

    def gone(self, *args, **kwargs):
        raise RayActorError()

    def acquire_once(self, request_id):
        calls.append(request_id)
        return acquire(self, request_id) if dies == "with a server" and len(calls) == 1 else gone(self)

    monkeypatch.setattr(GlobalRequestLoadBalancer, "acquire_server", acquire_once)
    monkeypatch.setattr(GlobalRequestLoadBalancer, "remove_servers", gone)
    output, turn, _ = ask({"a": Server(3, dies_after=5)})
    assert output.stop_reason in FAILED_STOPS
    assert turn.lost == (["a"] if dies == "with a server" else [])
    assert output.token_ids == (TEXT[:5] if dies == "with a server" else [])


@pytest.mark.parametrize("hangs", ["acquire_server", "remove_servers"])
def test_a_router_that_hangs_does_not_hang_the_turn(ask, monkeypatch, hangs):
    """Its process exists but does not answer."""
    from verl.workers.rollout.router import GlobalRequestLoadBalancer

    from verl_ext.fleet import client as clients
    from verl_ext.rollout.sampled import FAILED_STOPS

    async def hang(self, *args, **kwargs):
        await asyncio.Event().wait()

    monkeypatch.setattr(GlobalRequestLoadBalancer, hangs, hang)
    monkeypatch.setattr(clients, "ROUTER_S", 0.05)
    output, turn, _ = ask({"a": Server(3, dies_after=1)}, attempts=2)
    assert output.stop_reason in FAILED_STOPS
    assert turn.lost == ([] if hangs == "acquire_server" else ["a", "a"])
    assert output.token_ids == TEXT[: len(turn.lost)]


def test_an_error_of_another_kind_is_raised(ask):
    class Wrong(Server):
        async def generate(self, **_):
            raise ValueError("we erred")

    with pytest.raises(ValueError, match="we erred"):
        ask({"a": Wrong(3)})


def test_the_rank_of_a_server_leaves_with_it(cpu_platform, monkeypatch):
    """A router that knows data-parallel ranks names them `server/rank`, and removes servers."""
    from verl_ext.fleet import client as clients

    removed = []

    class Balancer:
        def require_acquire_fields(self):
            return []

        require_release_fields = require_acquire_fields

        def acquire_server(self, request_id):
            return "b/1", Remote(Server(3, dies_after=0, loses="RayActorError"))

        def release_server(self, server_id): ...

        def remove_servers(self, server_ids):
            removed.extend(server_ids)

    async def turn():
        rollout = SimpleNamespace(name="vllm", full_determinism=False, response_length=99)
        config = SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=rollout))
        limits = HealthSettings(**vars(LIMITS) | {"attempts": 1})
        client = clients.FleetClient(config=config, load_balancer_handle=Remote(Balancer()), limits=limits)
        return await client.generate("rollout", prompt_ids=[1], sampling_params={"max_tokens": 8})

    assert asyncio.run(turn()).stop_reason == clients.GAVE_UP and removed == ["b"]
