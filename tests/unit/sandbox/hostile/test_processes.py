"""Programs start and touch no process, except those that may start some, which get no more rights."""

import threading
from time import monotonic

import psutil
import pytest

from tests.unit.sandbox.hostile.attacks import HARMFUL, MARK, NAMESPACES, PROC, SECCOMP, Case, cases, need
from tests.unit.sandbox.server_process import wait_for_program

# --- other programs and processes


@cases(
    Case("fork", SECCOMP, "denied(os.fork)"),
    Case("fork, the call itself", SECCOMP, "call_denied(57)"),
    Case("clone without CLONE_THREAD", SECCOMP, "call_denied(56, 17, 0, 0, 0, 0)"),
    Case("clone into a user namespace", SECCOMP, "call_denied(56, 0x10000011, 0, 0, 0, 0)"),
    Case(
        "clone3",
        SECCOMP,
        "arguments = (ctypes.c_uint64 * 8)(0, 0, 0, 0, 17)\n"
        "print('held' if syscall(435, ctypes.byref(arguments), 64) == 'ENOSYS' else 'ESCAPED')",
    ),
    Case("exec", SECCOMP, "denied(lambda: os.execv('/bin/true', ['true']))"),
    Case("exec of its own file", SECCOMP, "denied(lambda: os.execv(sys.executable, ['python', '-c', '']))"),
    Case("posix_spawn", SECCOMP, "denied(lambda: os.posix_spawn('/bin/true', ['true'], {}))"),
    Case("subprocess", SECCOMP, "import subprocess\ndenied(lambda: subprocess.run(['true']))"),
    Case("os.system", SECCOMP, "print('held' if os.system('true') else 'ESCAPED')"),
    Case("os.popen", SECCOMP, "denied(lambda: os.popen('true').read())"),
    Case(
        "multiprocessing",
        SECCOMP,
        "import multiprocessing as m\ndenied(lambda: m.get_context('fork').Process(target=print).start())",
    ),
    Case("fork bomb", SECCOMP, "denied(lambda: [os.fork() for _ in range(100_000)])", harmful=True),
    Case("ptrace of its parent", SECCOMP, "call_denied(101, 0x4206, os.getppid(), 0, 0)"),  # PTRACE_SEIZE
    Case("reading its parent's memory", SECCOMP, "call_denied(310, os.getppid(), 0, 0, 0, 0, 0)"),
    Case("pidfd_getfd", SECCOMP, "call_denied(438, os.pidfd_open(os.getppid()), 0, 0)"),
    Case(
        "pidfd_send_signal",
        SECCOMP,
        "import signal\ndenied(lambda: signal.pidfd_send_signal(os.pidfd_open(os.getppid()), 0))",
    ),
    Case("kcmp", SECCOMP, "call_denied(312, os.getpid(), os.getppid(), 0, 0, 0)"),
    Case(
        "limits of its parent",
        SECCOMP,
        "import resource\ndenied(lambda: resource.prlimit(os.getppid(), resource.RLIMIT_CORE, (0, 0)))",
    ),
    Case("cores of its parent", SECCOMP, "denied(lambda: os.sched_setaffinity(os.getppid(), {0}))"),
    Case("priority of its parent", SECCOMP, "denied(lambda: os.setpriority(os.PRIO_PROCESS, os.getppid(), 1))"),
    Case("priority of all of its user", SECCOMP, "denied(lambda: os.setpriority(os.PRIO_USER, 0, 1))", harmful=True),
    Case("priority above normal", NAMESPACES, "denied(lambda: os.nice(-5))"),
    Case(
        "signals of its files to its parent",
        SECCOMP,
        "import fcntl\ndenied(lambda: fcntl.fcntl(os.pipe()[0], fcntl.F_SETOWN, os.getppid()))",
    ),
    Case("memory of its parent in /proc", PROC, "denied(lambda: open(f'/proc/{os.getppid()}/mem'), OSError)"),
    Case("environment of its parent", PROC, "denied(lambda: open(f'/proc/{os.getppid()}/environ').read(), OSError)"),
    Case("command line of its parent", PROC, "denied(lambda: open(f'/proc/{os.getppid()}/cmdline').read(), OSError)"),
    Case(
        "other processes in /proc",
        PROC,
        "seen = [name for name in os.listdir('/proc') if name.isdigit()]\n"
        "print('held' if seen == [str(os.getpid())] else f'ESCAPED {seen}')",
    ),
    Case(
        "more threads than allowed",
        NAMESPACES,
        "import threading\nthreading.stack_size(65536)\nstop = threading.Event()\ncount = 0\n"
        "try:\n    while count < 500:\n        threading.Thread(target=stop.wait).start()\n        count += 1\n"
        "except RuntimeError:\n    print('held')\nelse:\n    print('ESCAPED')\nstop.set()",
    ),
)
def test_no_process_can_be_made_or_touched(server, case):
    need(server, case.needs)
    assert server.result(case.code)["stdout"] == "held\n"


@pytest.mark.parametrize(
    ("name", "target"),
    [(name, "os.getppid()") for name in ("SIGKILL", "SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGCHLD")]
    + [pytest.param("SIGSTOP", "os.getppid()", id="SIGSTOP to its parent")]
    + [pytest.param(name, "-1", id=f"{name} to all", marks=HARMFUL) for name in ("SIGKILL", "SIGSTOP")],
)
def test_signal_reaches_nobody_else(server, name, target):
    """Without isolation the worker dies of it, or hangs."""
    need(server, NAMESPACES)
    code = f"""
import signal, time
try:
    os.kill({target}, signal.{name})
except OSError:
    pass
time.sleep(0.1)
print(os.getppid())
"""
    assert server.result(code, run_timeout=5)["stdout"] == "1\n"
    assert server.result("print('still here')")["stdout"] == "still here\n"


