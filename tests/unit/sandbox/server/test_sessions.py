"""Sessions over HTTP: what they keep, what bounds them, and that they leave nothing behind."""

import base64
import contextlib
import json
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import psutil
import pytest

from tests.unit.sandbox.machines import needs_root
from tests.unit.sandbox.server_process import Server, wait_until
from verl_ext.sandbox.server import sessions as sessions_module
from verl_ext.sandbox.server.pool import Pool
from verl_ext.sandbox.server.sessions import SessionEndedError, Sessions


@pytest.fixture(scope="module", params=["auto", "none"])
def server(request) -> Iterator[Server]:
    server = Server("--max-sessions", "3", "--session-idle-s", "30", "--preload", "", "--isolation", request.param)
    yield server
    server.stop()


@pytest.fixture
def session(server, request) -> Iterator[str]:
    yield request.node.name
    end(server, request.node.name)


def said(answer: dict) -> tuple[int, bool]:
    """Return the number of the call in its session, and whether that continues."""
    return answer["session"]["call"], answer["session"]["alive"]


def end(server: Server, session_id: str) -> int:
    return server.request(f"/v1/sessions/{quote(session_id, safe='')}", method="DELETE")[0]


def test_later_calls_see_variables_functions_imports_and_files(server, session):
    first = server.run("import math\nx = 6\ndef f(y): return x * y\nopen('a', 'w').write('kept')", session_id=session)
    assert said(first) == (1, True)
    second = server.run("x += 1\nprint(f(math.floor(6.5)), open('a').read())", session_id=session)
    assert second["run_result"]["stdout"] == "42 kept\n"
    assert said(second) == (2, True)


def test_sessions_do_not_see_each_other_nor_do_calls_without_one(server, session):
    server.run("secret = 1; open('mine', 'w').close()", session_id=session)
    code = "import os; print('secret' in globals(), os.path.exists('mine'))"
    assert server.run(code, session_id=session)["run_result"]["stdout"] == "True True\n"
    assert server.run(code, session_id="other")["run_result"]["stdout"] == "False False\n"
    assert server.run(code)["run_result"]["stdout"] == "False False\n"
    end(server, "other")


def test_session_survives_exceptions_and_exit_codes(server, session):
    server.run("x = 1", session_id=session)
    assert "ZeroDivisionError" in server.run("1 / 0", session_id=session)["run_result"]["stderr"]
    for code, return_code in ((3, 3), (-1, 255), (10**20, 255)):
        answer = server.run(f"raise SystemExit({code})", session_id=session)
        assert answer["run_result"]["return_code"] == return_code
    assert "SyntaxError" in server.run("def", session_id=session)["run_result"]["stderr"]
    assert server.run("print(x)", session_id=session)["run_result"]["stdout"] == "1\n"


def test_traceback_shows_the_lines_of_the_call_that_defined_them(server, session):
    server.run("def f():\n    return 1 / 0  # of the first call", session_id=session)
    stderr = server.run("# second\n\nf()  # of the second call", session_id=session)["run_result"]["stderr"]
    assert 'File "main.py", line 2, in f\n    return 1 / 0  # of the first call' in stderr
    assert 'File "main2.py", line 3, in <module>\n    f()  # of the second call' in stderr


def test_each_call_has_its_own_output_and_input(server, session):
    code = "import sys; print(sys.stdin.read(), end=''); print('err', file=sys.stderr)"
    for text in ("one", "", "two", "x" * (1 << 20)):
        result = server.run(code, session_id=session, stdin=text)["run_result"]
        assert (result["stdout"], result["stderr"]) == (text, "err\n")


def test_files_come_and_go_with_each_call(server, session):
    server.run("pass", session_id=session)
    answer = server.run(
        "open('out', 'w').write(open('in').read() * 2)", session_id=session, files={"in": "YWI="}, fetch_files=["out"]
    )
    assert answer["files"] == {"out": "YWJhYg=="}


@pytest.mark.parametrize("how", ["timeout", "exit", "signal"])
def test_end_of_the_program_is_told_and_the_next_call_begins_anew(server, session, how):
    code, status, return_code = {
        "timeout": ("while True: pass", "TimeLimitExceeded", None),
        "exit": ("import os; os._exit(7)", "Finished", 7),
        "signal": ("import os; os.kill(os.getpid(), 9)", "Finished", -9),
    }[how]
    server.run("x = 1", session_id=session)
    answer = server.run(code, session_id=session, run_timeout=1)
    assert (answer["run_result"]["status"], answer["run_result"]["return_code"]) == (status, return_code)
    assert said(answer) == (2, False)
    answer = server.run("print('x' in globals())", session_id=session)
    assert answer["run_result"]["stdout"] == "False\n"
    assert said(answer) == (1, True)


