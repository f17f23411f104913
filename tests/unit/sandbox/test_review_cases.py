"""Programs that beat an earlier sandbox, word for word, on every kind of machine; see also test_channels.py."""

import sys
import threading
import time

import pytest

from tests.unit.sandbox.machines import MACHINES, USUAL, needs_root, server_on
from tests.unit.sandbox.server_process import Server, wait_for_sleeping_program

SYNCFS = r"""
import ctypes,os,time,threading
l=ctypes.CDLL(None,use_errno=True)
fd=os.open('/usr/bin',os.O_RDONLY)
def f():
    while True:
        t=time.time(); r=l.syncfs(fd); print('syncfs',r,ctypes.get_errno(),round(time.time()-t,2),flush=True)
for _ in range(4): threading.Thread(target=f,daemon=True).start()
time.sleep(100)
"""
FLOCK = r"""
import fcntl,os,time
fd=os.open('/usr/bin/env',0)
try: fcntl.flock(fd,fcntl.LOCK_EX|fcntl.LOCK_NB); print('LOCKED')
except OSError as e: print('HELD BY OTHER',e)
"""
DISK = r"""
b=b'x'*(1<<20)
n=0
for i in range(4):
    with open(f'big{i}','wb') as f:
        for _ in range(60): f.write(b); n+=1
print(n,'MB on disk, no limit')
"""
SCM_RIGHTS = r"""
import socket,os,array,time
n=0;S=[]
try:
  for k in range(60):
    a,b=socket.socketpair(); S+=[a,b]
    socket.send_fds(a,[b'x'],[0]*250); n+=250
except OSError as e: print(e)
print('in flight',n,flush=True)
time.sleep(4)
"""
SESSION_FD3 = r"""
import os,struct
for i in range(3): os.write(3,struct.pack('<i',0))
print('forged')
"""
WALK = "import os\nfor d,_,fs in os.walk({folder!r}):\n  for f in fs: print('READ',d+'/'+f)"

# In a separate mount namespace, a file with answers where administrators keep sources.
FOLDERS = ("/usr/src", "/usr/etc", "/usr/share", "/usr/local/src", "/usr/local/etc", "/usr/local/share", "/usr/games")
HOST_WITH_SOURCES = f"""
import os, sys
from verl_ext.sandbox.server import namespaces as n
n.unshare(n.CLONE_NEWNS)
n.mount(None, "/", None, n.MS_REC | n.MS_PRIVATE)
for folder in {FOLDERS!r}:
    if os.path.isdir(folder):
        if folder != "/usr/share":
            n.mount("tmpfs", folder, "tmpfs", 0, "mode=755")
            os.makedirs(folder + "/repository/data")
            open(folder + "/repository/data/answers", "w").write("42")
os.execv(sys.executable, [sys.executable, "-m", "verl_ext.sandbox.server", "--port", "0", *sys.argv[1:]])
"""


server = server_on(USUAL, "--max-sessions", "4")


def test_syncfs_is_denied_and_its_program_is_a_timeout(server):
    started = time.monotonic()
    result = server.result(SYNCFS, run_timeout=1)
    assert (result["status"], result["stdout"][:12]) == ("TimeLimitExceeded", "syncfs -1 1 ")
    assert time.monotonic() - started < 5


def test_flock_is_denied(server):
    assert server.result(FLOCK)["stdout"].startswith("HELD BY OTHER [Errno 1]")


def test_disk_limit_holds(server):
    result = server.result(DISK)
    assert result["return_code"] != 0
    assert "no limit" not in result["stdout"]
    expected = "No space left on device" if "root" in server.ping()["layers"] else "disk limit: "
    assert expected in result["stderr"]
    assert server.result("print(1)")["stdout"] == "1\n"


def test_descriptors_in_flight_end_no_other_session(server):
    server.run("x = 1", session_id="other")
    attack = threading.Thread(target=server.run, args=(SCM_RIGHTS,), kwargs={"run_timeout": 3})
    attack.start()
    wait_for_sleeping_program(server, fds=range(5, 500))  # the sockets of its attempt
    for _ in range(3):
        answer = server.run("print(x)", session_id="other", run_timeout=2)
        assert answer["run_result"]["stdout"] == "1\n", answer
    attack.join()


