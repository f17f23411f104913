"""The server as its clients see it: a real process on loopback, requests over HTTP."""

import base64
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.unit.sandbox.server_process import (
    REPOSITORY,
    SECRET,
    Server,
    is_running,
    root_of,
    running,
    wait_for_program,
    wait_until,
)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.stop()


@pytest.fixture(scope="module")
def narrow() -> Iterator[Server]:
    """One worker, little output."""
    server = Server("--max-output-bytes", "1000", "--preload", "", workers=1)
    yield server
    server.stop()


@pytest.fixture(scope="module")
def bare() -> Iterator[Server]:
    """Programs may do what only isolation forbids: fork, see the host's files and processes."""
    server = Server("--isolation", "none", "--preload", "")
    yield server
    server.stop()


# --- the contract


def test_answer_has_the_fields_of_sandbox_fusion(server):
    answer = server.run("import sys; print('out'); print('err', file=sys.stderr)")
    result = answer.pop("run_result")
    assert 0 < result.pop("execution_time") < 5
    assert 0 <= answer.pop("queue_time") < 5
    assert result == {"status": "Finished", "return_code": 0, "stdout": "out\n", "stderr": "err\n"}
    assert answer == {
        "status": "Success",
        "message": "",
        "compile_result": None,
        "executor_pod_name": None,
        "files": {},
        "session": None,
    }


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"language": "python"}, "code"),
        ({"code": "1"}, "language"),
        ({"code": "1", "language": "cobol"}, "language"),
        ({"code": "1", "language": "cpp"}, "language"),
        ({"code": 1, "language": "python"}, "code"),
        ({"code": "1", "language": "python", "run_timeout": 0}, "run_timeout"),
        ({"code": "1", "language": "python", "files": {"../a": ""}}, "files"),
        ({"code": "1", "language": "python", "files": {"/tmp/a": ""}}, "files"),
        ({"code": "1", "language": "python", "files": {"b/../../a": ""}}, "files"),
        ({"code": "1", "language": "python", "files": {"./main.py": ""}}, "files"),
        ({"code": "1", "language": "python", "files": {"a": "abcde"}}, "files"),
        ({"code": "1", "language": "python", "fetch_files": ["../a"]}, "fetch_files"),
        ({"code": "1", "language": "python", "fetch_files": ["/etc/passwd"]}, "fetch_files"),
    ],
)
def test_wrong_request_is_422_and_names_the_field(server, body, field):
    status, _, answer = server.post(json.dumps(body).encode())
    assert status == 422
    assert answer["detail"][0]["loc"][:2] == ["body", field]


@pytest.mark.parametrize("body", [b"{", b"\xff", b"[]", b"[" * 100_000])
def test_body_that_is_no_json_object_is_422(server, body):
    assert server.post(body)[0] == 422


def test_server_without_sessions_refuses_them_clearly(server):
    status, _, answer = server.post(json.dumps({"code": "1", "language": "python", "session_id": "a"}).encode())
    assert status == 422
    assert "--max-sessions" in answer["detail"][0]["msg"]
    assert answer["detail"][0]["loc"] == ["body", "session_id"]


def test_unknown_fields_are_ignored(server):
    assert server.result("print(1)", args=["-v"], colour="red")["stdout"] == "1\n"


def test_ping_executes_code_and_names_what_bounds_a_program(bare):
    with urllib.request.urlopen(f"{bare.url}/v1/ping", timeout=10) as response:
        assert json.load(response) == {"status": "ok", "message": "", "layers": ["rlimits"]}


@pytest.mark.parametrize("code", ["a = 1\x00", "\ud800"])
def test_code_that_is_no_text_file_is_a_syntax_error(server, code):
    result = server.result(code)
    assert (result["return_code"], result["stdout"]) == (1, "")
    assert "SyntaxError: " in result["stderr"]


@pytest.mark.parametrize(
    ("code", "return_code"),
    [
        ("", 0),
        ("import sys; sys.exit(3)", 3),
        ("import sys; sys.exit()", 0),
        ("import sys; sys.exit(-1)", 255),
        ("import sys; sys.exit(-2)", 254),  # not what SIGINT gives
        ("import sys; sys.exit(10**20)", 255),
        ("import os; os._exit(7)", 7),
        ("import os; os.kill(os.getpid(), 9)", -9),
        ("import os; os.abort()", -6),
        ("import ctypes; ctypes.string_at(0)", -11),
        ("raise KeyboardInterrupt", -2),
        ("import sys; sys.stdout.close()", 0),
        ("import os; os.close(1); print(1)", 120),
    ],
)
def test_return_code_is_that_of_cpython(server, code, return_code):
    answer = server.run(code)
    assert answer["run_result"]["return_code"] == return_code
    assert answer["status"] == ("Success" if return_code == 0 else "Failed")


