"""What reaches a sandbox from the environment: the token, but no proxy."""

import json
from collections.abc import Iterator

import pytest
from aiohttp import web

from tests.unit.sandbox.server_process import Server
from verl_ext.reward.openai_endpoint import OpenAiEndpoint
from verl_ext.sandbox.client import SandboxClient
from verl_ext.sandbox.probe import NotWell, probe

NOBODY = "http://127.0.0.1:9"  # no proxy listens there
VARIABLES = ["http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"]


@pytest.fixture(
    params=[*[[name] for name in VARIABLES], VARIABLES], ids=lambda names: names[-1] + "s" * (len(names) > 1)
)
def proxied(request, monkeypatch) -> None:
    """The environment names a proxy, and excepts nothing or another host from it."""
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, "example.org")
    for name in request.param:
        monkeypatch.setenv(name, NOBODY)


async def test_no_proxy_stands_before_a_server(bare, proxied, monkeypatch):
    assert probe(bare.url) == ["rlimits"]
    client = SandboxClient([bare.url], max_attempts=1)
    assert (await client.run("print(1)")).stdout == "1\n"
    await client.aclose()

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"data": []})

    app = web.Application()
    app.add_routes([web.get("/v1/models", models)])
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    endpoint = OpenAiEndpoint(f"http://127.0.0.1:{port}/v1", api_key="", timeout_s=5, max_attempts=1)
    assert await endpoint.request("/models") == {"data": []}
    await endpoint.aclose()
    await runner.cleanup()


TOKEN = "s3cret-ü-€"


@pytest.fixture(scope="module")
def guarded(tmp_path_factory) -> Iterator[Server]:
    path = tmp_path_factory.mktemp("token") / "token"
    path.write_text(TOKEN, encoding="utf-8")
    server = Server("--preload", "", "--token-file", str(path), workers=1)
    yield server
    server.stop()


@pytest.mark.parametrize("written", [TOKEN, f"{TOKEN}\n", f" {TOKEN}\r\n"])
async def test_token_of_the_environment_is_sent_as_the_server_reads_it(guarded, monkeypatch, written):
    """With the newline that a file or a secret store leaves."""
    monkeypatch.setenv("SANDBOX_TOKEN", written)
    assert "rlimits" in probe(guarded.url)
    client = SandboxClient([guarded.url], max_attempts=1)
    assert (await client.run("print(1)")).stdout == "1\n"
    await client.aclose()


@pytest.mark.parametrize("token", ["s3cret\nsecond", "s3cret\x7f", "s3cret\udcff"])
def test_token_that_no_header_can_carry_is_refused_and_not_quoted(bare, monkeypatch, token):
    monkeypatch.setenv("SANDBOX_TOKEN", token)
    with pytest.raises(NotWell, match="line breaks or control characters") as told:
        probe(bare.url)
    with pytest.raises(ValueError, match="line breaks or control characters") as raised:
        SandboxClient([bare.url])
    assert "s3cret" not in str(told.value) + str(raised.value) + json.dumps(str(told.value.__context__))
