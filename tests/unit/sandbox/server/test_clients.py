"""Connections: how many are allowed, and how long each may take."""

import asyncio
import base64
import hashlib
import json
import socket
import subprocess
import sys
import time
import zlib
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, suppress
from functools import cache
from http import HTTPStatus

import psutil
import pytest
from aiohttp import web

from tests.unit.sandbox.server_process import LAUNCHER, REPOSITORY, Server, wait_until
from verl_ext.sandbox.server import answers, api, body, clients
from verl_ext.sandbox.server.boxes import Boxes
from verl_ext.sandbox.server.clients import Clients
from verl_ext.sandbox.server.pool import Pool
from verl_ext.sandbox.server.sessions import Sessions
from verl_ext.sandbox.server.workers import Workers

TOKEN = "correct-horse-battery"
UNPROCESSABLE = f"HTTP/1.1 422 {HTTPStatus(422).phrase}"  # Python 3.13 has another
AUTHORIZATION = {"Authorization": f"Bearer {TOKEN}"}


def post(content: bytes, *headers: str, length: int | None = None) -> bytes:
    lines = ["POST /run_code HTTP/1.1", "Host: x", f"Content-Length: {len(content) if length is None else length}"]
    return "\r\n".join([*lines, *headers, "", ""]).encode() + content


def body_of(**fields: object) -> bytes:
    return json.dumps({"code": "pass", "language": "python"} | fields).encode()


# --- one client's requests and all others


@pytest.fixture(scope="module")
def guarded() -> Iterator[Server]:
    """A server that asks for a token, has one worker and may have 200 files open."""
    environment = pytest.MonkeyPatch()
    environment.setenv("SANDBOX_TOKEN", TOKEN)
    launcher = ("prlimit", "--nofile=200:200", *LAUNCHER)
    server = Server("--preload", "", "--max-boxes", "0", workers=1, launcher=launcher)
    environment.undo()
    yield server
    server.stop()


def connect(server: Server) -> socket.socket:
    return socket.create_connection(("127.0.0.1", int(server.url.rsplit(":")[-1])), timeout=30)


def first_line(connection: socket.socket) -> str:
    """Return the first line of the answer; "" for none."""
    try:
        with connection.makefile("rb") as file:
            return file.readline().decode().strip()
    except ConnectionError:
        return ""


def run(server: Server, code: str = "print(6 * 7)", **fields: object) -> dict:
    return server.post(body_of(code=code, **fields), **AUTHORIZATION)[2]["run_result"]


@cache
def bomb(megabytes: int) -> bytes:
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    return b"".join([packer.compress(bytes(1 << 20)) for _ in range(megabytes)]) + packer.flush()


MIB = 1 << 20


def unknown(value: bytes, count: int) -> bytes:
    return b'{"code": "1", "language": "python", "x": [' + value * count + b"0]}"