@HARMFUL
def test_program_cannot_signal_one_of_another_request(server):
    need(server, NAMESPACES)
    victim = threading.Thread(
        target=lambda: results.append(server.result("import time; time.sleep(0.7); print('alive')"))
    )
    results = []
    victim.start()
    wait_for_program(server)
    code = """
for pid in range(1, 40_000):
    try:
        if pid != os.getpid():
            os.kill(pid, 9)
    except OSError:
        pass
print('done')
"""
    assert server.result(code)["stdout"] == "done\n"
    victim.join()
    assert results[0]["stdout"] == "alive\n"


def test_programs_of_two_requests_do_not_see_each_other(server):
    need(server, PROC)
    other = threading.Thread(target=server.result, args=("import time; time.sleep(0.5)",))
    other.start()
    wait_for_program(server)
    code = "print([p for p in os.listdir('/proc') if p.isdigit() and open(f'/proc/{p}/comm').read()[:6] == 'python'])"
    assert server.result(code)["stdout"].count("'") == 2  # itself
    other.join()


# --- with subprocesses allowed


def test_subprocess_works_where_it_is_allowed(forking):
    code = (
        "import subprocess\nprint(subprocess.run([sys.executable, '-c', 'print(6 * 7)'], capture_output=True).stdout)"
    )
    assert forking.result(code)["stdout"] == "b'42\\n'\n"


def test_multiprocessing_works_where_it_is_allowed(forking):
    code = "import multiprocessing as m\nwith m.get_context('fork').Pool(2) as pool: print(pool.map(abs, [-1, -2]))"
    result = forking.result(code)
    assert result["stdout"] == "[1, 2]\n", result["stderr"]


@cases(
    Case("fork and socket", SECCOMP, "import socket\nif os.fork() == 0:\n    denied(socket.socket)\nos.wait()"),
    Case("fork and unshare", SECCOMP, "if os.fork() == 0:\n    call_denied(272, 0x10000000)\nos.wait()"),
    Case("clone into a user namespace", SECCOMP, "call_denied(56, 0x10000011, 0, 0, 0, 0)"),
    Case(
        "clone3",
        SECCOMP,
        "arguments = (ctypes.c_uint64 * 8)(0x10000000, 0, 0, 0, 17)\n"
        "print('held' if syscall(435, ctypes.byref(arguments), 64) == 'ENOSYS' else 'ESCAPED')",
    ),
    Case(
        "ptrace of a child", SECCOMP, "call_denied(101, 0x4206, os.posix_spawn('/bin/sleep', ['sleep', '1'], {}), 0, 0)"
    ),
    Case(
        "no privileges from an exec",
        {"seccomp"},
        "import re, subprocess\n"
        "status = subprocess.run(['cat', '/proc/self/status'], capture_output=True, text=True).stdout\n"
        "good = re.search(r'CapEff:\\s+0+\\n', status) and re.search(r'NoNewPrivs:\\s+1\\n', status)\n"
        "print('held' if good else 'ESCAPED')",
    ),
    Case(
        "fork bomb",
        NAMESPACES,
        "try:\n    for _ in range(100_000):\n        if os.fork() == 0:\n            import time; time.sleep(60)\n"
        "except BlockingIOError:\n    print('held')",
        harmful=True,
    ),
    Case(
        "fork bomb in all children, too",
        NAMESPACES,
        "import time\nprint('held', flush=True)\nend = time.monotonic() + 1\nwhile time.monotonic() < end:\n"
        "    try:\n        os.fork()\n    except BlockingIOError:\n        pass\nos._exit(0)",
        harmful=True,
    ),
)
def test_a_subprocess_has_no_more_rights(forking, case):
    need(forking, case.needs)
    assert forking.result(case.code)["stdout"] == "held\n"


@HARMFUL
def test_memory_of_all_processes_together_is_limited(forking):
    need(forking, PROC)
    code = """
import time
for _ in range(6):
    if os.fork() == 0:
        x = bytearray(100 << 20)
        time.sleep(5)
        os._exit(0)
time.sleep({wait})
print(1, flush=True)
"""
    result = forking.result(code.format(wait=4), memory_limit_MB=256)
    assert (result["return_code"], result["stdout"]) == (-9, "")
    assert result["stderr"].startswith("\nKilled: memory limit: it has more than 256 MiB")
    assert result["execution_time"] < 3
    result = forking.result(code.format(wait=0.5), memory_limit_MB=1024)
    assert (result["return_code"], result["stdout"]) == (0, "1\n")


@pytest.mark.parametrize(
    "escape",
    [
        "os.setsid()",
        "os.setsid()\nif os.fork(): os._exit(0)",
        "import signal\nfor n in (1, 2, 3, 15): signal.signal(n, signal.SIG_IGN)",
        "os.close(1); os.close(2)",
        "os.setpgid(0, 0)",
        "libc.prctl(1, 0, 0, 0, 0); os.setsid()",  # PR_SET_PDEATHSIG
    ],
    ids=["setsid", "double fork", "signals ignored", "streams closed", "group", "no death signal"],
)
def test_child_that_wants_to_outlive_its_request_is_dead(forking, escape):
    started = monotonic()
    code = f"""
if os.fork() == 0:
    exec({escape!r})
    os.execv('/bin/sleep', ['{MARK}', '60'])
import time
time.sleep(0.1)
"""
    forking.result(code)
    assert monotonic() - started < 5
    assert not [p for p in psutil.process_iter(["cmdline"]) if forking.mark in str(p.info["cmdline"])]