def test_program_that_breaks_the_protocol_only_ends_its_own_session(server, session):
    for code in (
        "import os; os.close(3)",
        "import os; os.write(3, b'lies'[:3])",
        "import os; os.write(3, b'x' * 5000)",
        # says that it is done, continues in the next call, and closes the socket with that call unread
        "import os, time; os.write(3, bytes(4)); time.sleep(0.2); os.close(3)",
    ):
        server.run("x = 1", session_id=session)
        answer = server.run(f"{code}\nimport time; time.sleep(5)", session_id=session)
        if answer["session"]["alive"]:
            answer = server.run("print('not run')", session_id=session)
        assert answer["status"] == "Failed"
        assert answer["session"]["alive"] is False
        assert answer["run_result"]["execution_time"] < 4
    assert server.run("print(1)")["run_result"]["stdout"] == "1\n"


@pytest.mark.parametrize(
    "code",
    [
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))",
        "import builtins; builtins.open = None",
        "import os; os.mkdir('main2.py')",
        # fires while the program is stopped, and so at the start of the next call
        "import signal\nsignal.signal(signal.SIGALRM, lambda *_: 1 / 0)\nsignal.setitimer(signal.ITIMER_REAL, 0.5)",
    ],
)
def test_program_that_can_take_no_further_call_fails_it(server, session, code):
    server.run(code, session_id=session)
    if "setitimer" in code:
        wait_until(lambda: any(map(is_alarm_pending, server.descendants())))
    answer = server.run("print(1)", session_id=session)
    assert (answer["status"], said(answer)) == ("Failed", (2, False))
    assert "cannot take another call" in answer["run_result"]["stderr"]


def test_program_that_closes_its_streams_fails_the_next_call(server, session):
    server.run("import os; os.closerange(0, 3)", session_id=session)
    answer = server.run("print(1)", session_id=session)
    assert (answer["status"], said(answer)) == ("Failed", (2, False))


def test_full_disk_fails_the_next_call():
    server = Server("--max-sessions", "1", "--preload", "", "--isolation", "full")
    try:
        code = "for i in range(3):\n    try: open(f'{i}', 'wb').write(bytes(60 << 20))\n    except OSError: pass"
        server.run(code, session_id="a")
        answer = server.run("print(1)", session_id="a")
        assert answer["status"] == "Failed"
        assert "No space left" in answer["run_result"]["stderr"]
    finally:
        server.stop()


def test_another_working_directory_keeps_no_call_from_its_files(server, session):
    server.run("import os; os.chdir('/')", session_id=session)
    code = "print(os.getcwd(), open(os.path.join(os.environ['HOME'], 'd/in')).read())"
    answer = server.run(code, session_id=session, files={"d/in": "YWI="}, fetch_files=["d/in"])
    assert answer["run_result"]["stdout"] == "/ ab\n"
    assert answer["files"] == {"d/in": "YWI="}


def test_forked_child_that_does_not_exit_answers_no_call():
    server = Server("--max-sessions", "1", "--preload", "", "--allow-subprocess")
    try:
        server.run("import os\nif os.fork() == 0: print('child')", session_id="a")
        for i in range(3):
            assert f"call {i}\n" in server.run(f"print('call {i}')", session_id="a")["run_result"]["stdout"]
    finally:
        server.stop()


def test_fetched_file_is_not_written_to_any_more(server, session):
    code = """
import os, threading, time
def write():
    while True:
        fd = os.open("a", os.O_WRONLY | os.O_CREAT)
        os.write(fd, bytes(30 << 20))
        os.ftruncate(fd, 0)
        os.close(fd)
open("b", "w").write("b")
threading.Thread(target=write, daemon=True).start()
time.sleep(0.05)
"""
    answer = server.run(code, session_id=session, fetch_files=["a", "b"])
    assert base64.b64decode(answer["files"]["b"]) == b"b"
    assert answer["session"]["alive"]
    assert server.run("print(1)", session_id=session)["run_result"]["stdout"] == "1\n"


