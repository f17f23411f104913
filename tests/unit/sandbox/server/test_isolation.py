"""Machines that refuse a layer: played by a seccomp filter around the server, which fails what such a kernel would.

And the filter for programs, evaluated here instruction by instruction; and a server that does not run as root.
"""

import json
import os
import platform
import re
import signal
import subprocess
import sys
import sysconfig
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.unit.sandbox.server_process import IS_BELOW_TMP
from verl_ext.sandbox.server import seccomp

REPOSITORY = Path(__file__).parents[4]
ALLOWED, EPERM, ENOSYS = 0x7FFF0000, 0x00050001, 0x00050026

# Runs the server with system calls that fail with EPERM: a number, or a number and the value of its first argument.
REFUSE = """
import json, os, sys
from verl_ext.sandbox.server import isolation
from verl_ext.sandbox.server import seccomp as s
code = [(s.LOAD, 0, 0, s.OFFSET_NUMBER)]
for number, first in json.loads(sys.argv[1]):
    if first is None:
        code += [(s.JUMP_EQUAL, 0, 1, number), (s.RETURN, 0, 0, s.ERRNO | 1)]
    else:
        code += [(s.JUMP_EQUAL, 0, 4, number), (s.LOAD, 0, 0, s.OFFSET_ARGUMENTS), (s.JUMP_EQUAL, 0, 1, first)]
        code += [(s.RETURN, 0, 0, s.ERRNO | 1), (s.LOAD, 0, 0, s.OFFSET_NUMBER)]
code += [(s.RETURN, 0, 0, s.ALLOW)]
isolation.set_no_new_privs()
s.install(s.prepare(b"".join(s.INSTRUCTION.pack(*instruction) for instruction in code)))
os.execv(sys.executable, [sys.executable, "-m", "verl_ext.sandbox.server", "--port", "0", *sys.argv[2:]])
"""
# Runs before that, in a mount namespace: an interpreter below a home that is closed to others becomes all of that home.
OPEN_INTERPRETER = """
import os, sys, tempfile
from verl_ext.sandbox.server import isolation
from verl_ext.sandbox.server import namespaces as n
n.unshare(n.CLONE_NEWNS)
n.mount(None, "/", None, n.MS_REC | n.MS_PRIVATE)
prefix = os.path.realpath(sys.base_prefix)
parts = prefix.split("/")
above = ["/".join(parts[:i]) for i in range(2, len(parts))]
home = next((folder for folder in above if not os.stat(folder).st_mode & 0o001), None)
if home:
    with tempfile.TemporaryDirectory() as aside:
        n.mount(prefix, aside, None, n.MS_BIND | n.MS_REC)
        n.mount("tmpfs", home, "tmpfs", 0, "mode=755")
        os.makedirs(prefix)
        n.mount(aside, prefix, None, n.MS_BIND | n.MS_REC)
        n.check(n.libc.umount2(aside.encode(), n.MNT_DETACH), "umount2")
"""
AS_NOBODY = """
isolation.set_uid(65534)
os.environ["HOME"] = "/"
os.execv(sys.executable, [sys.executable, "-m", "verl_ext.sandbox.server", "--port", "0", *sys.argv[1:]])
"""
UNSHARE, MOUNT, LANDLOCK, SECCOMP = [272, None], [165, None], [444, None], [157, 22]  # prctl(PR_SET_SECCOMP)
# Part of /proc is covered, as containers do, which makes the kernel refuse a fresh one in a user namespace.
COVERED_PROC = """
import os, sys
from verl_ext.sandbox.server import namespaces as n
n.unshare(n.CLONE_NEWNS)
n.mount(None, "/", None, n.MS_REC | n.MS_PRIVATE)
n.mount("/dev/null", "/proc/keys", None, n.MS_BIND)
os.execv(sys.executable, [sys.executable, "-m", "verl_ext.sandbox.server", "--port", "0", *sys.argv[1:]])
"""


