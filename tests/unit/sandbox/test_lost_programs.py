"""Programs that the server loses: one that not even SIGKILL ends, and one whose worker dies."""

import asyncio
import contextlib
import ctypes
import http.client
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from tests.unit.sandbox.machines import MACHINES, machines, needs_root
from tests.unit.sandbox.server_process import ANSWER_S, Server, wait_for_program, wait_until
from verl_ext.sandbox import SandboxClient
from verl_ext.sandbox.server.pool import within
from verl_ext.sandbox.server.wire import STALL_S

TIMEOUT_S = 8.0  # of a program that is stuck; it must have printed by then, next to other tests on two cores


@pytest.fixture(scope="module", params=machines("all layers", "plain Docker"))
def server(request) -> Iterator[Server]:
    server = Server("--preload", "", "--max-sessions", "2", launcher=MACHINES[request.param])
    server.run("x = 'kept'", session_id="bystander")
    yield server
    server.stop()


@pytest.mark.nightly
@needs_root
def test_program_that_survives_sigkill_is_a_timeout_in_time(server):
    """Like a process that waits for a disk, a traced one is not gone until its tracer, this process, lets it go."""
    libc = ctypes.CDLL(None, use_errno=True)
    code = "import time; print('partial', flush=True); time.sleep(60)"
    answers, stuck = [], []
    try:
        with ThreadPoolExecutor() as executor:
            for session in (None, "s"):
                before = {process.pid for process in server.descendants()}
                answers.append(executor.submit(server.run, code, run_timeout=TIMEOUT_S, session_id=session))
                stuck.append(wait_for_program(server, but=before, fds=(3, 4)).pid)
                assert libc.ptrace(0x4206, stuck[-1], 0, 0) == 0, ctypes.get_errno()  # PTRACE_SEIZE
            started = time.monotonic()
        assert time.monotonic() - started < TIMEOUT_S + ANSWER_S
        for answer in answers:
            result = answer.result()["run_result"]
            assert (result["status"], result["return_code"]) == ("TimeLimitExceeded", None)
            assert result["stdout"] == "partial\n"
        assert all(map(psutil.pid_exists, stuck))
        assert server.run("print(1)")["run_result"]["stdout"] == "1\n"
        assert server.run("print(x)", session_id="bystander")["run_result"]["stdout"] == "kept\n"
    finally:
        for pid in stuck:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0x40000000)  # __WALL
    wait_until(lambda: not any(map(psutil.pid_exists, stuck)))


@pytest.mark.nightly
def test_program_whose_worker_dies_twice_is_killed_and_one_that_does_once_is_run_again():
    server = Server("--preload", "", workers=1)

    def kill_workers(times: int, outcome: list[dict]) -> None:
        code = "import time; time.sleep(1.5); print('ran')"
        thread = threading.Thread(target=lambda: outcome.append(server.run(code)))
        thread.start()
        killed: set[int] = set()
        for _ in range(times):
            program = wait_for_program(server, but=killed)
            killed.add(program.pid)
            program.parent().send_signal(signal.SIGKILL)  # what no program here can do
        thread.join()

    try:
        outcome: list[dict] = []
        server.run("pass")
        for _ in range(2):  # the second time does not count as another loss: it has ended in between
            kill_workers(1, outcome)
            assert (outcome[-1]["status"], outcome[-1]["run_result"]["stdout"]) == ("Success", "ran\n")
        kill_workers(2, outcome)
        assert (outcome[-1]["status"], outcome[-1]["run_result"]["return_code"]) == ("Failed", -9)
        assert server.run("print(1)")["run_result"]["stdout"] == "1\n"
    finally:
        server.stop()


async def test_program_that_takes_its_worker_with_it_late_is_to_blame_at_the_clients_next_attempt(server):
    """Too late for the server to run it again within the same request, of which the client waits a share of 1 s."""
    client = SandboxClient([server.url], queue_timeout_s=40, max_attempts=40)
    call = asyncio.create_task(client.run("import time; time.sleep(9)", timeout_s=10))
    killed: set[int] = set()
    for _ in range(2):
        program = await asyncio.to_thread(wait_for_program, server, but=killed)
        killed.add(program.pid)
        await asyncio.sleep(1.5)
        program.parent().kill()
    result = await call
    assert (result.status, result.return_code, result.attempts) == ("code_error", -9, 2), result
    await client.aclose()