@pytest.mark.parametrize(
    "code",
    [
        "def f(x):\n    return 1 / x\n\nprint('before')\nf(0)",
        "x = (",
        "try:\n    {}['a']\nexcept KeyError as e:\n    raise ValueError('b') from e",
        "import sys\nsys.exit('a message')",
        "import atexit, threading\natexit.register(print, 'last')\n"
        "threading.Thread(target=lambda: print('thread')).start()\nprint('main')",
        "class A:\n    def __del__(self):\n        print('bye', name)\nname = 'a'\na = A()\n",
        "import warnings\nwarnings.warn('careful')\nprint(__name__, __spec__, __package__, __doc__, __cached__)",
        "import threading\ndef f():\n    raise ValueError(1)\nthreading.Thread(target=f, name='t').start()",
        "import sys\nsys.excepthook = lambda *a: print('hook', a[0].__name__)\n1/0",
        "print('é', file=__import__('sys').stderr)\nprint('\\ud800')",
        "import sys\nprint(sys.argv, sys.stdin.read() == '', sys.stdout.encoding, __import__('signal').getsignal(2))",
        "# coding: latin-1\nprint(ascii('é'))",
        "import pickle\nclass P:\n    x = 1\nprint(pickle.loads(pickle.dumps(P())).x, P.__module__)",
        "print('no newline', end='')",
        "import os, sys\nos.write(1, b'a\\xffb\\0')\nsys.stdout.write('unflushed')",
    ],
)
def test_output_is_that_of_python_main_py(server, tmp_path, code):
    check_against_python(server, tmp_path, code)


def test_output_of_a_fork_is_that_of_python_main_py(bare, tmp_path):
    code = "import os\nif os.fork() == 0:\n    print('child')\n    raise SystemExit(4)\nprint(os.wait()[1] >> 8)"
    check_against_python(bare, tmp_path, code)


def check_against_python(server: Server, tmp_path: Path, code: str) -> None:
    (tmp_path / "main.py").write_bytes(code.encode("utf-8", "surrogatepass"))
    expected = subprocess.run(
        [sys.executable, "main.py"],
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        env={"LANG": "C.UTF-8", "PATH": os.environ["PATH"]},
    )
    got = server.result(code)
    stderr = expected.stderr.decode(errors="replace").replace(f"{tmp_path}/main.py", "main.py")
    assert got["stdout"] == expected.stdout.decode(errors="replace")
    assert re.sub(r"0x\w+", "0x", got["stderr"]) == re.sub(r"0x\w+", "0x", stderr)
    assert got["return_code"] == expected.returncode


def test_traceback_shows_source_lines_also_after_chdir(server):
    stderr = server.result("import os\nos.chdir('/')\nraise ValueError('x')")["stderr"]
    assert stderr == (
        'Traceback (most recent call last):\n  File "main.py", line 3, in <module>\n'
        "    raise ValueError('x')\nValueError: x\n"
    )


def test_stdin_reaches_the_program(server):
    code = "import sys; print(input(), repr(sys.stdin.read()))"
    assert server.result(code, stdin="one\ntwo é\nthree")["stdout"] == "one 'two é\\nthree'\n"


def test_without_stdin_reading_ends_at_once(server):
    assert "EOFError" in server.result("input()", stdin=None)["stderr"]


def test_stdin_of_a_megabyte_reaches_the_program(server):
    code = "import sys; print(len(sys.stdin.read()))"
    assert server.result(code, stdin="x" * 1_000_000)["stdout"] == "1000000\n"


def test_unflushed_file_is_written_when_the_program_ends(server):
    answer = server.run("f = open('a', 'w'); f.write('late')", fetch_files=["a"])
    assert base64.b64decode(answer["files"]["a"]) == b"late"


# --- limits


def test_timeout_keeps_partial_output_and_has_no_return_code(server):
    started = time.monotonic()
    answer = server.run("import time; print('partial', flush=True); time.sleep(60)", run_timeout=0.3)
    assert time.monotonic() - started < 3
    result = answer["run_result"]
    assert 0.3 <= result.pop("execution_time") < 2
    assert answer["status"] == "Failed"
    assert result == {"status": "TimeLimitExceeded", "return_code": None, "stdout": "partial\n", "stderr": ""}


