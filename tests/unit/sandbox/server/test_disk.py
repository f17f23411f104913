"""The limit of a program's files if it has no separate file system: counted, and then killed."""

import ctypes
import gc
import itertools
import mmap
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.sandbox.machines import MACHINES, machines, server_on
from tests.unit.sandbox.server_process import REPOSITORY, Server, wait_until
from verl_ext.sandbox.server import disk

MIB = 1 << 20
libc = ctypes.CDLL(None)


@pytest.fixture
def watch(tmp_path, monkeypatch) -> disk.DiskWatch:
    """With limits that a test reaches quickly."""
    monkeypatch.setattr(disk, "HOME_BYTES", 4 * MIB)
    monkeypatch.setattr(disk, "HOME_INODES", 50)
    return disk.DiskWatch(str(tmp_path), os.geteuid())


def test_bytes_that_are_on_the_disk_count_and_holes_do_not(watch, tmp_path):
    (tmp_path / "a").mkdir()
    with open(tmp_path / "a/sparse", "wb") as file:
        file.truncate(1 << 30)
    (tmp_path / "a/b").write_bytes(b"x" * 3 * MIB)
    os.link(tmp_path / "a/b", tmp_path / "again")  # the same file
    assert watch.excess([]) == ""
    (tmp_path / "c").write_bytes(b"x" * 2 * MIB)
    assert watch.excess([]) == "disk limit: its files take more than 4 MiB"


def test_files_folders_and_links_count(watch, tmp_path):
    for i in range(25):
        (tmp_path / f"d{i}").mkdir()
    assert watch.excess([]) == ""
    for i in range(26):
        (tmp_path / f"d1/l{i}").symlink_to("nowhere")
    assert watch.excess([]) == "disk limit: it has more than 50 files and folders"


@pytest.mark.parametrize("files", [1, 60])  # within the limit, and beyond it
def test_a_count_leaves_nothing_for_the_next_program_to_find(watch, tmp_path, files):
    """Programs are forks of the process that does the counting."""
    for i in range(files):
        (tmp_path / str(i)).touch()
    watch.excess([])
    inodes = {path.stat().st_ino for path in tmp_path.iterdir()}
    assert not [found for found in gc.get_objects() if type(found) is set and found is not inodes and found & inodes]


@pytest.mark.parametrize("how", ["open", "mapped"])
def test_file_without_a_name_counts(watch, tmp_path, monkeypatch, how):
    monkeypatch.setattr(disk, "MAPS_S", 0)
    fd = os.open(tmp_path / "a", os.O_RDWR | os.O_CREAT)
    os.write(fd, b"x" * 5 * MIB)
    os.unlink(tmp_path / "a")
    memory = mmap.mmap(fd, 5 * MIB)
    if how == "mapped":
        os.close(fd)
    assert watch.excess([os.getpid()]) == "disk limit: its files take more than 4 MiB"
    memory.close()
    if how == "open":
        os.close(fd)
    assert watch.excess([os.getpid()]) == ""


@pytest.mark.parametrize("mode", [0, 0o100, 0o400])
def test_locked_folder_counts(tmp_path, mode):
    """Only for users other than root, whom no mode stops."""
    code = f"""
import os, sys
from verl_ext.sandbox.server import disk
from verl_ext.sandbox.server import isolation
if os.geteuid() == 0:
    isolation.set_uid(65534)
folder = {str(tmp_path)!r}
os.mkdir(folder + "/a")
open(folder + "/a/b", "wb").write(bytes(4 << 20) + b"x" * (4 << 20))
os.chmod(folder + "/a", {mode})
disk.HOME_BYTES = 4 << 20
print(disk.DiskWatch(folder, os.geteuid()).excess([]))
"""
    for folder in (tmp_path, *tmp_path.parents[:3]):
        if folder != Path("/tmp"):
            folder.chmod(0o777)
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, cwd="/", env=environment, capture_output=True, text=True, check=False)
    assert (run.stdout, run.stderr) == ("disk limit: its files take more than 4 MiB\n", "")


