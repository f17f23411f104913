"""What a program does to a file of the machine that it may only read, and what another must not see of that."""

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.unit.sandbox.machines import USUAL, server_on
from tests.unit.sandbox.server.test_isolation import ALLOWED, EPERM, evaluate, needs_x86_64
from tests.unit.sandbox.server_process import wait_for_sleeping_program
from verl_ext.sandbox.server import seccomp

PRETENDED = 0x00050000

PRELUDE = """
import ctypes, errno, fcntl, mmap, os, socket, struct, sys
libc = ctypes.CDLL(None, use_errno=True)
host = os.open('/usr/bin/env', os.O_RDONLY)
def call(number, *args):
    result = libc.syscall(ctypes.c_long(number), *[ctypes.c_long(a) if isinstance(a, int) else a for a in args])
    print(errno.errorcode[ctypes.get_errno()] if result == -1 else result)
def attempt(function, *args):
    try:
        print('DONE', function(*args))
    except OSError as exc:
        print(errno.errorcode[exc.errno])
lock = struct.pack('hhqqi4x', {type}, 0, 0, 1, 0)
"""
READ_LOCK, WRITE_LOCK = 0, 1


server = server_on(USUAL, needs="seccomp")


@pytest.mark.parametrize(
    "attempt",
    [
        "attempt(fcntl.flock, host, fcntl.LOCK_SH)",
        "attempt(fcntl.flock, host, fcntl.LOCK_EX | fcntl.LOCK_NB)",
        "attempt(fcntl.lockf, host, fcntl.LOCK_SH | fcntl.LOCK_NB)",
        "attempt(fcntl.fcntl, host, 5, lock)",  # F_GETLK
        "attempt(fcntl.fcntl, host, 6, lock)",  # F_SETLK
        "attempt(fcntl.fcntl, host, 7, lock)",  # F_SETLKW
        "attempt(fcntl.fcntl, host, 36, lock)",  # F_OFD_GETLK
        "attempt(fcntl.fcntl, host, 37, lock)",  # F_OFD_SETLK
        "attempt(fcntl.fcntl, host, 38, lock)",  # F_OFD_SETLKW
        "attempt(fcntl.fcntl, host, 1024, 0)",  # F_SETLEASE
        "attempt(fcntl.fcntl, host, 1025)",  # F_GETLEASE
        "attempt(fcntl.fcntl, os.open('/usr/bin', 0), 1026, 1)",  # F_NOTIFY
        "attempt(fcntl.fcntl, host, 1036, bytes(8))",  # F_SET_RW_HINT
        "attempt(fcntl.fcntl, host, 1035, bytes(8))",  # F_GET_RW_HINT
        "call(253)",  # inotify_init
        "call(294, 0)",  # inotify_init1
        "call(300, 0, 0)",  # fanotify_init
        "call(27, 0, 4096, 0)",  # mincore
        "call(451, host, 0, 0, 0)",  # cachestat
        "call(327, host, 0, 0, 0, 0, 8)",  # preadv2, RWF_NOWAIT
        "call(306, host)",  # syncfs
        "call(162)",  # sync
        "call(46, 0, 0, 0)",  # sendmsg
        "call(307, 0, 0, 0, 0)",  # sendmmsg
        "call(444, 0, 0, 1)",  # landlock_create_ruleset: rules take memory that no limit counts
        "call(317, 1, 0, 0)",  # seccomp
        "call(157, 22, 2, 0, 0, 0)",  # prctl(PR_SET_SECCOMP)
        "call(157, 4, 0, 0, 0, 0)",  # prctl(PR_SET_DUMPABLE)
        "call(157, 1, 0, 0, 0, 0)",  # prctl(PR_SET_PDEATHSIG): it would outlive its worker
        "attempt(fcntl.fcntl, os.pipe()[0], 1031, 1 << 20)",  # F_SETPIPE_SZ: counted per user
        # Without a network namespace these are the machine's interfaces, with their addresses.
        "attempt(fcntl.ioctl, socket.socketpair()[0], 0x8912, bytes(40))",  # SIOCGIFCONF
        "attempt(fcntl.ioctl, socket.socketpair()[0], 0x8915, bytes(40))",  # SIOCGIFADDR
        "attempt(fcntl.ioctl, socket.socketpair()[0], 0x8927, bytes(40))",  # SIOCGIFHWADDR
        "attempt(fcntl.ioctl, socket.socketpair()[0], 0x8910, bytes(40))",  # SIOCGIFNAME
        "attempt(socket.socketpair()[0].getsockopt, 1, 57, 8)",  # SO_COOKIE: counts the sockets of the machine
        "attempt(socket.socketpair()[0].getsockopt, 1, 71, 8)",  # SO_NETNS_COOKIE
        # a file's place on the disk, and its file system
        "attempt(fcntl.ioctl, host, 0xC020660B, bytes(32))",  # FIEMAP
        "attempt(fcntl.ioctl, host, 1, bytes(4))",  # FIBMAP
        "attempt(fcntl.ioctl, host, 0x80111500, bytes(17))",  # FS_IOC_GETFSUUID
        "attempt(fcntl.ioctl, host, 0x80086601, bytes(8))",  # FS_IOC_GETFLAGS
    ],
)
def test_call_is_denied(server, attempt):
    result = server.result(PRELUDE.format(type=READ_LOCK) + attempt)
    assert result["stdout"] == "EPERM\n", result


