"""What stopping a server waits for, over a made-up Ray whose clock runs while somebody waits."""

import threading
from types import SimpleNamespace

import pytest

from verl_ext.fleet import replicas


class Ray:
    """A Ray of one node with a GPU per group. Events: at a time, which group gives its GPU back, or who takes it."""

    def __init__(self, groups: str, *events: tuple[float, str, str]):
        self.now, self.free, self.groups, self.events = 0.0, 0, {*groups}, sorted(events)
        self.util, self.removed = self, []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        while self.events and self.events[0][0] <= self.now:
            _, what, group = self.events.pop(0)
            self.free += 1 if what == "frees" else -1
            self.groups ^= {group}

    def cluster_resources(self) -> dict[str, float]:
        of_groups = {
            f"{kind}_group_{index}{each}": 1.0
            for kind in ("GPU", "bundle")
            for index in ("", "0_")
            for each in self.groups
        }
        return {"GPU": self.free + float(len(self.groups))} | of_groups

    def available_resources(self) -> dict[str, float]:
        return {"GPU": float(self.free)} if self.free else {}  # like Ray, which omits a zero

    def remove_placement_group(self, group: SimpleNamespace) -> None:
        self.removed.append(group.id.hex())


@pytest.fixture
def stop(monkeypatch):
    """Stop the server of some groups; return when that returned, in seconds."""

    def stops(ray: Ray, *groups: str) -> float:
        monkeypatch.setattr(replicas, "ray", ray)
        monkeypatch.setattr(replicas, "time", ray)
        held = [
            SimpleNamespace(id=SimpleNamespace(hex=lambda name=name: name), bundle_specs=[{"GPU": 1}])
            for name in groups
        ]
        replicas.stop_replica(SimpleNamespace(servers=[], workers=[], resource_pool=SimpleNamespace(pgs=held)))
        assert ray.removed == [*groups]
        return ray.now

    return stops


@pytest.mark.parametrize(
    ("events", "returns_s"),
    [
        ([(0.55, "frees", "b")], 0.6),
        ([(0.25, "frees", "a"), (0.55, "frees", "b")], 0.6),  # the GPU of another server that is stopped is not its own
        ([(0.25, "frees", "a"), (0.35, "takes", "c"), (0.55, "frees", "b")], 0.6),
        ([(0.35, "frees", "b"), (0.36, "takes", "c")], 0.4),  # its own, which another start takes at once
    ],
)
def test_the_stop_of_a_server_waits_only_for_its_own_gpus(stop, caplog, events, returns_s):
    assert stop(Ray("ab", *events), "b") == pytest.approx(returns_s)
    assert not caplog.text


def test_a_gpu_that_another_server_takes_meanwhile_is_not_waited_for(stop, caplog):
    ray = Ray("ab", (0.0, "frees", "a"), (0.3, "takes", "c"), (0.55, "frees", "b"))
    ray.sleep(0)
    assert stop(ray, "b") == pytest.approx(0.6) and not caplog.text


def test_a_server_of_two_groups_is_stopped_when_both_are_back(stop):
    assert stop(Ray("ab", (0.15, "frees", "a"), (0.75, "frees", "b")), "a", "b") == pytest.approx(0.8)


def test_the_wait_for_gpus_has_an_end_and_says_what_is_missing(stop, caplog):
    assert stop(Ray("ab"), "b") == pytest.approx(replicas.FREE_S, abs=0.2)
    assert "Ray has not freed" in caplog.text and "GPU_group_0_b" in caplog.text


def test_a_start_in_time_returns_its_server_or_raises_its_own_error():
    stopped = []
    assert replicas.start_in_time(lambda: "a server", stopped.append, 10) == "a server"
    with pytest.raises(TimeoutError, match="of Ray"):
        replicas.start_in_time(lambda: (_ for _ in ()).throw(TimeoutError("of Ray")), stopped.append, 10)
    assert not stopped


@pytest.mark.parametrize("fails", [False, True])
def test_a_server_that_starts_late_is_stopped(fails, caplog):
    goes_on, stopped, others = threading.Event(), [], {*threading.enumerate()}

    def start() -> str:
        assert goes_on.wait(10)
        if fails:
            raise OSError("no GPU")
        return "a server"

    with pytest.raises(TimeoutError, match=r"did not start in 0.05 s .*wait_s"):
        replicas.start_in_time(start, stopped.append, 0.05)
    assert not stopped
    [thread] = {*threading.enumerate()} - others
    goes_on.set()
    thread.join(10)
    assert not thread.is_alive()
    assert stopped == ["a server"] * (not fails)


@pytest.mark.parametrize(
    ("known", "place"),
    [
        ({"State": "ALIVE", "Address": {"NodeID": "node"}, "Pid": 12}, ("node", 12)),
        ({"State": "DEAD", "Address": {"NodeID": "node"}, "Pid": 12}, None),  # its number may be another's by now
        ({}, None),
    ],
)
def test_the_place_of_a_server_is_asked_of_rays_head(monkeypatch, known, place):
    monkeypatch.setattr(replicas, "state", SimpleNamespace(actors=lambda actor_id: known))
    handle = SimpleNamespace(_actor_id=SimpleNamespace(hex=lambda: "ab"))
    assert replicas.place_of(SimpleNamespace(server_handle=handle)) == place
