"""Ports for servers that a test starts, or starts again, at an address that it names."""

import random
import socket
from contextlib import suppress


def free_port(host: str = "127.0.0.1") -> int:
    """A free port below those that the kernel gives to clients: no client takes it before the server does.

    A client that connects again and again to one of its own kind may get the very port, and keep the server from it.
    """
    for port in random.sample(range(20000, 30000), 100):
        with socket.socket() as listener, suppress(OSError):
            listener.bind((host, port))
            return port
    raise AssertionError("no free port among 100")