KEEPS_CONTINUING = """
import ctypes, signal, struct, threading
signal.signal(signal.SIGCONT, lambda *_: None)
libc, timer = ctypes.CDLL(None), ctypes.c_void_p()
event = struct.pack("<QiI", 0, signal.SIGCONT, 0) + bytes(48)
assert libc.timer_create(1, event, ctypes.byref(timer)) == 0
assert libc.timer_settime(timer, 0, struct.pack("<4q", 0, PERIOD_NS, 0, PERIOD_NS), None) == 0
def spin():
    while True: pass
threading.Thread(target=spin, daemon=True).start()
"""


@pytest.mark.parametrize("period_ms", [1, 300])  # from before it has stopped, and after that
def test_program_that_has_itself_continued_uses_no_cpu_for_long(server, session, period_ms):
    server.run(KEEPS_CONTINUING.replace("PERIOD_NS", str(period_ms * 1_000_000)), session_id=session)
    if period_ms == 300:
        wait_until(lambda: not any(map(has_threads, server.descendants())), timeout_s=20)
        assert server.run("print(1)", session_id=session)["run_result"]["return_code"] == -9
    # It is killed, or it stays stopped: a SIGSTOP takes a pending SIGCONT away, and with it the timer that sent it.
    wait_until(lambda: used_cpu_s(server, 0.5) < 0.1)


def test_session_uses_no_cpu_between_calls(server, session):
    server.run(
        """
import threading, time
count = 0
def spin():
    global count
    while True: count += 1
threading.Thread(target=spin, daemon=True).start()
""",
        session_id=session,
    )
    time.sleep(0.05)
    assert used_cpu_s(server, 0.5) < 0.2
    code = "time.sleep(0.05); print(count)"
    counts = [int(server.run(code, session_id=session)["run_result"]["stdout"]) for _ in range(2)]
    assert counts[0] < counts[1]  # and continues in the next call


def is_alarm_pending(process: psutil.Process) -> bool:
    try:
        status = Path(f"/proc/{process.pid}/status").read_text()
    except OSError:  # it has ended
        return False
    return bool(int(re.search(r"ShdPnd:\s+(\w+)", status)[1], 16) & 1 << signal.SIGALRM - 1)


def has_threads(process: psutil.Process) -> bool:
    """Of the server's processes, only a program that starts threads has any; a dead one has none."""
    try:
        return process.num_threads() > 1
    except psutil.NoSuchProcess:
        return False


def used_cpu_s(server: Server, during_s: float) -> float:
    """Return the CPU time that the server's processes use in the next `during_s` seconds."""
    before = total_cpu_s(server)
    time.sleep(during_s)
    return total_cpu_s(server) - before


def total_cpu_s(server: Server) -> float:
    total_s = 0.0
    for process in server.descendants():
        with contextlib.suppress(psutil.NoSuchProcess):  # it was killed after it was listed
            total_s += sum(process.cpu_times()[:2])
    return total_s


def test_memory_limit_holds_over_all_calls(server, session):
    server.run("blocks = []", session_id=session, memory_limit_MB=100)
    for _ in range(2):
        server.run("blocks.append(bytearray(40 << 20))", session_id=session)
    answer = server.run("blocks.append(bytearray(40 << 20))", session_id=session, memory_limit_MB=1000)
    assert answer["run_result"]["stderr"].endswith("MemoryError\n")


@needs_root
def test_idle_session_takes_little_memory():
    """Its worker shares the pages of the preloaded packages with the zygote."""
    server = Server("--max-sessions", "1", workers=1)
    try:
        before = {process.pid for process in server.descendants()}
        for _ in range(2):
            assert server.run("print('idle')", session_id="a")["run_result"]["stdout"] == "idle\n"
        own = [process for process in server.descendants() if process.pid not in before]
        assert len(own) == 2  # the worker and its program
        assert sum(process.memory_full_info().uss for process in own) < 10 << 20
    finally:
        server.stop()


def test_one_session_too_many_is_503_with_retry_after_and_runs_nothing(server):
    names = [f"many-{i}" for i in range(4)]
    for name in names[:3]:
        server.run("pass", session_id=name)
    body = json.dumps({"code": "print(1)", "language": "python", "session_id": names[3]}).encode()
    status, headers, answer = server.post(body)
    assert (status, headers["Retry-After"]) == (503, "1")
    assert "3 sessions" in answer["detail"]
    assert end(server, names[0]) == 200
    assert said(server.run("print(1)", session_id=names[3])) == (1, True)
    assert [end(server, name) for name in names] == [404, 200, 200, 200]


