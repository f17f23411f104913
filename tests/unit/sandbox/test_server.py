"""The server process: metrics, tokens, failures of the sandbox itself, start and stop."""

import json
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.unit.sandbox.server_process import (
    REPOSITORY,
    Server,
    is_running,
    root_of,
    running,
    wait_for_program,
    wait_until,
)
from verl_ext.sandbox import running_server
from verl_ext.sandbox.limits import READY


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
        busy = threading.Thread(target=server.run, args=("import time; time.sleep(2)",))
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
    assert 2.3 < metrics["sandbox_run_seconds_sum"] < 10
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
    assert (answer["status"], answer["run_result"], answer["lost"]) == ("SandboxError", None, False)
    assert "died" in answer["message"]
    wait_until(lambda: not running(processes))
    assert narrow.result("print(1)")["stdout"] == "1\n"


def test_program_that_kills_its_worker_is_blamed_at_last_and_leaves_nothing(bare, tmp_path):
    """Without isolation, another program could have killed the worker the first times."""
    file = tmp_path / "pid"
    code = (
        f"import os, time\nwith open({str(file)!r}, 'w') as file: print(os.getpid(), os.getcwd(), file=file)\n"
        "os.kill(os.getppid(), 9)\ntime.sleep(30)"
    )
    for _ in range(3):
        answer = bare.run(code)
        assert (answer["status"], answer["lost"]) == ("SandboxError", True)
    assert bare.result(code)["return_code"] == -9
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
        f"sandbox: port {port} on 127.0.0.1 is in use. Stop the process that holds it, or choose another port\n"
    )


@pytest.mark.parametrize(
    ("number", "isolation"), [(signal.SIGTERM, "auto"), (signal.SIGINT, "auto"), (signal.SIGTERM, "none")]
)
def test_stop_signal_kills_programs_and_leaves_no_file(number, isolation):
    server = Server("--isolation", isolation, "--preload", "")
    root = root_of(server.descendants())
    assert root.is_dir()

    def run() -> None:
        with suppress(OSError):  # the server ends before it answers
            server.run("import time; time.sleep(30)")

    thread = threading.Thread(target=run)
    thread.start()
    wait_for_program(server)
    processes = server.descendants()
    server.process.send_signal(number)
    _, stderr = server.process.communicate(timeout=10)
    thread.join()
    assert (server.process.returncode, stderr) == (0, "")
    assert not running(processes)
    assert not root.exists()


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


def test_a_server_that_says_something_else_first_is_waited_for(tmp_path, monkeypatch):
    """Two lines in one write, as a warning of a library and ours may be."""
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\nprintf 'a warning\\n{READY}http://127.0.0.1:1\\n'\nexec sleep 10\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with running_server(start_timeout_s=5) as url:
        assert url == "http://127.0.0.1:1"


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
