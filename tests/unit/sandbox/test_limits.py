"""What bounds a program, which files it receives and returns, and that it leaves nothing behind."""

import base64
import json
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.unit.sandbox.server_process import (
    SECRET,
    is_running,
    wait_until,
)
from tests.unit.sandbox.test_server import read_metrics
from verl_ext.sandbox.server.worker import is_over_cpu_limit

# --- limits


def test_timeout_keeps_partial_output_and_has_no_return_code(server):
    started = time.monotonic()
    answer = server.run("import time; print('partial', flush=True); time.sleep(60)", run_timeout=1.5)
    assert time.monotonic() - started < 5
    result = answer["run_result"]
    assert 1.5 <= result.pop("execution_time") < 4
    assert answer["status"] == "Failed"
    assert result == {"status": "TimeLimitExceeded", "return_code": None, "stdout": "partial\n", "stderr": ""}


@pytest.mark.parametrize(
    ("return_code", "used_s", "is_over"),
    [
        (-signal.SIGXCPU, 4.0, True),  # by 2.5 s of wall clock, several threads may use 4 s
        (-signal.SIGXCPU, 3.7, True),
        (-signal.SIGXCPU, 3.5, False),
        (-signal.SIGKILL, 5.0, True),  # it ignored the first
        (-signal.SIGKILL, 0.1, False),
        (-signal.SIGSEGV, 5.0, False),
        (0, 5.0, False),
        (152, 5.0, False),
        (None, 5.0, False),
    ],
)
def test_cpu_time_of_threads_counts_as_timeout(return_code, used_s, is_over):
    assert is_over_cpu_limit(return_code, used_s, run_timeout=2.5) is is_over


def test_cpu_limit_of_a_program(server):
    code = "import resource as r\nprint(r.getrlimit(r.RLIMIT_CPU))"
    assert server.result(code, run_timeout=2.5)["stdout"] == "(4, 5)\n"


@pytest.mark.parametrize("number", ["XCPU", "KILL", "ALRM", "PROF", "VTALRM", "XFSZ", "TERM", "USR1", "SEGV", "PIPE"])
@pytest.mark.parametrize(
    "how",
    [
        "os.kill(os.getpid(), N)",
        "signal.raise_signal(N)",
        "signal.pthread_kill(threading.get_ident(), N)",
        "threading.Thread(target=os.kill, args=(os.getpid(), N)).start(); time.sleep(5)",
    ],
    ids=["kill", "raise", "pthread_kill", "thread"],
)
def test_program_that_sends_itself_a_signal_is_no_timeout(server, number, how):
    code = f"import os, signal, threading, time\nN = signal.SIG{number}\nprint('x', flush=True)\n"
    code += "" if number == "KILL" else "signal.signal(N, signal.SIG_DFL)\n"
    result = server.result(code + how, run_timeout=20)
    expected = ("Finished", -signal.Signals[f"SIG{number}"], "x\n")
    assert (result["status"], result["return_code"], result["stdout"]) == expected


@pytest.mark.parametrize(
    "code",
    [
        "import resource\nresource.setrlimit(resource.RLIMIT_CPU, (1, 2))\nwhile True: pass",
        "import signal\nsignal.setitimer(signal.ITIMER_PROF, 0.05)\nwhile True: pass",
        "import signal\nsignal.setitimer(signal.ITIMER_VIRTUAL, 0.05)\nwhile True: pass",
        "import signal\nsignal.setitimer(signal.ITIMER_REAL, 0.05)\nwhile True: pass",
    ],
)
def test_program_that_shortens_its_own_time_is_no_timeout(server, code):
    result = server.result(code, run_timeout=20)
    assert result["status"] == "Finished"
    assert result["return_code"] < 0


@pytest.mark.parametrize("code", [24, 124, 137, 152, 232, 247])
def test_exit_code_that_looks_like_a_signal_is_none(server, code):
    for line in (f"import sys; sys.exit({code})", f"import os; os._exit({code})"):
        result = server.result(line)
        assert (result["status"], result["return_code"]) == ("Finished", code)


def test_program_that_ignores_signals_is_killed_at_its_time_limit(server):
    code = "import signal, time\nfor s in (1, 2, 15, 24): signal.signal(s, signal.SIG_IGN)\ntime.sleep(60)"
    assert server.result(code, run_timeout=0.3)["status"] == "TimeLimitExceeded"