@pytest.mark.parametrize(
    "call",
    [
        "os.fsync({fd})",
        "os.fdatasync({fd})",
        "os.posix_fadvise({fd}, 0, 0, os.POSIX_FADV_DONTNEED)",
        "libc.sync_file_range({fd}, 0, 0, 7)",
        "mmap.mmap({fd}, 4096, mmap.MAP_SHARED, mmap.PROT_READ).flush()",
    ],
)
def test_call_that_a_disk_could_block_succeeds_on_any_file_and_does_nothing(server, call):
    prelude = (
        PRELUDE.format(type=READ_LOCK) + "own = os.open('own', os.O_RDWR | os.O_CREAT)\nos.write(own, bytes(5000))\n"
    )
    for fd in ("own", "host"):
        result = server.result(f"{prelude}print({call.format(fd=fd)})")
        assert result["stdout"] in ("None\n", "0\n"), result


@pytest.mark.parametrize(
    "lock", ["fcntl.flock(fd, 6)", "fcntl.lockf(fd, 5)", "fcntl.fcntl(fd, 37, struct.pack('hhqqi4x', 0, 0, 0, 0, 0))"]
)
def test_two_programs_at_once_see_no_lock_of_each_other(server, lock):
    code = f"""
import fcntl, os, struct, time
fd = os.open('/usr/bin/env', 0)
try:
    {lock}
    print('LOCKED')
except OSError as exc:
    print(exc.errno)
time.sleep(0.5)
"""
    results: list[dict] = []
    threads = [threading.Thread(target=lambda: results.append(server.result(code))) for _ in range(2)]
    threads[0].start()
    wait_for_sleeping_program(server, fds=(4,))  # its lock
    threads[1].start()
    for thread in threads:
        thread.join()
    assert [result["stdout"] for result in results] == ["1\n", "1\n"]


@pytest.fixture
def owned(tmp_path) -> Iterator[Path]:
    """A file and its folder that an ordinary user's server could change, outside of what programs may read."""
    for folder in (tmp_path, *tmp_path.parents[:3]):
        if folder != Path("/tmp"):
            folder.chmod(0o755)
    path = tmp_path / "file"
    path.write_text("x")
    if os.geteuid() == 0:
        for each in (path, tmp_path):
            os.chown(each, 65534, 65534)
    return path


def look(path: Path) -> tuple[object, ...]:
    """What a program must not change, with times in nanoseconds: in equal seconds a change would not be seen."""
    stat = os.stat(path)
    return stat, stat.st_mtime_ns, stat.st_ctime_ns, os.listxattr(path)


