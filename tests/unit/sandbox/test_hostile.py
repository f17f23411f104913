"""Programs that attack the sandbox: one property a case, and after each the server is healthy and nothing is left.

All of it runs inside a sandbox server; the only network targets are listeners on 127.0.0.1 that a test opens itself.
A program prints `held` when what it tried failed as it should. A case skips where a layer that it needs is off.

    SANDBOX_TEST_ISOLATION=none pytest tests/unit/sandbox/test_hostile.py

runs what is harmless to a machine (all but HARMFUL) without isolation: those cases fail that only isolation makes pass.
"""

import base64
import json
import os
import re
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic, sleep
from typing import NamedTuple

import psutil
import pytest

from tests.unit.sandbox.server_process import IS_BELOW_TMP, REPOSITORY, SECRET, Server

MARK = f"verl-hostile-{os.getppid()}"  # in the name of everything that a program tries to leave
ISOLATION = os.environ.get("SANDBOX_TEST_ISOLATION", "auto")
ALL_LAYERS = {"namespaces", "root", "proc", "landlock", "seccomp", "uid"}
SECCOMP, ROOT, PROC, NAMESPACES = {"seccomp"}, {"root"}, {"proc"}, {"namespaces"}
FILES = {"landlock"}
HARMFUL = pytest.mark.skipif(ISOLATION == "none", reason="would harm the machine without isolation")

PRELUDE = """
import ctypes, errno, os, sys
libc = ctypes.CDLL(None, use_errno=True)
def denied(attempt, *errors):
    try:
        result = attempt()
    except (errors or PermissionError):
        print("held")
    else:
        print("ESCAPED", result)
def syscall(number, *args):
    result = libc.syscall(ctypes.c_long(number), *[ctypes.c_long(a) if isinstance(a, int) else a for a in args])
    return errno.errorcode[ctypes.get_errno()] if result == -1 else result
def call_denied(number, *args):
    result = syscall(number, *args)
    print("held" if result == "EPERM" else f"ESCAPED {result}")
"""


class HostileServer(Server):
    """Every program begins with PRELUDE; `check` finds what it left."""

    def __init__(self, *options: str) -> None:
        super().__init__(*options)
        self.layers = set(self.ping()["layers"])

    def run(self, code: str, **fields: object) -> dict:
        return super().run(PRELUDE + code, **{"memory_limit_MB": 1024, "run_timeout": 10} | fields)

    def check(self) -> None:
        """It executes code, and nothing is left: no process but the zygote and two idle workers, no file."""
        assert self.ping()["status"] == "ok"
        deadline = monotonic() + 3
        while (left := [*self.descendants()[3:], *self.root.iterdir()]) and monotonic() < deadline:
            sleep(0.01)
        left += [path for folder in ("/", "/tmp", "/dev/shm", "/var/tmp") for path in Path(folder).glob(f"{MARK}*")]
        for path in left:
            if isinstance(path, Path):  # so that the next test does not find it, too
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        assert not left


@pytest.fixture(scope="module")
def started_server() -> Iterator[HostileServer]:
    server = HostileServer("--isolation", ISOLATION)
    yield server
    server.stop()


@pytest.fixture
def server(started_server: HostileServer) -> Iterator[HostileServer]:
    """Healthy and clean after each test."""
    yield started_server
    started_server.check()


@pytest.fixture(scope="module")
def started_forking() -> Iterator[HostileServer]:
    server = HostileServer("--isolation", ISOLATION, "--allow-subprocess", "--preload", "")
    yield server
    server.stop()


@pytest.fixture
def forking(started_forking: HostileServer) -> Iterator[HostileServer]:
    """Programs may start other programs."""
    yield started_forking
    started_forking.check()


def need(server: HostileServer, layers: set[str]) -> None:
    missing = layers - server.layers
    if missing and ISOLATION != "none":
        pytest.skip(f"off on this machine: {', '.join(sorted(missing))}")