def test_depth_is_limited_so_that_counting_is_quick(watch, tmp_path, monkeypatch):
    monkeypatch.setattr(disk, "HOME_INODES", 10_000)
    folder = os.open(tmp_path, os.O_RDONLY)
    for _ in range(600):
        os.mkdir("d" * 200, dir_fd=folder)
        below = os.open("d" * 200, os.O_RDONLY, dir_fd=folder)
        os.close(folder)
        folder = below
    os.close(folder)
    descriptors = len(os.listdir("/proc/self/fd"))
    started = time.monotonic()
    assert watch.excess([]) == "disk limit: it has more than 128 folders in each other"
    assert time.monotonic() - started < 2
    assert len(os.listdir("/proc/self/fd")) == descriptors
    subprocess.run(["rm", "-rf", tmp_path / ("d" * 200)], check=True)


def test_folder_that_becomes_a_link_leads_nowhere(watch, tmp_path, monkeypatch):
    """What a program does between two of the watch's calls changes nothing outside of its folder."""
    aside, folder = tmp_path / "aside", tmp_path / "folder"
    for each in (aside, folder, aside / "b", folder / "a", folder / "a/b"):
        each.mkdir(mode=0o500)
        each.chmod(0o700)
    (aside / "b/big").write_bytes(b"x" * 5 * MIB)
    (aside / "b").chmod(0o500)
    (folder / "a/b").chmod(0)
    watch.folder = str(folder)
    real_open = disk.openat

    def open_after_exchange(parent: int, name: int, flags: int) -> int:
        if ctypes.string_at(name) == b"b" and not (folder / "a").is_symlink():
            (folder / "a").rename(folder / "was-a")
            (folder / "a").symlink_to(aside)
        return real_open(parent, name, flags)

    monkeypatch.setattr(disk, "openat", open_after_exchange)
    assert watch.excess([]) == ""
    assert (folder / "a").is_symlink()
    assert (aside / "b").stat().st_mode & 0o777 == 0o500


def test_threads_are_limited(watch):
    stop = threading.Event()
    threads = [threading.Thread(target=stop.wait) for _ in range(disk.MAX_TASKS)]
    for thread in threads:
        thread.start()
    try:
        assert watch.excess([os.getpid()]) == "thread limit: it has more than 128 threads"
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_pause_grows_with_what_a_count_takes_and_has_an_end(watch, monkeypatch):
    clock = itertools.chain([10.0], itertools.repeat(10.005))
    monkeypatch.setattr(disk.time, "monotonic", lambda: next(clock))
    watch.excess([])
    assert watch.next_check == pytest.approx(10.005 + 10 * 0.005)
    clock = itertools.chain([10.0], itertools.repeat(10.5))
    watch.excess([])
    assert watch.next_check == 10.5 + disk.MAX_PAUSE_S


def test_part_of_a_file_without_a_name_that_is_mapped_counts_as_a_file_of_any_size(watch, tmp_path):
    """The whole file stays on the disk, and nobody can see how large it is."""
    with open(tmp_path / "a", "w+b") as file:
        file.write(b"x" * 5 * MIB)
        file.flush()
        memory = map_without_descriptor(file.fileno())
    (tmp_path / "a").unlink()
    assert watch.excess([os.getpid()]) == "disk limit: its files take more than 4 MiB"
    libc.munmap(ctypes.c_void_p(memory), mmap.PAGESIZE)


def map_without_descriptor(fd: int) -> int:
    """Map one page. Python's own mmap would also keep the file open."""
    libc.mmap.restype = ctypes.c_void_p
    return libc.mmap(None, ctypes.c_size_t(mmap.PAGESIZE), mmap.PROT_READ, mmap.MAP_SHARED, fd, ctypes.c_long(0))


