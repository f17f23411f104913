"""Servers that the modules of this folder share; a module that needs another one has its own `server`."""

from collections.abc import Iterator

import pytest

from tests.unit.sandbox.server_process import Server


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