class Case(NamedTuple):
    """A program that prints `held` on its only line when what it tries fails as it should."""

    name: str
    needs: set[str]
    code: str
    harmful: bool = False


def cases(*table: Case) -> Callable:
    return pytest.mark.parametrize(
        "case", [pytest.param(case, id=case.name, marks=[HARMFUL] if case.harmful else []) for case in table]
    )


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
    assert server.result(code, run_timeout=1)["stdout"] == "1\n"
    assert server.result("print('still here')")["stdout"] == "still here\n"


@HARMFUL
def test_program_cannot_signal_one_of_another_request(server):
    need(server, NAMESPACES)
    victim = threading.Thread(
        target=lambda: results.append(server.result("import time; time.sleep(0.7); print('alive')"))
    )
    results = []
    victim.start()
    sleep(0.2)
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
    sleep(0.2)
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
    assert not [p for p in psutil.process_iter(["cmdline"]) if MARK in str(p.info["cmdline"])]


# --- the machine's files


@pytest.mark.parametrize(
    "path",
    [
        "/etc/shadow",
        "/etc/hostname",
        "/etc/ssl",
        "/root",
        "/var/log",
        "/var/lib",
        "/sys/kernel",
        "/dev/kmsg",
        "/dev/vda",
        "/dev/shm/../pts",
        "/proc/kallsyms",
        "/proc/sys/kernel/hostname",
        "/proc/cmdline",
        "/proc/net/tcp",
        "/proc/1/environ",
        str(REPOSITORY / "setup.py"),
        str(REPOSITORY / ".git"),
    ],
)
def test_file_of_the_machine_cannot_be_read(server, path):
    if not os.path.exists(path):
        pytest.skip("not on this machine")
    need(server, {"root", "proc"} if path.startswith("/proc") else FILES)
    code = f"path = {path!r}\n"
    code += "denied(lambda: os.listdir(path) if os.path.isdir(path) else open(path, 'rb').read(1), OSError)"
    assert server.result(code)["stdout"] == "held\n"


@pytest.fixture
def host_file(tmp_path) -> Path:
    """A file that anyone on the machine may read and write."""
    for folder in (tmp_path, *tmp_path.parents[:3]):
        if folder.owner() == Path(tmp_path).owner() and folder != Path("/tmp"):
            folder.chmod(0o777)
    path = tmp_path / "host"
    path.write_text(SECRET)
    path.chmod(0o666)
    return path


@pytest.mark.parametrize(
    "attempt",
    [
        "open({path!r}).read()",
        "open({path!r}, 'a').write('x')",
        "os.unlink({path!r})",
        "os.rename({path!r}, {path!r} + '2')",
        "os.chmod({path!r}, 0)",
        "os.stat({path!r})",
        "open('/proc/self/root' + {path!r}).read()",
        "open('/proc/self/cwd/' + '../' * 20 + {path!r}[1:]).read()",
        "open('../' * 20 + {path!r}[1:]).read()",
        "(os.symlink({path!r}, 'link'), open('link').read())",
        "os.link({path!r}, 'link')",
        "__import__('shutil').copy({path!r}, 'copy')",
        "os.mkfifo({path!r} + '-fifo')",
        "libc.truncate({path!r}.encode(), 0) and (_ for _ in ()).throw(OSError)",
    ],
)
def test_known_path_leads_to_no_file_of_the_machine(server, host_file, attempt):
    need(server, ROOT)
    server_result = server.result(f"denied(lambda: {attempt.format(path=str(host_file))}, OSError)")
    assert server_result["stdout"] == "held\n"
    assert host_file.read_text() == SECRET