async def test_no_program_is_blamed_where_all_is_killed_twice_while_others_ask(server):
    """They have a new zygote started before the server has seen which end took the program with it."""
    client = SandboxClient([server.url], backoff_s=0.02)

    async def ask() -> None:
        while not program.done():
            await client.run("print(1)", timeout_s=5)

    def runs_longer_than_those_of_the_others() -> bool:
        with contextlib.suppress(psutil.NoSuchProcess):
            return any(p.num_fds() == 3 and time.time() - p.create_time() > 0.3 for p in server.descendants()[1:])
        return False

    program = asyncio.create_task(client.run("import time; time.sleep(1.5); print('ran')", timeout_s=10))
    others = asyncio.create_task(ask())
    for _ in range(2):
        async with asyncio.timeout(10):
            while not runs_longer_than_those_of_the_others():
                await asyncio.sleep(0.02)
        for process in server.descendants():
            with contextlib.suppress(psutil.NoSuchProcess):  # it has ended with the one before
                process.kill()
    result = await program
    assert (result.status, result.stdout) == ("ok", "ran\n"), result
    await others
    await client.aclose()


WORK = "time.sleep(1)\nwhile time.process_time() < 0.5: pass"
PRINT = "print('ran', flush=True)"


STOPPED = [
    (f"time.sleep(1); {PRINT}", 2, "Finished"),
    (f"time.sleep(1); {PRINT}\nwhile True: pass", 2, "TimeLimitExceeded"),
    (f"{WORK}\n{PRINT}", 3, "Finished"),  # the worker wakes less than a second after this limit
]


@pytest.mark.nightly
def test_time_in_which_workers_and_programs_stand_still_is_not_the_programs():
    """As in a container that was frozen for a while. The workers wake first, after the time limits."""
    server = Server("--preload", "", workers=len(STOPPED))
    answers, programs = [], []
    try:
        server.run("pass")
        with ThreadPoolExecutor() as executor:
            for code, timeout_s, _ in STOPPED:
                answers.append(executor.submit(server.run, f"import time\n{code}", run_timeout=timeout_s))
                programs.append(wait_for_program(server, but=[program.pid for program in programs]))
                programs[-1].parent().suspend()
                programs[-1].suspend()
            time.sleep(3.2)
            for program in programs:
                program.parent().resume()
            time.sleep(0.2)
            for program in programs:
                program.resume()
        results = [answer.result()["run_result"] for answer in answers]
    finally:
        server.stop()
    assert [(result["status"], result["stdout"]) for result in results] == [(end, "ran\n") for *_, end in STOPPED]


async def test_an_answer_that_comes_while_the_server_stands_still_or_soon_after_is_taken():
    """From .05 s to 2.55 s: beyond the limit, or before it."""
    loop = asyncio.get_running_loop()

    async def check(limit_s: float, answered_s: float) -> None:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with ours, theirs:
            threading.Timer(answered_s, theirs.send, [b"answer"]).start()
            assert await within(limit_s, loop.sock_recv(ours, 6)) == b"answer"
            with pytest.raises(TimeoutError):
                await within(0.1, loop.sock_recv(ours, 6))
            theirs.send(b"later")  # no caller waits any more
            assert await loop.sock_recv(ours, 6) == b"later"

    loop.call_later(0.05, time.sleep, STALL_S + 1.5)
    await asyncio.gather(check(0.7, 1.0), check(1, 2.7), check(3, 3.6))


@pytest.fixture(params=machines("all layers", "plain Docker"))
def family(request) -> Iterator[tuple[Server, threading.Thread, list[psutil.Process]]]:
    """A server, the request that it answers, and the program with its eight descendants."""
    code = """
import os, time
for i in range(4):
    if os.fork() == 0:
        if i % 2: os.setsid()
        os.fork()
        time.sleep(99)
time.sleep(99)"""
    server = Server("--preload", "", "--allow-subprocess", workers=1, launcher=MACHINES[request.param])
    try:
        server.run("pass")
        before = {process.pid for process in server.descendants()}

        def run() -> None:
            with contextlib.suppress(OSError, http.client.HTTPException):  # the server ends before it answers
                server.run(code, run_timeout=2)

        thread = threading.Thread(target=run)
        thread.start()
        wait_until(lambda: len({process.pid for process in server.descendants()} - before) >= 9)
        program = next(p for p in server.descendants() if p.pid not in before and len(p.children()) == 4)
        yield server, thread, [program, *program.children(recursive=True)]
    finally:
        server.stop()


def test_what_a_program_has_forked_dies_with_its_worker(family):
    """A fork clears PR_SET_PDEATHSIG, and a new session leaves the program's process group."""
    server, thread, processes = family
    processes[0].parent().kill()
    assert psutil.wait_procs(processes, timeout=5)[1] == []
    thread.join()
    assert server.run("print(1)")["run_result"]["stdout"] == "1\n"


@pytest.mark.nightly
def test_what_a_program_has_forked_dies_with_a_zygote_that_hangs(family):
    server, thread, processes = family
    processes[0].parent().suspend()
    server.descendants()[0].suspend()
    server.stop()
    thread.join()
    assert psutil.wait_procs(processes, timeout=5)[1] == []
