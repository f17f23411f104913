"""The schedule by hand; that processes share it is shown by a Ray job in tests/e2e."""

import pytest

from verl_ext.sandbox.rate_limit import Schedule


def test_requests_are_spaced_after_the_burst():
    schedule = Schedule(per_s=4, burst=2)  # one every 0.25 s
    assert [schedule.reserve(100.0) for _ in range(5)] == [0, 0, 0.25, 0.5, 0.75]
    # The next would go at 100.0 + 1.0 - 0.5 (5 x 0.25, less the burst's 0.25): from 100.5 on it need not wait.
    assert schedule.reserve(100.5) == 0.5


def test_quiet_time_gives_no_more_than_the_burst():
    schedule = Schedule(per_s=4, burst=2)
    schedule.reserve(100.0)
    assert [schedule.reserve(200.0) for _ in range(3)] == [0, 0, 0.25]


def test_rate_holds_whatever_the_arrival_times():
    schedule = Schedule(per_s=10, burst=3)
    times = [0.0, 0.01, 0.02, 0.5, 0.5, 0.5, 0.5, 0.51, 0.52, 2.0, 2.0, 2.0, 2.0]
    sent = [now + schedule.reserve(now) for now in times]
    assert sent == sorted(sent)
    for start in sent:  # in every window of w s there are at most 3 + 10 w
        for end in (time for time in sent if time >= start):
            count = sum(start <= time <= end for time in sent)
            assert count <= 3 + 10 * (end - start) + 1e-6


def test_requests_that_gave_up_do_not_keep_out_later_ones():
    schedule = Schedule(per_s=10, burst=1)
    waits = [schedule.reserve(0.0) for _ in range(1000)]  # 0, 0.1, ..., 99.9 s
    for wait in waits:
        if wait > 60.05:  # s: 399 of them, who do not wait as long
            schedule.give_back()
    # At 60 s 601 have gone, the last one just now; the next may go 0.1 s later, not 40 s.
    assert schedule.reserve(60.0) == pytest.approx(0.1)


@pytest.mark.parametrize(("per_s", "burst"), [(0, 1), (-1, 1), (1, 0)])
def test_impossible_rates_raise(per_s, burst):
    with pytest.raises(ValueError, match="per_s > 0 and burst >= 1"):
        Schedule(per_s, burst)