@cases(
    Case("the interpreter's library", FILES, "denied(lambda: os.open(os.__file__, os.O_WRONLY), OSError)"),
    Case("a file in /usr", FILES, "denied(lambda: os.open('/usr/bin/env', os.O_WRONLY), OSError)"),
    Case("beside its folder", ROOT, f"denied(lambda: open('../{MARK}', 'w'), OSError)"),
    Case("in the root", ROOT, f"denied(lambda: os.mkdir('/{MARK}'), OSError)"),
    Case("its own limits in /proc", PROC, "denied(lambda: open('/proc/self/oom_score_adj', 'w').write('0'), OSError)"),
    Case("a block device", FILES, "denied(lambda: os.mknod('disk', 0o60600, os.makedev(254, 0)), OSError)"),
    Case("a character device", FILES, "denied(lambda: os.mknod('mem', 0o20600, os.makedev(1, 1)), OSError)"),
    Case("a root of its own", SECCOMP, "denied(lambda: os.chroot('.'))"),
    Case("the owner of a file", NAMESPACES, "open('a', 'w')\ndenied(lambda: os.chown('a', 0, 0), OSError)"),
    Case("another user", NAMESPACES | {"uid"}, "denied(lambda: os.setuid(0), OSError)"),
    Case("a group", NAMESPACES | {"uid"}, "denied(lambda: os.setgroups([0]), OSError)"),
)
def test_nothing_outside_its_folder_can_be_changed(server, case):
    need(server, case.needs)
    assert server.result(case.code)["stdout"] == "held\n"


# --- the kernel

BAD = -1  # a pointer that no call accepts


@pytest.mark.parametrize(
    ("name", "number", "arguments"),
    [
        ("mount", 165, (BAD, BAD, BAD, 0, 0)),
        ("umount2", 166, (BAD, 0)),
        ("unshare user", 272, (0x10000000,)),
        ("unshare mount", 272, (0x00020000,)),
        ("setns", 308, (0, 0)),
        ("pivot_root", 155, (BAD, BAD)),
        ("fsopen", 430, (BAD, 0)),
        ("open_tree", 428, (-100, BAD, 0)),
        ("move_mount", 429, (-100, BAD, -100, BAD, 0)),
        ("mount_setattr", 442, (-100, BAD, 0, 0, 0)),
        ("open_by_handle_at", 304, (-100, BAD, 0)),
        ("name_to_handle_at", 303, (-100, BAD, BAD, BAD, 0)),
        ("bpf", 321, (0, BAD, 0)),
        ("perf_event_open", 298, (BAD, 0, -1, -1, 0)),
        ("io_uring_setup", 425, (1, BAD)),
        ("io_setup", 206, (1, BAD)),
        ("userfaultfd", 323, (1,)),
        ("keyctl", 250, (0, -3, 0, 0, 0)),
        ("add_key", 248, (BAD, BAD, BAD, 0, 0)),
        ("init_module", 175, (BAD, 1, BAD)),
        ("finit_module", 313, (-1, BAD, 0)),
        ("reboot", 169, (0, 0, 0, 0)),
        ("syslog", 103, (10, 0, 0)),
        ("settimeofday", 164, (BAD, BAD)),
        ("sethostname", 170, (BAD, 1)),
        ("personality", 135, (0xFFFFFFFF,)),
        ("fanotify_init", 300, (-1, 0)),
        ("memfd_create", 319, (BAD, 0)),
        ("memfd_secret", 447, (0,)),
        ("shmget", 29, (0, 4096, 0o1600)),
        ("semget", 64, (0, 1, 0o1600)),
        ("msgget", 68, (0, 0o1600)),
        ("mq_open", 240, (BAD, 0, 0, 0)),
        ("modify_ldt", 154, (0, BAD, 0)),
        ("process_madvise", 440, (-1, 0, 0, 0, 0)),
    ],
)
def test_system_call_is_denied(server, name, number, arguments):
    need(server, SECCOMP)
    assert server.result(f"call_denied({number}, *{arguments})")["stdout"] == "held\n"


def test_system_call_newer_than_the_list_is_missing(server):
    need(server, SECCOMP)
    assert server.result("print(syscall(467, -100, -1, 0, 0, 0))")["stdout"] == "ENOSYS\n"  # open_tree_attr


