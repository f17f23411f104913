"""The connections of clients: how many there are, how long each may take, and what the log says about them.

aiohttp speaks HTTP on each (`Client`). They are accepted here, because asyncio's own server takes all that come, and so
all descriptors that the server may have, of which every program needs some.
"""

import asyncio
import logging
import re
import resource
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import Any, cast

from aiohttp import web

logger = logging.getLogger(__name__)

# How long a connection may take for a first request that passes the checks of its sender; and between two requests, or
# to take an answer. The second is longer than clients keep idle connections (aiohttp: 15 s), so that they close them,
# and no request meets a connection that is being closed.
FIRST_REQUEST_S, IDLE_S = 10.0, 75.0
MAX_ACCEPTED = 4  # at once, so that what they sent is read before many more come and, at the limit, replace them
MAX_NEWCOMERS = 1024  # connections that have not yet sent such a request
SWEEP_S = 1.0
ACCEPT_PAUSE_S = 1.0  # after accept() failed
MAX_HEADERS = 64
READ_BYTES = 1 << 16  # parsed at once, before other connections get their turn
SMALL_CHUNK_BYTES, MAX_SMALL_CHUNKS = 64, 1 << 14
MAX_DESCRIPTORS = 1 << 14  # enough for as many clients; a connection takes some kB
SERVER_DESCRIPTORS = 100  # the server's own, and folders that are being removed
WORKER_DESCRIPTORS = 3  # socket, process and request of a worker
MIN_CLIENTS = 16
USUAL_SESSIONS, USUAL_BOXES = 1000, 256  # the server's defaults


class DescriptorLimitError(Exception):
    """The limit on open files leaves too few for clients; the message says how many are needed."""


class Client(web.RequestHandler):
    """One connection, in aiohttp's hands; `clients` knows whether the server waits for it, or it for the server."""

    def __init__(self, clients: "Clients", server: web.Server) -> None:
        loop = asyncio.get_running_loop()
        # Bodies are not unpacked; see body.py. `Clients` closes idle connections long before aiohttp would.
        # aiohttp's annotation leaves out that there may be no access log.
        log: Any = None
        super().__init__(server, loop=loop, access_log=log, auto_decompress=False, max_headers=MAX_HEADERS)
        self._clients = clients
        self.is_unwanted = False  # closed before it was set up
        self.is_chunked = False  # the body of the request that is read
        self._small_chunks = 0

    def connection_made(self, transport: asyncio.Transport) -> None:
        # asyncio's own is four times as much. Only its transports for sockets have this, and their type is private.
        transport.max_size = READ_BYTES  # pyright: ignore[reportAttributeAccessIssue]
        super().connection_made(transport)
        if self.is_unwanted:
            transport.abort()

    def data_received(self, data: bytes) -> None:
        """Parse what came. Chunks of a few bytes take long to parse, so a connection may send only a limited number."""
        chunks = data.count(b"\r\n") // 2 if self.is_chunked else 0
        if chunks * SMALL_CHUNK_BYTES > len(data):
            self._small_chunks += chunks
            if self._small_chunks > MAX_SMALL_CHUNKS:
                self.drop()
                return
        super().data_received(data)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._clients.remove(self)
        super().connection_lost(exc)

    def works(self) -> None:
        """Note that the server has all that it needs, and the connection must not be closed."""
        self._clients.works(self)

    def waits(self) -> None:
        """Note that the server waits: for a request, its body, or the client to take an answer."""
        self._clients.waits(self)

    def drop(self) -> None:
        """Close the connection at once, even if the client does not take its answer."""
        self._clients.close(self)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer what was not HTTP (400), or met a bug of ours (500). aiohttp's own method would log what was sent."""
        if status >= 500 and not isinstance(exc, ConnectionError):
            log_failure("a request failed", exc)
        if request.writer.output_size > 0:
            raise ConnectionError("the answer has begun")  # as aiohttp's own method does: it closes the connection
        detail = "expected an HTTP/1.1 request" if status < 500 else "the sandbox failed; its log says how"
        response = web.json_response({"detail": detail}, status=status)
        response.force_close()
        return response

    def log_exception(self, *args: Any, **kw: Any) -> None:
        log_failure("a connection failed", sys.exc_info()[1])


def client_of(http_request: web.Request) -> Client:
    """Return the connection of a request; aiohttp only knows that it is one of its own kind."""
    return cast(Client, http_request.protocol)