@contextmanager
def running(script: str, *arguments: str) -> Iterator["Client"]:
    command = [sys.executable, "-c", script, *arguments, "--workers", "1", "--preload", ""]
    process = subprocess.Popen(
        command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | PATHS
    )
    try:
        yield Client(process)
    finally:
        process.terminate()
        _, stderr = process.communicate(timeout=10)
        assert "Traceback" not in stderr, stderr


PATHS = {"PYTHONPATH": str(REPOSITORY)}


class Client:
    def __init__(self, process: subprocess.Popen) -> None:
        line = process.stdout.readline()
        assert line.startswith("sandbox ready on "), process.stderr.read()
        self.url = line.split()[-1]
        self.layers = process.stdout.readline().removeprefix("sandbox layers: ").strip().split(", ")
        with urllib.request.urlopen(f"{self.url}/v1/ping", timeout=20) as response:
            said = json.load(response)
        assert (said["status"], said["message"], said["layers"]) == ("ok", "", self.layers)

    def stdout(self, code: str, **fields: object) -> str:
        body = {"code": code, "language": "python", "run_timeout": 5} | fields
        request = urllib.request.Request(f"{self.url}/run_code", json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=20) as response:
            answer = json.load(response)
        assert answer["status"] != "SandboxError", answer
        return answer["run_result"]["stdout"] + answer["run_result"]["stderr"]


needs_x86_64 = pytest.mark.skipif(platform.machine() != "x86_64", reason="the numbers here are those of x86_64")


@pytest.fixture(scope="module")
def layers() -> set[str]:
    """The layers that work on this machine."""
    command = [sys.executable, "-m", "verl_ext.sandbox.server", "--port", "0", "--preload", ""]
    process = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        return set(Client(process).layers)
    finally:
        process.terminate()
        process.communicate(timeout=10)


ATTACKS = {
    "fork": ("import os\nos.fork()", {"seccomp"}),
    "exec": ("import os\nos.execv('/bin/true', ['true'])", {"seccomp", "landlock"}),
    "socket": ("import socket\nsocket.socket()", {"seccomp"}),
    "connect": ("import socket\nsocket.create_connection(('127.0.0.1', {port}), timeout=1)", {"seccomp", "landlock"}),
    "host file": ("open({host!r}).read()", {"landlock"}),
    "host file written": ("open({host!r}, 'w')", {"landlock"}),
    "other programs": ("import os\nos.listdir('/proc')", {"landlock"}),
    "signal": ("import os\nos.kill(os.getppid(), 0)", {"seccomp", "landlock"}),
    "all signals": ("import os\nos.kill(-1, 0)", {"seccomp"}),
    "trace": ("import ctypes\nassert ctypes.CDLL(None).ptrace(0x4206, __import__('os').getppid(), 0, 0) == 0, "
              "'PermissionError'", {"seccomp", "landlock"}),
    "capabilities": ("import os\nos.setgroups([1])", {"seccomp", "landlock"}),
}  # fmt: skip


@needs_x86_64
@pytest.mark.parametrize(
    ("refused", "left"),
    [
        ([UNSHARE], {"landlock", "seccomp"}),
        ([MOUNT], {"landlock", "seccomp"}),
        ([UNSHARE, LANDLOCK], {"seccomp"}),
        ([UNSHARE, SECCOMP], {"landlock"}),
    ],
    ids=["no namespaces", "no mounts", "seccomp alone", "landlock alone"],
)
def test_other_layers_hold_where_one_is_refused(layers, tmp_path, refused, left):
    if not left <= layers:
        pytest.skip(f"this machine has {layers}")
    host = tmp_path / "host"
    host.write_text("a file of the host")
    with running(REFUSE, json.dumps(refused)) as client:
        assert set(client.layers) - {"rlimits", "uid"} == left
        assert client.stdout("import os; print(os.listdir(), open('main.py').read()[:6])") == "['main.py'] import\n"
        for name, (code, held_by) in ATTACKS.items():
            if held_by & left:
                stderr = client.stdout(code.format(host=str(host), port=client.url.rsplit(":")[-1]))
                assert "PermissionError" in stderr, (name, stderr)
        assert client.stdout("print(1)") == "1\n"
    assert host.read_text() == "a file of the host"


