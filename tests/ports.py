"""Ports for servers that a test starts, or starts again, at an address that it names."""

import random
import socket
from contextlib import suppress


def free_port(host: str = "127.0.0.1") -> int:
    """A free port below the range from which the kernel gives ports to clients, so that no client can take it.

    Within that range, a client that connects to the port again and again may get this port as its own.
    """
    for port in random.sample(range(20000, 30000), 100):
        with socket.socket() as listener, suppress(OSError):
            listener.bind((host, port))
            return port
    raise AssertionError("no free port among 100")
