"""The rate limit's schedule by hand; a Ray job in tests/e2e shows that processes share it."""

import asyncio
from types import SimpleNamespace

import pytest

from verl_ext.environments import shared_client
from verl_ext.environments.shared_client import RateLimit, Schedule


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


class BusyActor:
    """As a handle of Ray's: a call is made at once and in order, and its result comes when the test says so."""

    def __init__(self, per_s: float, burst: int) -> None:
        self.schedule, self.answers = Schedule(per_s, burst), asyncio.Event()
        self.reserve, self.give_back = SimpleNamespace(remote=self._reserve), SimpleNamespace(remote=self._give_back)

    def _reserve(self) -> asyncio.Future:
        wait_s = self.schedule.reserve(0.0)

        async def answer() -> float:
            await self.answers.wait()
            return wait_s

        return asyncio.ensure_future(answer())

    def _give_back(self) -> None:
        self.schedule.give_back()


@pytest.mark.parametrize("answers", [False, True], ids=["while it reserves", "while it waits"])
async def test_one_that_is_cancelled_gives_its_time_back(monkeypatch, answers):
    actor = BusyActor(0.01, burst=1)  # one in 100 s
    options = SimpleNamespace(remote=lambda *_, **__: actor)
    fake = SimpleNamespace(remote=lambda _: SimpleNamespace(options=lambda **_: options))
    monkeypatch.setattr(shared_client, "ray", fake)
    limit = RateLimit(0.01)
    if answers:
        actor.answers.set()
    actor.schedule.reserve(0.0)
    waiting = asyncio.create_task(limit.acquire())
    await asyncio.sleep(0.05)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert actor.schedule.reserve(0.0) == 100  # not 200


@pytest.mark.parametrize(("per_s", "burst"), [(0, 1), (-1, 1), (1, 0)])
def test_impossible_rates_raise(per_s, burst):
    with pytest.raises(ValueError, match="per_s > 0 and burst >= 1"):
        Schedule(per_s, burst)
