"""Exclusion is not for sale: no program makes itself, or another, a failure of the sandbox.

A sample whose sandbox failed is left out of training. So a policy that finds a program which breaks its own sandbox
could buy its way out of a wrong answer. Every known way is a line of PROGRAMS or FORKING; add a new one there. Each
runs on every machine, alone and in a session, next to somebody else's session, and must have an ordinary outcome.

All of it runs inside a sandbox server, and never on one with `--isolation none`: as root, some of the programs stop or
kill every process of the machine, and lock /dev/null. Machines without all layers are nightly tests.
tests/unit/environments/test_notebook.py runs them between the calls of notebooks.
"""

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from tests.unit.sandbox.machines import USUAL, machines, server_on
from tests.unit.sandbox.server_process import ANSWER_S, Server
from verl_ext.sandbox import SandboxClient

TIMEOUT_S = 0.5  # of a program

PRELUDE = """
import ctypes, os, resource, signal, socket, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
def attempt(function, *args):
    try:
        return function(*args)
    except Exception as exc:
        print(type(exc).__name__)
"""
PROGRAMS = {
    # stuck in the kernel
    "syncfs of the machine's disk": """
fd = os.open('/usr/bin', os.O_RDONLY)
def f():
    while True:
        print('syncfs', libc.syncfs(fd), ctypes.get_errno())
        time.sleep(0.01)
for _ in range(4): threading.Thread(target=f, daemon=True).start()
time.sleep(100)""",
    "fsync of the machine's files": """
fds = [os.open(path, os.O_RDONLY) for path in ('/usr/bin/env', '/usr/bin', os.__file__, sys.executable)]
for _ in range(100):
    for fd in fds: os.fsync(fd); os.fdatasync(fd); libc.sync_file_range(fd, 0, 0, 7)
os.sync()""",
    "msync of the machine's file": """
import mmap
memory = mmap.mmap(os.open('/usr/bin/env', os.O_RDONLY), 4096, mmap.MAP_SHARED, mmap.PROT_READ)
for _ in range(100): memory.flush()""",
    # the program and what it says
    "program of 8 MB": "x = 1\n" * (1 << 20) + "# " + "x" * (2 << 20),
    "line of 8 MB": "x = '" + "y" * (8 << 20) + "'",
    "nested too deep": "x = " + "[" * 100_000,
    "operators too many": "x = " + "-" * 100_000 + "1",
    "null byte": "x = 1\0",
    "lone surrogate": "print('\ud800')",
    "output of no text": "os.write(1, bytes(range(256)) * 5000); os.write(2, b'\\xed\\xa0\\x80' * 5000)",
    "output that looks like an answer": "print('{\"status\": \"SandboxError\"}' * 999); os.write(2, b'not set up')",
    "output without end": "while True: os.write(1, b'x' * 65536); os.write(2, b'x' * 65536)",
    # descriptors
    "forged descriptors": "for fd in range(3, 256):\n    for size in (4, 20, 5000): attempt(os.write, fd, bytes(size))",
    "closed descriptors": "os.closerange(0, 256)",
    "descriptors over its streams": "r, w = os.pipe()\nfor fd in (0, 1, 2): os.dup2(w, fd)",
    "all descriptors": "while True: os.pipe()",
    "no descriptors": "resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))",
    "descriptors in flight": """
pairs = [socket.socketpair() for _ in range(60)]
for a, _ in pairs: attempt(socket.send_fds, a, [b'x'], [0] * 250)
time.sleep(0.3)""",
    "streams that never end": "os.set_blocking(1, False)\nfor _ in range(1000): attempt(os.write, 1, b'x' * 100000)",
    "output that it reads back": """
ends = [attempt(os.open, f'/proc/self/fd/{fd}', os.O_RDWR | os.O_NONBLOCK) for fd in (1, 2)]
while True:
    for fd, end in zip((1, 2), ends): os.write(fd, b'x'); attempt(os.read, end or 0, 100)""",
    "flags, sizes and owners of its streams": """
import fcntl
for fd in (0, 1, 2, 3):
    for flags in (0o4000, 0o40000, 0o20000): attempt(fcntl.fcntl, fd, 4, flags)
    for command in (8, 10, 1024, 1031): attempt(fcntl.fcntl, fd, command, 1)
    for change in (os.fchmod, os.ftruncate, os.fsync): attempt(change, fd, *(0,) * (change != os.fsync))
for i in range(3000): attempt(os.write, 1, b'x' * i)""",
    "output that is pages of a file which it cuts": """
open('f', 'wb').write(bytes(400000))
file = os.open('f', os.O_RDWR)
for _ in range(50): attempt(os.splice, file, 1, 65536, 0); os.ftruncate(file, 0); os.pwrite(file, bytes(400000), 0)""",
    "socket that is shut down": """
for how in (0, 1, 2): attempt(lambda: socket.socket(fileno=os.dup(3)).shutdown(how))
time.sleep(9)""",
    "socket that is full": "attempt(os.set_blocking, 3, False)\nfor i in range(3000): attempt(os.write, 3, b'x' * i)",
    "its input taken apart": "os.lseek(0, 0, 0) if not os.isatty(0) else 0\nos.close(0)\nsys.stdin.read()",
    # signals and processes
    "stops itself": "os.kill(os.getpid(), signal.SIGSTOP)",
    "stops all": "attempt(os.kill, -1, signal.SIGSTOP)\nattempt(os.kill, 0, signal.SIGSTOP)\ntime.sleep(9)",
    "kills its parent": "for n in (9, 15, 19, 6, 11): attempt(os.kill, os.getppid(), n)",
    "kills process 1": "for n in (9, 15, 19, 6, 11): attempt(os.kill, 1, n)",
    "kills all": "attempt(os.kill, -1, 9)",
    "kills its group": "os.killpg(0, 9)",
    "kills itself by every signal": "for n in range(1, 65):\n    if n != 19: attempt(os.kill, os.getpid(), n)",
    "memory and descriptors of its parent": """
for pid in (os.getppid(), 1):
    for number in (310, 311, 312, 279, 256): libc.syscall(number, pid, 0, 0, 0, 0, 0)
    for number in (438, 440, 448, 424): libc.syscall(number, attempt(os.pidfd_open, pid) or 0, 0, 0, 0, 0, 0)""",
    "priority and limits of its parent": """
for pid in (os.getppid(), 1):
    for which in (0, 1, 2): attempt(os.setpriority, which, pid, 19)
    attempt(os.sched_setaffinity, pid, {0}); attempt(os.sched_setscheduler, pid, 5, os.sched_param(0))
    attempt(resource.prlimit, pid, resource.RLIMIT_NOFILE, (1, 1)); attempt(resource.prlimit, pid, 0, (0, 0))
    libc.syscall(251, 1, pid, 3 << 13); libc.setpgid(pid, 0)""",
    "leader that ends before its threads": """
threading.Thread(target=lambda: (time.sleep(0.2), os.write(1, b'x'))).start()
libc.syscall(60, 3)""",
    "traces its parent": "print(libc.ptrace(16, os.getppid(), 0, 0), libc.ptrace(0x4206, os.getppid(), 0, 0))",
    "traced by its parent": "libc.ptrace(0, 0, 0, 0)\nos.kill(os.getpid(), signal.SIGTRAP)",
    "hides from its worker": "libc.prctl(4, 0, 0, 0, 0)\nlibc.prctl(1, 0, 0, 0, 0)",
    "leaves its session": "attempt(os.setsid)\nattempt(os.setpgid, 0, 0)\nattempt(os.fork)",
    "lowest priority": "os.nice(19)\nattempt(os.sched_setscheduler, 0, 5, os.sched_param(0))\nwhile True: pass",
    "blocked signals": "signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))\ntime.sleep(9)",
    "timers": "signal.signal(14, lambda *_: 1 / 0)\nsignal.setitimer(signal.ITIMER_REAL, 0.01, 0.001)\ntime.sleep(9)",
    # memory and threads
    "all memory": "x = []\nwhile True: x.append(bytearray(1 << 20))",
    "no memory left at the end": """
x = []
try:
    while True: x.append(bytearray(1 << 12))
except MemoryError: pass
sys.excepthook = lambda *a: x.append(bytearray(1 << 30))
1 / 0""",
    "no address space": "resource.setrlimit(resource.RLIMIT_AS, (1, 1))",
    "no stack": "resource.setrlimit(resource.RLIMIT_STACK, (4096, 4096))\ndef f(): f()\nf()",
    "all threads": "threading.stack_size(65536)\nwhile True: threading.Thread(target=time.sleep, args=(9,)).start()",
    "end in a thread": "threading.Thread(target=os._exit, args=(3,)).start()\ntime.sleep(9)",
    "first to be killed": "attempt(lambda: open('/proc/self/oom_score_adj', 'w').write('1000'))",
    # its folder
    "removes its folder": "import shutil\nattempt(shutil.rmtree, os.getcwd())\nattempt(os.rmdir, os.getcwd())",
    "locks its folder": "os.makedirs('a/b')\nfor n in ('a/b', 'a', 'main.py', '.'): attempt(os.chmod, n, 0)",
    "gives its folder away": "for n in ('main.py', '.'): attempt(os.chown, n, 0, 0)",
    "renames its folder": "attempt(os.rename, os.getcwd(), os.getcwd() + '2')\nattempt(os.rename, 'main.py', 'x')",
    "folders for files": "os.unlink('main.py')\nfor n in ('main.py/a', 'main2.py', '.stdin'): os.makedirs(n)",
    "full disk": "for i in range(9):\n    attempt(lambda: open(f'{i}', 'wb').write(bytes(60 << 20)))",
    "full disk without names": """
for i in range(9):
    f = os.open('f', os.O_RDWR | os.O_CREAT); os.unlink('f')
    attempt(lambda: [os.write(f, bytes(1 << 20)) for _ in range(60)])""",
    "full inodes": "while True: os.close(os.open(str(time.monotonic_ns()), os.O_CREAT))",
    "deep folders": "for i in range(3000): attempt(os.mkdir, 'd' * 200) ; attempt(os.chdir, 'd' * 200)",
    "names of all kinds": """
for name in (b'n' * 255, b'\\xff\\xfe', b'a\\nb', b'"\\\\', b'-rf', b' ', b'\\xed\\xa0\\x80'): open(name, 'w').close()
os.mkfifo('fifo'); os.symlink('loop', 'loop'); os.symlink('/', 'root'); os.mkdir('dir')
open('sparse', 'w').truncate(9 << 20)""",
    "mapped file whose name is no text": """
import mmap
for name in (b'\\xff', b'a\\rb', b'a\\nb (deleted)'):
    fd = os.open(name, os.O_RDWR | os.O_CREAT); os.write(fd, bytes(4096)); x = mmap.mmap(fd, 4096); os.unlink(name)
    time.sleep(0.15)""",
    "file that has no size": "resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\nopen('a', 'w').write('x')",
    # the interpreter
    "no builtins": "import builtins\nvars(builtins).clear()",
    "no modules": "sys.modules.clear()",
    "no globals": "import gc\nfor x in gc.get_objects():\n    if type(x) is dict: x.clear()",
    "hook that fails": "sys.excepthook = lambda *a: os._exit(77)\n1 / 0",
    "recursion": "sys.setrecursionlimit(10**9)\ndef f(): f()\nf()",
    "crash": "ctypes.string_at(0)",
    "crash at the end": "import atexit\natexit.register(ctypes.string_at, 0)",
    "ends after its last line": """
x = bytearray(b'x') * (150 << 20)  # so that ending takes a while
main = threading.main_thread().ident
def end():
    while True:
        frame = sys._current_frames()[main]
        while frame and frame.f_code.co_name != 'next_call': frame = frame.f_back
        if frame: os._exit(0)
threading.Thread(target=end, daemon=True).start()""",
    "never ends": "import atexit\natexit.register(time.sleep, 99)",
    "trace function": "sys.settrace(lambda *a: 1 / 0)\ndef f(): pass\nf()",
    "frames above it": """
frame = sys._getframe()
while frame:
    print(sorted(frame.f_locals)[:3])
    for name in list(frame.f_globals): frame.f_globals.pop(name) if name not in ('__builtins__',) else 0
    frame = frame.f_back""",
    "locks": "import fcntl\nattempt(fcntl.flock, os.open('/usr/bin/env', 0), 2)\ntime.sleep(0.1)",
}
FETCH = [
    "fifo",
    "loop",
    "root",
    "root/etc",
    "dir",
    "sparse",
    "n" * 255,
    "\udcff\udcfe",
    "a\nb",
    '"\\',
    "d/" * 127 + "x",
]
FORKING = {
    "fork bomb": "while True:\n    try: os.fork()\n    except OSError: pass",
    "kills its parent in a child": "if os.fork() == 0: os.kill(os.getppid(), 9)\ntime.sleep(9)",
    "kills all from a double fork": """
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0: attempt(os.kill, -1, 9)
    os._exit(0)
time.sleep(9)""",
    "stops its children": "for _ in range(5):\n    if os.fork() == 0: os.kill(os.getpid(), 19)\ntime.sleep(0.1)",
    "children that stay": "for _ in range(5):\n    if os.fork() == 0: os.setsid(); time.sleep(99)",
    "children that write": """
for i in range(9):
    if os.fork() == 0:
        while True: open(f'{i}', 'wb').write(bytes(30 << 20))
time.sleep(9)""",
    "children that go on writing": """
for fd in (1, 3):
    if os.fork() == 0:
        os.setsid()
        while True: attempt(os.write, fd, b'x' * 20)
time.sleep(0.1)""",
    "children of its parent": "if libc.syscall(56, 0x8000 | 17, 0, 0, 0, 0) == 0: time.sleep(99)\ntime.sleep(0.1)",
    "child that is traced": """
if os.fork() == 0: libc.ptrace(0, 0, 0, 0); os.kill(os.getpid(), 19)
time.sleep(9)""",
}