def test_files_of_a_process_whose_first_thread_has_ended_count(watch, tmp_path):
    code = f"""
import ctypes, os, threading, time
fd = os.open({str(tmp_path / "a")!r}, os.O_RDWR | os.O_CREAT)
os.write(fd, bytes(5 << 20))
os.unlink({str(tmp_path / "a")!r})
threading.Thread(target=time.sleep, args=(60,)).start()
ctypes.CDLL(None).syscall(60, 0)
"""
    process = subprocess.Popen([sys.executable, "-S", "-c", code])
    try:
        wait_until(lambda: b"\nState:\tZ" in Path(f"/proc/{process.pid}/status").read_bytes())
        assert watch.excess([process.pid]) == "disk limit: its files take more than 4 MiB"
    finally:
        process.kill()
        process.wait()
    assert watch.excess([process.pid]) == ""


def test_process_that_has_ended_hides_nothing(watch):
    process = subprocess.Popen([sys.executable, "-S", "-c", ""])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # and its exit code has not been fetched
    assert watch.excess([os.getpid(), process.pid]) == ""
    process.wait()


# --- through the server


MOUNTS_REFUSED = machines("ordinary user in plain Docker", "plain Docker")


@pytest.fixture(scope="module", params=MOUNTS_REFUSED)
def server(request) -> Iterator[Server]:
    server = Server("--preload", "", "--max-sessions", "2", launcher=MACHINES[request.param])
    yield server
    server.process.terminate()
    _, stderr = server.process.communicate(timeout=10)
    assert "files are counted while they run" in stderr


forking = server_on(MOUNTS_REFUSED, "--allow-subprocess")


WRITE = "import os, time\nfor i in range({files}): open(f'f{{i}}', 'wb').write(bytes(1) * {size})\n{after}"


@pytest.mark.parametrize(
    ("files", "size", "after"),
    [(5, 40 * MIB, "time.sleep(60)"), (5, 40 * MIB, ""), (4200, 0, "time.sleep(60)"), (4200, 0, "os._exit(0)")],
    ids=["bytes", "bytes, at once", "files", "files, at once"],
)
def test_program_over_the_limit_is_killed_and_told_why(server, files, size, after):
    result = server.result(WRITE.format(files=files, size=size, after=after), run_timeout=25)  # a busy disk is slow
    assert (result["status"], result["return_code"]) == ("Finished", -9)
    assert "\nKilled: disk limit: " in result["stderr"]


@pytest.mark.parametrize("keep", ["open", "mapped"])
def test_files_without_a_name_are_limited(server, keep):
    code = f"""
import mmap, os, time
kept = []
for i in range(5):
    fd = os.open('f', os.O_RDWR | os.O_CREAT)
    os.unlink('f')
    for _ in range(50): os.write(fd, bytes(1 << 20))
    if {keep!r} == 'mapped':
        kept.append(mmap.mmap(fd, 50 << 20))
        os.close(fd)
    time.sleep(0.2)
time.sleep(9)
"""
    result = server.result(code, run_timeout=8)
    assert result["return_code"] == -9, result
    assert result["stderr"].endswith("\nKilled: disk limit: its files take more than 128 MiB\n")


