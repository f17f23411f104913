"""Supervisor, in separate processes: it makes its process the reaper of all orphans below it."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from uuid import uuid4

import psutil
import pytest

from verl_ext.runs.lock import lock_folder

REPO = Path(__file__).resolve().parents[3]

# Poll often and be impatient, so that a test takes a second.
PREAMBLE = """
import os, sys
from pathlib import Path
from verl_ext.quickstart import supervise
supervise.POLL_S, supervise.MEMORY_POLL_S, supervise.GRACE_S = 0.02, 0.05, 0.3
"""
# Forks twice into a new session, as daemons do, maps a segment of shared memory, and reports.
DAEMON = """
import json, mmap, os, signal, sys, time
report, segment, stubborn = sys.argv[1], sys.argv[2], "stubborn" in sys.argv
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        if stubborn:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        maps = []
        for path in segment.split(","):
            with open(path, "a+b") as file:
                file.truncate(4096)
                maps.append(mmap.mmap(file.fileno(), 4096))
        with open(report + ".part", "w") as file:
            json.dump({"daemon": os.getpid(), "tmp": os.environ["TMPDIR"]}, file)
        os.replace(report + ".part", report)
        time.sleep(600)
    os._exit(0)
os.wait()
while not os.path.exists(report):
    time.sleep(0.01)
"""
WAIT = """
if stubborn:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
print("up", flush=True)
try:
    time.sleep(600)
except KeyboardInterrupt:
    print("ended in order")
"""


@pytest.fixture
def segment():
    """Name of a segment of shared memory, which does not outlive the test."""
    path = Path(f"/dev/shm/psm_test_{uuid4().hex[:8]}")
    yield path
    path.unlink(missing_ok=True)


def start(code, *arguments):
    return subprocess.Popen(
        [sys.executable, "-c", PREAMBLE + code, *map(str, arguments)],
        cwd=REPO,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(code, *arguments):
    """Run `code` after the preamble to its end; returns the JSON that it prints last."""
    process = start(code, *arguments)
    stdout, stderr = process.communicate(timeout=30)
    assert process.returncode == 0, stderr
    return json.loads(stdout.splitlines()[-1])


def wait_for(path, text, timeout_s=20.0):
    deadline = time.monotonic() + timeout_s
    while not path.exists() or text not in path.read_text():
        assert time.monotonic() < deadline, f"{path} was not written"
        time.sleep(0.02)


def read_when_there(path):
    wait_for(path, "}")
    return json.loads(path.read_text())


def is_gone(pid):
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("mood", ["polite", "stubborn"])
def test_a_daemon_and_its_shared_memory_do_not_outlive_the_command(tmp_path, segment, mood):
    report = tmp_path / "report"
    code = """
import json, psutil
supervise.MEMORY_POLL_S = 60  # what the daemon has just made is found too
with supervise.Supervisor() as supervisor:
    supervisor.run([sys.executable, "-c", *sys.argv[1:]], log=None)
    left = [p.pid for p in psutil.Process().children()]
print(json.dumps({"left": left, "segment": os.path.exists(sys.argv[3])}))
"""
    seen = run(code, DAEMON, report, segment, mood)
    assert seen == {"left": [], "segment": False}
    told = json.loads(report.read_text())
    assert is_gone(told["daemon"])
    assert told["tmp"].startswith("/tmp/retool-") and not Path(told["tmp"]).exists()


def test_shared_memory_of_a_process_that_is_gone_is_deleted(segment):
    code = """
import json
command = "import mmap, sys, time; f = open(sys.argv[1], 'w+b'); f.truncate(9); m = mmap.mmap(f.fileno(), 9)"
with supervise.Supervisor() as supervisor:
    supervisor.run([sys.executable, "-c", command + "; time.sleep(1.5)", sys.argv[1]], log=None)
print(json.dumps(os.path.exists(sys.argv[1])))
"""
    assert run(code, segment) is False


def test_only_shared_memory_that_a_command_made_is_deleted(tmp_path, segment):
    """Not what was there before, and no files in folders of /dev/shm: that may be the model."""
    before, folder = Path(f"{segment}_before"), Path(f"{segment}_folder")
    checkpoint = folder / "model.safetensors"
    try:
        before.write_bytes(b"x")
        folder.mkdir()
        code = """