def test_cpu_time_of_threads_counts_as_timeout(server):
    code = "import os, resource as r\nprint(r.getrlimit(r.RLIMIT_CPU), flush=True)\nos.kill(os.getpid(), 24)"
    result = server.result(code, run_timeout=2.5)
    assert (result["status"], result["stdout"]) == ("TimeLimitExceeded", "(4, 5)\n")


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
    code = "import time; a = time.monotonic(); time.sleep(0.2); print(a, time.monotonic())"
    with ThreadPoolExecutor(5) as executor:
        answers = list(executor.map(lambda _: server.run(code), range(5)))
    spans = [tuple(map(float, answer["run_result"]["stdout"].split())) for answer in answers]
    assert max(sum(start <= begin < end for start, end in spans) for begin, _ in spans) == 2
    assert max(answer["queue_time"] for answer in answers) > 0.35  # the fifth waited for two others


def test_request_that_cannot_start_in_time_is_504_with_retry_after(narrow):
    busy = threading.Thread(target=narrow.run, args=("import time; time.sleep(0.8)",))
    busy.start()
    time.sleep(0.2)
    body = {"code": "print(1)", "language": "python", "queue_timeout": 0.2}
    status, headers, answer = narrow.post(json.dumps(body).encode())
    assert (status, headers["Retry-After"]) == (504, "1")
    assert "no worker became free within 0.2 s" in answer["detail"]
    answer = narrow.run("print(1)")
    assert answer["queue_time"] > 0.1  # of the 0.8 s, 0.4 s are over, or more on a busy machine
    busy.join()


# --- beyond the contract


@pytest.mark.parametrize(
    ("code", "stdout"),
    [
        ("6 * 7", "42\n"),
        ("x = 6\nx * 7  # a comment", "42\n"),
        ("'text'", "'text'\n"),
        ("print(1)", "1\n"),  # its value is None
        ("x = 42", ""),
        ("for i in range(3):\n    i", ""),
        ("if True: 42", ""),
        ("1, 2", "(1, 2)\n"),
        ("1; 2; 3;", "3\n"),
        ("", ""),
        ("# only a comment", ""),
        ("from __future__ import annotations\n42", "42\n"),
        ("def f(): return 42\nf()", "42\n"),
        ("(y := 42)", "42\n"),
    ],
)
def test_echo_prints_the_value_of_a_last_expression_when_asked(server, code, stdout):
    assert server.result(code, echo_last_expression=True)["stdout"] == stdout
    plain = server.result(code)
    assert plain["stdout"] == (stdout if "print" in code else "")
    assert plain["stderr"] == ""


def test_echo_keeps_line_numbers_errors_and_exit_codes(server):
    result = server.result("x = 1\n\nx / 0", echo_last_expression=True)
    assert (result["return_code"], result["stdout"]) == (1, "")
    assert 'File "main.py", line 3, in <module>\n    x / 0' in result["stderr"]
    result = server.result("1\n)", echo_last_expression=True)
    assert result["stderr"].endswith("SyntaxError: unmatched ')'\n")
    assert server.result("exit(3)", echo_last_expression=True)["return_code"] == 3
    deep = server.result("-" * 5000 + "1", echo_last_expression=True)  # too deep for CPython's compiler, too
    assert deep["return_code"] == 1
    assert "RecursionError: maximum recursion depth exceeded" in deep["stderr"]


