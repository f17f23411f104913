"""Servers that the modules of this folder share, real and fake; a module that needs another one has its own."""

import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

import pytest

from tests.unit.sandbox.fake_server import FakeServer
from tests.unit.sandbox.server_process import Server
from verl_ext.sandbox import SandboxClient, running_server


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.stop()


@pytest.fixture(scope="module")
def narrow() -> Iterator[Server]:
    """One worker, little output."""
    server = Server("--max-output-bytes", "1000", "--preload", "", workers=1)
    yield server
    server.stop()


@pytest.fixture(scope="module")
def bare() -> Iterator[Server]:
    """Programs may do what only isolation forbids: fork, see the host's files and processes."""
    server = Server("--isolation", "none", "--preload", "")
    yield server
    server.stop()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with running_server(workers=2) as url:
        yield url


@pytest.fixture
async def start() -> AsyncIterator[Callable[..., Awaitable[FakeServer]]]:
    servers = []

    async def start_one(*script: Callable) -> FakeServer:
        servers.append(FakeServer())
        servers[-1].script = list(script)
        await servers[-1].start()
        return servers[-1]

    yield start_one
    for server in servers:
        await server.runner.cleanup()


@pytest.fixture
async def client_of() -> AsyncIterator[Callable[..., SandboxClient]]:
    """Makes clients for calls that need the same one; closes them."""
    clients = []

    def make(urls: list[str], **settings: object) -> SandboxClient:
        clients.append(SandboxClient(urls, **({"backoff_s": 0.01} | settings)))
        return clients[-1]

    yield make
    for client in clients:
        await client.aclose()


@pytest.fixture
def down() -> Iterator[list[str]]:
    """Three URLs that refuse connections. Their ports are bound, so that no other server gets one meanwhile."""
    with socket.socket() as first, socket.socket() as second, socket.socket() as third:
        for bound in (first, second, third):
            bound.bind(("127.0.0.1", 0))
        yield [f"http://127.0.0.1:{bound.getsockname()[1]}" for bound in (first, second, third)]
