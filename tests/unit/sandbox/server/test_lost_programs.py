"""Workers that die or hang with a program: whom the pool blames, and what still counts as its own failure."""

import asyncio
import contextlib
import ctypes
import errno
import os
import signal
import socket
import time
from collections.abc import AsyncIterator

import psutil
import pytest

from tests.unit.sandbox.machines import needs_root
from tests.unit.sandbox.server.test_pool import my_processes, request, stdout, wait_until
from verl_ext.sandbox.server import connection
from verl_ext.sandbox.server import pool as pool_module
from verl_ext.sandbox.server.pool import LostProgramError, Pool, SandboxError, ZygoteEndedError

SLEEP = "import time; print('begun', flush=True); time.sleep(30)"


@pytest.fixture
async def pool(monkeypatch) -> AsyncIterator[Pool]:
    monkeypatch.setattr(pool_module, "WORKER_GRACE_S", 0.5)
    monkeypatch.setattr(pool_module, "CONTROL_S", 5)  # on a busy machine
    pool = Pool(workers=2, max_output_bytes=1 << 20, preload=())
    await stdout(pool, "pass")  # its worker is idle
    yield pool
    await pool.close()


async def begun(worker: int) -> None:
    """Wait until the worker runs its program, having sealed the request: from then on the program may be to blame."""
    await wait_until(lambda: len(my_processes()) == 3)  # zygote, worker, program
    await wait_until(lambda: psutil.Process(worker).status() == psutil.STATUS_SLEEPING)


async def lose(pool: Pool, number: signal.Signals = signal.SIGKILL, **options: float) -> dict:
    """Signal the worker as soon as it runs a program."""
    pid = pool._idle[-1].pid
    run_timeout = 30 if number == signal.SIGKILL else 2
    task = asyncio.create_task(pool.execute(request(SLEEP, run_timeout), **options))
    await begun(pid)
    os.kill(pid, number)
    return await task


async def test_late_loss_is_a_failure_of_the_sandbox_once_and_then_the_programs(pool):
    with pytest.raises(LostProgramError, match=r"the worker that ran the program died \(its socket closed\)"):
        await lose(pool)
    await stdout(pool, "pass")
    result = await lose(pool)
    assert (result["status"], result["return_code"], result["stdout"]) == ("Finished", -9, "")
    assert "died with it, twice" in result["stderr"]
    assert await stdout(pool, "print(1)") == "1\n"


async def test_where_the_control_program_fails_the_sandbox_is_to_blame(pool, monkeypatch):
    with pytest.raises(LostProgramError):
        await lose(pool)
    await stdout(pool, "pass")

    async def control() -> str:
        return "no worker"

    monkeypatch.setattr(pool, "_control", control)
    with pytest.raises(SandboxError, match=r"died .*; a control program failed, too: no worker"):
        await lose(pool)


def kill_all() -> None:
    """Kill all; return once the zygote has ended, before the pool sees any end: it may take more than ZYGOTE_END_S."""
    for process in my_processes():
        with contextlib.suppress(psutil.NoSuchProcess):  # a program ends with its worker
            process.kill()
    while my_processes():
        time.sleep(0.01)


async def test_loss_with_the_zygote_is_the_sandboxs_though_the_next_request_has_started_another(pool):
    for _ in range(2):
        task = asyncio.create_task(pool.execute(request(SLEEP, run_timeout=30), spare_s=60))
        await wait_until(lambda: len(my_processes()) == 3)
        kill_all()
        await wait_until(lambda: pool._zygote.poll() is not None)
        assert await stdout(pool, "print(1)") == "1\n"
        with pytest.raises(ZygoteEndedError):
            await task


async def test_worker_that_has_outlived_its_zygote_runs_no_program(pool):
    """Otherwise its zygote's earlier end would excuse a program that kills the worker."""
    worker, zygote = pool._idle[-1], pool._zygote
    zygote.kill()
    await wait_until(lambda: zygote.poll() is not None)
    assert worker.is_alive() and await stdout(pool, "print(1)") == "1\n"
    assert pool._idle[-1] is not worker
    with pytest.raises(LostProgramError):
        await lose(pool)


@pytest.mark.parametrize(("options", "error"), [({}, ZygoteEndedError), ({"allow_subprocess": True}, SandboxError)])
async def test_only_what_no_program_can_have_done_is_nobodys(options, error):
    """Programs that fork may fill the machine's memory, until the kernel kills zygotes."""
    pool = Pool(workers=1, max_output_bytes=1000, preload=(), **options)
    try:
        await stdout(pool, "pass")
        worker = await pool.take_worker()
        for ask in (lambda: pool.call(worker, request(SLEEP) | {"session": False}), lambda: pool.execute(request("1"))):
            pool._zygote.send_signal(signal.SIGSTOP)  # or it might start a worker that outlives it
            task = asyncio.create_task(ask())
            await asyncio.sleep(0)  # it has sent what it asks
            kill_all()
            with pytest.raises(SandboxError) as raised:
                await task
            assert type(raised.value) is error
            pool._start_zygote()
    finally:
        await pool.close()


