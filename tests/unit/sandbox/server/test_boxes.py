"""Boxes on the server's side: leases, limits on their number, what is left, and whose doing it is that one is lost."""

import asyncio
import contextlib
import json
import signal
from collections.abc import Iterator

import psutil
import pytest

from tests.unit.sandbox.boxes import need_boxes, opened, unpacked
from tests.unit.sandbox.server_process import Server, root_of, wait_until
from verl_ext.sandbox import Box, BoxUnavailable, SandboxClient


@pytest.fixture(scope="module")
def started() -> Iterator[Server]:
    server = Server("--preload", "", "--session-idle-s", "1.5", "--max-boxes", "4")
    need_boxes(server.url)
    yield server
    server.stop()


@pytest.fixture
def server(started) -> Server:
    """A server without a box."""
    wait_until(lambda: not count(started), timeout_s=10)
    return started


def ask(server: Server, path: str, body: dict | None = None, method: str | None = None) -> tuple[int, dict]:
    content = None if method else json.dumps(body or {}).encode()
    status, _, answer = server.request(f"/v1/boxes/{path}", content, method=method)
    return status, json.loads(answer)


def processes_of_boxes(server: Server) -> list[psutil.Process]:
    """Return the zygote of boxes first, then the workers of boxes."""
    for child in psutil.Process(server.process.pid).children():
        if '"boxes": true' in " ".join(child.cmdline()):
            return [child, *child.children(recursive=True)]
    return []


def count(server: Server) -> float:
    """Return how many boxes are open."""
    lines = server.request("/metrics")[2].decode().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith("sandbox_boxes "))


def test_box_that_nobody_renews_ends_and_one_that_is_renewed_does_not(server):
    for name in ("renewed", "left"):
        assert ask(server, name)[0] == 200
    assert count(server) == 2

    def has_ended() -> bool:
        server.request("/v1/sessions", b'{"session_ids": ["renewed", "unknown"]}')
        return count(server) == 1

    wait_until(has_ended, timeout_s=20)
    assert ask(server, "renewed/run", {"command": "true"})[1]["status"] == "Success"
    assert ask(server, "left/run", {"command": "true"})[1]["status"] == "SandboxError"


@pytest.mark.nightly
async def test_client_renews_the_boxes_that_wait(server):
    client = SandboxClient([server.url])
    async with opened(client) as box:
        await asyncio.sleep(4)
        assert (await box.run("true", timeout_s=5)).status == "ok"
    await client.aclose()


def test_number_of_boxes_is_limited_and_no_id_is_used_twice(server):
    for name in "abcd":
        assert ask(server, name)[0] == 200
    assert ask(server, "e")[0] == 503
    assert ask(server, "a")[0] == 422
    assert ask(server, "a", method="DELETE")[0] == 200
    assert ask(server, "a", method="DELETE")[0] == 404
    assert ask(server, "e")[0] == 200
    assert ask(server, "f?given_up", method="DELETE")[0] == 404  # before it came
    assert ask(server, "e", method="DELETE")[0] == 200
    assert ask(server, "f")[1]["status"] == "SandboxError"


def test_server_without_boxes_says_why():
    server = Server("--preload", "", "--max-boxes", "0")
    try:
        status, answer = ask(server, "a")
        assert status == 422 and "--max-boxes" in answer["detail"][0]["msg"]
        assert server.ping()["max_boxes"] == 0
    finally:
        server.stop()


def test_request_that_may_not_be_is_422(server):
    for path, body in (
        ("a", {"workdir": "/etc"}),
        ("a", {"workdir": "/app/../etc"}),
        ("a", {"workdir": "app"}),
        ("a", {"archive": 7}),
        ("a", {"memory_limit_MB": 1}),
        ("a/run", {}),
        ("a/run", {"command": "true", "run_timeout": 0}),
        ("a/seal", {"paths": ["/etc/passwd"]}),
        ("a/seal", {"paths": ["/app/../tests/x"]}),
        ("a/seal", {"paths": ["/"]}),
        ("a/seal", {"paths": [], "max_bytes": 1 << 40}),
    ):
        assert ask(server, path, body)[0] == 422, (path, body)