def test_a_megabyte_on_both_streams_arrives_whole(server):
    code = "import sys\nfor _ in range(1000): print('x' * 999); print('y' * 999, file=sys.stderr)"
    result = server.result(code, run_timeout=10)
    assert (result["status"], result["return_code"]) == ("Finished", 0)
    assert result["stdout"] == ("x" * 999 + "\n") * 1000
    assert result["stderr"] == ("y" * 999 + "\n") * 1000


@pytest.mark.parametrize(
    ("code", "kept", "cut"),
    [
        ("print('x' * 1000, end='')", "x" * 1000, ""),
        ("print('x' * 1001, end='')", "x" * 1000, "\n[output cut: 1 of 1001 bytes]\n"),
        ("print('x' * 300_000, end='')", "x" * 1000, "\n[output cut: 299000 of 300000 bytes]\n"),
        ("print('x' * 999 + '∑∑', end='')", "x" * 999, "\n[output cut: 5 of 1005 bytes]\n"),  # no half character
    ],
)
def test_output_over_the_limit_is_cut_and_says_so(narrow, code, kept, cut):
    assert narrow.result(code)["stdout"] == kept + cut
    assert narrow.result(f"import sys; sys.stdout = sys.stderr\n{code}")["stderr"] == kept + cut


def test_memory_limit_raises_memory_error_and_numpy_works_under_it(server):
    pytest.importorskip("numpy")
    code = "x = bytearray(900 << 20)"
    assert server.result(code, memory_limit_MB=1024)["return_code"] == 0
    assert server.result(code, memory_limit_MB=512)["stderr"].endswith("MemoryError\n")
    assert server.result(code, memory_limit_MB=1)["return_code"] != 0
    code = "import numpy as np; print(np.linalg.inv(2 * np.eye(200))[0, 0])"
    assert server.result(code, memory_limit_MB=1024)["stdout"] == "0.5\n"


def test_threads_work_under_the_memory_limit(server):
    code = (
        "import threading\nb = threading.Barrier(32)\n"
        "for _ in range(31): threading.Thread(target=b.wait).start()\nb.wait()\nprint('ok')"
    )
    assert server.result(code, memory_limit_MB=1024)["stdout"] == "ok\n"


def test_file_size_is_limited(server):
    code = "f = open('big', 'wb')\nfor _ in range(100): f.write(bytes(1 << 20))"
    assert "File too large" in server.result(code)["stderr"]


def test_no_more_programs_run_at_once_than_there_are_workers(server):
    code = "import time; a = time.monotonic(); time.sleep(1); print(a, time.monotonic())"
    with ThreadPoolExecutor(5) as executor:
        answers = list(executor.map(lambda _: server.run(code), range(5)))
    spans = [tuple(map(float, answer["run_result"]["stdout"].split())) for answer in answers]
    assert max(sum(start <= begin < end for start, end in spans) for begin, _ in spans) == 2
    assert max(answer["queue_time"] for answer in answers) > 1.2  # the fifth waited for two others


def test_request_that_cannot_start_in_time_is_504_with_retry_after(narrow):
    busy = threading.Thread(target=narrow.run, args=("import time; time.sleep(2)",))
    busy.start()
    wait_until(lambda: read_metrics(narrow)["sandbox_requests_running"] == 1)
    body = {"code": "print(1)", "language": "python", "queue_timeout": 0.2}
    status, headers, answer = narrow.post(json.dumps(body).encode())
    assert (status, headers["Retry-After"]) == (504, "1")
    assert "no worker became free within 0.2 s" in answer["detail"]
    answer = narrow.run("print(1)")
    assert answer["queue_time"] > 0.1  # of the 2 s, 0.2 s are over, or more on a busy machine
    busy.join()


# --- files


def test_files_are_there_for_the_program_and_can_be_fetched(server):
    files = {
        "helper.py": base64.b64encode(b"VALUE = 42").decode(),
        "data/in.bin": base64.b64encode(bytes(range(256))).decode(),
        "no_file": None,
    }
    code = (
        "import os, helper\nprint(helper.VALUE, os.path.exists('no_file'))\n"
        "os.makedirs('out/deep')\nopen('empty', 'w')\n"
        "open('out/deep/r', 'wb').write(open('data/in.bin', 'rb').read()[::-1])"
    )
    answer = server.run(code, files=files, fetch_files=["out/deep/r", "./empty", "main.py"])
    assert answer["run_result"]["stdout"] == "42 False\n"
    assert {path: base64.b64decode(content) for path, content in answer["files"].items()} == {
        "out/deep/r": bytes(range(256))[::-1],
        "./empty": b"",
        "main.py": code.encode(),
    }