@pytest.mark.parametrize(
    "change",
    [
        "os.chmod(path, 0)",
        "os.chmod(path, 0o777)",
        "os.chmod(os.path.basename(path), 0, dir_fd=os.open(os.path.dirname(path), os.O_PATH))",
        "os.fchmod(os.open(path, os.O_PATH), 0)",
        "libc.syscall(452, -100, path.encode(), 0, 0)",  # fchmodat2
        "os.chown(path, -1, -1)",
        "os.lchown(path, -1, -1)",
        "os.utime(path, (1, 1))",
        "os.utime(path)",
        "libc.syscall(132, path.encode(), 0)",  # utime
        "libc.syscall(235, path.encode(), 0)",  # utimes
        "libc.syscall(261, -100, path.encode(), 0)",  # futimesat
        "os.setxattr(path, 'user.x', b'1')",
        "os.setxattr(path, 'user.x', b'1', follow_symlinks=False)",
        "libc.syscall(463, -100, path.encode(), 0, b'user.x', bytes(16), 16)",  # setxattrat
    ],
)
def test_no_call_changes_a_file_of_the_user(server, owned, change):
    """Landlock denies none of these; the user's own programs may do them if no mount is read-only."""
    before = [look(path) for path in (owned, owned.parent)]
    code = "import ctypes, os\nlibc = ctypes.CDLL(None)\npath = {path!r}\n"
    for path in (owned, owned.parent):
        server.result(code.format(path=str(path)) + change)
    assert [look(path) for path in (owned, owned.parent)] == before


LOOKS = {
    "getpriority": "os.getpriority(os.PRIO_PROCESS, {pid})",
    "sched_getaffinity": "len(os.sched_getaffinity({pid}))",
    "sched_getscheduler": "os.sched_getscheduler({pid})",
    "sched_getparam": "os.sched_getparam({pid}).sched_priority",
    "sched_rr_get_interval": "os.sched_rr_get_interval({pid}) * 0",
    "getpgid": "os.getpgid({pid}) * 0",
    "getsid": "os.getsid({pid}) * 0",
    "pidfd_open": "os.pidfd_open({pid}) * 0",
}


def test_program_cannot_look_at_the_processes_of_others_but_at_its_own(server):
    """What one program sets for itself, such as its priority, or that it has a thread, another must not see."""
    if "namespaces" in server.ping()["layers"]:
        pytest.skip("here a program sees no other process than its worker, which sets nothing")
    code = "import os\nfor {name} in [0]:\n try: print({look} is not None)\n except OSError: print(False)\n"
    for name, look in LOOKS.items():
        results = [
            server.result(code.format(name=name, look=look.format(pid=pid)))["stdout"]
            for pid in ("os.getppid()", "os.getpid()")
        ]
        assert results == ["False\n", "True\n"], name
    code = "import os, threading\n"
    code += "threading.Thread(target=lambda: print(len(os.sched_getaffinity(0)) > 0, os.nice(0) >= 0)).start()"
    assert server.result(code)["stdout"] == "True True\n"


def test_no_program_finds_the_folder_of_another(server):
    """Landlock allows stat() and readlink() on every path, so no other program may know the path."""
    leave = "import os, time\nos.symlink('a message', 'link')\ntime.sleep(1)\nprint(os.getcwd())"
    with ThreadPoolExecutor() as executor:
        first = executor.submit(server.result, leave)
        wait_for_sleeping_program(server)
        code = """
import os
for folder in ('..', os.getcwd() + '/..'):
    for i in range(200):
        try: print(os.readlink(f'{folder}/{i}/link'))
        except OSError: pass
try: print(os.listdir('..'))
except OSError: pass
print('looked')"""
        own = server.result("import os\nprint(os.getcwd())")["stdout"]
        assert server.result(code)["stdout"].splitlines()[-1:] == ["looked"]
        assert "a message" not in server.result(code)["stdout"]
        other = first.result()["stdout"]
    if "root" not in server.ping()["layers"]:  # where all have one path, each has another file system there
        assert other != own and len(other.rpartition("/")[2]) > 16


