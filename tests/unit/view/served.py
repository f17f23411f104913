"""The viewer over a real socket, as its command serves it."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import uvicorn

from verl_ext.view.app import HOST, create_app
from verl_ext.view.data import Run


@contextmanager
def served(*folders: Path) -> Iterator[str]:
    """The viewer's address for the runs in some folders."""
    listener = socket.create_server((HOST, 0))
    port = listener.getsockname()[1]
    runs = [Run(folder, folder.name, number) for number, folder in enumerate(folders)]
    server = uvicorn.Server(uvicorn.Config(create_app(runs, port), log_level="error"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(10)
