"""The time limit of a request, against a server on 127.0.0.1 that answers, but never to the end."""

import asyncio
import time

import pytest
from aiohttp import web

from verl_ext.reward.openai_endpoint import OpenAiEndpoint, RequestFailed


def test_server_that_drips_its_answer_is_out_of_time_at_each_attempt():
    """Sends a byte every 0.05 s: each read ends within the limit of 1 s, but the whole answer would take 10 s."""
    attempts = []

    async def drip(request: web.Request) -> web.StreamResponse:
        attempts.append(time.monotonic())
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        for _ in range(200):
            await response.write(b" ")
            await asyncio.sleep(0.05)
        return response

    async def run():
        app = web.Application()
        app.add_routes([web.get("/v1/models", drip)])
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        port = runner.addresses[0][1]
        endpoint = OpenAiEndpoint(f"http://127.0.0.1:{port}/v1", api_key="", timeout_s=1.0, max_attempts=2)
        try:
            with pytest.raises(RequestFailed, match=r"did not answer within 1 s"):
                await endpoint.request("/models")
        finally:
            await endpoint.aclose()
            await runner.cleanup()

    asyncio.run(run())
    first, second = attempts
    assert second - first < 8  # s; a dripped answer takes 10