def test_metrics_count_what_was_answered():
    server = Server("--preload", "", "--max-sessions", "2", workers=1)
    try:
        for code in ("pass", "pass", "1 / 0", "import os; os.kill(1, 9)"):
            server.run(code)
        server.run("pass", session_id="a")
        server.run("while True: pass", run_timeout=0.3)
        assert server.post(b"{}")[0] == 422
        assert server.post(b"{}", **{"Content-Encoding": "gzip"})[0] == 422
        assert server.request("/run_code", b" " * (65 << 20))[0] == 413
        busy = threading.Thread(target=server.run, args=("import time; time.sleep(0.6)",))
        busy.start()
        wait_until(lambda: read_metrics(server)["sandbox_requests_running"] == 1)
        body = {"code": "pass", "language": "python", "queue_timeout": 0.1}
        assert server.post(json.dumps(body).encode())[0] == 504
        busy.join()
        metrics = read_metrics(server)
    finally:
        server.stop()
    counts = {outcome: metrics[f'sandbox_requests_total{{outcome="{outcome}"}}'] for outcome in OUTCOMES}
    assert sum(counts.values()) == 11
    assert [counts[name] for name in ("timeout", "overloaded", "rejected")] == [1, 1, 3]
    assert counts["ok"] + counts["code_error"] + counts["sandbox_error"] == 6
    assert counts["ok"] >= 4
    assert metrics["sandbox_run_seconds_count"] == 9 - 2 - counts["sandbox_error"]
    assert 0.9 < metrics["sandbox_run_seconds_sum"] < 5
    assert metrics["sandbox_queue_seconds_count"] == metrics["sandbox_run_seconds_count"]
    assert metrics["sandbox_requests_running"] == metrics["sandbox_requests_waiting"] == 0
    assert metrics["sandbox_sessions"] == 1
    assert metrics['sandbox_restarts_total{process="zygote"}'] == 0


OUTCOMES = ("ok", "code_error", "timeout", "sandbox_error", "overloaded", "rejected", "hung_up")


def read_metrics(server: Server) -> dict[str, float]:
    status, headers, content = server.request("/metrics")
    assert (status, headers["Content-Type"].partition(";")[0]) == (200, "text/plain")
    samples = [line.rpartition(" ") for line in content.decode().splitlines() if not line.startswith("#")]
    zeros = {f'sandbox_requests_total{{outcome="{outcome}"}}': 0.0 for outcome in OUTCOMES}
    return zeros | {name: float(value) for name, _, value in samples}


@pytest.mark.parametrize("where", ["file", "environment"])
def test_token_is_asked_of_every_request(tmp_path, monkeypatch, where):
    if where == "file":
        (tmp_path / "token").write_text("s3cret-ü\n", encoding="utf-8")
        server = Server("--preload", "", "--token-file", str(tmp_path / "token"))
    else:
        monkeypatch.setenv("SANDBOX_TOKEN", "s3cret-ü")
        server = Server("--preload", "")
    right = "Bearer s3cret-ü".encode().decode("latin-1")  # as http.client sends it
    body = json.dumps({"code": "print(1)", "language": "python"}).encode()
    try:
        for headers in (
            {},
            {"Authorization": "Bearer s3cret"},
            {"Authorization": "Bearer "},
            {"Authorization": "s3cret"},
        ):
            assert server.post(body, **headers)[0] == 401
            assert [server.request(path, **headers)[0] for path in ("/v1/ping", "/metrics", "/nothing")] == [401] * 3
        assert server.post(body, Authorization=right)[2]["run_result"]["stdout"] == "1\n"
        assert server.request("/v1/ping", Authorization=right)[0] == 200
    finally:
        server.stop()


@pytest.mark.parametrize("content", [None, " \n"])
def test_token_file_without_a_token_is_one_clear_line(tmp_path, content):
    path = tmp_path / "token"
    if content is not None:
        path.write_text(content)
    command = [sys.executable, "-m", "verl_ext.sandbox.server", "--port", "0", "--token-file", str(path)]
    run = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=20)
    assert run.returncode == 1
    assert run.stderr.startswith(f"sandbox: --token-file {path}")
    assert run.stderr.count("\n") == 1


def test_web_page_is_refused(server):
    body = json.dumps({"code": "print(1)", "language": "python"}).encode()
    status, _, answer = server.post(body, Origin="http://evil.example")
    assert (status, answer) == (403, {"detail": "requests from web pages are refused"})


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
    answer = narrow.run("open('a', 'w').write('a')", fetch_files=["a"] * 300)
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
def detach(depth):
    if os.fork() == 0:
        os.setsid()
        if depth:
            detach(depth - 1)
        print(os.getpid(), flush=True)
        time.sleep(60)
for _ in range(3):
    detach(2)
