"""Random lives of notebooks against a real server: whatever happens to an episode, nothing of it is left."""

import asyncio
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress

import psutil
import pytest
from omegaconf import OmegaConf

from tests.unit.sandbox.server_process import Server, wait_until
from tests.unit.sandbox.test_server import read_metrics
from verl_ext.environments.notebook import Notebook
from verl_ext.protocols.base import CODE_TOOL, Call

CODES = [
    "x = globals().get('x', 0) + 1\nx",
    "open('left', 'a').write('x' * 100_000)",
    "1 / 0",
    "import os; os._exit(3)",
    "import os; os.kill(os.getpid(), 9)",
    "import threading, time\nthreading.Thread(target=time.sleep, args=(9,)).start()",
    "import time; time.sleep(0.05)",
    "while True: pass",
]
AT_ONCE, SESSIONS = 8, 4


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server("--preload", "", "--max-sessions", str(SESSIONS))  # some wait
    yield server
    server.stop()


async def live(server: Server, chance: random.Random) -> tuple[Notebook, str]:
    """Let an episode make some calls, and abort it at any time, close it while a call runs, or end it in order."""
    sandbox = {"urls": [server.url], "timeout_s": 0.2, "memory_limit_mb": 256, "queue_timeout_s": 60}
    sandbox |= {"max_concurrency": 64, "echo_last_expression": False}
    notebook = Notebook(OmegaConf.create({"sandbox": sandbox, "traceback": "full"}))

    async def call() -> None:
        for code in chance.choices(CODES, weights=[8, 2, 1, 1, 1, 1, 2, 0.5], k=chance.randrange(5)):
            result = await notebook.run(Call(CODE_TOOL, {"code": code}, start=0))
            assert result.failure in (None, "the notebook is closed"), result.failure

    episode, how = asyncio.create_task(call()), chance.choice(["ended", "ended", "aborted", "closed", "both"])
    if how != "ended":
        await asyncio.wait([episode], timeout=chance.choice([0, 0.01, 0.1, 0.3]))
        if how in ("aborted", "both"):
            episode.cancel()
        if how in ("closed", "both"):
            await notebook.close()
    with suppress(asyncio.CancelledError):
        await episode
    await notebook.close()
    return notebook, how


async def check_lives(server: Server, count: int) -> None:
    process, free = psutil.Process(server.process.pid), asyncio.Semaphore(AT_ONCE)
    num_fds = process.num_fds()

    async def one(number: int) -> tuple[Notebook, str]:
        async with free:
            return await live(server, random.Random(number))

    lived = await asyncio.gather(*map(one, range(count)))
    assert min(Counter(how for _, how in lived).values()) >= count // 10, "every way was tried"
    await lived[0][0].sandbox.aclose()
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert read_metrics(server)["sandbox_sessions"] == 0
    wait_until(lambda: programs(server) == [], timeout_s=10)
    workers = server.descendants()[1:]
    assert len(workers) <= 2 + 2 * SESSIONS, "idle ones stay, as many as ran at one time"
    assert list(server.root.iterdir()) == []
    wait_until(lambda: process.num_fds() <= num_fds + 2 * len(workers), timeout_s=10)


def programs(server: Server) -> list[psutil.Process]:
    """Return the children of workers; a worker is a child of the zygote, the first process."""
    zygote, *others = server.descendants()
    return [each for each in others if each.ppid() != zygote.pid]


async def test_sixty_random_lives_leave_nothing(server):
    await check_lives(server, 60)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
async def test_five_thousand_random_lives_leave_nothing(server):
    await check_lives(server, 5000)