def test_call_that_comes_after_the_end_of_its_session_begins_none(server):
    """As the call of a client that gave up may: it goes by another connection."""
    assert server.request("/v1/sessions/late?given_up", method="DELETE")[0] == 404
    body = json.dumps({"code": "1", "language": "python", "session_id": "late"}).encode()
    status, _, answer = server.post(body)
    assert status == 422 and "ended before it began" in answer["detail"][0]["msg"]
    assert renew(server, "late") == (200, {"renewed": 0})
    assert end(server, "another") == 404, "which may begin later"
    assert said(server.run("1", session_id="another")) == (1, True)
    end(server, "another")


async def test_ends_of_unknown_sessions_take_no_memory_for_long(monkeypatch):
    monkeypatch.setattr(sessions_module, "MAX_ENDED", 2)
    pool = Pool(workers=1, max_output_bytes=1000, preload=())
    sessions = Sessions(pool, max_sessions=1, idle_s=60)
    for name in "abc":
        await sessions.end(name, given_up=True)
    request = {"code": "1", "stdin": None, "run_timeout": 5, "memory_limit_MB": -1, "files": {}, "fetch_files": []}
    request["echo_last_expression"] = False
    with pytest.raises(SessionEndedError):
        await sessions.run("b", request, queue_timeout_s=5)
    assert (await sessions.run("a", request, queue_timeout_s=5))[0]["alive"]
    sessions.close()
    await pool.close()


def test_calls_of_one_session_run_one_after_the_other(server, session):
    server.run("x = 0", session_id=session)
    code = "import time\ny = x\ntime.sleep(.05)\nx = y + 1"
    threads = [threading.Thread(target=server.run, args=(code,), kwargs={"session_id": session}) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert server.run("print(x)", session_id=session)["run_result"]["stdout"] == "4\n"


def test_ended_session_leaves_no_process_and_no_file(server, session):
    before = len(server.descendants())
    code = "import subprocess\ntry: subprocess.Popen(['sleep', '60'], start_new_session=True)\nexcept OSError: pass"
    server.run(f"{code}\nopen('left', 'w').close()", session_id=session)
    assert end(server, session) == 200
    wait_until(lambda: len(server.descendants()) <= before and not list(server.root.glob("*/left")))


@pytest.mark.parametrize("session_id", ["", "x" * 129, 7, None])
def test_wrong_session_id_is_422_but_null_is_none(server, session_id):
    status, _, answer = server.post(json.dumps({"code": "1", "language": "python", "session_id": session_id}).encode())
    assert status == (200 if session_id is None else 422), answer


def test_idle_session_ends():
    server = Server("--max-sessions", "1", "--session-idle-s", "2", "--preload", "")
    try:
        server.run("x = 1", session_id="a")
        assert said(server.run("print(x)", session_id="a")) == (2, True)
        processes = len(server.descendants())
        wait_until(lambda: len(server.descendants()) < processes, timeout_s=15)
        answer = server.run("print('x' in globals())", session_id="a")
        assert (answer["run_result"]["stdout"], answer["session"]["call"]) == ("False\n", 1)
    finally:
        server.stop()


def renew(server: Server, *session_ids: str) -> tuple[int, dict]:
    status, _, content = server.request("/v1/sessions", json.dumps({"session_ids": session_ids}).encode())
    return status, json.loads(content)


def test_lease_that_is_renewed_does_not_end():
    server = Server("--session-idle-s", "1", "--preload", "")
    try:
        for name in ("renewed", "other"):
            server.run("x = 1", session_id=name)
        processes, deadline = len(server.descendants()), time.monotonic() + 20
        while len(server.descendants()) == processes and time.monotonic() < deadline:  # until the other one has ended
            assert renew(server, "renewed", "unknown") == (200, {"renewed": 1})
            time.sleep(0.05)
        assert said(server.run("print(x)", session_id="renewed")) == (2, True)
        assert said(server.run("pass", session_id="other")) == (1, True)
    finally:
        server.stop()


@pytest.mark.parametrize("body", [b"{}", b"[]", b'{"session_ids": [7]}', b'{"session_ids": [""]}', b"{"])
def test_renewal_of_what_is_no_id_is_422(server, body):
    status, _, content = server.request("/v1/sessions", body)
    assert status == 422 and "session_ids" in json.loads(content)["detail"]


def test_stop_ends_sessions_and_removes_their_files():
    server = Server("--max-sessions", "2", "--preload", "")
    server.run("x = 1", session_id="a")
    processes = server.descendants()
    server.stop()
    wait_until(lambda: not any(psutil.pid_exists(process.pid) for process in processes))
