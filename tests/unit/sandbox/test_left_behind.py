"""What a program finds of earlier programs, and what it leaves to later ones and to the machine."""

import os

import pytest

from tests.unit.sandbox.machines import USUAL, server_on

MARK = "qzLeftBehind"  # searchers write it backwards, so that none finds itself


server = server_on(USUAL, workers=1)  # all programs are forks of the one worker


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
    """Anybody may write to these files, and therefore set their times."""
    paths = [f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom")]
    looks = [[look_at(path) for path in paths]]
    server.result(TRY_ALL.format(paths=paths, changes=CHANGES))
    assert [look_at(path) for path in paths] == looks[0]
    code = (
        "open('/dev/null', 'w').write('x')\nprint([len(open('/dev/' + n, 'rb').read(9)) for n in ('null', 'urandom')])"
    )
    assert server.result(code)["stdout"] == "[0, 9]\n"


def test_program_changes_nothing_of_a_file_that_anybody_may_write_to(server, tmp_path):
    """Landlock lets nobody write to the file, but does not stop changes of its times and attributes."""
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


# Without /proc, which is not there on every machine: a write() of a page that is not there fails. The one place that
# counts as nothing is `want` itself.
SEARCH = f"""
import ctypes, gc, os
want = bytes(reversed({MARK[::-1].encode()!r}))
libc = ctypes.CDLL(None)
libc.memmem.restype = ctypes.c_void_p
r, w = os.pipe()
near = {{(id(x) >> 21) + i for x in [*gc.get_objects(), *('x' * n for n in range(1, 9000, 3))] for i in (-1, 0, 1)}}
found = []
for page in (huge << 21 | i << 12 for huge in sorted(near) for i in range(512)):
    if libc.write(w, ctypes.c_void_p(page), 1) == 1:
        os.read(r, 1)
        address = libc.memmem(ctypes.c_void_p(page), ctypes.c_size_t(4096), want, ctypes.c_size_t(len(want)))
        if address and not id(want) < address < id(want) + 64: found.append(address)
print(len(near) > 1, [ctypes.string_at(address - 40, 90) for address in found[:3]])
"""
NAME = f"name = '{MARK[:4]}' + '{MARK[4:]}'\nimport mmap, os, time\n"
REQUESTS = {
    "code": {"code": f"x = '{MARK}' * 3"},
    "input": {"code": "input()", "stdin": MARK * 50},
    "files": {"code": "1", "files": {f"{MARK}/{MARK}.txt": "aGVsbG8="}},
    "output": {"code": NAME + "print(name * 1000)"},
    "error": {"code": NAME + "raise ValueError(name)"},
    "files that are fetched": {
        "code": NAME + "os.mkdir(name); open(f'{name}/{name}', 'w').write(name * 10)",
        "fetch_files": [f"{MARK}/{MARK}"],
    },
    "files that are not there": {"code": "1", "fetch_files": [f"{MARK}_{i}/{MARK}" for i in range(3)]},
    "files of its own": {
        "code": NAME
        + "for i in range(50): os.mkdir(name + str(i)); os.symlink(name, f'{name}{i}/{name}')\ntime.sleep(0.2)"
    },
    "files without a name": {
        "code": NAME
        + """
maps = []
for i in range(20):
    fd = os.open(name + str(i), os.O_RDWR | os.O_CREAT)
    os.write(fd, bytes(4096))
    maps.append(mmap.mmap(fd, 4096))
    os.unlink(name + str(i))
time.sleep(0.3)"""
    },
    "names of its threads": {
        "code": NAME
        + """
import ctypes, threading
def rename(): ctypes.CDLL(None).prctl(15, name.encode(), 0, 0, 0); time.sleep(0.4)
for _ in range(4): threading.Thread(target=rename).start()
rename()"""
    },
    "too many files": {"code": NAME + "for i in range(9999): open(name + str(i), 'w').write('x' * 40000)"},
    "its time": {"code": NAME + "open(name, 'w')\nwhile True: pass", "run_timeout": 0.3, "fetch_files": [MARK]},
}


@pytest.mark.parametrize("kind", REQUESTS)
def test_next_program_finds_no_word_of_the_request_before_in_its_memory(server, kind):
    server.run("pass")  # what a worker does once is done
    assert server.run(**REQUESTS[kind])["status"] in ("Success", "Failed")
    result = server.result(SEARCH, run_timeout=30)
    assert result["stdout"] == "True []\n", result


def test_next_program_finds_nothing_of_the_request_before_in_its_frames(server):
    """For example, how many there were and how much they printed. A float is a time, and belongs to this request."""
    code = """
import sys
frame, found = sys._getframe().f_back, []
while frame and frame.f_code.co_name != '<module>':
    for value in list(frame.f_locals.values()):
        attributes = [vars(each) for each in getattr(value, 'buffers', [])]
        for each in (value, *(x for attribute in attributes for x in attribute.values())):
            if type(each) in (int, list): found.append(each)
    frame = frame.f_back
print(found)"""
    server.run("pass")
    first = server.result(code)["stdout"]
    assert first.startswith("[")
    server.run("print('x' * 12345)", fetch_files=["a", "main.py"])
    assert server.result(code)["stdout"] == first


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
