"""What the server's log says: never what a client sent, such as a token or a program."""

import socket
import subprocess

import pytest

from tests.unit.sandbox.server.test_clients import AUTHORIZATION, TOKEN, body_of, connect, run
from tests.unit.sandbox.server_process import LAUNCHER, REPOSITORY, Server
from verl_ext.sandbox.server.clients import log_failure, without_quotations

MALFORMED = {
    "NUL in the token": f"GET /v1/ping HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\x00\r\n\r\n",
    "folded header": f"GET /v1/ping HTTP/1.1\r\nHost: x\r\nX: y\r\n Bearer {TOKEN}\r\n\r\n",
    "no colon": f"GET /v1/ping HTTP/1.1\r\nAuthorization Bearer {TOKEN}\r\n\r\n",
    "token as method": f"{TOKEN} / HTTP/1.1\r\n\r\n",
    "token in the path": f"GET /{TOKEN}\x01 HTTP/1.1\r\n\r\n",
    "bad version": f"GET / HTTP/9.{TOKEN}\r\n\r\n",
    "long header": f"GET / HTTP/1.1\r\nAuthorization: Bearer {TOKEN}{'x' * 20_000}\r\n\r\n",
    "two lengths": f"POST /run_code HTTP/1.1\r\nContent-Length: 3\r\nContent-Length: 4\r\nX: {TOKEN}\r\n\r\n{TOKEN}",
    "length and chunks": f"POST / HTTP/1.1\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n{TOKEN}",
    "more than its length": f"POST /run_code HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\n\r\n1print({TOKEN!r})\r\n\r\n",
    "bad chunk": f"POST /run_code HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n"
    f"Transfer-Encoding: chunked\r\n\r\nzz{TOKEN}\r\n",
    "unknown expectation": f"GET / HTTP/1.1\r\nHost: x\r\nExpect: {TOKEN}\r\n\r\n",
    "TLS": f"\x16\x03\x01{TOKEN}\r\n\r\n",
    "websocket": f"GET /v1/ping HTTP/1.1\r\nHost: x\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n{TOKEN}\x00",
}
PROGRAMS = [
    body_of(code=f"1/0  # {TOKEN}", files={f"{TOKEN}/a": "", TOKEN: ""}),
    body_of(code="import sys; sys.stderr.write('" + TOKEN + "'); sys.exit(1)"),
    body_of(code=TOKEN, language=TOKEN),
    body_of(code=f"import os; os.write(2, b'{TOKEN}'); os._exit(3)", fetch_files=[TOKEN]),
    body_of(code=f"raise SystemExit('{TOKEN}')", session_id=TOKEN),
    body_of(code="\ud800" + TOKEN, stdin=TOKEN, files={TOKEN: "not base64"}),
]


def test_log_holds_neither_token_nor_program(monkeypatch):
    monkeypatch.setenv("SANDBOX_TOKEN", TOKEN)
    server = Server("--preload", "", workers=1)
    try:
        for text in MALFORMED.values():
            with connect(server) as connection:
                connection.sendall(text.encode("latin-1"))
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(1 << 16):
                    pass
        for content in PROGRAMS:
            server.post(content, **AUTHORIZATION)
        assert run(server)["stdout"] == "42\n"
    finally:
        server.process.terminate()
        _, stderr = server.process.communicate(timeout=10)
    assert stderr == ""


def raised(error: Exception) -> Exception:
    try:
        raise error
    except Exception as exc:
        return exc


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ValueError(f"Invalid header value 'Bearer {TOKEN}'"), "a request failed: ValueError at test_log.py:"),
        (OSError(24, "Too many open files", TOKEN), "OSError (Too many open files) at test_log.py:"),
        (KeyError(TOKEN), "KeyError at "),
    ],
)
def test_failure_is_logged_by_its_kind_and_place(caplog, error, words):
    log_failure("a request failed", raised(error))
    log_failure(f"Exception in callback Client.f({TOKEN!r})", raised(error))
    assert words in caplog.messages[0]
    assert caplog.messages[1].startswith("Exception in callback Client.f: ")
    assert TOKEN not in caplog.text.replace(str(raised), "")


def test_message_of_a_sandbox_error_is_logged_without_names_of_files():
    error = FileExistsError(17, "File exists", f"{TOKEN}/a")
    assert without_quotations(error) == "[Errno 17] File exists:"


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"\xff\xfetoken", "is not UTF-8: expected"), (b"two\nlines", "contains line breaks or control characters")],
)
def test_token_that_no_header_can_carry_is_one_clear_line(tmp_path, content, words):
    (tmp_path / "token").write_bytes(content)
    command = [*LAUNCHER, "--token-file", str(tmp_path / "token")]
    run = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=20)
    assert (run.returncode, run.stderr.count("\n")) == (1, 1)
    assert words in run.stderr
    assert "lines" not in run.stderr.replace("line breaks", "")
