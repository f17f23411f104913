"""Memory that RLIMIT_AS does not bound, and that a worker counts; what is denied is in ../test_uncounted_memory.py."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.unit.sandbox.machines import USUAL, server_on
from tests.unit.sandbox.server_process import wait_until
from verl_ext.sandbox.server.memory import PIPE_BYTES, SOCKET_BYTES, memory_excess

MIB = 1 << 20


@contextmanager
def running(code: str) -> Iterator[list[int]]:
    """Yield the processes of a program that prints "ready" once it holds the memory to count."""
    command = [sys.executable, "-S", "-c", code + "\nprint('ready', flush=True)\ntime.sleep(60)"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        tree = psutil.Process(process.pid)
        try:
            process.stdout.readline()
            yield [process.pid, *(child.pid for child in tree.children())]
        finally:
            for each in (*tree.children(), process):
                each.kill()


def exceed(pids: list[int], limit: int, *, several: bool) -> bool:
    excess = memory_excess(pids, limit, uid=os.geteuid(), several=several)
    assert excess == "" or excess.startswith(f"memory limit: it has more than {limit >> 20} MiB")
    return bool(excess)


@pytest.mark.parametrize("several", [False, True])
def test_process_whose_first_thread_has_ended_counts(several):
    code = f"""
import ctypes, threading, time
kept = b"x" * {50 * MIB}
def sleep():
    print("ready", flush=True)
    time.sleep(60)
threading.Thread(target=sleep).start()
ctypes.CDLL(None).syscall(60, 0)
"""
    with running(code) as (pid,):
        wait_until(lambda: b"\nState:\tZ" in Path(f"/proc/{pid}/status").read_bytes())
        assert exceed([pid], 40 * MIB, several=several)
        assert not exceed([pid], 90 * MIB, several=several)


@pytest.mark.parametrize(("make", "num_bytes"), [("socket.socketpair()", 2 * SOCKET_BYTES), ("os.pipe()", PIPE_BYTES)])
def test_sockets_and_pipes_of_several_processes_count_as_full(make, num_bytes):
    with running(f"import os, socket, time\nkept = [{make} for _ in range(400)]") as pids:
        assert not exceed(pids, 400 * num_bytes, several=False)
        assert exceed(pids, 400 * num_bytes, several=True)
        assert not exceed(pids, 400 * num_bytes + 50 * MIB, several=True)


def test_memory_that_processes_share_counts_once():
    code = f"""
import mmap, os, time
memory = mmap.mmap(-1, {60 * MIB})
memory.write(b"x" * {60 * MIB})
reader, writer = os.pipe()
for _ in range(5):
    if os.fork() == 0:
        memory[::4096]  # each has it mapped
        os.write(writer, b"x")
        time.sleep(60)
for _ in range(5): os.read(reader, 1)
"""
    with running(code) as pids:
        assert len(pids) == 6
        assert exceed(pids, 60 * MIB, several=True)
        assert not exceed(pids, 200 * MIB, several=True)


def test_process_that_has_ended_counts_nothing():
    process = subprocess.Popen([sys.executable, "-S", "-c", ""])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # and its exit code has not been fetched
    assert memory_excess([process.pid, 2**22 + 1], 1, uid=os.geteuid(), several=True) == ""
    process.wait()


# --- through the server

PRELUDE = """
import ctypes, os, socket, threading, time
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
def fill_sparsely(count):  # a page table or two for each page
    for i in range(count):
        page = libc.mmap(0x10000000000 + i * ((1 << 30) + 4096), 4096, 3, 0x100022, -1, 0)
        if page == 2**64 - 1: break
        ctypes.memset(page, 1, 1)
"""


server = server_on(USUAL)
forking = server_on(USUAL, "--allow-subprocess")


def test_page_tables_are_limited(server):
    result = server.result(f"{PRELUDE}fill_sparsely(60_000); time.sleep(9)", memory_limit_MB=256, run_timeout=8)
    assert (result["status"], result["return_code"]) == ("Finished", -9), result
    assert "\nKilled: memory limit: it has more than " in result["stderr"]
    result = server.result(f"{PRELUDE}fill_sparsely(1_000); time.sleep(0.2); print('ok')", memory_limit_MB=256)
    assert (result["stdout"], result["return_code"]) == ("ok\n", 0), result


def test_limit_comes_on_top_of_what_was_loaded_before(server):
    assert server.result("import time; time.sleep(0.2); print('ok')", memory_limit_MB=4)["stdout"] == "ok\n"


MANY = {
    "children": "for _ in range(6):\n    if os.fork() == 0: hold()",
    "children of children that have ended": """
for _ in range(6):
    if os.fork() == 0:
        if os.fork() == 0: os.setsid(); hold()
        os._exit(0)""",
    "children whose first thread has ended": """
for _ in range(6):
    if os.fork() == 0:
        threading.Thread(target=hold).start()
        libc.syscall(60, 0)""",
}
HOLD = {
    "memory": "x = b'x' * (100 << 20)",
    "page tables": "fill_sparsely(12_000)",
    "sockets": "x = [socket.socketpair() for _ in range(120)]",
}


@pytest.mark.parametrize("hold", HOLD)
@pytest.mark.parametrize("many", MANY)
def test_memory_of_all_processes_together_is_limited(forking, many, hold):
    code = (
        f"{PRELUDE}\ndef hold():\n    {HOLD[hold]}\n    time.sleep(9)\n{MANY[many]}\ntime.sleep(9)\nos.write(1, b'end')"
    )
    result = forking.result(code, memory_limit_MB=256, run_timeout=8)
    assert (result["status"], result["return_code"], result["stdout"]) == ("Finished", -9, ""), result
    assert "\nKilled: memory limit: " in result["stderr"]
