"""What a worker shares with its program, and what can happen to it: the table at the top of `server/worker.py`.

Programs that need no more than a line to say are in test_exclusion_for_sale.py.
"""

import contextlib
import errno
import os
import platform
import signal
import socket
import subprocess
import time
from collections.abc import Iterator

import pytest

from tests.unit.sandbox.machines import USUAL, server_on
from verl_ext.sandbox import SandboxClient
from verl_ext.sandbox.server import processes
from verl_ext.sandbox.server.output import Buffer

server = server_on(USUAL, "--max-sessions", "4")


@pytest.fixture
def session(server, request) -> Iterator[str]:
    yield request.node.originalname
    server.request(f"/v1/sessions/{request.node.originalname}", method="DELETE")


# --- pipes

# At all moments, so that some are between its worker's poll() and readv(). Without /proc, it has no such end.
READ_BACK = """
import os, random, time
ends = []
for fd in (1, 2):
    try: ends.append((fd, os.open(f'/proc/self/fd/{fd}', os.O_RDONLY | os.O_NONBLOCK)))
    except OSError: pass
end = time.monotonic() + 1.5
while time.monotonic() < end:
    for fd, r in ends:
        os.write(fd, b'x')
        again = time.perf_counter_ns() + random.randrange(0, 120000)
        while time.perf_counter_ns() < again: pass
        try: os.read(r, 100)
        except OSError: pass
os.write(1, b'end')
"""


@pytest.mark.parametrize("session_id", [None, "reads-back"])
def test_program_that_reads_its_output_itself_ends_as_it_would(server, session_id):
    answer = server.run(READ_BACK, session_id=session_id, run_timeout=8)
    assert answer["status"] == "Success", answer
    assert answer["run_result"]["stdout"].endswith("end")
    server.request("/v1/sessions/reads-back", method="DELETE")


async def test_program_that_reads_its_output_itself_is_not_excluded_where_no_time_is_left_to_repeat_it(server):
    client = SandboxClient([server.url], queue_timeout_s=1.5)
    result = await client.run("import time\ntime.sleep(1.7)" + READ_BACK, timeout_s=9)
    await client.aclose()
    assert result.status == "ok", result


def test_read_of_a_pipe_tells_nothing_there_from_its_end():
    r, w = os.pipe()
    os.set_blocking(r, False)
    buffer = Buffer(100)
    assert buffer.read_from(r) == -1
    os.write(w, b"abc")
    assert (buffer.read_from(r), bytes(buffer.kept())) == (3, b"abc")
    os.close(w)
    assert buffer.read_from(r) == 0
    os.close(r)
    folder = os.open("/", os.O_RDONLY)  # a read that fails, with EISDIR
    assert (buffer.read_from(folder), buffer.total) == (0, 3)
    os.close(folder)


# Continues itself whenever its worker has stopped it after the call.
CONTINUES_ITSELF = """
import ctypes, os, threading, time
libc = ctypes.CDLL(None)
timer, event = ctypes.c_void_p(), (ctypes.c_long * 8)(0, 18)  # struct sigevent: SIGCONT
libc.timer_create(1, event, ctypes.byref(timer))
libc.timer_settime(timer, 0, (ctypes.c_long * 4)(0, 100_000, 0, 100_000), None)
"""
WRITES_ON = (
    CONTINUES_ITSELF
    + """
def write():
    while True: os.write(1, b'x' * 65536)
for _ in range(2): threading.Thread(target=write, daemon=True).start()
"""
)


def test_program_that_goes_on_writing_after_its_call_does_not_hold_up_the_answer(server, session):
    answer = server.run(WRITES_ON, session_id=session, run_timeout=30)
    assert (answer["status"], answer["session"]["call"]) == ("Success", 1)
    assert answer["run_result"]["execution_time"] < 10


# --- the memory file of a call

WHEN_READ = (
    "import os\nreal = os.pread\ndef pread(fd, *rest):\n    content = real(fd, *rest)\n    {}\n    return content\n"
)


def test_program_changes_nothing_of_its_call(server, session):
    tried = """
    for change in (lambda: os.pwrite(fd, b'x', 0), lambda: os.ftruncate(fd, 1 << 20), lambda: os.write(fd, b'x')):
        try: change(); print('CHANGED')
        except OSError: print('held')"""
    answer = server.run(WHEN_READ.format(tried) + "os.pread = pread", session_id=session)
    assert answer["status"] == "Success", answer
    assert server.run("pass", session_id=session)["run_result"]["stdout"] == "held\n" * 3


