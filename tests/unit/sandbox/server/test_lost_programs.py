"""Workers that die or hang with a program: whom the pool blames, and what still counts as its own failure."""

import asyncio
import contextlib
import ctypes
import errno
import json
import os
import signal
import socket
import time
from collections.abc import AsyncIterator

import psutil
import pytest

from tests.unit.sandbox.machines import needs_root
from tests.unit.sandbox.server.test_pool import (
    my_processes,
    parent_of,
    request,
    stdout,
    wait_until,
    workers,
    zygote,
)
from verl_ext.sandbox.limits import LOSSES_WITHOUT_ISOLATION
from verl_ext.sandbox.server import connection
from verl_ext.sandbox.server import pool as pool_module
from verl_ext.sandbox.server import workers as workers_module
from verl_ext.sandbox.server.connection import LostProgramError, SandboxError
from verl_ext.sandbox.server.pool import Pool
from verl_ext.sandbox.server.sessions import Sessions
from verl_ext.sandbox.server.wire import LENGTH

SLEEP = "import time; print('begun', flush=True); time.sleep(30)"


@pytest.fixture
async def pool(monkeypatch) -> AsyncIterator[Pool]:
    monkeypatch.setattr(pool_module, "WORKER_GRACE_S", 0.5)
    monkeypatch.setattr(pool_module, "CONTROL_S", 5)  # on a busy machine
    pool = Pool(workers=2, max_output_bytes=1 << 20, preload=())
    await stdout(pool, "pass")  # its worker is idle
    yield pool
    await pool.close()


async def begin(pool: Pool, run_timeout: float = 30, **options: float) -> tuple[asyncio.Task, psutil.Process]:
    """Return the request and its worker, once the worker has sealed it: from then on the program may be to blame."""
    task = asyncio.create_task(pool.execute(request(SLEEP, run_timeout), **options))
    return task, await running_worker()


async def running_worker() -> psutil.Process:
    """Wait for a worker that has a program and sleeps: it waits for the program."""
    found: list[psutil.Process] = []

    def look() -> bool:
        programs = [parent_of(process) for process in my_processes()]
        found[:] = [worker for worker in workers() if worker.pid in programs]
        return bool(found) and found[0].status() == psutil.STATUS_SLEEPING

    await wait_until(look)
    return found[0]


async def lose(pool: Pool, number: signal.Signals = signal.SIGKILL, **options: float) -> dict:
    """Signal the worker as soon as it runs a program."""
    task, worker = await begin(pool, **options)
    worker.send_signal(number)
    return await task


def kill_all() -> None:
    """Kill all; return once the zygote has ended, before the pool sees any end: it may take more than ZYGOTE_END_S."""
    killed = my_processes()
    for process in killed:
        with contextlib.suppress(psutil.NoSuchProcess):  # a program ends with its worker
            process.kill()
    while any(map(lives, killed)):
        time.sleep(0.01)


def lives(process: psutil.Process) -> bool:
    """A process that is ending has no command line any more, and `my_processes` no longer finds it."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def assert_blamed(result: dict) -> None:
    assert (result["status"], result["return_code"], result["stdout"]) == ("Finished", -9, "")
    assert "died with it, 2 times" in result["stderr"]


async def test_late_loss_is_a_failure_of_the_sandbox_once_and_then_the_programs(pool):
    with pytest.raises(LostProgramError, match=r"the worker that ran the program died \(its socket closed\)"):
        await lose(pool)
    await stdout(pool, "pass")
    assert_blamed(await lose(pool))
    assert await stdout(pool, "print(1)") == "1\n"


async def test_where_the_control_program_fails_the_sandbox_is_to_blame(pool, monkeypatch):
    with pytest.raises(LostProgramError):
        await lose(pool)
    await stdout(pool, "pass")
    monkeypatch.setattr(pool_module, "CONTROL_S", 0.5)
    task, worker = await begin(pool)
    zygote().suspend()  # so that the control program gets no worker
    worker.kill()
    with pytest.raises(SandboxError, match=r"died .*; a control program failed, too: it did not end within 0.5 s"):
        await task
    zygote().resume()


async def test_call_of_a_session_counts_as_lost_only_while_a_control_program_runs(pool, monkeypatch):
    """Its caller blames the program if it happens again, as nobody else could run the session's calls twice."""
    sessions = Sessions(pool, max_sessions=1, idle_s=60)
    for is_well in (True, False):
        task = asyncio.create_task(sessions.run("s", request(SLEEP, 30), queue_timeout_s=5))
        worker = await running_worker()
        if not is_well:
            monkeypatch.setattr(pool_module, "CONTROL_S", 0.5)
            idle = await pool.workers.take()  # the control program gets no other
            zygote().suspend()
        worker.kill()
        with pytest.raises(SandboxError, match=None if is_well else "a control program failed, too") as caught:
            await task
        assert isinstance(caught.value, LostProgramError) == is_well
        assert len(sessions) == 0
    zygote().resume()
    idle.close()