BIG_REQUESTS = {
    "deep names": lambda: body_of(files={f"{i}/" + "a/" * 1700 + "x": "" for i in range(100)}),
    "deep names below one folder": lambda: body_of(files={"a/" * 1700 + str(i): "" for i in range(500)}),
    "one name of megabytes": lambda: body_of(files={"a/" * (2 * MIB): ""}),
    "names to fetch": lambda: body_of(fetch_files=[0] * 250_000),
    "names to fetch, less than is counted": lambda: body_of(fetch_files=[0] * 20_000),
    "deep names to fetch": lambda: body_of(fetch_files=["a/" * 1700 + str(i) + "/.." for i in range(500)]),
    "wrong files": lambda: body_of(files={str(i): "!" for i in range(16_000)}),
    "arrays in an unknown field": lambda: (
        b'{"code": "1", "language": "python", "x": [' + b"[]," * (8 * MIB // 3) + b"0]}"
    ),
    "strings in an unknown field": lambda: (
        b'{"code": "1", "language": "python", "x": [' + b'"",' * (8 * MIB // 3) + b"0]}"
    ),
    "objects in an unknown field": lambda: unknown(b'{"a":1},', MIB),
}


@pytest.mark.parametrize("content", BIG_REQUESTS.values(), ids=BIG_REQUESTS)
def test_request_is_refused_for_little_time_and_memory(guarded, content):
    process = psutil.Process(guarded.process.pid)
    content = content()
    run(guarded)
    cpu, memory = process.cpu_times(), process.memory_info().rss
    status, _, answer = guarded.post(content, **AUTHORIZATION)
    used = process.cpu_times()
    assert status == 422
    assert len(json.dumps(answer)) < 50_000
    assert used.user + used.system - cpu.user - cpu.system < 0.5
    assert process.memory_info().rss - memory < 50 * MIB
    assert run(guarded)["stdout"] == "42\n"


@pytest.mark.parametrize(
    ("encoding", "headers", "line"),
    [
        ("gzip", ["Authorization: Bearer " + TOKEN], UNPROCESSABLE),
        ("gzip", [], "HTTP/1.1 401 Unauthorized"),
        ("gzip", ["Authorization: Bearer wrong"], "HTTP/1.1 401 Unauthorized"),
        ("gzip, gzip", ["Authorization: Bearer " + TOKEN], UNPROCESSABLE),
        ("deflate", [], "HTTP/1.1 401 Unauthorized"),
        ("br", [], "HTTP/1.1 401 Unauthorized"),
        ("zstd", ["Authorization: Bearer " + TOKEN], UNPROCESSABLE),
    ],
)
def test_no_body_is_unpacked(guarded, encoding, headers, line):
    process = psutil.Process(guarded.process.pid)
    request = post(bomb(400), f"Content-Encoding: {encoding}", *headers)
    before = process.cpu_times().user
    with ExitStack() as stack:
        connections = [stack.enter_context(connect(guarded)) for _ in range(4)]
        for connection in connections:
            connection.sendall(request)
        assert [first_line(connection) for connection in connections] == [line] * 4
    assert process.cpu_times().user - before < 0.5


@pytest.mark.parametrize("headers", [[], ["Authorization: Bearer " + TOKEN]], ids=["no token", "token"])
def test_chunks_of_a_byte_do_not_take_the_server_s_time(guarded, headers):
    head = "\r\n".join(["POST /run_code HTTP/1.1", "Host: x", "Transfer-Encoding: chunked", *headers, "", ""])
    process = psutil.Process(guarded.process.pid)
    before = process.cpu_times().user
    with connect(guarded) as connection:
        with suppress(ConnectionError):  # it was closed meanwhile
            connection.sendall(head.encode() + b"1\r\nx\r\n" * (2 * MIB) + b"0\r\n\r\n")
        assert first_line(connection) in ("", "HTTP/1.1 401 Unauthorized")
    assert process.cpu_times().user - before < 0.5


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_a_body_in_chunks_is_read(guarded, size):
    content = body_of(code="print('in chunks')")
    chunks = [content[start : start + size] for start in range(0, len(content), size)]
    head = "\r\n".join(["POST /run_code HTTP/1.1", "Host: x", "Transfer-Encoding: chunked"])
    with connect(guarded) as connection:
        connection.sendall(f"{head}\r\nAuthorization: Bearer {TOKEN}\r\nConnection: close\r\n\r\n".encode())
        for chunk in chunks:
            connection.sendall(b"%x\r\n%s\r\n" % (len(chunk), chunk))
        connection.sendall(b"0\r\n\r\n")
        with connection.makefile("rb") as file:
            assert b"in chunks\\n" in file.read()


def test_largest_answer_is_sent_without_copies(guarded):
    process = psutil.Process(guarded.process.pid)
    code = "import os\nwith open('a', 'wb') as f:\n    for _ in range(40): f.write(os.urandom(1 << 20))\nopen('b', 'w')"
    code += "\nopen('c', 'w').write('cc')\nimport hashlib; print(hashlib.sha256(open('a', 'rb').read()).hexdigest())"
    before, peak = process.memory_info().rss, 0
    content = body_of(code=code, fetch_files=["a", "b", "c"])
    with connect(guarded) as connection:
        connection.sendall(post(content, f"Authorization: Bearer {TOKEN}", "Connection: close"))
        received = bytearray()
        while chunk := connection.recv(MIB):
            received += chunk
            peak = max(peak, process.memory_info().rss)
    head, _, content = bytes(received).partition(b"\r\n\r\n")
    answer = json.loads(content)
    assert int(head.lower().split(b"content-length: ")[1].split()[0]) == len(content)
    assert hashlib.sha256(base64.b64decode(answer["files"]["a"])).hexdigest() + "\n" == answer["run_result"]["stdout"]
    assert (answer["files"]["b"], answer["files"]["c"], list(answer["files"])) == ("", "Y2M=", ["a", "b", "c"])
    assert peak - before < 70 * MIB  # of which 40 are the file
    wait_until(lambda: process.memory_info().rss - before < 20 * MIB)  # no worker keeps its answer


# --- idle connections


def test_idle_connections_without_a_token_keep_nobody_out_and_end_no_program(guarded):
    process = psutil.Process(guarded.process.pid)
    with ExitStack() as stack:
        kept = stack.enter_context(connect(guarded))
        request = post(body_of(code="print(1)"), f"Authorization: Bearer {TOKEN}")
        for _ in range(3):
            kept.sendall(request)
            assert b"200 OK" in kept.recv(1 << 16)
            for _ in range(150):
                stack.enter_context(connect(guarded))
            wait_until(lambda: process.num_fds() > 50)
            assert run(guarded)["stdout"] == "42\n"
        assert process.num_fds() < 120


def test_connections_that_send_their_bodies_slowly_keep_nobody_out(guarded):
    with ExitStack() as stack:
        for _ in range(150):
            connection = stack.enter_context(connect(guarded))
            connection.sendall(post(b"{", f"Authorization: Bearer {TOKEN}", length=1000))
        assert run(guarded)["stdout"] == "42\n"


def test_running_programs_keep_their_connections(guarded):
    """Its worker runs one program at a time, and what waits for it is not closed for new connections."""
    request = post(body_of(code="print(1)"), f"Authorization: Bearer {TOKEN}", "Connection: close")
    slow = post(body_of(code="import time; time.sleep(1)"), f"Authorization: Bearer {TOKEN}", "Connection: close")
    with ExitStack() as stack:
        working = [stack.enter_context(connect(guarded)) for _ in range(20)]
        for i, connection in enumerate(working):
            connection.sendall(request if i else slow)
        for _ in range(200):
            stack.enter_context(connect(guarded))
        assert [first_line(connection) for connection in working] == ["HTTP/1.1 200 OK"] * 20


def test_server_with_too_few_descriptors_says_so():
    command = ["prlimit", "--nofile=110:110", sys.executable, "-m", "verl_ext.sandbox.server", "--port", "0"]
    run = subprocess.run([*command, "--workers", "2"], cwd=REPOSITORY, capture_output=True, text=True, timeout=30)
    assert (run.returncode, run.stdout) == (1, "")
    assert run.stderr == (
        "sandbox: this process may have 110 open files, and 2 workers with 0 sessions and boxes need 122: "
        "raise `ulimit -n`, or lower --workers, --max-sessions or --max-boxes\n"
    )


def test_sessions_by_default_leave_descriptors_to_clients():
    """(600 - 100 of the server - 2 x 3 of workers) / 2 / 3 = 82."""
    code = "from verl_ext.sandbox.server import clients as c; n = c.usual_sessions(2); print(n, c.max_clients(2, n))"
    command = ["prlimit", "--nofile=600:600", sys.executable, "-c", code]
    run = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=30)
    assert run.stdout == f"82 {600 - 100 - 3 * 84}\n", run.stderr


@pytest.fixture
async def port() -> AsyncIterator[int]:
    """The port of a server in this process."""
    pool = Pool(workers=1, max_output_bytes=1000, preload=())
    sessions = Sessions(pool, max_sessions=0, idle_s=1)
    boxes = Boxes(pool, Workers(0, 1000, isolation="auto", boxes=True), max_boxes=0, idle_s=1)
    runner = web.AppRunner(api.make_app(pool, sessions, boxes), handler_cancellation=True)
    await runner.setup()
    listener = socket.create_server(("127.0.0.1", 0))
    accepted = Clients(runner.server, listener, limit=3)
    accepted.start()
    yield listener.getsockname()[1]
    accepted.stop()
    await runner.cleanup()
    await pool.close()
    await boxes.workers.close()
    listener.close()


async def talk(port: int, *messages: bytes) -> bytes:
    """Return what the server says until it closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for message in messages:
        writer.write(message)
    try:
        async with asyncio.timeout(10):
            return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()


@pytest.mark.parametrize(
    "messages",
    [[], [b"GET /v1/ping HTTP/1.1\r\nX: "], [b"GET /nothing HTTP/1.1\r\nHost: x\r\n\r\n"]],
    ids=["nothing", "part of a header", "a request"],
)
async def test_connection_that_sends_nothing_more_is_closed(port, monkeypatch, messages):
    monkeypatch.setattr(clients, "SWEEP_S", 0.05)
    monkeypatch.setattr(clients, "FIRST_REQUEST_S", 0.2)
    monkeypatch.setattr(clients, "IDLE_S", 0.4)
    started = time.monotonic()
    answer = await talk(port, *messages)
    assert time.monotonic() - started >= 0.2
    assert answer[:12] == (b"HTTP/1.1 404" if messages and b"nothing" in messages[0] else b"")


async def test_body_that_is_slow_is_408(port, monkeypatch):
    monkeypatch.setattr(body, "BODY_S", 0.3)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(post(b'{"code"', length=100))
    assert (await reader.readline()).startswith(b"HTTP/1.1 408 ")
    writer.close()


async def test_program_may_take_longer_than_a_connection_may_idle(port, monkeypatch):
    monkeypatch.setattr(clients, "SWEEP_S", 0.05)
    monkeypatch.setattr(clients, "FIRST_REQUEST_S", 1.0)
    monkeypatch.setattr(clients, "IDLE_S", 0.2)
    request = post(body_of(code="import time; time.sleep(1.5); print(6 * 7)"), "Connection: close")
    assert b'"42\\n"' in await talk(port, request)


@pytest.mark.parametrize(("piece_s", "idle_s"), [(0.3, 60.0), (60.0, 0.3)])
async def test_client_that_does_not_take_its_answer_is_closed(port, monkeypatch, piece_s, idle_s):
    monkeypatch.setattr(clients, "SWEEP_S", 0.05)
    monkeypatch.setattr(clients, "IDLE_S", idle_s)
    monkeypatch.setattr(answers, "PIECE_S", piece_s)
    content = body_of(code="open('a', 'wb').write(bytes(30 << 20))", fetch_files=["a"])
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1)
    writer.write(post(content))
    assert (await reader.readexactly(15)) == b"HTTP/1.1 200 OK"
    writer.transport.pause_reading()
    ours = writer.get_extra_info("sockname")
    while ours in [connection.raddr for connection in psutil.Process().net_connections()]:  # the server's end of it
        await asyncio.sleep(0.02)
    with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
        await reader.readexactly(30 << 20)
    writer.close()


async def test_new_connection_takes_the_place_of_the_one_that_waits_longest(port):
    idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
    answer = await talk(port, b"GET /nothing HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 404")
    assert await idle[0][0].read() == b""
    idle[1][1].write(b"GET /nothing HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    assert (await idle[1][0].read()).startswith(b"HTTP/1.1 404")
    for _, writer in idle:
        writer.close()


async def test_newcomers_take_each_others_places_below_the_limit_too(port, monkeypatch):
    """A connection that has sent a request is not one of them."""
    monkeypatch.setattr(clients, "MAX_NEWCOMERS", 1)
    request = b"GET /nothing HTTP/1.1\r\nHost: x\r\n"
    kept, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request + b"\r\n")
    assert (await kept.readline()).startswith(b"HTTP/1.1 404")
    newcomers = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
    assert await newcomers[0][0].read() == b""
    newcomers[0][1].close()
    for reader, of_reader in ((kept, writer), newcomers[1]):
        of_reader.write(request + b"Connection: close\r\n\r\n")
        assert b"HTTP/1.1 404" in await reader.read()
        of_reader.close()


async def test_large_bodies_count_until_they_are_answered_and_no_longer(port, monkeypatch):
    monkeypatch.setattr(body, "MAX_HELD_BYTES", 3 * MIB)
    content = body_of(code="import time; time.sleep(0.5)  # " + "x" * (5 * MIB // 2))
    request = post(content, "Connection: close")
    both = await asyncio.gather(talk(port, request), talk(port, request))
    assert sorted(answer[9:12] for answer in both) == [b"200", b"503"]
    for _ in range(2):
        assert (await talk(port, request))[9:12] == b"200"
