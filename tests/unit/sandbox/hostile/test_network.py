"""Programs reach no network and no socket of the machine."""

import socket
from collections.abc import Iterator

import pytest

from tests.unit.sandbox.hostile.attacks import MARK, NAMESPACES, SECCOMP, Case, cases, need


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """A listener on 127.0.0.1 that nothing may ever reach."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        yield listener
        with pytest.raises(BlockingIOError):
            listener.accept()


@pytest.mark.parametrize(
    "attempt",
    [
        "socket.create_connection(('127.0.0.1', {port}), timeout=2)",
        "urllib.request.urlopen('http://127.0.0.1:{port}', timeout=2)",
        "http.client.HTTPConnection('127.0.0.1', {port}, timeout=2).connect()",
        "asyncio.run(asyncio.open_connection('127.0.0.1', {port}))",
        "socket.socket(socket.AF_INET6).connect(('::ffff:127.0.0.1', {port}))",
    ],
)
def test_listener_is_out_of_reach(server, listener, attempt):
    need(server, NAMESPACES)
    code = "import asyncio, http.client, socket, urllib.request\n"
    code += f"denied(lambda: {attempt.format(port=listener.getsockname()[1])}, OSError)"
    assert server.result(code)["stdout"] == "held\n"


def test_udp_listener_is_out_of_reach(server):
    need(server, NAMESPACES)
    with socket.socket(type=socket.SOCK_DGRAM) as receiver:
        receiver.bind(("127.0.0.1", 0))
        receiver.settimeout(0.1)
        send = f"socket.socket(type=socket.SOCK_DGRAM).sendto(b'x', {receiver.getsockname()})"
        assert server.result(f"import socket\ndenied(lambda: {send}, OSError)")["stdout"] == "held\n"
        with pytest.raises(TimeoutError):
            receiver.recv(10)


@pytest.mark.parametrize("abstract", [False, True])
@pytest.mark.parametrize("kind", ["SOCK_STREAM", "SOCK_DGRAM"])
def test_unix_socket_of_the_machine_is_out_of_reach(server, tmp_path, kind, abstract):
    need(server, NAMESPACES)
    address = f"\0{server.mark}" if abstract else str(tmp_path / "socket")
    with socket.socket(socket.AF_UNIX, getattr(socket, kind)) as listener:
        listener.bind(address)
        if kind == "SOCK_STREAM":
            listener.listen()
        code = (
            f"import socket\ndenied(lambda: socket.socket(socket.AF_UNIX, socket.{kind}).connect({address!r}), OSError)"
        )
        assert server.result(code)["stdout"] == "held\n"


@cases(
    *(
        Case(f"socket {family}", SECCOMP, f"import socket\ndenied(lambda: socket.socket({family}, {kind}))")
        for family, kind in [(1, 1), (2, 1), (2, 2), (2, 3), (10, 1), (16, 3), (17, 3), (38, 5), (40, 1)]
    ),
    Case("bind of a pair", SECCOMP, f"import socket\ndenied(lambda: socket.socketpair()[0].bind('\\0{MARK}'))"),
    Case(
        "datagram pair", SECCOMP, "import socket\ndenied(lambda: socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM))"
    ),
    Case("listen", SECCOMP, "import socket\ndenied(lambda: socket.create_server(('127.0.0.1', 0)))"),
)
def test_socket_is_denied(server, case):
    need(server, case.needs)
    assert server.result(case.code)["stdout"] == "held\n"


def test_asyncio_and_a_stream_pair_work(server):
    code = (
        "import asyncio, socket\na, b = socket.socketpair()\na.send(b'x')\n"
        "async def main(): return await asyncio.to_thread(b.recv, 1)\nprint(asyncio.run(main()))"
    )
    assert server.result(code)["stdout"] == "b'x'\n"
