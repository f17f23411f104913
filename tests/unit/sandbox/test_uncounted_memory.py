"""Memory that no limit counts is denied to programs, and Python works without it, on every machine.

See docs/guides/sandbox.md, "Memory"; what a worker counts is in server/test_memory.py.
"""

import ctypes
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.sandbox.machines import USUAL, server_on
from verl_ext.sandbox.server import preload

PRELUDE = """
import ctypes, errno, fcntl, mmap, os, socket, struct, sys
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
def call(number, *args):
    result = libc.syscall(ctypes.c_long(number), *[ctypes.c_long(a) if isinstance(a, int) else a for a in args])
    return errno.errorcode[ctypes.get_errno()] if result == -1 else 'DONE'
def attempt(function, *args):
    try:
        function(*args)
        return 'DONE'
    except OSError as exc:
        return errno.errorcode[exc.errno]
def map_shared(flags, fd=-1):
    return 'DONE' if libc.mmap(None, 4096, 3, flags, fd, 0) != 2**64 - 1 else errno.errorcode[ctypes.get_errno()]
"""
MIB = 1 << 20


server = server_on(USUAL, "--max-sessions", "2", needs="seccomp")
forking = server_on(USUAL, "--allow-subprocess")


UNCOUNTED = {
    "shared memory, of which a part is unmapped": "map_shared(0x21)",
    "shared memory, checked": "map_shared(0x23)",
    "shared memory that is read": "map_shared(0x21 | 0x8000)",
    "socket buffers": "attempt(socket.socketpair()[0].setsockopt, 1, 7, 1 << 22)",
    "socket buffers, forced": "attempt(socket.socketpair()[0].setsockopt, 1, 32, 1 << 22)",
    "receive buffers": "attempt(socket.socketpair()[0].setsockopt, 1, 8, 1 << 22)",
    "reserved for a socket": "attempt(socket.socketpair()[0].setsockopt, 1, 73, 1 << 20)",
    "filter of a socket": "attempt(socket.socketpair()[0].setsockopt, 1, 26, bytes(16))",
    "datagrams": "attempt(socket.socketpair, socket.AF_UNIX, socket.SOCK_DGRAM)",
    "pages in a pipe": "attempt(fcntl.fcntl, os.pipe()[0], 1031, 1 << 20)",
    "huge pages in a pipe": "call(278, os.pipe()[1], struct.pack('QQ', id(libc), 1), 1, 0)",
    "a page of a file in a pipe": "call(275, os.open('main.py', 0), 0, os.pipe()[1], 0, 1, 0)",
    "a page of a pipe in a pipe": "call(276, os.pipe()[0], os.pipe()[1], 1, 2)",
    "a page of a file, sent": "attempt(os.sendfile, os.pipe()[1], os.open('main.py', 0), 0, 1)",
    "epoll": "call(213, 1)",
    "epoll, with flags": "call(291, 0)",
    "futex hash": "call(157, 78, 1, 1 << 24, 0, 0)",
    "names of memory": "call(157, 0x53564D41, 0, 0, 4096, b'x')",
    "merged pages": "call(157, 67, 1, 0, 0, 0)",
    "huge pages": "call(157, 41, 0, 0, 0, 0)",
    "files of a thread": "call(56, 0x10900, 0, 0, 0, 0)",
    "files of a thread that has begun": "call(436, 300, 400, 2)",
    "a memory file": "call(319, b'x', 0)",
}


@pytest.mark.parametrize("name", UNCOUNTED)
def test_memory_that_nothing_counts_is_denied(server, name):
    result = server.result(f"{PRELUDE}print({UNCOUNTED[name]})", memory_limit_MB=64)
    assert result["stdout"] == "EPERM\n", result


def test_memory_of_the_zero_device_cannot_be_had(server):
    """If shared, it is memory without a file under another name."""
    result = server.result(f"{PRELUDE}open('/dev/zero', 'rb')")
    assert "FileNotFoundError" in result["stderr"] or "PermissionError" in result["stderr"]


def test_huge_pages_are_off_since_one_stays_whole_until_all_of_it_is_unmapped(server):
    result = server.result(f"{PRELUDE}print(libc.prctl(42, 0, 0, 0, 0))")
    assert result["stdout"] == "1\n"


