"""A fake server for the client, and calls of the client."""

import asyncio
import json
from collections.abc import Awaitable, Callable

from aiohttp import web

from verl_ext.sandbox import RunResult, SandboxClient
from verl_ext.sandbox.client import SERVER_NAME


def answer(answer_status: str = "Success", **result: object) -> web.Response:
    run_result = {"status": "Finished", "execution_time": 0.5, "return_code": 0, "stdout": "out", "stderr": "err"}
    body = {"status": answer_status, "message": "why", "run_result": run_result | result, "queue_time": 0.25}
    return web.json_response(body)


async def hang() -> web.Response:
    await asyncio.sleep(60)
    raise AssertionError("not reached")


class FakeServer:
    """Answers each request with the next entry of `script`, repeating the last; keeps the requests' bodies."""

    def __init__(self) -> None:
        self.script: list[Callable[[], web.Response | Awaitable[web.Response]]] = [answer]
        self.bodies: list[dict] = []
        self.ends: list[str] = []  # queries of the ends of sessions

    async def end(self, request: web.Request) -> web.Response:
        self.ends.append(request.query_string)
        return web.Response(status=404)

    async def handle(self, request: web.Request) -> web.Response:
        self.bodies.append(await request.json())
        step = self.script[min(len(self.bodies), len(self.script)) - 1]()
        return step if isinstance(step, web.Response) else await step

    async def open_box(self, _: web.Request) -> web.Response:
        return web.json_response({"status": "Success", "idle_s": 600.0})

    async def start(self, port: int = 0) -> None:
        app = web.Application()
        app.router.add_post("/run_code", self.handle)
        app.router.add_delete("/v1/sessions/s", self.end)
        app.router.add_post("/v1/boxes/{box}", self.open_box)
        self.runner = web.AppRunner(app, shutdown_timeout=0.01, handler_cancellation=True)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", port).start()
        self.url = f"http://127.0.0.1:{self.runner.addresses[0][1]}"


async def call(*urls: str, code: str = "print(1)", timeout_s: float = 5, **settings: object) -> RunResult:
    client = SandboxClient(urls, **({"backoff_s": 0.01} | settings))
    try:
        return await client.run(code, timeout_s=timeout_s)
    finally:
        await client.aclose()


def in_session(call: int, status: str = "Success") -> web.Response:
    """Return our server's answer to a session's call of that number."""
    body = json.loads(answer(status).text) | {"session": {"call": call, "alive": True, "idle_s": 600.0}}
    return web.json_response(body, headers={"Server": SERVER_NAME})