@needs_x86_64
def test_without_landlock_namespaces_and_seccomp_hold(layers):
    if "namespaces" not in layers:
        pytest.skip("namespaces do not work here")
    with running(REFUSE, json.dumps([LANDLOCK])) as client:
        assert set(client.layers) == layers - {"landlock"}
        assert "FileNotFoundError" in client.stdout(f"open({__file__!r})")
        assert "Permission" in client.stdout("import os; os.fork()")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can cover a part of /proc")
def test_where_a_fresh_proc_is_refused_it_is_empty(layers):
    if "proc" not in layers or not os.path.exists("/proc/keys"):
        pytest.skip("there is no /proc to be refused")
    with running(COVERED_PROC) as client:
        assert set(client.layers) == layers - {"proc"}
        assert client.stdout("import os; print(os.listdir('/proc'))").endswith("Permission denied: '/proc'\n")
        assert client.stdout("import os; print(os.path.exists('/proc/self'))") == "False\n"
        assert client.stdout("import random; print(1)") == "1\n"
        with urllib.request.urlopen(f"{client.url}/metrics", timeout=20) as response:
            assert 'sandbox_restarts_total{process="worker"} 0.0' in response.read().decode().split("\n")


@needs_x86_64
def test_without_seccomp_a_request_cannot_leave_ipc_objects(layers):
    if "namespaces" not in layers:
        pytest.skip("namespaces do not work here")
    with running(REFUSE, json.dumps([SECCOMP])) as client:
        assert set(client.layers) == layers - {"seccomp"}
        get = "import ctypes; print(ctypes.CDLL(None).shmget(77, 4096, {flags}) >= 0)"
        assert client.stdout(get.format(flags=0o1600)) == "True\n"
        assert client.stdout(get.format(flags=0)) == "False\n"
        left = "import os, time\nif os.fork() == 0: os.setsid(); time.sleep(60)\nprint(1)"
        assert client.stdout(left) == "1\n"
        assert client.stdout("import os; print([p for p in os.listdir('/proc') if p.isdigit()] == [str(os.getpid())])")


@needs_x86_64
@pytest.mark.parametrize(
    ("refused", "options", "message"),
    [
        ([UNSHARE, LANDLOCK, SECCOMP], [], "no isolation works on this machine .* start with --isolation none"),
        ([LANDLOCK], ["--isolation", "full"], "--isolation full needs all layers, but .*landlock: "),
        ([UNSHARE], ["--isolation", "full"], "--isolation full needs all layers, but .* namespaces"),
    ],
    ids=["auto without any", "full without landlock", "full without namespaces"],
)
def test_server_refuses_to_start(refused, options, message):
    command = [sys.executable, "-c", REFUSE, json.dumps(refused), "--preload", "", *options]
    run = subprocess.run(
        command, cwd=REPOSITORY, env=os.environ | PATHS, capture_output=True, text=True, timeout=30, check=False
    )
    assert (run.returncode, run.stdout) == (1, "")
    assert re.fullmatch(rf"sandbox: .*{message}.*\n", run.stderr)


@needs_x86_64
def test_none_starts_where_nothing_works():
    with running(REFUSE, json.dumps([UNSHARE, LANDLOCK, SECCOMP]), "--isolation", "none") as client:
        assert client.layers == ["rlimits"]
        assert client.stdout("print(1)") == "1\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_ordinary_user_has_all_layers(layers, tmp_path):
    if "namespaces" not in layers:
        pytest.skip("namespaces do not work here")
    with running(OPEN_INTERPRETER + AS_NOBODY, "--isolation", "full") as client:
        assert set(client.layers) == layers - {"uid"}
        assert client.stdout("import os; print(os.getuid(), os.getppid(), os.listdir())") == "1000 1 ['main.py']\n"
        for _ in range(2):
            path = "x" if IS_BELOW_TMP else "/tmp/x"
            assert client.stdout(f"print(open({path!r}, 'x').name, input())", stdin="in") == f"{path} in\n"
        for attack in ("import os; os.fork()", "import socket; socket.socket()", "open('/etc/hostname')"):
            assert re.search("PermissionError|FileNotFoundError", client.stdout(attack))


