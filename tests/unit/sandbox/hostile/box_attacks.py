"""Attacks from inside a box. As all programs of this folder, they run in a sandbox server, and only there."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from time import monotonic, sleep

from tests.unit.sandbox.boxes import opened
from tests.unit.sandbox.hostile.attacks import PRELUDE
from tests.unit.sandbox.server_process import Server
from verl_ext.sandbox import Box, RunResult, SandboxClient

SECRET = "the-expected-answer"


class BoxServer(Server):
    """A server whose boxes are attacked; `check` finds what one left."""

    def check(self) -> None:
        """It executes code, and there is no process but its two zygotes and idle workers, and no box."""
        assert self.ping()["status"] == "ok"
        assert b"sandbox_boxes 0.0" in self.request("/metrics")[2]
        deadline = monotonic() + 5
        while len(left := self.descendants()) > 4 and monotonic() < deadline:
            sleep(0.01)
        assert len(left) <= 4, left


class Attack:
    """What a test does with one box, and that the box then still works."""

    def __init__(self, box: Box) -> None:
        self.box = box

    async def run(self, command: str, *, timeout_s: float = 20) -> RunResult:
        result = await self.box.run(command, timeout_s=timeout_s)
        assert result.status != "sandbox_failure", result
        return result

    async def python(self, code: str, *, with_: str = "python3") -> str:
        """Return what a program prints that begins with PRELUDE."""
        return (await self.run(f"{with_} - <<'END_OF_PROGRAM'\n{PRELUDE}{code}\nEND_OF_PROGRAM")).stdout

    async def still_works(self) -> None:
        result = await self.run("echo still works; touch /app/probe && rm /app/probe")
        assert (result.status, result.stdout) == ("ok", "still works\n"), result


@asynccontextmanager
async def attack(server: Server, files: Mapping[str, str] = {}, **options: object) -> AsyncIterator[Attack]:
    client = SandboxClient([server.url])
    try:
        async with opened(client, files, **options) as box:
            yield Attack(box)
    finally:
        await client.aclose()