def test_file_that_is_asked_for_many_times_is_fetched_once(narrow):
    answer = narrow.run("open('a', 'w').write('a')", fetch_files=["a"] * 200)
    assert (answer["files"], answer["message"]) == ({"a": "YQ=="}, "")
    assert narrow.run("print(1)")["status"] == "Success"  # by the same worker


@pytest.mark.parametrize("content", ["", "a"])
def test_fetched_files_are_closed(narrow, content):
    code = f"for i in range(150): open(str(i), 'w').write({content!r})"
    for _ in range(2):  # by the same worker, which may have 256 files open
        assert len(narrow.run(code, fetch_files=[str(i) for i in range(150)])["files"]) == 150


def test_fetch_files_follows_no_link_and_waits_for_no_pipe(server, tmp_path):
    (tmp_path / "host").write_text("a file of the host")
    code = (
        f"import os\nos.symlink({str(tmp_path / 'host')!r}, 'link')\nos.symlink({str(tmp_path)!r}, 'dir')\n"
        "os.mkfifo('pipe')\nos.mkdir('folder')\nos.symlink('main.py', 'inner')"
    )
    answer = server.run(code, fetch_files=["link", "dir/host", "pipe", "folder", "inner", "missing"])
    assert (answer["status"], answer["files"]) == ("Success", {})
    assert "missing was not fetched: No such file or directory" in answer["message"]
    assert answer["message"].count("was not fetched") == 6


# --- nothing is left, nothing leaks


def test_server_environment_is_not_visible(server):
    code = (
        "import os\nprint(dict(os.environ))\n"
        "for process in ('self', os.getppid()): print(open(f'/proc/{process}/environ').read())"
    )
    stdout = server.result(code)["stdout"]
    assert "LANG" in stdout
    assert SECRET not in stdout


def test_only_the_standard_streams_are_open(server):
    code = "import os; print(sorted(map(int, os.listdir('/proc/self/fd'))))"
    assert server.result(code)["stdout"] == "[0, 1, 2, 3]\n"  # 3: the listing itself


@pytest.mark.parametrize("how", ["", "time.sleep(60)"])
def test_processes_that_left_the_session_are_dead_when_answered(bare, how):
    code = f"""
import os, time
r, w = os.pipe()
def detach(depth):
    if os.fork() == 0:
        os.setsid()
        if depth:
            detach(depth - 1)
        print(os.getpid(), flush=True)
        os.write(w, b"x")
        time.sleep(60)
for _ in range(3):
    detach(2)
for _ in range(9):
    os.read(r, 1)
{how}
"""
    pids = bare.result(code, run_timeout=2)["stdout"].split()
    assert len(pids) == 9
    assert not [pid for pid in pids if is_running(int(pid))]


def test_written_files_are_gone_when_answered(bare):
    code = (
        "import os, tempfile\nopen(tempfile.mkdtemp() + '/a', 'w').close()\nos.makedirs('locked/b')\n"
        "os.chmod('locked', 0)\nfor _ in range(1500): os.mkdir('d'); os.chdir('d')\n"
        "print(os.environ['HOME'], tempfile.gettempdir())"
    )
    folder, temporary = bare.result(code)["stdout"].split()
    assert folder == temporary
    assert not Path(folder).exists()
    assert Path(folder).parent.exists()


def test_nothing_of_an_earlier_request_is_in_the_memory_of_a_later_one(narrow):
    # The pattern does not match itself, so what it finds is what someone wrote.
    scan = (
        "import re\nfound = set()\nmemory = open('/proc/self/mem', 'rb')\n"
        "for line in open('/proc/self/maps'):\n"
        "    start, end = (int(x, 16) for x in line.split()[0].split('-'))\n"
        "    if line.split()[1].startswith('rw'):\n"
        "        memory.seek(start)\n"
        "        found |= set(re.findall(rb'NONC[E]-[a-z]+', memory.read(end - start)))\n"
        "print(sorted(found))"
    )
    narrow.result("import sys; print(input()); print('NONCE-output', file=sys.stderr)", stdin="NONCE-stdin")
    assert narrow.result(scan + "\n# NONCE-own")["stdout"] == "[b'NONCE-own']\n"


def test_a_program_sees_no_global_of_an_earlier_one(server):
    for _ in range(4):
        code = "import builtins, random; print(hasattr(builtins, 'x'), random.random()); builtins.x = 1"
        assert server.result(code)["stdout"].startswith("False")
    draws = {server.result("import random; print(random.random())")["stdout"] for _ in range(4)}
    assert len(draws) == 4