def test_forged_return_codes_decide_no_later_call(server):
    server.run(SESSION_FD3, session_id="forged")
    answer = server.run("raise SystemExit(7)", session_id="forged")
    assert (answer["status"], answer["run_result"]["return_code"]) == ("Failed", 7)


WALK = """
def walk(*_):
    frame = sys._getframe()
    while frame:
        for v in list(frame.f_locals.values()):
            for item in v if type(v) is list else [v]:
                if type(item) is bytes and len(item) == 16: send(item + bytes(4))
        frame = frame.f_back
"""


@pytest.mark.parametrize(
    "forge",
    [
        "for size in range(64): send(bytes(size))",
        "import threading\ndef f():\n    while True: send(bytes(4))\nthreading.Thread(target=f).start()",
        "fd = os.dup(3)\nimport atexit\natexit.register(os.write, fd, bytes(4))\nsend(bytes(20))",
        # what Python shows of all frames and objects, as a token
        """
frame, found = sys._getframe(), []
while frame:
    found += [v for v in frame.f_locals.values()]
    frame = frame.f_back
for v in list(found): found += v if isinstance(v, (list, tuple)) else v.values() if isinstance(v, dict) else []
for v in gc.get_objects(): found += v if isinstance(v, (list, tuple)) else v.values() if isinstance(v, dict) else []
for v in {bytes(v) for v in found if isinstance(v, (bytes, bytearray)) and len(v) == 16}: send(v + bytes(4))""",
        # what runs after the last line
        WALK + "class Stream:\n closed = False\n write = flush = walk\nsys.stdout = Stream()",
        WALK + "def trace(frame, *_):\n walk()\n return trace\nsys.settrace(trace)",
    ],
    ids=["sizes", "thread", "copy", "search", "stream", "trace"],
)
def test_no_forged_message_is_a_return_code(server, forge):
    prelude = "import gc, os, sys, time\ndef send(b):\n    try: os.write(3, b)\n    except OSError: pass\n"
    first = server.run(prelude + forge + "\ntime.sleep(0.1)\nsys.exit(5)", session_id="forge", run_timeout=3)
    assert first["status"] == "Failed", first
    answer = server.run("raise SystemExit(7)", session_id="forge")
    assert (answer["status"], answer["run_result"]["return_code"]) == ("Failed", 7)
    server.request("/v1/sessions/forge", method="DELETE")


@needs_root
@pytest.mark.parametrize("machine", ["all layers", "plain Docker"])
def test_sources_and_configuration_below_usr_cannot_be_read(machine):
    launcher = list(MACHINES[machine])
    if launcher[1] == "-c":  # the refusals come after the mounts
        first, _second = HOST_WITH_SOURCES.rsplit("os.execv", 1)
        launcher[2] = first + launcher[2]
    else:
        launcher = [sys.executable, "-c", HOST_WITH_SOURCES]
    server = Server("--preload", "", launcher=launcher)
    try:
        for folder in FOLDERS:
            if folder != "/usr/share":
                assert server.result(WALK.format(folder=folder))["stdout"] == "", folder
                stderr = server.result(f"open('{folder}/repository/data/answers')")["stderr"]
                assert "FileNotFoundError" in stderr or "PermissionError" in stderr
        read = server.result(WALK.format(folder="/usr/share"))["stdout"].splitlines()
        allowed = ("READ /usr/share/zoneinfo/", "READ /usr/share/font")
        assert not [line for line in read if not line.startswith(allowed)]
    finally:
        server.stop()


def test_what_python_needs_can_be_read(server):
    code = """
import ctypes.util, encodings.idna, os, sqlite3, ssl, sysconfig, unicodedata, zoneinfo
print(zoneinfo.ZoneInfo('Europe/Berlin').key, sqlite3.connect(':memory:').execute('select 1').fetchone()[0])
os.fsync(os.open('own', os.O_RDWR | os.O_CREAT))
"""
    result = server.result(code)
    assert (result["stdout"], result["return_code"]) == ("Europe/Berlin 1\n", 0), result