def test_programs_that_set_modes_and_times_of_their_files_go_on(server):
    code = """
import os, pathlib, shutil, tarfile, zipfile
pathlib.Path('a').write_text('a')
pathlib.Path('a').touch()
os.chmod('a', 0o644); os.utime('a', (1e9, 1e9)); os.chown('a', -1, -1)
shutil.copy('a', 'b'); shutil.copy2('a', 'c'); shutil.copytree('.', 'd', ignore=lambda *_: ['d'])
shutil.make_archive('e', 'tar', 'd'); shutil.unpack_archive('e.tar', 'f')
shutil.make_archive('e', 'zip', 'd'); shutil.unpack_archive('e.zip', 'g')
shutil.move('b', 'h'); shutil.rmtree('d')
print(open('f/a').read() + open('g/b').read() + open('h').read())
"""
    assert server.result(code)["stdout"] == "aaa\n"


def test_sqlite_works_on_a_file_without_locks(server):
    code = """
import sqlite3
for _ in range(2):
    with sqlite3.connect('x.db') as database:
        database.execute('create table if not exists t (a)')
        database.execute('insert into t values (1)')
    database.close()
print(sqlite3.connect('x.db').execute('select * from t').fetchall())
"""
    result = server.result(code)
    assert result["stdout"] == "[(1,), (1,)]\n", result


def test_ordinary_calls_beside_the_denied_ones_work(server):
    code = """
import asyncio, fcntl, os, socket, tempfile
a, b = socket.socketpair()
a.sendall(b'x'); print(b.recv(1), fcntl.fcntl(a, fcntl.F_GETFL) >= 0, fcntl.fcntl(a, fcntl.F_GETFD))
print(asyncio.run(asyncio.to_thread(abs, -1)))
with tempfile.TemporaryFile() as file:
    file.write(b'x'); file.flush(); os.fsync(file.fileno())
fd = os.open('/usr/bin/env', 0)
print(os.preadv(fd, [bytearray(4)], 0), len(os.sched_getaffinity(0)) > 0)
"""
    result = server.result(code)
    assert result["stdout"] == "b'x' True 1\n1\n4 True\n", result


@needs_x86_64
def test_filter_pretends_only_what_it_lists():
    program = seccomp.assemble(allow_subprocess=False)
    for name, number in seccomp.PRETENDED.items():
        assert evaluate(program, number, 3) == PRETENDED, name
    for number in set(range(466)) - set(seccomp.PRETENDED.values()):
        assert evaluate(program, number) != PRETENDED, number


@needs_x86_64
def test_filter_where_no_mount_is_read_only_changes_no_file_of_another():
    """Times and attributes of any file that others may write to; for a file of the same user, also the mode."""
    apart, shared, own = (
        seccomp.assemble(allow_subprocess=False, on_disk=on_disk, owns_files=owns)
        for on_disk, owns in ((False, False), (True, False), (True, True))
    )
    for numbers, expected in (
        (seccomp.TIMES, (ALLOWED, PRETENDED, PRETENDED)),
        (seccomp.EXTENDED_ATTRIBUTES, (ALLOWED, EPERM, EPERM)),
        (seccomp.MODES, (ALLOWED, ALLOWED, PRETENDED)),
    ):
        for number in numbers.values():
            assert tuple(evaluate(program, number, 3) for program in (apart, shared, own)) == expected, number
    for program in (apart, own):
        for request in (0x40086602, 0x401C5820):  # FS_IOC_SETFLAGS, FS_IOC_FSSETXATTR
            assert evaluate(program, 16, 3, request) == EPERM


@needs_x86_64
@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ((72, 3, 1), ALLOWED),  # F_GETFD
        ((72, 3, 4, 0o4000), ALLOWED),  # F_SETFL
        ((72, 3, 6), EPERM),
        ((72, 3, 1024), EPERM),
        ((157, 15), ALLOWED),  # PR_SET_NAME
        ((157, 22), EPERM),
        ((157, 4), EPERM),
        ((327, 3, 0, 0, 0, 0, 0), ALLOWED),
        ((327, 3, 0, 0, 0, 0, 8), EPERM),
        ((47, 3), ALLOWED),  # recvmsg: a session's program gets its next call by it
        ((44, 3), ALLOWED),  # sendto
    ],
)
def test_filter_tells_arguments_apart(call, expected):
    for allow_subprocess in (False, True):
        assert evaluate(seccomp.assemble(allow_subprocess=allow_subprocess), *call) == expected
