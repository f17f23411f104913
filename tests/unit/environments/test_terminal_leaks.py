"""Episodes of `terminal` that are given up at any moment: no box, process or file of theirs stays."""

import asyncio

import psutil
import pytest
from omegaconf import OmegaConf

from tests.unit.sandbox.boxes import need_boxes
from tests.unit.sandbox.server_process import Server, wait_until
from tests.unit.sandbox.test_server import read_metrics
from verl_ext.environments.shared_client import shared_client
from verl_ext.tasks import archive, task
from verl_ext.tasks.task import BoxTask

TASK = BoxTask(
    "leave",
    "Leave something.",
    image=archive.pack({"app/a": b"1"}),
    tests=archive.pack({"tests/test.sh": "true"}),
    **{"memory_mb": 128, "disk_mb": 8},
)
CALLS = [
    ("bash", {"command": "sleep 300 & sleep 300 & echo x > left"}),
    ("edit", {"path": "b", "old": "", "new": "b"}),
    ("bash", {"command": "setsid sleep 300 & exit 3"}),
]


async def check(give_up, count: int) -> None:
    server = Server("--preload", "", "--max-boxes", "4")  # some wait
    try:
        need_boxes(server.url)
        before = len(server.descendants())
        sandbox = {"urls": [server.url], "timeout_s": 5, "queue_timeout_s": 60, "max_concurrency": 64}
        config = OmegaConf.create({"retool": {"sandbox": sandbox}})
        ended = await give_up("terminal", config, CALLS, count=count, within_s=1.0, task=task.row(TASK))
        assert 0 < ended < count, "some ended and some were given up"
        wait_until(lambda: read_metrics(server)["sandbox_boxes"] == 0, timeout_s=20)
        await shared_client(config.retool.sandbox).aclose()
        assert asyncio.all_tasks() == {asyncio.current_task()}
        wait_until(lambda: len(server.descendants()) <= before + 3, timeout_s=20)  # a zygote for boxes, idle workers
        names = [each.name() for each in server.descendants() if each.status() != psutil.STATUS_ZOMBIE]
        assert not {"sleep", "bash"}.intersection(names)
        assert list(server.root.iterdir()) == []
    finally:
        server.stop()


async def test_forty_episodes_that_are_given_up_leave_nothing(give_up):
    await check(give_up, 40)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
async def test_two_thousand_episodes_that_are_given_up_leave_nothing(give_up):
    await check(give_up, 2000)