@needs_x86_64
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize(
    ("refused", "left"),
    [([UNSHARE], ["landlock", "seccomp", "uid"]), ([UNSHARE, LANDLOCK, SECCOMP], None)],
    ids=["no namespaces", "no layer but the user"],
)
def test_root_runs_programs_as_a_user_that_owns_nothing(layers, tmp_path, refused, left):
    if not {"namespaces", "landlock", "seccomp"} <= layers:
        pytest.skip(f"this machine has {layers}")
    if left is None:  # a user by itself is not enough for `auto`
        server = running(OPEN_INTERPRETER + REFUSE, json.dumps(refused))
        with pytest.raises(AssertionError, match="no isolation works"), server:
            pass
        return
    host = tmp_path / "host"
    host.write_text("a file of the host")
    with running(OPEN_INTERPRETER + REFUSE, json.dumps(refused)) as client:
        assert client.layers == ["rlimits", *left]
        assert int(client.stdout("import os; print(os.getuid())")) >= 61184
        assert client.stdout("open('a', 'w').write('x'); print(open('a').read())") == "x\n"
        assert client.stdout("import os; print(os.listdir())") == "['main.py']\n"
        for attack in (f"open({str(host)!r})", "import os; os.setuid(0)", "import os; os.kill(os.getppid(), 9)"):
            assert "PermissionError" in client.stdout(attack)


@needs_x86_64
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_servers_of_a_machine_give_programs_users_of_their_own(tmp_path):
    """Programs may not kill another server's processes or use up their number, which RLIMIT_NPROC counts by user."""
    users = []
    for _ in range(3):  # two of three may draw the same
        with running(OPEN_INTERPRETER + REFUSE, json.dumps([UNSHARE])) as client:
            users.append(client.stdout("import os; print(os.getuid())"))
    assert len(set(users)) > 1


# --- the filter


def evaluate(program: bytes, number: int, *arguments: int, arch: int = seccomp.AUDIT_ARCH_X86_64) -> int:
    """Return what the kernel does with a system call: linux/net/core/filter.c, for the instructions that we use."""
    data = seccomp.struct.pack("<IIQ6Q", number, arch, 0, *(a & (2**64 - 1) for a in (*arguments, *[0] * 6)[:6]))
    code = list(seccomp.INSTRUCTION.iter_unpack(program))
    accumulator = position = 0
    while True:
        kind, jump_true, jump_false, operand = code[position]
        position += 1
        match kind:
            case seccomp.LOAD:
                (accumulator,) = seccomp.struct.unpack_from("<I", data, operand)
            case seccomp.AND:
                accumulator &= operand
            case seccomp.JUMP_EQUAL:
                position += jump_true if accumulator == operand else jump_false
            case seccomp.JUMP_GREATER:
                position += jump_true if accumulator > operand else jump_false
            case seccomp.RETURN:
                return operand