def test_files_of_a_call_that_the_program_has_emptied_are_not_fetched(server, session):
    server.run(WHEN_READ.format("os.ftruncate(fd, 0)") + "os.pread = pread", session_id=session)
    answer = server.run("open('a', 'w').write('a')", session_id=session, fetch_files=["a", "b/c"])
    assert (answer["status"], answer["files"], answer["session"]["alive"]) == ("Success", {}, True), answer
    assert "b/c was not fetched" in answer["message"]


# void seal(void **a) {  // {recvmsg, fcntl, message, its descriptor, its msg_controllen}
#     for (;;) {
#         *(long *)a[4] = 24;
#         if (recvmsg(3, a[2], MSG_DONTWAIT) > 0) fcntl(*(int *)a[3], F_ADD_SEALS, F_SEAL_SEAL);
#     }
# }
SEAL = (
    "415455534889fb488b2f4c8b6708488b432048c70018000000488b7310ba40000000bf03000000"
    "ffd54885c07ee0488b43188b38ba01000000be0904000041ffd4ebcb"
)
SEAL_NEXT_CALL = f"""{CONTINUES_ITSELF}
import mmap
code = mmap.mmap(-1, 4096, prot=7)
code.write(bytes.fromhex({SEAL!r}))
memory = (ctypes.c_char * 256)()
base = ctypes.addressof(memory)  # msghdr, at 64 its iovec, at 80 its byte, at 96 its cmsghdr with the descriptor
for offset, value in ((16, base + 64), (24, 1), (32, base + 96), (40, 24), (64, base + 80), (72, 1)):
    ctypes.c_long.from_address(base + offset).value = value
address = lambda function: ctypes.cast(function, ctypes.c_void_p).value
a = (ctypes.c_void_p * 5)(address(libc.recvmsg), address(libc.fcntl), base, base + 112, base + 40)
seal = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(ctypes.addressof(ctypes.c_char.from_buffer(code)))
threading.Thread(target=seal, args=(ctypes.addressof(a),), daemon=True).start()
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="machine code of x86_64: Python is too slow to be first")
def test_program_that_seals_its_next_call_first_is_no_failure_of_the_sandbox(server):
    for i in range(16):
        server.run(SEAL_NEXT_CALL, session_id=f"seals{i}", run_timeout=5)
        answer = server.run("print(1)", session_id=f"seals{i}", run_timeout=0.5)
        assert answer["status"] in ("Success", "Failed"), answer
        server.request(f"/v1/sessions/seals{i}", method="DELETE")


# --- the socket of a session


@pytest.fixture
def program() -> Iterator[tuple[subprocess.Popen, processes.Program, socket.socket]]:
    """A process in the role of a session's program, as its worker sees it, and the program's end of the socket."""
    process = subprocess.Popen(["sleep", "60"], start_new_session=True)
    ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    yield process, processes.Program(process.pid, -1, (-1, -1), ours, bytearray()), theirs
    process.kill()
    process.wait()
    ours.close()
    theirs.close()


@pytest.mark.parametrize("unread", [True, False])
def test_program_that_has_its_calls_in_flight_itself_is_killed_for_it(program, monkeypatch, unread):
    """The kernel counts descriptors in flight per user: it is the sandbox's error only if they are others'."""
    process, seen, theirs = program

    def send_fds(*_: object) -> int:
        raise OSError(errno.ETOOMANYREFS, "Too many references: cannot splice")

    body = os.open("/dev/null", os.O_RDONLY)
    seen.call(body)
    if not unread:
        for fd in socket.recv_fds(theirs, 1, 1)[1]:
            os.close(fd)
    monkeypatch.setattr(processes.socket, "send_fds", send_fds)
    monkeypatch.setattr(processes, "SEND_FDS_S", 0.05)
    with contextlib.nullcontext() if unread else pytest.raises(OSError, match="Too many references"):
        seen.call(body)
    os.close(body)
    if unread:
        assert process.wait(5) == -signal.SIGKILL
    else:
        assert process.poll() is None


@pytest.mark.parametrize("do", ["shutdown(0)", "shutdown(1)", "shutdown(2)", "close()", "send(b'')", "send(b'x' * 20)"])
def test_program_that_spoils_the_socket_of_its_session_ends_its_session(server, session, do):
    code = f"import socket, time\nsocket.socket(fileno=3).{do}\n"
    started = time.monotonic()
    answers = [server.run(code, session_id=session, run_timeout=2), server.run("1", session_id=session, run_timeout=2)]
    assert {answer["status"] for answer in answers} <= {"Success", "Failed"}, answers
    assert time.monotonic() - started < 8