class Clients:
    """Accepts connections, up to a limit, and closes those that the server has waited for too long.

    At the limit, the connection that it has waited for longest is closed for a new one, first among those that have
    sent no good request yet. If it waits for none, new ones stay in the kernel's queue until one ends.

    Args:
        server: of a runner that is set up.
        listener: bound; it is not closed here.
        limit: connections at once.
    """

    def __init__(self, server: web.Server, listener: socket.socket, *, limit: int) -> None:
        self._server, self._listener, self._limit = server, listener, limit
        self._loop = asyncio.get_running_loop()
        self._open: set[Client] = set()
        self._newcomers: dict[Client, float] = {}  # -> when the server began to wait for them; the longest wait first
        self._waiting: dict[Client, float] = {}  # the same for the others
        self._tasks: set[asyncio.Task] = set()
        self._is_full = self._is_stopped = False

    def start(self) -> None:
        """Accept connections until `stop`."""
        self._loop.set_exception_handler(lambda _, context: log_failure(context["message"], context.get("exception")))
        self._listener.setblocking(False)
        self._sweep()
        self._resume()

    def stop(self) -> None:
        self._is_stopped = True
        self._loop.remove_reader(self._listener)
        self._timer.cancel()

    def _resume(self) -> None:
        self._is_full = False
        if not self._is_stopped:
            self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        if len(self._open) >= self._limit:
            self._is_full = True  # until one is removed, or waits
            self._loop.remove_reader(self._listener)
            self._close_longest()
            return
        for _ in range(min(MAX_ACCEPTED, self._limit - len(self._open))):
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                return
            except ConnectionError:  # the client is gone
                continue
            except OSError as exc:  # the machine has no more descriptors, or memory
                log_failure("no connection could be accepted", exc)
                self._loop.remove_reader(self._listener)
                self._loop.call_later(ACCEPT_PAUSE_S, self._resume)
                return
            connection.setblocking(False)
            if len(self._newcomers) >= MAX_NEWCOMERS:
                self._close_longest()
            client = Client(self, self._server)
            self._open.add(client)
            self._newcomers[client] = time.monotonic()
            task = self._loop.create_task(self._loop.connect_accepted_socket(lambda client=client: client, connection))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _close_longest(self) -> None:
        if client := next(iter(self._newcomers or self._waiting), None):
            self.close(client)

    def _sweep(self) -> None:
        now = time.monotonic()
        for clients, limit_s in ((self._newcomers, FIRST_REQUEST_S), (self._waiting, IDLE_S)):
            while clients and now - next(iter(clients.values())) > limit_s:
                self.close(next(iter(clients)))
        self._timer = self._loop.call_later(SWEEP_S, self._sweep)

    def works(self, client: Client) -> None:
        self._newcomers.pop(client, None)
        self._waiting.pop(client, None)

    def waits(self, client: Client) -> None:
        self._waiting.pop(client, None)
        if client in self._open:
            self._waiting[client] = time.monotonic()
            if self._is_full:
                self._resume()

    def close(self, client: Client) -> None:
        self.works(client)
        client.is_unwanted = True
        if client.transport:  # else it is being set up
            client.transport.abort()

    def remove(self, client: Client) -> None:
        self._open.discard(client)
        self.works(client)
        if self._is_full:
            self._resume()


def max_clients(workers: int, sessions: int) -> int:
    """Return how many connections leave every program its descriptors; raise the soft limit as the hard one allows.

    Raises:
        DescriptorLimitError: see there.
    """
    number, hard = _descriptors()
    resource.setrlimit(resource.RLIMIT_NOFILE, (number, hard))
    reserved = SERVER_DESCRIPTORS + WORKER_DESCRIPTORS * (workers + sessions)
    if number - reserved < MIN_CLIENTS:
        raise DescriptorLimitError(
            f"this process may have {number} open files, and {workers} workers with {sessions} sessions and boxes need "
            f"{reserved + MIN_CLIENTS}: raise `ulimit -n`, or lower --workers, --max-sessions or --max-boxes"
        )
    return number - reserved


def usual_sessions(workers: int) -> int:
    """Return USUAL_SESSIONS, or fewer: those for which half of the descriptors that workers leave are enough."""
    return min(USUAL_SESSIONS, _left(workers) // 2 // WORKER_DESCRIPTORS)


def usual_boxes(workers: int) -> int:
    """Return USUAL_BOXES, or fewer: those for which an eighth of the descriptors that workers leave are enough."""
    return min(USUAL_BOXES, _left(workers) // 8 // WORKER_DESCRIPTORS)


def _left(workers: int) -> int:
    return max(_descriptors()[0] - SERVER_DESCRIPTORS - WORKER_DESCRIPTORS * workers, 0)


def _descriptors() -> tuple[int, int]:
    """Return how many descriptors this process may use, and its hard limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS), hard


def log_failure(what: str, exc: BaseException | None) -> None:
    """Log an exception by type and place only: its text may hold what a client sent, such as a token or a program."""
    frames = traceback.extract_tb(exc.__traceback__)[-4:] if exc else ()
    places = ", ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in frames)
    kind = type(exc).__name__ + (f" ({exc.strerror})" if isinstance(exc, OSError) and exc.strerror else "")
    logger.error("%s: %s at %s", re.split(r"[(<]", what)[0].strip(), kind, places or "no line of ours")


def without_quotations(error: Exception) -> str:
    """Return an error's text up to the first quotation mark: what follows can be the name of a client's file."""
    return re.split(r"['\"]", str(error))[0].strip()
