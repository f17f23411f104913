"""Cases that HTTP cannot provoke: processes that hang, abandoned requests, leaks over many requests."""

import asyncio
import os
import time
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import psutil
import pytest

from tests.unit.sandbox.server_process import root_of
from verl_ext.sandbox.server import pool as pool_module
from verl_ext.sandbox.server import workers as workers_module
from verl_ext.sandbox.server.connection import SandboxError
from verl_ext.sandbox.server.pool import Pool, QueueTimeoutError


@pytest.fixture
async def pool() -> AsyncIterator[Pool]:
    pool = Pool(workers=2, max_output_bytes=1 << 20, preload=())
    yield pool
    await pool.close()


def request(code: str, run_timeout: float = 10) -> dict:
    fields = {"stdin": None, "memory_limit_MB": -1, "files": {}, "fetch_files": [], "echo_last_expression": False}
    return {"code": code, "run_timeout": run_timeout} | fields


async def stdout(pool: Pool, code: str) -> str:
    return (await pool.execute(request(code)))["stdout"]


async def wait_until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.01)


async def test_no_two_workers_have_one_user(pool, monkeypatch):
    monkeypatch.setattr(workers_module, "NUM_UIDS", 3)
    monkeypatch.setattr(workers_module, "_by_user", weakref.WeakValueDictionary())  # which all pools of a process share

    async def user() -> int:
        taken.append(await pool.workers.take())
        return int(taken[-1].folder.name.partition("-")[0]) % 3

    taken = []
    users = [await user() for _ in range(3)]
    assert sorted(users) == [0, 1, 2]
    taken.pop(1).close()
    assert await user() == users[1]
    for worker in taken:
        worker.close()


def my_processes() -> list[psutil.Process]:
    """Return the pool's processes: all children except those kept by other tests of this session (verifier workers)."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if process.status() != psutil.STATUS_ZOMBIE and "zygote.py" in " ".join(process.cmdline()):
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


def zygote() -> psutil.Process:
    """Return the pool's zygote, of which all else descends."""
    return my_processes()[0]


def workers() -> list[psutil.Process]:
    parent = zygote().pid
    return [process for process in my_processes() if parent_of(process) == parent]


def parent_of(process: psutil.Process) -> int | None:
    try:
        return process.ppid()
    except psutil.NoSuchProcess:
        return None


async def assert_sandbox_error(call: Awaitable[dict], match: str, within_s: float) -> None:
    started = time.monotonic()
    with pytest.raises(SandboxError, match=match):
        await call
    assert time.monotonic() - started < within_s


async def test_worker_that_hangs_is_replaced(pool, monkeypatch):
    monkeypatch.setattr(pool_module, "WORKER_GRACE_S", 0.3)
    assert await stdout(pool, "print(1)") == "1\n"
    workers()[0].suspend()
    await assert_sandbox_error(pool.execute(request("print(1)", run_timeout=0.2)), "did not answer", within_s=3)
    await wait_until(lambda: len(my_processes()) == 1)  # the zygote
    assert await stdout(pool, "print(1)") == "1\n"


async def test_worker_ends_when_the_server_dies_within_a_request(pool):
    worker = await pool.workers.take()
    process = psutil.Process(worker.pid)
    worker.connection.send(b"\0")  # and never the request
    worker.connection.close()
    await wait_until(lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE)


async def test_zygote_that_hangs_is_replaced(pool, monkeypatch):
    await pool.workers.take()
    monkeypatch.setattr(workers_module, "START_GRACE_S", 0.3)
    hung = zygote()
    hung.suspend()
    await assert_sandbox_error(pool.execute(request("print(1)")), "did not start a worker", within_s=3)
    await wait_until(lambda: hung not in my_processes())
    monkeypatch.undo()
    assert await stdout(pool, "print(1)") == "1\n"


async def test_zygote_that_cannot_start_is_a_sandbox_error(pool, monkeypatch, tmp_path):
    monkeypatch.setattr(workers_module, "ZYGOTE", tmp_path / "missing.py")
    await assert_sandbox_error(pool.execute(request("print(1)")), "did not start a worker", within_s=5)


async def test_request_that_is_given_up_ends_its_program_and_frees_its_worker(pool):
    task = asyncio.create_task(pool.run(request("import time; time.sleep(30)"), queue_timeout_s=1))
    await wait_until(lambda: len(my_processes()) == 3)  # zygote, worker, program
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await wait_until(lambda: len(my_processes()) == 1)
    results = await asyncio.gather(*(pool.run(request("print(1)"), queue_timeout_s=5) for _ in range(4)))
    assert [result["stdout"] for result, _ in results] == ["1\n"] * 4


async def test_request_that_waits_too_long_gives_up_its_place(pool):
    async with pool.slot(1), pool.slot(1):
        with pytest.raises(QueueTimeoutError, match=r"within 0\.1 s"):
            await pool.run(request("print(1)"), queue_timeout_s=0.1)
        assert pool.waiting == 0
        next_one = asyncio.create_task(pool.run(request("print(1)"), queue_timeout_s=5))
        await wait_until(lambda: pool.waiting == 1)
        began = time.monotonic()
        await stdout(pool, "pass")  # takes a while
        took_s = time.monotonic() - began
    _, waited_s = await next_one
    assert waited_s >= took_s


async def test_answers_of_concurrent_requests_are_not_mixed(pool):
    codes = [f"import sys; print({i}); print({-i}, file=sys.stderr); sys.exit({i})" for i in range(40)]
    results = await asyncio.gather(*(pool.run(request(code), queue_timeout_s=30) for code in codes))
    got = [(result["stdout"], result["stderr"], result["return_code"]) for result, _ in results]
    assert got == [(f"{i}\n", f"{-i}\n", i) for i in range(40)]


async def test_many_requests_leave_no_process_file_or_descriptor(pool):
    def count() -> tuple[int, list[int], list[Path]]:
        return (
            len(os.listdir("/proc/self/fd")),
            sorted(process.num_fds() for process in my_processes()),
            list(root_of(my_processes()).rglob("*")),
        )

    codes = ["print(1)", "1/0", "open('a', 'w')", "import os; os.fork()", "import os; os.abort()"]
    for round_number in range(6):
        await asyncio.gather(*(pool.run(request(code), queue_timeout_s=30) for code in codes))
        if round_number == 0:
            before = None
            while (now := count()) != before:  # an answer is sent just before its worker closes the program's files
                before = now
                await asyncio.sleep(0.3)
    assert len(before[1]) == 3  # the zygote and two workers
    await wait_until(lambda: count() == before)


async def test_close_removes_all_files_and_processes():
    pool = Pool(workers=1, max_output_bytes=100, preload=())
    assert await stdout(pool, "print(1)") == "1\n"
    root = root_of(my_processes())
    assert root.is_dir()
    await pool.close()
    assert not root.exists()
    assert not my_processes()
