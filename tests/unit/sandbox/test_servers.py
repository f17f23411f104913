"""Which server gets a request, by a clock that the test sets."""

import pytest

from verl_ext.sandbox.servers import Servers


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def three(clock) -> Servers:
    return Servers(3, rest_s=1.0, clock=clock)


def chosen(servers: Servers, failed: set[int] = frozenset()) -> set[int]:
    """Return all that chance may choose."""
    return {servers.least_busy(failed) for _ in range(100)}


def test_the_fewest_requests_in_flight_decide(three):
    assert chosen(three) == {0, 1, 2}
    with three.request(0), three.request(1), three.request(1):
        assert chosen(three) == {2}
        with three.request(2):
            assert chosen(three) == {0, 2}
    assert chosen(three) == {0, 1, 2}


def test_one_that_fails_by_an_exception_is_not_in_flight(three):
    with pytest.raises(ConnectionError), three.request(0):
        raise ConnectionError
    assert chosen(three) == {0, 1, 2}


def test_one_that_refuses_rests_twice_as_long_each_time_and_10_s_at_most(three, clock):
    for rest_s in (1, 2, 4, 8, 10, 10):
        three.refuses(0)
        clock.now_s += rest_s - 0.1
        assert 0 not in chosen(three)
        clock.now_s += 0.1
        assert 0 in chosen(three)
    three.answers(0)
    three.refuses(0)
    clock.now_s += 1
    assert 0 in chosen(three)


def test_one_that_is_away_for_hours_rests_10_s_each_time(three, clock):
    for _ in range(2000):
        three.refuses(0)
        assert chosen(three) == {1, 2}
        clock.now_s += 10
    assert 0 in chosen(three)


def test_refusals_of_one_that_rests_do_not_make_it_rest_longer(three, clock):
    """Many calls may be in flight to one that goes away."""
    for _ in range(50):
        three.refuses(0)
    clock.now_s += 1
    assert 0 in chosen(three)


def test_one_that_hangs_rests_longer(three, clock):
    three.refuses(0, longer_s=30)
    clock.now_s += 30.9
    assert chosen(three) == {1, 2}
    clock.now_s += 0.1
    assert chosen(three) == {0, 1, 2}


def test_those_that_have_failed_a_call_come_last(three):
    assert chosen(three, failed={1}) == {0, 2}
    three.refuses(2)
    assert chosen(three, failed={0, 1}) == {0, 1}  # which refused none
    three.refuses(0)
    three.refuses(1)
    assert chosen(three, failed={0, 1}) == {2}  # though it rests: the others do, and have failed
    assert chosen(three, failed={0, 1, 2}) == {0, 1, 2}