with supervise.Supervisor() as supervisor:
    supervisor.run([sys.executable, "-c", *sys.argv[1:]], log=None)
print("null")
"""
        run(code, DAEMON, tmp_path / "report", f"{segment},{before},{checkpoint}")
        assert not segment.exists()
        assert before.exists() and checkpoint.exists()
    finally:
        before.unlink(missing_ok=True)
        checkpoint.unlink(missing_ok=True)
        folder.rmdir()


INTERRUPTED = """
try:
    with supervise.Supervisor() as supervisor:
        supervisor.run([sys.executable, "-c", *sys.argv[2:]], log=Path(sys.argv[1]))
except KeyboardInterrupt:
    raise SystemExit(7)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda n: n.name)
def test_a_signal_ends_the_command_and_leaves_nothing(tmp_path, segment, number):
    log, report = tmp_path / "log.txt", tmp_path / "report"
    process = start(INTERRUPTED, log, DAEMON + WAIT, report, segment)
    told = read_when_there(report)
    wait_for(log, "up")
    [command] = [p for p in psutil.Process(process.pid).children() if p.pid != told["daemon"]]
    process.send_signal(number)
    process.communicate(timeout=10)
    assert process.returncode == 7
    assert "ended in order" in log.read_text()  # it was interrupted first, as by Ctrl-C
    assert is_gone(command.pid) and is_gone(told["daemon"])
    assert not segment.exists() and not Path(told["tmp"]).exists()


def test_shared_memory_of_a_process_that_ends_at_the_signal_is_deleted(tmp_path, segment):
    """It was made since the last look, and no process has it open when the command has ended."""
    log, report = tmp_path / "log.txt", tmp_path / "report"
    command = "import mmap, sys, time; f = open(sys.argv[2], 'w+b'); f.truncate(9); m = mmap.mmap(f.fileno(), 9); "
    command += "open(sys.argv[1], 'w').write('{}'); time.sleep(600)"
    process = start("supervise.MEMORY_POLL_S = 60" + INTERRUPTED, log, command, report, segment)
    read_when_there(report)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=10)
    assert process.returncode == 7 and not segment.exists()


def test_pressing_ctrl_c_again_and_again_leaves_nothing_either(tmp_path, segment):
    log, report = tmp_path / "log.txt", tmp_path / "report"
    process = start(INTERRUPTED, log, DAEMON + WAIT, report, segment, "stubborn")
    told = read_when_there(report)
    wait_for(log, "up")
    [command] = [p for p in psutil.Process(process.pid).children() if p.pid != told["daemon"]]
    for _ in range(12):  # while it waits for a command and a daemon that ignore SIGTERM
        process.send_signal(signal.SIGINT)
        time.sleep(0.05)
    process.communicate(timeout=10)
    assert process.returncode != 0
    assert is_gone(command.pid) and is_gone(told["daemon"])
    assert not segment.exists() and not Path(told["tmp"]).exists()


def test_a_hang_up_that_nohup_ignores_stays_ignored(tmp_path):
    code = """
import json, signal
signal.signal(signal.SIGHUP, signal.SIG_IGN)
with supervise.Supervisor():
    os.kill(os.getpid(), signal.SIGHUP)
    inside = signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
restored = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
print(json.dumps([inside, restored]))
"""
    assert run(code) == [True, True]


def test_a_failure_shows_the_end_of_the_log_and_the_next_command_can_run(tmp_path):
    code = """
import json
log = Path(sys.argv[1]) / "new folder" / "log.txt"
messages = []
with supervise.Supervisor() as supervisor:
    for last in ("exit(3)", "os.kill(os.getpid(), 9)"):
        try:
            lines = "import os\\nfor i in range(60): print('line', i)\\n"
            supervisor.run([sys.executable, "-c", lines + last], log=log)
        except supervise.CommandFailed as error:
            messages.append(str(error))
    supervisor.run(["true"], log=log)
print(json.dumps(messages))
"""
    failed, killed = run(code, tmp_path)
    log = tmp_path / "new folder" / "log.txt"
    assert "failed with exit status 3." in failed and f"The end of {log}:" in failed
    assert "line 59" in failed and "line 20\n" in failed and "line 19\n" not in failed  # 40 lines
    assert "failed with exit status -9." in killed
    assert log.read_text().count("line 0\n") == 2  # appended