def test_session_cannot_keep_what_its_calls_were(server):
    """The memory file of a call is empty after it, open or mapped, and does not grow."""
    begin = """
import mmap, os, socket
kept, recv_fds = [], socket.recv_fds
def keep(*args):
    received = recv_fds(*args)
    kept.append(os.dup(received[1][0]))
    mmap.mmap(kept[-1], 0, prot=mmap.PROT_READ)
    return received
socket.recv_fds = keep
"""
    count = """
def grow(how, *args):
    try: how(*args)
    except OSError: return 'held'
print(len(kept), sum(os.fstat(fd).st_blocks for fd in kept[:-1]), grow(os.truncate, kept[0], 1 << 20),
      grow(os.pwrite, kept[0], b'x', 0), grow(os.posix_fallocate, kept[0], 0, 4096))
"""
    server.run(begin, session_id="keeps")
    for _ in range(3):
        answer = server.run("pass", stdin="x" * 2 * MIB, session_id="keeps")
        assert answer["status"] == "Success", answer
    answer = server.run(count, session_id="keeps")
    assert answer["run_result"]["stdout"] == "4 0 held held held\n", answer
    server.request("/v1/sessions/keeps", method="DELETE")


# --- what programs need


def test_what_python_needs_works_beside_what_is_denied(server):
    code = """
import array, asyncio, fcntl, mmap, os, selectors, shutil, socket, sys, termios, threading
print(sys.stdout.isatty(), shutil.get_terminal_size())
a, b = socket.socketpair()
a.sendall(b'xy')
print(array.array('i', fcntl.ioctl(b, termios.FIONREAD, bytes(4)))[0], b.getsockopt(1, 3) == socket.SOCK_STREAM)
a.settimeout(5); a.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, bytes(16)); os.set_inheritable(a.fileno(), True)
print(socket.socket(fileno=os.dup(a.fileno())).type == socket.SOCK_STREAM, fcntl.fcntl(a, fcntl.F_DUPFD_CLOEXEC, 9))
async def talk():
    reader, writer = await asyncio.open_connection(sock=b)
    a.sendall(b'z\\n')
    line = await reader.readline()
    process = await asyncio.gather(asyncio.to_thread(abs, -1), asyncio.sleep(0.01, 2))
    writer.close()
    return line, process
print(asyncio.run(talk()))
with mmap.mmap(-1, 30 << 20) as memory: memory[-1] = 1; print(len(memory) >> 20)
open('from', 'wb').write(b'x' * 100_000); shutil.copy('from', 'to'); print(os.path.getsize('to'))
left, right = socket.socketpair()
with open('from', 'rb') as file: print(left.sendfile(file, count=1000))
threads = [threading.Thread(target=lambda: results.append(1)) for _ in range(20)]; results = []
[t.start() for t in threads]; [t.join() for t in threads]; print(len(results))
import ctypes; print(ctypes.CDLL(None).prctl(15, b'name', 0, 0, 0))
import multiprocessing; print(multiprocessing.RawValue('i', 8).value)
"""
    result = server.result(code, memory_limit_MB=1024)
    assert result["stdout"].splitlines() == [
        "False os.terminal_size(columns=80, lines=24)",
        "2 True",
        "True 9",
        "(b'xyz\\n', [1, 2])",
        *("30", "100000", "1000", "20", "0", "8"),
    ], result


def test_what_several_processes_need_works_beside_what_is_denied(forking):
    code = """
import asyncio, ctypes, mmap, multiprocessing as mp, os, signal, subprocess, sys
left, right = mp.Pipe()
worker = mp.get_context('fork').Process(target=lambda: right.send('pipe'))
worker.start(); print(left.recv()); worker.join()
memory = mmap.mmap(-1, 1 << 20)
if os.fork() == 0: memory[0] = 7; os._exit(0)
os.wait(); print(memory[0])
die = lambda: ctypes.CDLL(None).prctl(1, signal.SIGTERM, 0, 0, 0) and os._exit(9)
command = [sys.executable, '-c', 'import asyncio; print(asyncio.run(asyncio.sleep(0, 6)))']
print(subprocess.run(command, capture_output=True, text=True, preexec_fn=die))
async def child():
    process = await asyncio.create_subprocess_exec('cat', stdin=-1, stdout=-1)
    return (await process.communicate(b'cat'))[0]
print(asyncio.run(child()))
"""
    result = forking.result(code, memory_limit_MB=1024, run_timeout=15)
    first, second, third, fourth = result["stdout"].splitlines()
    assert (first, second, fourth) == ("pipe", "7", "b'cat'"), result
    assert "returncode=0, stdout='6\\n'" in third, result


