"""What the tests of several environments share: a call, and many episodes that are given up at random moments."""

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from omegaconf import OmegaConf

from verl_ext.environments.by_name import Environments
from verl_ext.protocols.base import Call
from verl_ext.rollout.lives import Life
from verl_ext.rollout.ways import Way
from verl_ext.settings import Domain


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The folder of what environments keep between runs."""
    monkeypatch.setenv("RETOOL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="session")
def config() -> Any:
    """The part of a run's config that environments read."""
    return OmegaConf.create({"retool": {"sandbox": {"timeout_s": 5, "queue_timeout_s": 30}}})


@pytest.fixture(scope="session")
def give_up() -> Callable[..., Any]:
    """Live episodes of an entry, ten at a time, of which each is cancelled after a random time, as an abort does."""

    async def live(
        entry: Any,
        config: Any,
        calls: Any,
        *,
        count: int = 200,
        within_s: float = 0.05,
        task: Any = None,
        turns: Sequence[str] = (),
    ) -> int:
        environments, rng, ended = Environments(entry, config), random.Random(0), 0
        slots = asyncio.Semaphore(10)

        async def episode() -> None:
            nonlocal ended
            async with slots:
                async with asyncio.timeout(rng.uniform(0, within_s)):
                    way = Way(None, None, environments, Domain())
                    async with Life(way).opened(
                        {"raw_prompt": [{"role": "user", "content": "?"}]} | (task or {})
                    ) as life:
                        for name, arguments in calls:
                            await life.run([Call(name, arguments, 0)], 0)
                        for turn in turns:
                            await life.reply(turn)
                ended += 1

        told = await asyncio.gather(*(episode() for _ in range(count)), return_exceptions=True)
        assert {type(each) for each in told} <= {type(None), TimeoutError}, told
        return ended

    return live