def test_commands_get_variables_and_a_private_tmpdir_and_watch_is_called(tmp_path):
    code = """
import json
calls = []
with supervise.Supervisor() as supervisor:
    supervisor.run(
        ["bash", "-c", 'sleep 1; echo $TMPDIR $MINE > "$OUT"'],
        log=None,
        env={"MINE": "x", "OUT": sys.argv[1]},
        watch=lambda: calls.append(1),
    )
print(json.dumps([len(calls), Path(sys.argv[1]).read_text().split()]))
"""
    calls, (folder, mine) = run(code, tmp_path / "out")
    assert calls >= 3 and mine == "x"
    assert len(folder) < 30 and not Path(folder).exists()  # short: Ray's socket paths lie below it


def test_peak_memory_is_that_of_the_commands_since_the_last_call():
    code = """
import json
with supervise.Supervisor() as supervisor:
    supervisor.run([sys.executable, "-c", "import time; x = b'x' * 80_000_000; time.sleep(1.5)"], log=None)
    print(json.dumps([supervisor.peak_gb(), supervisor.peak_gb()]))
"""
    first, second = run(code)
    assert 0.08 <= first < 0.2 and second == 0.0


def test_processes_that_were_there_before_and_the_sandbox_server_survive(tmp_path):
    code = """
import json, subprocess
def sleeper(*names):
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", *names])
before = sleeper()
with supervise.Supervisor() as supervisor:
    server, other = sleeper("-m", "verl_ext.sandbox.server"), sleeper()
    supervisor.run(["true"], log=None)
    alive = [p.poll() is None for p in (before, server, other)]
for process in (before, server):
    process.kill()
    process.wait()
print(json.dumps(alive))
"""
    assert run(code) == [True, True, False]


FORK_SERVER = """
import os, signal, sys, time
signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no zombies
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
if os.fork() == 0:
    with open(sys.argv[1] + ".part", "w") as file:
        file.write(str(os.getpid()))
    os.replace(sys.argv[1] + ".part", sys.argv[1] + ".pid")
time.sleep(600)
"""


def test_what_the_callers_warm_python_forked_for_a_command_does_not_outlive_it(tmp_path):
    code = """
import json, psutil, subprocess
request = sys.argv[2]
server = subprocess.Popen([sys.executable, "-c", sys.argv[1], request, "-m", "verl_ext.cpu.warm_python"])
with supervise.Supervisor() as supervisor:
    supervisor.run(["bash", "-c", 'touch "$0"; until [ -e "$0.pid" ]; do sleep .01; done', request], log=None)
    alive = [server.poll() is None, psutil.pid_exists(int(Path(request + ".pid").read_text()))]
server.kill()
server.wait()
print(json.dumps(alive))
"""
    assert run(code, FORK_SERVER, tmp_path / "request") == [True, False]


def test_a_command_holds_the_lock_when_its_supervisor_is_killed(tmp_path):
    code = """
from verl_ext.runs.lock import lock_folder
out = Path(sys.argv[1])
with lock_folder(out) as lock, supervise.Supervisor(lock) as supervisor:
    supervisor.run([sys.executable, "-c", sys.argv[2]], log=out / "log.txt")
"""
    process = start(
        code, tmp_path, "import os, time\nprint(os.getpid(), os.environ['TMPDIR'], '}', flush=True)\ntime.sleep(60)"
    )
    wait_for(tmp_path / "log.txt", "}")
    process.kill()
    process.communicate()
    pid, left, _ = (tmp_path / "log.txt").read_text().split()
    command = psutil.Process(int(pid))
    try:
        with pytest.raises(SystemExit, match="Another run writes into"):
            lock_folder(tmp_path)
    finally:
        command.kill()
        Path(left).rmdir()  # of the supervisor that was killed
    psutil.wait_procs([command], timeout=10)
    lock_folder(tmp_path).close()
