"""The contract with clients: what an answer contains, and that a program runs as with `python main.py`."""

import base64
import json
import os
import re
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tests.unit.sandbox.server_process import LAUNCHER, REPOSITORY, Server
from tests.unit.sandbox.test_server import read_metrics
from verl_ext.sandbox.server.box_isolation import NEEDED


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


REQUEST = '{"code": "print(1)", "language": "python"}'
TWICE = b'{"code": "1", "code": "2", "language": "python"}'


@pytest.mark.parametrize("body", [b"{", b"\xff", b"[]", b"[" * 100_000, b"", b"null", TWICE])
def test_body_that_is_no_json_object_is_422(server, body):
    assert server.post(body)[0] == 422


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "cp037"])
def test_body_that_is_not_utf_8_is_422(server, encoding):
    assert server.post(REQUEST.encode(encoding))[0] == 422
    assert server.post(REQUEST.encode("utf-8-sig"))[0] == 200


@pytest.mark.parametrize("field", ["run_timeout", "compile_timeout", "queue_timeout", "memory_limit_MB", "unknown"])
@pytest.mark.parametrize("value", ["NaN", "-Infinity", '"nan"', '"inf"', "1e999", f"1{'0' * 400}", f"1{'0' * 5000}"])
def test_number_that_is_none_or_too_large_is_422(server, field, value):
    status, _, answer = server.post(f'{REQUEST[:-1]}, "{field}": {value}}}'.encode())
    is_json = value[0] == '"' or value == "1e999" or len(value) == 401
    assert status == (200 if field == "unknown" and is_json else 422), answer


def test_server_without_sessions_refuses_them_clearly():
    server = Server("--preload", "", "--max-sessions", "0")
    try:
        status, _, answer = server.post(json.dumps({"code": "1", "language": "python", "session_id": "a"}).encode())
        assert status == 422
        assert "--max-sessions" in answer["detail"][0]["msg"]
        assert answer["detail"][0]["loc"] == ["body", "session_id"]
        assert server.ping()["max_sessions"] == 0
    finally:
        server.stop()


def test_sessions_are_allowed_and_ping_names_their_limits(server):
    assert server.run("1", session_id="a")["session"] == {"call": 1, "alive": True, "idle_s": 600}
    assert read_metrics(server)["sandbox_sessions"] == 1
    server.request("/v1/sessions/a", method="DELETE")
    assert read_metrics(server)["sandbox_sessions"] == 0


@pytest.mark.parametrize("number", ["-1", "4001"])
def test_number_of_sessions_has_bounds(number):
    command = [*LAUNCHER, "--max-sessions", number]
    run = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=30)
    assert run.returncode == 2 and "--max-sessions must be from 0 to 4000" in run.stderr


def test_unknown_fields_are_ignored(server):
    assert server.result("print(1)", args=["-v"], colour="red")["stdout"] == "1\n"


def test_ping_executes_code_and_names_what_bounds_a_program(bare):
    with urllib.request.urlopen(f"{bare.url}/v1/ping", timeout=10) as response:
        limits = {"max_sessions": 1000, "session_idle_s": 600, "max_boxes": 0}
        limits |= {"no_boxes": f"a box needs layers of isolation that are off on this server: {', '.join(NEEDED)}"}
        assert json.load(response) == {"status": "ok", "message": "", "layers": ["rlimits"]} | limits


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


# --- echo


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
    deep = server.result("-" * 20_000 + "1", echo_last_expression=True)  # also too deep for CPython's compiler
    assert deep["return_code"] == 1
    assert "RecursionError: maximum recursion depth exceeded" in deep["stderr"] or "MemoryError" in deep["stderr"]
