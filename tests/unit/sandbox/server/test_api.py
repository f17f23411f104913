"""What a request may contain, such as paths of files; and that no route runs a program past the queue."""

import json
import re
import socket
import threading
from collections.abc import Iterator

import psutil
import pytest

from tests.unit.sandbox.server_process import Server, wait_for_program, wait_until
from tests.unit.sandbox.test_server import read_metrics
from verl_ext.sandbox.server import api


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server("--preload", "", "--max-sessions", "1", workers=1)
    yield server
    server.stop()


def refused(server: Server, **fields: object) -> str:
    """Return the message of a 422 that names a field; check that the server runs the next program."""
    status, _, answer = server.post(json.dumps({"code": "pass", "language": "python"} | fields).encode())
    assert status == 422, answer
    assert answer["detail"][0]["loc"][:2] == ["body", next(iter(fields))]
    assert server.result("print(1)")["stdout"] == "1\n"
    return answer["detail"][0]["msg"]


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        (["a", "a/b"], "'a' cannot be both a file and the folder of other files"),
        (["a/b/c", "x", "a/b"], "'a/b' cannot be both a file and the folder"),
        (["a", "./a"], "two of the paths are the same file"),
        (["d/a", "d//a"], "two of the paths are the same file"),
        (["a", "a/"], "two of the paths are the same file"),
        (["main.py"], "'main.py' belongs to the sandbox"),
        (["main.py/a"], "'main.py' belongs to the sandbox"),
        ([".stdin"], "'.stdin' belongs to the sandbox"),
        ([".stdin/a"], "'.stdin' belongs to the sandbox"),
        (["n" * 300], "names of at most 255 bytes .* got a name of 300"),
        (["é" * 128], "got a name of 256"),
        (["d/" * 2500 + "a"], "a path of at most 3500 bytes, got a name of 1 in a path of 5001"),
        (["\ud800"], "without lone surrogates"),
        (["a\0b"], "without '..' or NUL"),
        (["../a"], "without '..' or NUL"),
        (["/a"], "below the request's folder"),
        (["."], "below the request's folder"),
        ([""], "below the request's folder"),
        ([f"d{i}/f" for i in range(1500)], "at most 2048 files and folders"),
        (["d/" * 1200 + "f"], "at most 128 names in a path, got 1201"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_files_that_cannot_be_made_are_422_with_a_message(server, paths, message):
    assert re.search(message, refused(server, files=dict.fromkeys(paths, "YQ==")))


@pytest.mark.parametrize("path", ["n" * 300, "d/" * 2500 + "a", "\ud800", "a\0b", "../a", "/a", ".", "", "a/../../b"])
def test_file_that_cannot_be_fetched_is_422(server, path):
    refused(server, fetch_files=[path])


def test_longest_names_spelt_in_any_way_are_made_and_fetched(server):
    paths = ["n" * 255, "é" * 127, "./a//b/", "/".join(["d" * 100] * 30), "\udcff", " ", "-rf", "a\nb"]
    code = "import os; print(sum(len(files) for _, _, files in os.walk('.')))"
    answer = server.run(code, files=dict.fromkeys(paths, "YQ=="), fetch_files=[p.rstrip("/") for p in paths])
    assert answer["run_result"]["stdout"] == f"{len(paths) + 1}\n", answer
    assert set(answer["files"].values()) == {"YQ=="}
    assert len(answer["files"]) == len(paths)


def test_null_makes_no_file_but_is_checked(server):
    assert server.result("import os; print(os.listdir())", files={"a": None})["stdout"] == "['main.py']\n"
    refused(server, files={"a": None, "a/b": ""})


@pytest.mark.parametrize("session_id", [None, "fetches"])
def test_as_many_files_as_may_be_named_are_fetched(server, session_id):
    paths = [f"f{i}" for i in range(200)]
    answer = server.run("pass", files=dict.fromkeys(paths, "YQ=="), fetch_files=paths, session_id=session_id)
    assert (list(answer["files"]), answer["message"]) == (paths, "")
    server.request("/v1/sessions/fetches", method="DELETE")
    assert "at most 200 items" in refused(server, fetch_files=[*paths, "one more"])


# --- /v1/ping


def test_ping_waits_in_the_queue_and_runs_nothing_beside_it(server):
    """A program holds the only worker until its client hangs up: many pings then share one place in the queue."""
    body = json.dumps({"code": "import time; time.sleep(30)", "language": "python", "run_timeout": 30}).encode()
    pings = [threading.Thread(target=server.ping) for _ in range(20)]
    with socket.create_connection(("127.0.0.1", int(server.url.rsplit(":")[-1]))) as busy:
        head = f"POST /run_code HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        busy.sendall(head.encode() + body)
        wait_for_program(server)
        before = len(server.descendants())
        for ping in pings:
            ping.start()
        connections = psutil.Process(server.process.pid).net_connections
        wait_until(lambda: len(connections()) >= len(pings) + 2)  # and of `busy`; and the listening socket
        wait_until(lambda: read_metrics(server)["sandbox_requests_waiting"] > 0)
        assert len(server.descendants()) <= before
        assert read_metrics(server)["sandbox_requests_waiting"] == 1
        assert all(ping.is_alive() for ping in pings)
    for ping in pings:
        ping.join()


async def test_ping_does_not_claim_health_while_the_queue_is_stuck(monkeypatch):
    from verl_ext.sandbox.server.pool import Pool

    monkeypatch.setattr(api, "PING_QUEUE_S", 0.2)
    pool = Pool(workers=1, max_output_bytes=1000, preload=())
    try:
        async with pool.slot(1):  # the only slot is taken and not given back
            why = await api.check_health(pool)
        assert why == "overloaded: no worker became free within 0.2 s; 1 requests run and 0 wait"
        assert await api.check_health(pool) is None
    finally:
        await pool.close()