async def test_loss_with_the_zygote_is_the_sandboxs_though_the_next_request_has_started_another(pool):
    for _ in range(2):
        task, _ = await begin(pool, spare_s=60)
        kill_all()
        assert await stdout(pool, "print(1)") == "1\n"
        with pytest.raises(SandboxError) as error:
            await task
        assert not isinstance(error.value, LostProgramError)


async def test_worker_that_has_outlived_its_zygote_runs_no_program(pool):
    """Otherwise its zygote's earlier end would excuse a program that kills the worker."""
    (worker,) = workers()
    zygote().kill()
    await wait_until(lambda: not worker.is_running() or worker.ppid() == os.getpid() or worker.ppid() == 1)
    assert worker.is_running() and await stdout(pool, "print(1)") == "1\n"
    assert worker.pid not in [other.pid for other in workers()]
    with pytest.raises(LostProgramError):
        await lose(pool)


@pytest.mark.parametrize("can_fork", [False, True])
async def test_end_of_the_zygote_excuses_a_program_unless_one_can_cause_it(can_fork):
    """Programs that fork may fill the machine's memory, until the kernel kills zygotes."""
    pool = Pool(workers=1, max_output_bytes=1000, preload=(), allow_subprocess=can_fork)
    try:
        for had_before in (False, True):
            await stdout(pool, "pass")
            task, _ = await begin(pool)
            kill_all()
            if can_fork and had_before:
                assert_blamed(await task)
                break
            with pytest.raises(SandboxError) as error:
                await task
            assert isinstance(error.value, LostProgramError) == can_fork
    finally:
        await pool.close()


async def test_request_that_found_no_zygote_was_not_lost(pool):
    """Whatever programs can do to a zygote: this one has not begun."""
    worker = await pool.workers.take()  # the idle one
    zygote().suspend()
    task = asyncio.create_task(pool.execute(request("1")))
    await asyncio.sleep(0)  # it has asked for another worker
    kill_all()
    started = time.monotonic()
    with pytest.raises(SandboxError, match="did not start a worker") as error:
        await task
    assert not isinstance(error.value, LostProgramError)
    assert time.monotonic() - started < 3
    worker.close()


async def test_worker_that_dies_before_its_program_begins_is_a_failure_of_the_sandbox(pool):
    (worker,) = workers()
    worker.suspend()
    task = asyncio.create_task(pool.execute(request("1"), spare_s=60))
    await asyncio.sleep(0)
    worker.kill()
    with pytest.raises(SandboxError, match="died") as error:
        await task
    assert not isinstance(error.value, LostProgramError)