def test_stop_of_the_server_leaves_nothing_of_its_boxes():
    server = Server("--preload", "")
    need_boxes(server.url)
    assert ask(server, "a")[0] == 200
    answer = ask(server, "a/run", {"command": "setsid sleep 300 & sleep 300 & echo ok"})[1]
    assert answer["run_result"]["stdout"] == "ok\n"
    processes = server.descendants()
    root = root_of(processes_of_boxes(server))
    server.stop()
    wait_until(lambda: not any(psutil.pid_exists(process.pid) for process in processes))
    assert not root.exists()


@pytest.mark.parametrize("with_box", [False, True])
def test_server_that_is_killed_leaves_no_folder(tmp_path, monkeypatch, with_box):
    tmp_path.chmod(0o711)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    server = Server("--preload", "", workers=1)
    assert not with_box or ask(server, "a")[0] in (200, 422)
    assert list(tmp_path.iterdir())
    server.process.kill()
    server.process.communicate()
    wait_until(lambda: not list(tmp_path.iterdir()), timeout_s=10)


async def test_client_that_hangs_up_ends_its_box(server):
    client = SandboxClient([server.url])
    box = Box(client)
    await box.open()
    call = asyncio.create_task(box.run("sleep 100", timeout_s=60))
    await asyncio.sleep(0.3)
    call.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await call
    for _ in range(500):
        if not count(server):
            break
        await asyncio.sleep(0.01)
    assert count(server) == 0
    assert (await box.run("true", timeout_s=5)).status == "sandbox_failure"
    await box.close()
    await client.aclose()


async def lose(server: Server, signals: dict[str, signal.Signals]) -> tuple:
    """Send signals to the box's worker and its zygote while a command runs; return what the client then sees."""
    client = SandboxClient([server.url], max_attempts=1, queue_timeout_s=5)
    box = Box(client)
    await box.open()
    call = asyncio.create_task(box.run("touch begun; sleep 100", timeout_s=1.5))
    await asyncio.sleep(0.5)
    zygote, worker, *_ = processes_of_boxes(server)
    for name, process in (("zygote", zygote), ("worker", worker)):
        if name in signals:
            process.send_signal(signals[name])
    first = await call
    second = await box.run("true", timeout_s=5)
    try:
        sealed: object = await box.seal(["/app/a"])
    except BoxUnavailable as error:
        sealed = error
    again = Box(client)
    await again.open()
    assert (await again.run("echo ok", timeout_s=5)).stdout == "ok\n"
    await again.close()
    await client.aclose()
    return first, second, sealed


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("number", "status", "code"), [(signal.SIGKILL, "code_error", -9), (signal.SIGSTOP, "timeout", None)]
)
async def test_box_whose_worker_is_lost_while_all_else_works_is_lost_by_its_own_doing(server, number, status, code):
    first, second, sealed = await lose(server, {"worker": number})
    assert (first.status, first.return_code, first.session_ended) == (status, code, True), first
    assert (second.status, second.session_ended) == ("code_error", True)
    assert sealed.lost and unpacked(sealed.archive) == {}


async def test_box_whose_worker_dies_with_the_zygote_is_a_failure_of_the_sandbox(server):
    first, second, sealed = await lose(server, {"zygote": signal.SIGKILL, "worker": signal.SIGKILL})
    assert (first.status, first.session_ended) == ("sandbox_failure", True), first
    assert second.status == "sandbox_failure"
    assert isinstance(sealed, BoxUnavailable)


async def test_server_that_is_gone_is_a_failure_of_the_sandbox_and_another_one_takes_the_next_box(server):
    other = Server("--preload", "", workers=1)
    client = SandboxClient([server.url, other.url], queue_timeout_s=5, backoff_s=0.01)
    try:
        boxes = [Box(client) for _ in range(4)]
        await asyncio.gather(*(box.open() for box in boxes))
        other.stop()
        results = await asyncio.gather(*(box.run("true", timeout_s=5) for box in boxes))
        assert {result.status for result in results} == {"ok", "sandbox_failure"}
        last = Box(client)
        await last.open()
        assert (await last.run("true", timeout_s=5)).status == "ok"
        for box in (*boxes, last):
            await box.close()
    finally:
        other.stop()
        await client.aclose()


def test_programs_of_run_code_keep_their_walls_while_there_are_boxes(server):
    assert ask(server, "a")[0] == 200
    code = "import os\ntry: os.fork()\nexcept PermissionError: print('held')\nprint(os.listdir())"
    assert server.result(code)["stdout"] == "held\n['main.py']\n"
    assert "tarfile" not in server.result("import sys; print(*sys.modules)")["stdout"]
