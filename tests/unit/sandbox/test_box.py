"""Boxes as a client sees them, on a real server."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from tests.unit.sandbox.boxes import need_boxes, opened, packed, unpacked
from tests.unit.sandbox.machines import MACHINES, machines
from tests.unit.sandbox.server_process import Server, running
from verl_ext.sandbox import Box, BoxUnavailable, SandboxClient


@pytest.fixture(scope="module", params=machines("all layers", "ordinary user"))
def server(request):
    server = Server("--preload", "", "--max-boxes", "3", launcher=MACHINES[request.param])
    try:
        need_boxes(server.url)
        yield server
    finally:
        server.stop()


@pytest.fixture
async def client(server) -> AsyncIterator[SandboxClient]:
    client = SandboxClient([server.url], backoff_s=0.01)
    yield client
    await client.aclose()


async def test_command_sees_the_files_and_leaves_others(client):
    async with opened(client, {"app/data.txt": "one\ntwo\n"}) as box:
        result = await box.run("wc -l < data.txt | tee out", timeout_s=10)
        assert (result.status, result.stdout, result.return_code) == ("ok", "2\n", 0), result
        sealed = await box.seal(["/app", "/logs/reward.txt"])
    assert unpacked(sealed.archive) == {"app": None, "app/data.txt": b"one\ntwo\n", "app/out": b"2\n"}
    assert (sealed.dropped, sealed.strays, sealed.lost) == ({}, (), "")


async def test_folder_lasts_and_variables_do_not(client):
    async with opened(client, workdir="/app/sub") as box:
        assert (await box.run("pwd; mkdir -p 'a b'; cd 'a b'; export X=1", timeout_s=10)).stdout == "/app/sub\n"
        assert (await box.run("pwd; echo $X", timeout_s=10)).stdout == "/app/sub/a b\n\n"
        gone = await box.run("cd ..; rmdir 'a b'; cd /tmp; mkdir x; cd x; rmdir ../x", timeout_s=10)
        assert gone.status == "ok", gone
        assert (await box.run("pwd", timeout_s=10)).status == "ok"


@pytest.mark.parametrize(
    "command", ["exit 3", "(exit 3)", "trap 'exit 3' EXIT", "exec bash -c 'exit 3'", "set -e; cd /; (exit 3)"]
)
async def test_exit_code_is_that_of_bash(client, command):
    async with opened(client) as box:
        result = await box.run(command, timeout_s=10)
        assert (result.status, result.return_code) == ("code_error", 3)


async def test_tools_work(client):
    async with opened(client) as box:
        commands = """
set -e
git init -q r && cd r && echo 1 > a && git add a && git commit -qm first && git log --format=%an
python3 -c 'import sqlite3; c = sqlite3.connect("d.db"); c.execute("create table t (x)"); c.commit(); print("sqlite")'
tar czf a.tgz a && mkdir b && tar xzf a.tgz -C b && cat b/a
flock /tmp/l echo locked
seq 3 | sort -r | head -1
python3 - <<'END'
import asyncio, multiprocessing, tempfile
asyncio.run(asyncio.sleep(0))
with multiprocessing.get_context("fork").Pool(2) as pool:
    print(pool.map(abs, [-1, -2]))
END
"""
        result = await box.run(commands, timeout_s=30)
        assert result.stdout == "agent\nsqlite\n1\nlocked\n3\n[1, 2]\n", result
        assert result.stderr == ""


async def test_stdin_reaches_the_command(client):
    async with opened(client) as box:
        text = "a'b\n" * 50_000
        assert (await box.run("cat > f; wc -c < f", timeout_s=10, stdin=text)).stdout == f"{len(text)}\n"
        assert (await box.run("cat", timeout_s=10)).stdout == ""


async def test_what_a_command_leaves_running_stops_between_calls_and_dies_with_the_box(server, client):
    async with opened(client) as box:
        await box.run("(while true; do echo >> ticks; sleep 0.05; done) &", timeout_s=10)
        before = await box.run("wc -l < ticks", timeout_s=10)
        await asyncio.sleep(0.5)
        after = await box.run("wc -l < ticks", timeout_s=10)
        assert int(after.stdout) - int(before.stdout) <= 3
        await box.run("sleep 0.3", timeout_s=10)
        assert int((await box.run("wc -l < ticks", timeout_s=10)).stdout) > int(after.stdout)
        left = [process for process in server.descendants() if process.name() == "bash"]
        await box.seal(["/app"])
        assert left and not running(left)


async def test_timeout_kills_the_processes_and_keeps_the_files(client):
    async with opened(client) as box:
        result = await box.run("echo begun; touch kept; sleep 30 & setsid sleep 31 & sleep 32", timeout_s=0.5)
        assert (result.status, result.stdout, result.session_ended) == ("timeout", "begun\n", False)
        assert (await box.run("ls; pgrep sleep", timeout_s=10)).stdout == "kept\n"


async def test_memory_is_that_of_all_processes_together(client):
    code = "python3 -c 'b = bytearray(60 << 20); import time; time.sleep(5)'"
    async with opened(client, memory_mb=150) as box:
        assert (await box.run(f"{code.replace('5', '0.2')}", timeout_s=10)).status == "ok"
        result = await box.run(f"{code} & {code} & {code} & wait", timeout_s=10)
        assert (result.status, result.return_code) == ("code_error", -9)
        assert "memory limit" in result.stderr
        assert (await box.run("echo lives", timeout_s=10)).stdout == "lives\n"


async def test_archive_that_may_not_be_unpacked_is_refused(client):
    for name, why in (("../x", "'..'"), ("/etc/passwd", "relative"), ("etc/passwd", "below /app")):
        with pytest.raises(ValueError, match=why):
            await Box(client).open(packed({name: "x"}))
    with pytest.raises(ValueError, match="tar.gz"):
        await Box(client).open(b"no archive")
    with pytest.raises(ValueError, match="disk limit"):
        await Box(client, disk_mb=1).open(packed({"app/large": bytes(2 << 20)}))


async def test_box_that_is_not_there_is_a_failure_of_the_sandbox(client):
    box = Box(client)
    assert (await box.run("true", timeout_s=1)).status == "sandbox_failure"
    with pytest.raises(BoxUnavailable):
        await box.seal(["/app"])
    async with opened(client) as box:
        await box.close()
        result = await box.run("true", timeout_s=1)
        assert (result.status, result.session_ended) == ("sandbox_failure", True)


async def test_a_box_waits_for_its_turn(client):
    boxes = [Box(client) for _ in range(3)]
    await asyncio.gather(*(box.open() for box in boxes))
    fourth = asyncio.create_task(Box(client).open())
    await asyncio.sleep(0.2)
    assert not fourth.done()
    await boxes[0].close()
    await asyncio.wait_for(fourth, 10)
    for box in boxes:
        await box.close()