async def test_loss_with_the_zygote_is_nobodys_but_the_sandboxs(pool):
    task = asyncio.create_task(pool.execute(request(SLEEP, run_timeout=5), spare_s=60))
    await wait_until(lambda: len(my_processes()) == 3)
    started = time.monotonic()
    kill_all()
    with pytest.raises(SandboxError) as error:
        await task
    assert not isinstance(error.value, LostProgramError)
    assert time.monotonic() - started < 3


async def test_worker_that_fails_with_a_running_program_twice_is_no_failure_of_the_sandbox(pool, monkeypatch):
    """For example, by what the program did to its own files; failing to set a program up is never its own doing."""
    real, failures = connection.Worker.call, []

    async def call(self, request: dict) -> tuple[dict, bytes]:
        if b"begun" in request["code"].encode():
            self.started = True
            failures.append(1)
            return {"error": "ValueError: seen", "lost": lost}, b""
        return await real(self, request)

    monkeypatch.setattr(connection.Worker, "call", call)
    lost = True
    result = await pool.execute(request(SLEEP), spare_s=60)
    assert (result["status"], result["return_code"], len(failures)) == ("Finished", -9, 2)
    lost = False
    with pytest.raises(SandboxError, match="ValueError: seen") as error:
        await pool.execute(request(SLEEP), spare_s=60)
    assert not isinstance(error.value, LostProgramError)


async def test_without_isolation_no_loss_is_blamed_on_a_program():
    pool = Pool(workers=1, max_output_bytes=1000, preload=(), isolation="none")
    try:
        for _ in range(3):
            with pytest.raises(SandboxError, match="died"):
                await pool.execute(request("import os, time; os.kill(os.getppid(), 9); time.sleep(9)"), spare_s=60)
    finally:
        await pool.close()


async def test_worker_that_hangs_after_the_program_began_is_a_timeout(pool):
    started = time.monotonic()
    result = await lose(pool, signal.SIGSTOP)
    assert (result["status"], result["return_code"]) == ("TimeLimitExceeded", None)
    assert time.monotonic() - started < 2 + 0.5 + 5
    assert pool.restarts["worker"] == 1
    assert await stdout(pool, "print(1)") == "1\n"
    await wait_until(lambda: len(my_processes()) == 2)


async def test_worker_that_hangs_with_the_zygote_is_a_failure_of_the_sandbox(pool, monkeypatch):
    monkeypatch.setattr(pool_module, "CONTROL_S", 0.5)
    worker = pool._idle[-1].pid
    task = asyncio.create_task(pool.execute(request(SLEEP, run_timeout=2)))
    await begun(worker)
    for process in my_processes():
        process.suspend()
    with pytest.raises(SandboxError, match="did not answer; a control program failed, too: "):
        await task
    await pool_module._kill_zygote(pool._zygote, "it is suspended")


@needs_root
async def test_zygote_that_hangs_with_a_worker_that_does_not_end_holds_up_nobody(pool, monkeypatch):
    """Like a process that waits for a disk, a traced process is not gone until its tracer lets it go."""
    monkeypatch.setattr(pool_module, "START_GRACE_S", 0.3)
    libc = ctypes.CDLL(None, use_errno=True)
    worker = await pool.take_worker()
    assert libc.ptrace(0x4206, worker.pid, 0, 0) == 0, ctypes.get_errno()  # PTRACE_SEIZE
    try:
        pool._zygote.send_signal(signal.SIGSTOP)
        call, longest_s, before = asyncio.create_task(pool.execute(request("pass"))), 0.0, time.monotonic()
        while not call.done():
            await asyncio.sleep(0.01)
            longest_s, before = max(longest_s, time.monotonic() - before), time.monotonic()
        with pytest.raises(SandboxError, match="did not start a worker"):
            await call
        assert longest_s < 1.9  # ORPHANS_S, if the loop itself killed it
    finally:
        os.waitpid(worker.pid, 0x40000000)  # __WALL
        worker.close()


async def test_descriptors_in_flight_of_others_delay_a_request_and_nothing_else(pool, monkeypatch):
    refusals = iter(range(5))

    def send_fds(*arguments: object) -> int:
        if next(refusals, None) is not None:
            raise OSError(errno.ETOOMANYREFS, "Too many references: cannot splice")
        return real(*arguments)

    real = socket.send_fds
    monkeypatch.setattr(connection.socket, "send_fds", send_fds)
    assert await stdout(pool, "print(1)") == "1\n"
    assert next(refusals, None) is None