time.sleep(0.3)
{how}
"""
    pids = bare.result(code, run_timeout=0.6)["stdout"].split()
    assert len(pids) == 9
    assert not [pid for pid in pids if is_running(int(pid))]


def test_written_files_are_gone_when_answered(bare):
    code = (
        "import os, tempfile\nopen(tempfile.mkdtemp() + '/a', 'w').close()\nos.makedirs('locked/b')\n"
        "os.chmod('locked', 0)\nfor _ in range(1100): os.mkdir('d'); os.chdir('d')\n"
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


# --- failures of the sandbox itself


def test_killing_all_its_processes_answers_sandbox_error_and_the_next_request_works(narrow):
    with ThreadPoolExecutor(1) as executor:
        future = executor.submit(narrow.run, "import time; time.sleep(30)", run_timeout=30)
        wait_for_program(narrow)
        processes = narrow.descendants()
        for process in processes:
            with suppress(psutil.NoSuchProcess):  # it has ended with the one before
                process.kill()
        answer = future.result(timeout=5)
    assert (answer["status"], answer["run_result"]) == ("SandboxError", None)
    assert "died" in answer["message"]
    wait_until(lambda: not running(processes))
    assert narrow.result("print(1)")["stdout"] == "1\n"


def test_program_that_kills_its_worker_gets_sandbox_error_and_leaves_nothing(bare, tmp_path):
    file = tmp_path / "pid"
    code = (
        f"import os, time\nwith open({str(file)!r}, 'w') as file: print(os.getpid(), os.getcwd(), file=file)\n"
        "os.kill(os.getppid(), 9)\ntime.sleep(30)"
    )
    assert bare.run(code)["status"] == "SandboxError"
    pid, folder = file.read_text().split()
    wait_until(lambda: not is_running(int(pid)))
    assert not Path(folder).exists()
    assert bare.result("print(1)")["stdout"] == "1\n"


def test_client_that_hangs_up_ends_its_program(bare, tmp_path):
    code = f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(f'{{os.getpid()}}\\n'); time.sleep(30)"
    body = json.dumps({"code": code, "language": "python", "run_timeout": 30}).encode()
    with socket.create_connection(("127.0.0.1", int(bare.url.rsplit(":")[-1]))) as connection:
        head = f"POST /run_code HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        wait_until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text().endswith("\n"))
    pid = int((tmp_path / "pid").read_text())
    wait_until(lambda: not is_running(pid))


# --- start and stop


def test_busy_port_is_one_clear_line_and_exit_code_1(server):
    port = server.url.rsplit(":")[-1]
    command = [sys.executable, "-m", "verl_ext.sandbox.server", "--port", port]
    run = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=20)
    assert run.returncode == 1
    assert run.stdout == ""
    assert run.stderr == (
        f"sandbox: port {port} on 127.0.0.1 is in use. "
        "Stop what holds it, or choose another with --port (0: any free one)\n"
    )


@pytest.mark.parametrize(
    ("number", "isolation"), [(signal.SIGTERM, "auto"), (signal.SIGINT, "auto"), (signal.SIGTERM, "none")]
)
def test_stop_signal_kills_programs_and_leaves_no_file(tmp_path, number, isolation):
    server = Server("--port-file", str(tmp_path / "port"), "--isolation", isolation, "--preload", "")
    assert f"http://127.0.0.1:{(tmp_path / 'port').read_text().strip()}" == server.url
    root = root_of(server.descendants())
    assert root.is_dir()
    thread = threading.Thread(target=lambda: pytest.raises(OSError, server.run, "import time; time.sleep(30)"))
    thread.start()
    wait_for_program(server)
    processes = server.descendants()
    server.process.send_signal(number)
    _, stderr = server.process.communicate(timeout=10)
    thread.join()
    assert (server.process.returncode, stderr) == (0, "")
    assert not running(processes)
    assert not root.exists()
    assert list(tmp_path.iterdir()) == []


def test_server_and_programs_end_with_the_parent_also_when_it_is_killed(tmp_path):
    code = (
        "import sys, time\nfrom verl_ext.sandbox import running_server\n"
        "with running_server(options=('--preload', '')) as url:\n    print(url, flush=True)\n    time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
    parent.stdout.readline()
    processes = psutil.Process(parent.pid).children(recursive=True)
    assert len(processes) >= 3  # server, zygote, worker
    root = root_of(processes)
    assert root.is_dir()
    parent.kill()
    parent.communicate()
    wait_until(lambda: not running(processes))
    assert not root.exists()


@pytest.mark.parametrize("isolation", ["auto", "none"])
def test_zygote_cleans_up_when_the_server_itself_is_killed(isolation):
    server = Server("--isolation", isolation, "--preload", "")
    processes = server.descendants()
    root = root_of(processes)
    assert root.is_dir()
    server.process.kill()
    server.process.communicate()
    wait_until(lambda: not running(processes))
    assert not root.exists()
