"""Which server gets which request, on a clock that the test moves."""

import os
import subprocess
import sys
from collections import Counter

import pytest

from verl_ext.fleet import routing
from verl_ext.fleet.routing import HALF_LIFE_S, NoServerError, Router

FOUR = ("a", "b", "c", "d")


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def homes(slots, rollouts):
    """Return where each rollout goes while nothing else is under way."""
    router = Router(slots)
    found = {}
    for rollout in rollouts:
        found[rollout] = router.acquire(rollout)
        router.release(found[rollout])
    return found


ROLLOUTS = [f"rollout {number}" for number in range(10_000)]


def test_first_turns_are_within_the_bound_of_the_mean_load():
    router = Router(FOUR)
    for rollout in ROLLOUTS[:400]:
        router.acquire(rollout)
        loads = [router.load(slot) for slot in FOUR]
        assert max(loads) <= -(-1.25 * sum(loads) // 4)  # ceil(c x m / n)
    assert min(loads) > 50  # of 100 in the mean


def test_with_no_load_each_slot_has_about_its_share_of_the_hashes():
    counts = Counter(homes(FOUR, ROLLOUTS).values())
    assert set(counts) == set(FOUR) and all(2000 < count < 3000 for count in counts.values()), counts


def test_a_rollout_stays_on_its_slot_while_others_come_and_go():
    router = Router(FOUR)
    slot = router.acquire("mine")
    router.release(slot)
    for rollout in ROLLOUTS[:100]:
        router.acquire(rollout)
    router.add("e")
    assert [router.acquire("mine") for _ in range(50)] == [slot] * 50  # even beyond the bound


def test_a_full_slot_takes_no_first_turn_but_the_turns_of_its_rollouts():
    router = Router(("a", "b"))
    first = router.acquire("mine")
    for _ in range(9):
        router.acquire("mine")
    other = {"a": "b", "b": "a"}[first]
    assert {router.acquire(rollout) for rollout in ROLLOUTS[:5]} == {other}
    assert router.acquire("mine") == first


def test_a_slot_that_joins_takes_a_fifth_of_the_hashes_and_nothing_moves_between_the_others():
    before, after = homes(FOUR, ROLLOUTS), homes((*FOUR, "e"), ROLLOUTS)
    moved = [rollout for rollout in ROLLOUTS if before[rollout] != after[rollout]]
    assert {after[rollout] for rollout in moved} == {"e"}
    assert 0.15 < len(moved) / len(ROLLOUTS) < 0.25  # 1 / 5; by hash modulo n it would be 4 / 5


def test_a_slot_that_leaves_gives_up_only_its_own_hashes():
    before, after = homes(FOUR, ROLLOUTS), homes(FOUR[:3], ROLLOUTS)
    assert all(before[rollout] == "d" for rollout in ROLLOUTS if before[rollout] != after[rollout])
    assert set(after.values()) == set(FOUR[:3])


def test_the_rollouts_of_a_slot_that_left_spread_over_all_others():
    router = Router(FOUR)
    slots = {rollout: router.acquire(rollout) for rollout in ROLLOUTS[:400]}
    router.remove("a")
    assert router.slots == ("b", "c", "d")
    moved = Counter(router.acquire(rollout) for rollout, slot in slots.items() if slot == "a")
    assert set(moved) == {"b", "c", "d"}
    assert all(router.acquire(rollout) == slot for rollout, slot in slots.items() if slot != "a")


def test_a_slot_that_joins_a_loaded_fleet_gets_all_first_turns_while_the_others_are_above_the_bound():
    router = Router(("a", "b"))
    for rollout in ROLLOUTS[:400]:
        router.acquire(rollout)
    assert min(router.load("a"), router.load("b")) >= 150
    router.add("c")  # the bound falls to 1.25 x 400 / 3 = 167
    got = Counter(router.acquire(rollout) for rollout in ROLLOUTS[400:500])
    assert got["c"] > 60, got


def test_requests_that_ended_are_no_load():
    router = Router(("a",))
    assert router.acquire("x") == router.acquire("y") == "a"
    router.release("a")
    assert router.load("a") == 1
    router.release("a")
    router.release("a")  # of a router before a restart: nobody is there to release
    assert router.load("a") == 0 and router.acquire("z") == "a" and router.load("a") == 1


def test_rollouts_that_are_forgotten_are_placed_anew():
    router = Router(FOUR)
    slot = router.acquire("mine")
    while router.load(slot) < 10:
        router.acquire("mine")
    router.forget_rollouts()
    assert router.rollouts == () and router.acquire("mine") != slot  # a first turn, and its slot is full


def test_only_the_slots_of_the_most_recent_rollouts_are_remembered(monkeypatch):
    monkeypatch.setattr(routing, "MAX_ROLLOUTS", 2)
    router = Router(FOUR)
    for rollout in "abacd":
        router.acquire(rollout)
    assert router.rollouts == ("c", "d")
    router.acquire("c")
    assert router.rollouts == ("d", "c")


def test_without_a_slot_the_error_has_the_words_that_verls_client_waits_for():
    router = Router(("a",))
    router.remove("a")
    with pytest.raises(NoServerError, match="No available servers in load balancer: all have left or died"):
        router.acquire("x")


def drive(router, clock, requests, is_failing, at_once=16, takes_s=1.0):
    """Send requests, `at_once` at a time: an answer takes a second, a failure none. Return each server's number."""
    got, running = Counter(), []
    for rollout in requests:
        while len(running) >= at_once:
            clock.now, ended = running.pop(0)
            router.release(ended)
        slot = router.acquire(rollout)
        got[slot] += 1
        if slot in is_failing:
            router.failed(slot)
            router.release(slot)
        else:
            running.append((clock.now + takes_s, slot))
            running.sort()
    return got


def test_a_server_that_fails_at_once_attracts_no_requests(clock):
    got = drive(Router(FOUR, clock=clock), clock, ROLLOUTS[:200], {"a"})
    assert 0 < got["a"] < 0.05 * 200, got


def test_a_dead_server_gets_few_requests_over_hours(clock):
    router, got = Router(FOUR, clock=clock), Counter()
    for number in range(60):
        got += drive(router, clock, ROLLOUTS[number * 100 : (number + 1) * 100], {"a"})
        clock.now += 60
    assert got["a"] < 0.05 * 6000, got


def test_the_rollouts_of_a_server_that_fails_leave_it_and_stay_where_they_go(clock):
    router = Router(FOUR, clock=clock)
    slot = router.acquire("mine")
    router.failed(slot)
    router.release(slot)
    other = router.acquire("mine")
    assert other != slot
    clock.now += 1000
    assert router.acquire("mine") == other


def test_a_penalty_ends_and_more_failures_take_longer(clock):
    def takes_first_turns(router):
        return "a" in {router.acquire(f"{clock.now} {number}") for number in range(200)}

    router = Router(FOUR, clock=clock)
    router.failed("a")
    assert not takes_first_turns(router)
    clock.now += HALF_LIFE_S + 1  # a half of one failure
    assert takes_first_turns(router)
    for _ in range(4):
        router.failed("a")
    clock.now += 2 * HALF_LIFE_S  # more than 4 / 4 failures
    assert not takes_first_turns(router)
    clock.now += 2 * HALF_LIFE_S
    assert takes_first_turns(router)


def test_if_all_fail_the_one_that_fails_most_is_avoided(clock):
    router = Router(("a", "b", "c"), clock=clock)
    for slot in "aaaaaaaaaabcc":
        router.failed(slot)
    assert {router.acquire(rollout) for rollout in ROLLOUTS[:100]} == {"b", "c"}


def test_a_slot_that_comes_back_has_no_penalty(clock):
    router = Router(("a", "b"), clock=clock)
    router.failed("a")
    router.remove("a")
    router.failed("a")  # reported late
    router.add("a")
    assert {router.acquire(rollout) for rollout in ROLLOUTS[:100]} == {"a", "b"}


def test_requests_of_a_slot_that_left_are_still_its_load():
    router = Router(("a",))
    router.acquire("x")
    router.remove("a")
    router.add("b")
    assert (router.load("a"), router.load("b")) == (1, 0)
    router.release("a")
    assert router.load("a") == 0


def test_ranks_of_a_server_are_slots():
    router = Router([f"{server}/{rank}" for server in "ab" for rank in range(4)])
    got = Counter(router.acquire(rollout) for rollout in ROLLOUTS[:800])
    assert len(got) == 8 and max(got.values()) <= 125


def test_every_process_places_rollouts_alike():
    program = (
        "from verl_ext.fleet.routing import Router\n"
        "router = Router(['a', 'b', 'c'])\n"
        "print(*[router.acquire(str(number)) for number in range(100)])"
    )
    found = set()
    for seed in "12":
        environment = {**os.environ, "PYTHONHASHSEED": seed, "VERL_USE_EXTERNAL_MODULES": ""}
        found.add(
            subprocess.run([sys.executable, "-c", program], env=environment, check=True, capture_output=True).stdout
        )
    assert len(found) == 1 and set(found.pop().decode().split()) == {"a", "b", "c"}