HOG = """
import ctypes, os, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
def hog(files=8):
    for i in range(files):
        fd = os.open(f'u{os.getpid()}-{i}', os.O_RDWR | os.O_CREAT)
        os.unlink(f'u{os.getpid()}-{i}')
        for _ in range(50): os.write(fd, bytes(1 << 20))
    time.sleep(9)
"""
HOGS = {
    "after its first thread has ended": "threading.Thread(target=hog).start(); libc.syscall(60, 0)",
    "mapped in part": """
libc.mmap.restype = ctypes.c_void_p
for i in range(8):
    fd = os.open('f', os.O_RDWR | os.O_CREAT)
    os.unlink('f')
    for _ in range(50): os.write(fd, bytes(1 << 20))
    libc.mmap(None, ctypes.c_size_t(4096), 1, 1, fd, ctypes.c_long(0))
    os.close(fd)
time.sleep(9)""",
}
FORKING_HOGS = {
    "in children": "for _ in range(4):\n    if os.fork() == 0: hog(2)\ntime.sleep(9)",
    "in children whose parent has ended": """
for _ in range(4):
    if os.fork() == 0:
        if os.fork() == 0: os.setsid(); hog(2)
        os._exit(0)
time.sleep(9)""",
    "in a process whose executable cannot be read": """
fd = os.open('sleep', os.O_WRONLY | os.O_CREAT, 0o111)
os.write(fd, open('/bin/sleep', 'rb').read()); os.close(fd)
fds = [os.open(f'z{i}', os.O_RDWR | os.O_CREAT) for i in range(8)]
for i, fd in enumerate(fds): os.unlink(f'z{i}'); os.set_inheritable(fd, True)
for fd in fds:
    if os.fork() == 0: os.execv('./sleep', ['sleep', '9'])
    for _ in range(50): os.write(fd, bytes(1 << 20))
    os.close(fd)
os.execv('./sleep', ['sleep', '9'])""",
}


@pytest.mark.parametrize("name", HOGS)
def test_files_are_limited_wherever_a_program_holds_them(server, name):
    check_hog(server, HOGS[name])


@pytest.mark.parametrize("name", FORKING_HOGS)
def test_files_of_all_processes_are_limited(forking, name):
    check_hog(forking, FORKING_HOGS[name])


def check_hog(server: Server, code: str) -> None:
    result = server.result(HOG + code, run_timeout=8)
    assert (result["status"], result["return_code"]) == ("Finished", -9), result
    assert "\nKilled: disk limit: " in result["stderr"]
    assert server.result("print(1)")["stdout"] == "1\n"


def test_space_cannot_be_taken_at_once(server):
    """The kernel would take more than the limit of a file, and in a moment as many files as there may be.

    libc would write zeros instead, but asks the file system first, which programs may not do.
    """
    code = """
import ctypes, errno, os
libc = ctypes.CDLL(None, use_errno=True)
fd = os.open('f', os.O_RDWR | os.O_CREAT)
for mode in (0, 1, 0x11, 3):
    libc.fallocate(fd, mode, ctypes.c_long(0), ctypes.c_long(3 << 30))
    print(errno.errorcode[ctypes.get_errno()], os.fstat(fd).st_blocks)
try: os.posix_fallocate(fd, 0, 1 << 20)
except PermissionError: print(os.fstat(fd).st_size)
"""
    assert server.result(code)["stdout"] == "ENOTSUP 0\n" * 4 + "0\n"


def test_programs_that_start_others_within_the_limit_go_on(forking):
    code = """
import os, subprocess, threading
for _ in range(100):
    if os.fork() == 0: os._exit(0)
for _ in range(3): subprocess.run(['sleep', '0.1'], check=True)
threads = [threading.Thread(target=os.getpid) for _ in range(200)]
for thread in threads: thread.start(); thread.join()
print('ok')
"""
    result = forking.result(code, run_timeout=8)
    assert (result["stdout"], result["stderr"], result["return_code"]) == ("ok\n", "", 0)


def test_program_within_the_limit_is_not(server):
    result = server.result(WRITE.format(files=3, size=40 * MIB, after="print('ok')"))
    assert (result["stdout"], result["stderr"], result["return_code"]) == ("ok\n", "", 0)


def test_session_is_limited_over_all_its_calls(server):
    for i in range(3):
        code = f"open('f{i}', 'wb').write(bytes(60 << 20)); print('ok')"
        answer = server.run(code, session_id="disk")
        assert answer["session"]["alive"] == (i < 2), answer
    assert "disk limit" in answer["run_result"]["stderr"]