@needs_x86_64
@pytest.mark.parametrize(
    ("call", "without", "with_subprocess", "why"),
    [
        ((0, 3), ALLOWED, ALLOWED, "read"),
        ((57,), EPERM, ALLOWED, "fork"),
        ((59,), EPERM, ALLOWED, "execve"),
        ((322,), EPERM, ALLOWED, "execveat"),
        ((56, 0x3D0F00), ALLOWED, ALLOWED, "clone of a thread"),
        ((56, 17), EPERM, ALLOWED, "clone of a process"),
        ((56, 0x4111), EPERM, ALLOWED, "clone as posix_spawn does it"),
        ((56, 0x10000000 | 17), EPERM, EPERM, "clone into a user namespace"),
        ((56, 0x00020000 | 0x3D0F00), EPERM, EPERM, "clone of a thread into a mount namespace"),
        ((435,), ENOSYS, ENOSYS, "clone3"),
        ((467,), ENOSYS, ENOSYS, "newer than the list"),
        ((0x40000000 | 57,), ENOSYS, ENOSYS, "x32"),
        ((41, 2, 1), EPERM, EPERM, "socket"),
        ((53, 1, 1), ALLOWED, ALLOWED, "socketpair, stream"),
        ((53, 1, 0o2004001), ALLOWED, ALLOWED, "socketpair, stream, close-on-exec, non-blocking"),
        ((53, 1, 2), EPERM, EPERM, "socketpair, datagram"),
        ((53, 2, 1), EPERM, EPERM, "socketpair, internet"),
        ((302, 0, 9), ALLOWED, ALLOWED, "prlimit64 of itself"),
        ((302, 1, 9), EPERM, EPERM, "prlimit64 of another"),
        ((141, 0, 0, 5), ALLOWED, ALLOWED, "nice"),
        ((141, 0, 1, 5), EPERM, EPERM, "setpriority of another"),
        ((141, 2, 0, 5), EPERM, EPERM, "setpriority of a user"),
        ((203, 0), ALLOWED, ALLOWED, "sched_setaffinity of itself"),
        ((203, 1), EPERM, EPERM, "sched_setaffinity of another"),
        ((72, 3, 1032), ALLOWED, ALLOWED, "fcntl"),
        ((72, 3, 8, 1), EPERM, EPERM, "fcntl F_SETOWN"),
        ((72, 3, 10, 9), EPERM, EPERM, "fcntl F_SETSIG"),
        ((72, 3, 15, 9), EPERM, EPERM, "fcntl F_SETOWN_EX"),
        ((16, 0, 0x5401), ALLOWED, ALLOWED, "isatty"),
        ((16, 0, 0x5412), EPERM, EPERM, "ioctl TIOCSTI"),
        ((16, 0, 0xFFFFFFFF00005412), EPERM, EPERM, "ioctl TIOCSTI: the kernel ignores the upper half"),
        ((62, 1, 9), ALLOWED, ALLOWED, "kill: the process namespace bounds it"),
        ((101,), EPERM, EPERM, "ptrace"),
        ((319,), EPERM, EPERM, "memfd_create"),
    ],
)
def test_filter_allows_and_denies(call, without, with_subprocess, why):
    assert evaluate(seccomp.assemble(allow_subprocess=False), *call) == without, why
    assert evaluate(seccomp.assemble(allow_subprocess=True), *call) == with_subprocess, why


@needs_x86_64
def test_filter_kills_calls_of_another_architecture():
    assert evaluate(seccomp.assemble(allow_subprocess=False), 20, arch=0x40000003) == seccomp.KILL_PROCESS


@needs_x86_64
@pytest.mark.parametrize("number", [62, 200, 234, 129, 297])
def test_filter_for_one_process_lets_it_signal_only_itself(number):
    program = seccomp.assemble(allow_subprocess=False, only_pid=1234)
    assert evaluate(program, number, 1234, signal.SIGKILL) == ALLOWED
    for other in (0, 1, 1233, -1, -1234):
        assert evaluate(program, number, other, signal.SIGKILL) == EPERM


@needs_x86_64
def test_every_call_of_the_list_is_denied():
    program = seccomp.assemble(allow_subprocess=False)
    for name, number in (seccomp.DENIED | seccomp.DENIED_WITHOUT_SUBPROCESS).items():
        assert evaluate(program, number) == EPERM, name


def test_interpreter_below_tmp_costs_no_layer(layers: set[str]) -> None:
    """There /tmp of the programs holds it, and cannot be a link to their own folder, which is $TMPDIR all the same."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o755)
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=50)
        paths = os.pathsep.join([str(REPOSITORY), sysconfig.get_path("purelib")])
        command = [f"{folder}/bin/python", "-m", "verl_ext.sandbox.server", "--port", "0", "--preload", ""]
        process = subprocess.Popen(
            command,
            cwd=REPOSITORY,
            env=os.environ | {"PYTHONPATH": paths},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            client = Client(process)
            code = "import sys, tempfile; print(sys.prefix); tempfile.TemporaryFile().write(b'x')"
            assert (set(client.layers), client.stdout(code)) == (layers, f"{folder}\n")
        finally:
            process.terminate()
            process.communicate(timeout=10)