def test_multiprocessing_with_shared_memory_works_beside_what_is_denied(forking):
    if "root" not in forking.ping()["layers"]:
        pytest.skip("/dev/shm is the machine's here")
    code = """
import multiprocessing as mp
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import shared_memory
fork = mp.get_context('fork')
value, queue = fork.Value('i', 0), fork.Queue()
def work():
    with value.get_lock(): value.value += 1
    queue.put('queue')
workers = [fork.Process(target=work) for _ in range(3)]
[w.start() for w in workers]; print(queue.get()); [w.join() for w in workers]; print(value.value)
with ProcessPoolExecutor(2, mp_context=fork) as pool: print(list(pool.map(abs, [-1, -2])))
block = shared_memory.SharedMemory(create=True, size=1 << 20); block.buf[0] = 5
again = shared_memory.SharedMemory(block.name); print(again.buf[0]); again.close(); block.close(); block.unlink()
"""
    result = forking.result(code, memory_limit_MB=1024, run_timeout=15)
    assert result["stdout"].splitlines() == ["queue", "3", "[1, 2]", "5"], result


# --- mmap.mmap(-1, ...), if shared memory without a file is denied


@pytest.fixture
def counted(monkeypatch, tmp_path) -> Iterator[type]:
    monkeypatch.setattr(mmap, "mmap", mmap.mmap)
    monkeypatch.setattr(preload.tempfile, "tempdir", str(tmp_path))
    preload.count_shared_memory(between_processes=False)
    yield mmap.mmap
    preload.CountedMemory.between_processes = False


def mapping_of(memory: mmap.mmap) -> str:
    """Its line in /proc/self/maps, in which the kernel joins neighbours of one kind."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for line in Path("/proc/self/maps").read_text().splitlines(keepends=True):
        begin, end = (int(each, 16) for each in line.split()[0].split("-"))
        if begin <= address < end:
            return line
    raise AssertionError("it is nowhere")


def test_memory_of_one_process_is_private(counted):
    with counted(-1, 1 << 16) as memory:
        memory[:2] = b"ab"
        assert (memory.read(2), len(memory), mapping_of(memory).split()[1]) == (b"ab", 1 << 16, "rw-p")
    assert isinstance(counted(-1, 4096, prot=mmap.PROT_READ), mmap.mmap)


@pytest.mark.parametrize("between_processes", [False, True])
@pytest.mark.parametrize(
    ("options", "writable"),
    [
        ({}, True),
        ({"access": mmap.ACCESS_WRITE}, True),
        ({"access": mmap.ACCESS_COPY}, True),
        ({"access": mmap.ACCESS_READ}, False),
        ({"prot": mmap.PROT_READ}, False),
        ({"flags": mmap.MAP_SHARED | mmap.MAP_ANONYMOUS}, True),
        ({"flags": mmap.MAP_PRIVATE}, True),
        ({"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, "offset": 0}, True),
    ],
)
def test_memory_can_be_written_to_as_before(counted, between_processes, options, writable):
    counted.between_processes = between_processes
    memory = counted(-1, 8192, **options)
    if writable:
        memory[8191] = 7
        assert memory[-1] == 7
    else:
        with pytest.raises(TypeError):
            memory[0] = 7


def test_memory_of_several_processes_is_shared_and_in_a_file(counted):
    counted.between_processes = True
    memory = counted(-1, 4096)
    assert mapping_of(memory).endswith(" (deleted)\n")
    pid = os.fork()
    if pid == 0:
        memory[0] = 7
        os._exit(0)
    os.waitpid(pid, 0)
    assert memory[0] == 7


def test_memory_of_a_file_is_that_of_the_file(counted, tmp_path):
    with open(tmp_path / "file", "w+b") as file:
        file.write(b"abc")
        file.flush()
        memory = counted(file.fileno(), 0)
        memory[0] = ord("x")
    assert (tmp_path / "file").read_bytes() == b"xbc"