server = server_on(USUAL, "--max-sessions", "4")
forking = server_on(
    machines("all layers", "plain Docker", "ordinary user"), "--max-sessions", "4", "--allow-subprocess"
)


def check(server: Server, code: str) -> None:
    """Alone, and as a call of a session; somebody else's session and request are unaffected."""
    server.run("x = 'kept'", session_id="bystander")
    fields = {"run_timeout": TIMEOUT_S, "memory_limit_MB": 256, "fetch_files": FETCH}
    with ThreadPoolExecutor() as executor:
        started = time.monotonic()
        alone = executor.submit(server.run, PRELUDE + code, **fields)
        in_session = executor.submit(server.run, PRELUDE + code, session_id="own", **fields)
        neighbour = executor.submit(server.run, "print(6 * 7)")
        for answer in (alone.result(), in_session.result()):
            assert answer["status"] in ("Success", "Failed"), answer
        assert time.monotonic() - started < TIMEOUT_S + ANSWER_S
        assert neighbour.result()["run_result"]["stdout"] == "42\n", neighbour.result()
    answer = server.run("print(x)", session_id="bystander")
    assert answer["run_result"]["stdout"] == "kept\n", answer
    server.request("/v1/sessions/own", method="DELETE")


@pytest.mark.parametrize("name", PROGRAMS)
def test_program_is_to_blame_for_itself(server, name):
    check(server, PROGRAMS[name])


