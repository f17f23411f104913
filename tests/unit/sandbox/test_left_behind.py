"""What a program finds of the programs before it, and leaves to those after it and to the machine."""

import os
from collections.abc import Iterator

import pytest

from tests.unit.sandbox.machines import MACHINES, machines
from tests.unit.sandbox.server_process import Server


@pytest.fixture(
    scope="module",
    params=machines("all layers", "ordinary user in plain Docker", slow=("plain Docker", "ordinary user")),
)
def server(request) -> Iterator[Server]:
    """With one worker, which all programs are forks of."""
    server = Server("--preload", "", workers=1, launcher=MACHINES[request.param])
    yield server
    server.stop()


def test_flags_and_offset_of_the_standard_streams_are_a_programs_own(server):
    change = "import fcntl, os\nfor fd in (0, 1, 2): fcntl.fcntl(fd, fcntl.F_SETFL, os.O_NONBLOCK | os.O_APPEND)"
    look = "import fcntl\nprint([fcntl.fcntl(fd, fcntl.F_GETFL) & 0o777777 for fd in (0, 1, 2)])"
    before = server.result(look)["stdout"]
    assert server.result(change)["return_code"] == 0
    assert server.result(look)["stdout"] == before
    assert server.result("import sys\nprint(sys.stdin.read())")["stdout"] == "\n"


CHANGES = (
    "os.utime(path)",
    "os.utime(path, (1, 1))",
    "libc.syscall(132, path.encode(), 0)",  # utime
    "libc.syscall(235, path.encode(), 0)",  # utimes
    "libc.syscall(261, -100, path.encode(), 0)",  # futimesat
    "os.utime(os.open(path, os.O_RDONLY))",
    "os.chmod(path, 0)",
    "os.chown(path, -1, -1)",
    "os.chown(path, os.getuid(), os.getgid())",
    "os.setxattr(path, 'user.x', b'1')",
    "os.truncate(path, 0)",
    "os.close(os.open(path, os.O_WRONLY | os.O_TRUNC))",
)
TRY_ALL = """
import ctypes, os
libc = ctypes.CDLL(None)
for path in {paths!r}:
    for change in {changes!r}:
        try: exec(change)
        except OSError: pass
"""


def test_program_changes_nothing_of_a_device_of_the_machine(server):
    """Anybody may write to them, and so set their times."""
    paths = [f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom")]
    looks = [[look_at(path) for path in paths]]
    server.result(TRY_ALL.format(paths=paths, changes=CHANGES))
    assert [look_at(path) for path in paths] == looks[0]
    code = (
        "open('/dev/null', 'w').write('x')\nprint([len(open('/dev/' + n, 'rb').read(9)) for n in ('null', 'urandom')])"
    )
    assert server.result(code)["stdout"] == "[0, 9]\n"


def test_program_changes_nothing_of_a_file_that_anybody_may_write_to(server, tmp_path):
    """Landlock lets nobody write to it, and stops no change of its times and attributes."""
    path = tmp_path / "shared"
    path.write_text("x")
    for each in (path, *path.parents[:3]):
        each.chmod(0o777)
    before = [look_at(each) for each in (path, tmp_path)]
    server.result(TRY_ALL.format(paths=[str(path), str(tmp_path)], changes=CHANGES))
    assert [look_at(each) for each in (path, tmp_path)] == before
    assert path.read_text() == "x"


def look_at(path: object) -> tuple[object, ...]:
    status = os.stat(path)
    return status.st_mode, status.st_uid, status.st_gid, status.st_mtime_ns, status.st_ctime_ns, os.listxattr(path)


def test_process_ids_tell_nothing_of_the_programs_before(server):
    if "namespaces" not in server.ping()["layers"]:
        pytest.skip("here process ids are the machine's")
    code = "import os, threading\nt = threading.Thread(target=int)\nt.start()\nprint(os.getpid(), t.native_id)"
    first = server.result(code)["stdout"]
    for count in (1, 7, 30):
        server.result(
            f"import threading\nfor i in range({count}): t = threading.Thread(target=int); t.start(); t.join()"
        )
        assert server.result(code)["stdout"] == first


@pytest.mark.parametrize("path", ["/usr/lib", "/usr/bin/env", "/dev/null", "/"])
def test_program_cannot_see_how_full_a_disk_of_the_machine_is(server, path):
    code = f"""
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
fd = os.open({path!r}, os.O_PATH)
numbers = bytes(200)
print(libc.statfs({path!r}.encode(), numbers), libc.fstatfs(fd, numbers), libc.statvfs({path!r}.encode(), numbers))
print(libc.syscall(136, os.stat({path!r}).st_dev, numbers), libc.syscall(139, 3), any(numbers))"""
    assert server.result(code)["stdout"] == "-1 -1 -1\n-1 -1 False\n"