def test_call_of_the_32_bit_kind_kills(server):
    need(server, SECCOMP)
    code = """
import mmap
memory = mmap.mmap(-1, 4096, prot=7)
memory.write(bytes.fromhex("b814000000 cd80 c3"))  # mov eax, 20 (getpid); int 0x80; ret
print(ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(memory)))())
"""
    assert server.result(code)["return_code"] == -31  # SIGSYS


@pytest.mark.parametrize("what", ["CapInh", "CapPrm", "CapEff", "CapAmb"])
def test_program_has_no_capability(server, what):
    need(server, PROC)
    assert server.result(f"print(*[l for l in open('/proc/self/status') if '{what}' in l])")["stdout"].split() == [
        f"{what}:",
        "0" * 16,
    ]


# --- the network


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """Listens on 127.0.0.1; nothing may ever reach it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        yield listener
        with pytest.raises(BlockingIOError):
            listener.accept()


@pytest.mark.parametrize(
    "attempt",
    [
        "socket.create_connection(('127.0.0.1', {port}), timeout=2)",
        "urllib.request.urlopen('http://127.0.0.1:{port}', timeout=2)",
        "http.client.HTTPConnection('127.0.0.1', {port}, timeout=2).connect()",
        "asyncio.run(asyncio.open_connection('127.0.0.1', {port}))",
        "socket.socket(socket.AF_INET6).connect(('::ffff:127.0.0.1', {port}))",
    ],
)
def test_listener_is_out_of_reach(server, listener, attempt):
    need(server, NAMESPACES)
    code = "import asyncio, http.client, socket, urllib.request\n"
    code += f"denied(lambda: {attempt.format(port=listener.getsockname()[1])}, OSError)"
    assert server.result(code)["stdout"] == "held\n"


def test_udp_listener_is_out_of_reach(server):
    need(server, NAMESPACES)
    with socket.socket(type=socket.SOCK_DGRAM) as receiver:
        receiver.bind(("127.0.0.1", 0))
        receiver.settimeout(0.1)
        send = f"socket.socket(type=socket.SOCK_DGRAM).sendto(b'x', {receiver.getsockname()})"
        assert server.result(f"import socket\ndenied(lambda: {send}, OSError)")["stdout"] == "held\n"
        with pytest.raises(TimeoutError):
            receiver.recv(10)


@pytest.mark.parametrize("abstract", [False, True])
@pytest.mark.parametrize("kind", ["SOCK_STREAM", "SOCK_DGRAM"])
def test_unix_socket_of_the_machine_is_out_of_reach(server, tmp_path, kind, abstract):
    need(server, NAMESPACES)
    address = f"\0{MARK}" if abstract else str(tmp_path / "socket")
    with socket.socket(socket.AF_UNIX, getattr(socket, kind)) as listener:
        listener.bind(address)
        if kind == "SOCK_STREAM":
            listener.listen()
        code = (
            f"import socket\ndenied(lambda: socket.socket(socket.AF_UNIX, socket.{kind}).connect({address!r}), OSError)"
        )
        assert server.result(code)["stdout"] == "held\n"


@cases(
    *(
        Case(f"socket {family}", SECCOMP, f"import socket\ndenied(lambda: socket.socket({family}, {kind}))")
        for family, kind in [(1, 1), (2, 1), (2, 2), (2, 3), (10, 1), (16, 3), (17, 3), (38, 5), (40, 1)]
    ),
    Case("bind of a pair", SECCOMP, f"import socket\ndenied(lambda: socket.socketpair()[0].bind('\\0{MARK}'))"),
    Case(
        "datagram pair", SECCOMP, "import socket\ndenied(lambda: socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM))"
    ),
    Case("listen", SECCOMP, "import socket\ndenied(lambda: socket.create_server(('127.0.0.1', 0)))"),
)
def test_socket_is_denied(server, case):
    need(server, case.needs)
    assert server.result(case.code)["stdout"] == "held\n"


def test_asyncio_and_a_stream_pair_work(server):
    code = (
        "import asyncio, socket\na, b = socket.socketpair()\na.send(b'x')\n"
        "async def main(): return await asyncio.to_thread(b.recv, 1)\nprint(asyncio.run(main()))"
    )
    assert server.result(code)["stdout"] == "b'x'\n"


# --- memory, disk, output and time


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
    """Buffers of the kernel that RLIMIT_AS does not count: what fits into the files that may be open."""
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
    result = server.result(f"while True: sys.{stream}.write('x' * 100_000)", run_timeout=0.5)
    assert result["status"] == "TimeLimitExceeded"
    assert len(result[stream]) < (1 << 20) + 100
    assert re.search(r"x\n\[output cut: \d+ of \d+ bytes\]\n$", result[stream])


def test_thread_left_running_is_dead(server):
    code = "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()\nprint('end')"
    assert server.result(code)["stdout"] == "end\n"  # and `check` finds no process


# --- crashes


@pytest.mark.parametrize(
    ("code", "return_codes", "stderr"),
    [
        ("def f(): f()\nf()", [1], "RecursionError"),
        ("sys.setrecursionlimit(10**9)\nclass A:\n def __repr__(self): return repr([self])\nrepr(A())", [-11], ""),
        ("x = []\nfor _ in range(10 ** 6): x = [x]\nprint(x)", [1, -11], ""),
        ("exec('(' * 10_000)", [1], "SyntaxError|MemoryError|RecursionError"),
        ("exec('-' * 100_000 + '1')", [1, -11], ""),
        ("ctypes.string_at(0)", [-11], ""),
        ("os.abort()", [-6], ""),
        ("os.kill(os.getpid(), 8)", [-8], ""),
        ("os.kill(os.getpid(), 31)", [-31], ""),
        ("import faulthandler; faulthandler.enable(); ctypes.string_at(0)", [-11], "Segmentation fault"),
        ("sys.exit(300)", [44], ""),
        ("os._exit(255)", [255], ""),
        ("raise SystemExit('bye')", [1], "bye"),
        ("import threading; threading.Thread(target=os._exit, args=(9,)).start()", [9], ""),
        ("print(int('9' * 5000))", [1], "ValueError"),
        ("del sys.modules['sys'], sys.modules['os']", [0], ""),
        ("import builtins; vars(builtins).clear()", [1, 0], ""),
        ("import gc\nfor x in gc.get_objects():\n    if type(x) is dict: x.clear()", None, ""),
        ("for f in [sys._getframe(i) for i in range(3)]: f.f_globals.pop('os', None)", None, ""),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else "",
)
def test_crash_is_a_return_code(server, code, return_codes, stderr):
    result = server.result(code)
    assert result["status"] == "Finished"
    assert return_codes is None or result["return_code"] in return_codes
    assert re.search(stderr, result["stderr"])


# --- text


@pytest.mark.parametrize(
    ("code", "stdin", "stdout"),
    [
        ("print('\\0a')", None, "\0a\n"),
        ("os.write(1, b'\\xff\\xfe\\x80')", None, "\ufffd\ufffd\ufffd"),
        ("os.write(1, '\\ud800'.encode('utf-8', 'surrogatepass'))", None, "\ufffd\ufffd\ufffd"),
        ("print('\U0001f600\u202e\u0007')", None, "\U0001f600\u202e\u0007\n"),
        ("sys.stdout.write('a\\r\\nb\\rc')", None, "a\r\nb\rc"),
        ("print(ascii(sys.stdin.read()))", "\0\u2028\U0001f600", "'\\x00\\u2028\\U0001f600'\n"),
        ("print(sys.stdin.buffer.read())", "\ud800", "b'\\xed\\xa0\\x80'\n"),
        ("\u0394 = 1; print(\u0394)", None, "1\n"),
        ("print('held')\x0c", None, "held\n"),
    ],
    ids=["NUL", "not UTF-8", "surrogate", "wide", "line ends", "stdin", "stdin surrogate", "names", "form feed"],
)
def test_text_passes_unchanged(server, code, stdin, stdout):
    assert server.result(code, stdin=stdin)["stdout"] == stdout


# --- from one request to the next


@pytest.mark.parametrize(
    ("leave", "look"),
    [
        pytest.param(
            f"open('/tmp/{MARK}', 'w')",
            f"os.path.exists('/tmp/{MARK}')",
            marks=pytest.mark.skipif(IS_BELOW_TMP, reason="the interpreter is below /tmp"),
        ),
        (f"open('/dev/shm/{MARK}', 'w')", f"os.path.exists('/dev/shm/{MARK}')"),
        (f"open('{MARK}', 'w')", "os.listdir() != ['main.py']"),
        ("os.chmod('.', 0o777)", "os.stat('.').st_mode & 0o777 != 0o700"),
        ("os.setxattr('.', 'user.x', b'1')", "os.listxattr('.')"),
        ("os.environ['LEFT'] = '1'; os.putenv('LEFT', '1')", "'LEFT' in os.environ"),
        ("import builtins; builtins.LEFT = 1", "'LEFT' in dir(__builtins__)"),
        ("import sympy; sympy.factor = None; sympy.S.LEFT = 1", "__import__('sympy').factor is None"),
        ("import math; math.pi = 3", "__import__('math').pi == 3"),
        ("import numpy; numpy.seterr(all='raise')", "__import__('numpy').geterr()['over'] == 'raise'"),
        ("sys.path.append('/LEFT')", "'/LEFT' in sys.path"),
        ("sys.setrecursionlimit(77)", "sys.getrecursionlimit() == 77"),
        ("os.umask(0o777)", "os.umask(0) == 0o777"),
        ("os.nice(5)", "os.nice(0) == 5"),
        ("os.sched_setaffinity(0, {0})", "len(os.sched_getaffinity(0)) < os.cpu_count()"),
        ("import resource as r; r.setrlimit(r.RLIMIT_NOFILE, (9, 9))", "__import__('resource').getrlimit(7)[1] == 9"),
        ("import signal; signal.signal(10, signal.SIG_IGN)", "__import__('signal').getsignal(10)"),
        ("import signal; signal.pthread_sigmask(0, {12})", "__import__('signal').pthread_sigmask(0, {12})"),
        ("libc.prctl(15, b'LEFT', 0, 0, 0)", "'LEFT' in open('/proc/self/comm').read()"),
        ("import tempfile; tempfile.tempdir = '/LEFT'", "__import__('tempfile').gettempdir() == '/LEFT'"),
        ("import locale; locale.setlocale(locale.LC_ALL, 'C')", "__import__('locale').setlocale(0) == 'C'"),
        (
            f"import _posixshmem; _posixshmem.shm_open('/{MARK}', os.O_CREAT | os.O_RDWR)",
            f"os.path.exists('/dev/shm/{MARK}')",
        ),
    ],
    ids=lambda text: text[:40],
)
def test_next_request_does_not_see(server, leave, look):
    if "sympy" in leave:
        pytest.importorskip("sympy")
    need(server, (ROOT if MARK in leave else set()) | (PROC if "/proc" in look else set()))
    for _ in range(3):  # one for each worker, and once more
        first = server.result(leave)
        assert first["return_code"] == 0, first
    assert [server.result(f"print(bool({look}))")["stdout"] for _ in range(3)] == ["False\n"] * 3


@pytest.mark.parametrize(
    "draw",
    [
        "__import__('random').random()",
        "__import__('random').Random().random()",
        "__import__('numpy').random.random()",
        "__import__('numpy').random.default_rng().random()",
        "__import__('sympy.core.random').core.random.rng.random()",
        "__import__('uuid').uuid4()",
        "__import__('secrets').token_hex()",
        "__import__('tempfile').mkdtemp()",
        "os.urandom(8)",
    ],
    ids=["random", "Random", "numpy", "default_rng", "sympy", "uuid4", "secrets", "tempfile", "urandom"],
)
def test_random_numbers_differ(server, draw):
    if "numpy" in draw or "sympy" in draw:
        pytest.importorskip("sympy" if "sympy" in draw else "numpy")
    assert len({server.result(f"print({draw})")["stdout"] for _ in range(6)}) == 6


# --- secrets of the server


@pytest.mark.parametrize(
    "search",
    [
        "str(dict(os.environ))",
        "open('/proc/self/environ').read()",
        "str(__import__('gc').get_objects())",
        "''.join(str(f.f_globals) + str(f.f_locals) for f in sys._current_frames().values())",
        "' '.join(sys.orig_argv) + ' '.join(sys.argv)",
        "str([os.readlink(f'/proc/self/fd/{fd}') for fd in os.listdir('/proc/self/fd')[:-1]])",
    ],
    ids=["environ", "proc", "objects", "frames", "arguments", "files"],
)
def test_secret_of_the_server_is_not_found(server, search):
    # Backwards, so that the program does not find itself.
    code = (
        f"found = {search}\nassert found\nprint('ESCAPED' if ''.join(reversed({SECRET[::-1]!r})) in found else 'held')"
    )
    result = server.result(code)
    assert result["stdout"] == "held\n", result


def test_only_standard_streams_are_open_and_none_is_a_socket(server):
    need(server, PROC)
    code = "import stat\nprint([stat.S_ISSOCK(os.fstat(int(fd)).st_mode) for fd in os.listdir('/proc/self/fd')[:-1]])"
    assert server.result(code)["stdout"] == "[False, False, False]\n"


# --- files that are fetched


@pytest.mark.parametrize(
    ("make", "path"),
    [
        ("os.symlink({host!r}, 'f')", "f"),
        ("os.symlink({host!r}.rpartition('/')[0], 'd')", "d/host"),
        ("os.symlink('/proc/self/root', 'd')", "d/etc/passwd"),
        ("os.symlink('main.py', 'f')", "f"),
        ("os.symlink('f', 'f')", "f"),
        ("os.mkfifo('f')", "f"),
        ("os.mkdir('f')", "f"),
        ("os.rename('main.py', 'g'); os.symlink({host!r}, 'main.py')", "main.py"),
        ("os.symlink('/dev/zero', 'f')", "f"),
        ("os.rmdir('.') if 0 else os.chmod('.', 0)", "nothing"),
    ],
    ids=["link", "folder link", "root link", "inner link", "loop", "FIFO", "folder", "program", "device", "locked"],
)
def test_fetch_gives_no_file_but_regular_ones_below_the_folder(server, host_file, make, path):
    answer = server.run(make.format(host=str(host_file)), fetch_files=[path])
    assert (answer["status"], answer["files"]) == ("Success", {})
    assert f"{path} was not fetched" in answer["message"]


@pytest.mark.parametrize("path", ["../x", "/etc/passwd", "a/../../x", "a\0b", ""])
def test_path_outside_the_folder_is_refused(server, path):
    for fields in ({"files": {path: ""}}, {"fetch_files": [path]}):
        status, _, _ = server.post(json.dumps({"code": "1", "language": "python"} | fields).encode())
        assert status == 422


@HARMFUL
def test_files_too_large_to_fetch_are_left_out(server):
    need(server, ROOT)
    answer = server.run("for n in 'ab': open(n, 'wb').truncate(40 << 20)", fetch_files=["a", "b"])
    assert [len(base64.b64decode(content)) for content in answer["files"].values()] == [40 << 20]
    assert "b was not fetched: over the limit" in answer["message"]


# --- starting


def test_layers_are_printed(server):
    """On the second line, in the words of /v1/ping."""
    assert set(server.second_line.removeprefix("sandbox layers: ").strip().split(", ")) == server.layers
    assert server.layers <= ALL_LAYERS | {"rlimits"}


def test_full_isolation_starts_only_with_all_layers(started_server):
    all_on = {"namespaces", "root", "proc", "landlock", "seccomp"} <= started_server.layers
    if not all_on:
        pytest.skip("not all layers work on this machine")
    server = HostileServer("--isolation", "full", "--preload", "")
    server.stop()
