"""Programs use no more memory, disk, output and time than they may."""

import re
from time import monotonic

import pytest

from tests.unit.sandbox.hostile.attacks import HARMFUL, NAMESPACES, ROOT, Case, cases, need


@pytest.mark.parametrize(
    "bomb",
    [
        "x = []\nwhile True: x.append(bytearray(1 << 20))",
        "x = 'x' * (10 << 30)",
        "x = [0]\nwhile True: x += x",
        "import mmap\nx = [mmap.mmap(-1, 1 << 20) for _ in range(10_000)]",
        "import mmap\nx = [mmap.mmap(-1, 1 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) for _ in range(10_000)]",
        "import numpy\nx = numpy.ones((1 << 31))",
        "import resource\ntry: resource.setrlimit(resource.RLIMIT_AS, (-1, -1))\nexcept ValueError: pass\n"
        "x = bytearray(2 << 30)",
        "import threading\nx = []\ndef f():\n    while True: x.append(bytearray(1 << 20))\n"
        "threading.excepthook = lambda a: os._exit(1 if a.exc_type is MemoryError else 0)\n"
        "[threading.Thread(target=f).start() for _ in range(4)]",
        "open('big', 'wb').truncate(60 << 20)\nimport mmap\nf = open('big', 'r+b')\n"
        "x = [mmap.mmap(f.fileno(), 0) for _ in range(100)]",
    ],
    ids=["list", "string", "doubling", "shared", "anonymous", "numpy", "limit raised", "threads", "file mapped often"],
)
@HARMFUL
def test_memory_is_limited(server, bomb):
    started = monotonic()
    result = server.result(bomb)
    assert result["return_code"] not in (0, None)
    assert result["return_code"] == -9 or re.search(r"MemoryError|Cannot allocate memory|^$", result["stderr"])
    assert monotonic() - started < 8


@HARMFUL
def test_memory_in_pipes_is_limited(server):
    """Kernel buffers that RLIMIT_AS does not count: as much as fits into the files that may be open."""
    code = """
import fcntl
total = 0
try:
    while True:
        r, w = os.pipe()
        try: fcntl.fcntl(w, 1031, 1 << 20)
        except OSError: pass
        os.set_blocking(w, False)
        total += os.write(w, bytes(1 << 20))
except OSError as exc:
    print("held" if exc.errno == errno.EMFILE and total <= 128 << 20 else f"ESCAPED {exc} {total}")
"""
    assert server.result(code)["stdout"] == "held\n"


def test_numpy_and_threads_work_under_the_usual_limit(server):
    pytest.importorskip("numpy")
    code = (
        "import threading, numpy as np\nresults = []\ndef f(): results.append(np.linalg.inv(np.eye(500) * 2)[0, 0])\n"
        "threads = [threading.Thread(target=f) for _ in range(16)]\n"
        "[t.start() for t in threads]; [t.join() for t in threads]\n"
        "x = np.ones(300 << 17)\nprint(results == [0.5] * 16, x.nbytes >> 20)"
    )
    assert server.result(code)["stdout"] == "True 300\n"


@cases(
    Case(
        "disk",
        ROOT,
        "total = 0\ntry:\n    for i in range(100):\n        with open(f'f{i}', 'wb') as f:\n"
        "            for _ in range(32): total += f.write(bytes(1 << 20))\n"
        "except OSError as e:\n    print('held' if e.errno == errno.ENOSPC and total <= 128 << 20 else e)\n"
        "else:\n    print('ESCAPED')",
        harmful=True,
    ),
    Case(
        "inodes",
        ROOT,
        "try:\n    for i in range(10_000): os.close(os.open(f'f{i}', os.O_CREAT))\n"
        "except OSError as e:\n    print('held' if e.errno == errno.ENOSPC else e)\nelse:\n    print('ESCAPED')",
    ),
    Case(
        "links",
        ROOT,
        "try:\n    for i in range(10_000): os.symlink('x' * 4000, f'l{i}')\n"
        "except OSError as e:\n    print('held' if e.errno == errno.ENOSPC else e)\nelse:\n    print('ESCAPED')",
    ),
    Case("fallocate", set(), "denied(lambda: os.posix_fallocate(os.open('f', 66), 0, 1 << 30), OSError)"),
    Case("sparse file", set(), "denied(lambda: open('f', 'wb').truncate(1 << 40), OSError)"),
    Case(
        "shared memory",
        ROOT,
        "import _posixshmem\nfd = _posixshmem.shm_open('/x', os.O_CREAT | os.O_RDWR)\n"
        "denied(lambda: os.posix_fallocate(fd, 0, 1 << 30), OSError)",
        harmful=True,
    ),
    Case("open files", set(), "denied(lambda: [os.pipe() for _ in range(10_000)], OSError)"),
    Case(
        "core file",
        set(),
        "import resource\nprint('held' if resource.getrlimit(resource.RLIMIT_CORE)[1] == 0 else 'ESCAPED')",
    ),
    Case(
        "locked memory",
        NAMESPACES,
        "import mmap\nx = ctypes.c_char.from_buffer(mmap.mmap(-1, 64 << 20))\n"
        "print('held' if libc.mlock(ctypes.byref(x), ctypes.c_size_t(64 << 20)) else 'ESCAPED')",
    ),
)
def test_resource_is_limited(server, case):
    need(server, case.needs)
    assert server.result(case.code)["stdout"] == "held\n"


@pytest.mark.parametrize(
    "code",
    [
        "while True: pass",
        "import time\ntime.sleep(1000)",
        "x = 7 ** (7 ** 12)",
        "import re\nre.match('(a+)+$', 'a' * 60 + 'b')",
        "import signal, time\nfor n in set(range(1, 65)) - {9, 19, 32, 33}: signal.signal(n, signal.SIG_IGN)\n"
        "time.sleep(99)",
        "import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))\nwhile True: pass",
        "import threading, time\nthreading.Thread(target=time.sleep, args=(1000,)).start()",
        "import atexit, time\natexit.register(time.sleep, 1000)",
        "class A:\n    def __del__(self):\n        while True: pass\na = A()",
        "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)",
        "import os\nos.read(os.pipe()[0], 1)",
        "import os\nos.mkfifo('f')\nopen('f')",
        "import sys\ntry:\n    while True: sys.stdin.read()\nexcept BaseException: pass",
        "while True:\n    try:\n        while True: pass\n    except BaseException: pass",
    ],
    ids=["loop", "sleep", "power", "regex", "signals ignored", "signals blocked", "thread", "atexit", "destructor"]
    + ["stopped", "empty pipe", "FIFO", "stdin", "catches all"],
)
def test_program_that_does_not_end_is_ended(server, code):
    started = monotonic()
    result = server.result(code, run_timeout=0.3)
    assert (result["status"], result["return_code"]) == ("TimeLimitExceeded", None)
    assert monotonic() - started < 3


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_endless_output_is_cut_and_counted(server, stream):
    result = server.result(f"while True: sys.{stream}.write('x' * 100_000)", run_timeout=1.5)
    assert result["status"] == "TimeLimitExceeded"
    assert len(result[stream]) < (1 << 20) + 100
    assert re.search(r"x\n\[output cut: \d+ of \d+ bytes\]\n$", result[stream])


def test_thread_left_running_is_dead(server):
    code = "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()\nprint('end')"
    assert server.result(code)["stdout"] == "end\n"  # and `check` finds no process