@pytest.mark.parametrize("name", FORKING)
def test_program_that_may_fork_is_to_blame_for_itself(forking, name):
    check(forking, FORKING[name])


def check_zygote(server: Server, begin: str = "") -> None:
    """Its end would be nobody's fault, and the programs that it takes with it excused (pool.Pool.call)."""
    zygote = server.descendants()[0]
    code = f"""
for pid in ({zygote.pid}, -{zygote.pid}, os.getppid(), 1, -1):
    for number in (9, 15, 11, 19): attempt(os.kill, pid, number)
    libc.tgkill(pid, pid, 9); libc.syscall(129, pid, 9, bytes(128)); libc.syscall(424, pid, 9, 0, 0)"""
    check(server, begin + code)
    assert server.descendants()[0] == zygote and zygote.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_STOPPED)


def test_no_program_ends_the_zygote(server):
    check_zygote(server)


def test_no_program_that_may_fork_ends_the_zygote(forking):
    check_zygote(forking, "attempt(os.fork)")


def test_client_calls_none_of_them_a_failure_of_the_sandbox(server):
    async def run_all() -> dict[str, str]:
        client = SandboxClient([server.url], max_concurrency=2)
        codes = {name: PRELUDE + code for name, code in PROGRAMS.items()}
        results = await asyncio.gather(
            *(client.run(c, timeout_s=TIMEOUT_S, memory_limit_mb=256) for c in codes.values())
        )
        await client.aclose()
        return dict(zip(codes, (result.status for result in results), strict=True))

    statuses = asyncio.run(run_all())
    assert {name: status for name, status in statuses.items() if status == "sandbox_failure"} == {}
