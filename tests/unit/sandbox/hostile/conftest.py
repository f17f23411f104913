"""The servers that the programs of this folder attack, and a file that they must not reach."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.sandbox.boxes import need_boxes
from tests.unit.sandbox.hostile.attacks import ISOLATION, HostileServer
from tests.unit.sandbox.hostile.box_attacks import BoxServer
from tests.unit.sandbox.server_process import SECRET


@pytest.fixture(scope="package")
def started_server() -> Iterator[HostileServer]:
    server = HostileServer("--isolation", ISOLATION)
    yield server
    server.stop()


@pytest.fixture
def server(started_server: HostileServer) -> Iterator[HostileServer]:
    """A server that is checked to be healthy and clean after each test."""
    yield started_server
    started_server.check()


@pytest.fixture(scope="package")
def started_forking() -> Iterator[HostileServer]:
    server = HostileServer("--isolation", ISOLATION, "--allow-subprocess", "--preload", "")
    yield server
    server.stop()


@pytest.fixture
def forking(started_forking: HostileServer) -> Iterator[HostileServer]:
    """Programs may start other programs."""
    yield started_forking
    started_forking.check()


@pytest.fixture
def host_file(tmp_path) -> Path:
    """A file that anyone on the machine may read and write."""
    for folder in (tmp_path, *tmp_path.parents[:3]):
        if folder.owner() == Path(tmp_path).owner() and folder != Path("/tmp"):
            folder.chmod(0o777)
    path = tmp_path / "host"
    path.write_text(SECRET)
    path.chmod(0o666)
    return path


@pytest.fixture(scope="package")
def started_boxes() -> Iterator[BoxServer]:
    server = BoxServer("--isolation", ISOLATION, "--preload", "")
    yield server
    server.stop()


@pytest.fixture
def boxes(started_boxes: BoxServer) -> Iterator[BoxServer]:
    """A server whose boxes are attacked; skipped if the machine cannot isolate them."""
    need_boxes(started_boxes.url)
    yield started_boxes
    started_boxes.check()