async def test_server_that_has_no_descriptors_left_blames_no_program(pool, monkeypatch):
    """Though the worker has run other programs before."""

    def refuse(*_: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(connection.os, "memfd_create", refuse)
    for _ in range(2):
        with pytest.raises(SandboxError, match="Too many open files") as error:
            await pool.execute(request("1"))
        assert not isinstance(error.value, LostProgramError)


def speak_for(worker: psutil.Process, said: bytes) -> None:
    """Send something to the server as the worker would: on its socket, which this process takes from it."""
    pidfd = os.pidfd_open(worker.pid)
    (theirs,) = [
        int(name)
        for name in os.listdir(f"/proc/{worker.pid}/fd")
        if os.readlink(f"/proc/{worker.pid}/fd/{name}").startswith("socket:")
    ]
    fd = ctypes.CDLL(None, use_errno=True).syscall(438, pidfd, theirs, 0)  # pidfd_getfd
    assert fd >= 0, os.strerror(ctypes.get_errno())
    with socket.socket(fileno=fd) as connection:
        connection.sendall(said)
    os.close(pidfd)


def message(**fields: object) -> bytes:
    text = json.dumps(fields).encode()
    return LENGTH.pack(len(text)) + text


FAILED = "OSError: seen"


@needs_root
@pytest.mark.parametrize(
    "said",
    [message(error=FAILED, lost=True), message(other=1), LENGTH.pack(3) + b"no!", LENGTH.pack(3) + b"[1]"],
    ids=["says so", "other message", "no JSON", "list"],
)
async def test_worker_that_fails_with_a_running_program_twice_is_no_failure_of_the_sandbox(pool, said):
    """For example, by what the program did to its own files."""
    task, worker = await begin(pool, spare_s=60)
    speak_for(worker, said)
    await wait_until(lambda: worker.pid not in [other.pid for other in workers()])
    speak_for(await running_worker(), said)
    assert_blamed(await task)
    assert await stdout(pool, "print(1)") == "1\n"


@needs_root
async def test_failure_to_set_a_program_up_is_never_the_programs(pool):
    task, worker = await begin(pool, spare_s=60)
    speak_for(worker, message(error=FAILED, lost=False))
    with pytest.raises(SandboxError, match=FAILED) as error:
        await task
    assert not isinstance(error.value, LostProgramError)


async def test_without_isolation_no_program_is_blamed_for_its_first_losses_nor_after_it_ran_well(tmp_path):
    """Any program may kill what it likes: a loss says little about one. But it is not lost each time by others."""
    pool = Pool(workers=1, max_output_bytes=1000, preload=(), isolation="none")
    well = tmp_path / "well"
    code = f"import os, time; os.path.exists({str(well)!r}) or (os.kill(os.getppid(), 9), time.sleep(9))"
    try:
        for _ in range(2):
            for _ in range(3):
                with pytest.raises(LostProgramError, match="died"):
                    await pool.execute(request(code), spare_s=60)
            well.touch()
            assert (await pool.execute(request(code)))["return_code"] == 0
            well.unlink()
    finally:
        await pool.close()


async def test_where_landlock_alone_holds_no_program_is_blamed_for_its_first_losses(pool):
    """Before Linux 6.12, any program of the same user may kill its worker there."""
    for losses in range(1, LOSSES_WITHOUT_ISOLATION + 1):
        task, worker = await begin(pool)
        pool.workers.layers = ["rlimits", "landlock"]  # as the newest worker reported
        worker.kill()
        if losses < LOSSES_WITHOUT_ISOLATION:
            with pytest.raises(LostProgramError, match="died"):
                await task
    assert "died with it, 4 times" in (await task)["stderr"]


async def test_worker_that_hangs_after_the_program_began_is_a_timeout(pool):
    started = time.monotonic()
    result = await lose(pool, signal.SIGSTOP, run_timeout=2)
    assert (result["status"], result["return_code"]) == ("TimeLimitExceeded", None)
    assert time.monotonic() - started < 2 + 0.5 + 5
    assert pool.workers.restarts["worker"] == 1
    assert await stdout(pool, "print(1)") == "1\n"
    await wait_until(lambda: len(my_processes()) == 2)


async def test_worker_that_hangs_with_the_zygote_is_a_failure_of_the_sandbox(pool, monkeypatch):
    monkeypatch.setattr(pool_module, "CONTROL_S", 0.5)
    monkeypatch.setattr(workers_module, "STOP_GRACE_S", 0.5)
    task, _ = await begin(pool, run_timeout=2)
    for process in my_processes():
        process.suspend()
    with pytest.raises(SandboxError, match="did not answer; a control program failed, too: "):
        await task


@needs_root
async def test_zygote_that_hangs_with_a_worker_that_does_not_end_holds_up_nobody(pool, monkeypatch):
    """Like a process that waits for a disk, a traced process is not gone until its tracer lets it go."""
    monkeypatch.setattr(workers_module, "START_GRACE_S", 0.3)
    libc = ctypes.CDLL(None, use_errno=True)
    worker = await pool.workers.take()
    assert libc.ptrace(0x4206, worker.pid, 0, 0) == 0, ctypes.get_errno()  # PTRACE_SEIZE
    try:
        zygote().suspend()
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
