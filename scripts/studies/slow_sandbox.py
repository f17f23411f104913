"""Make a sandbox slow: an HTTP proxy on 127.0.0.1 that delays each call before it forwards it.

The delay is log-normal with sigma 1, as tool latencies are: most calls are quick, few take ten times the mean. A call's
delay depends on the seed, on its program and on how often that program came before, and on nothing else: two runs that
call the same programs wait for the same times, in whatever order the calls come.
"""

import hashlib
import json
import math
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

SIGMA = 1.0
_ANSWER_TIMEOUT_S = 120.0
_GATEWAY_ERROR = 502


def delay_s(mean_s: float, seed: int, program: str, times: int) -> float:
    """Return the delay of a call in seconds: exp(N(mu, SIGMA)) with mu = ln(mean_s) - SIGMA^2 / 2, so that its mean is
    `mean_s`; 0 for a mean of 0.

    Args:
        times: calls of the same program before this one.
    """
    if mean_s == 0:
        return 0.0
    draw = random.Random(hashlib.sha256(f"{seed}/{times}/{program}".encode()).digest())
    return draw.lognormvariate(math.log(mean_s) - SIGMA**2 / 2, SIGMA)


@contextmanager
def slow_sandbox(url: str, mean_s: float, seed: int) -> Iterator[str]:
    """Yield the URL of a proxy in front of the sandbox at `url`, for the length of a `with` block."""
    came, lock = Counter(), threading.Lock()

    def hold_back(program: str) -> None:
        with lock:
            times = came[program]
            came[program] += 1
        time.sleep(delay_s(mean_s, seed, program, times))

    with proxied(url, hold_back) as slow:
        yield slow


@contextmanager
def proxied(url: str, before: Callable[[str], bytes | None]) -> Iterator[str]:
    """Yield the URL of a proxy in front of the sandbox at `url`, for the length of a `with` block.

    Args:
        before: is called with a call's program, in the call's thread. It returns the answer; None forwards the call.
    """
    upstream = urlsplit(url)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            answer = before(json.loads(body)["code"])
            if answer is not None:
                return self.answer(200, {}, answer)
            connection = HTTPConnection(upstream.hostname, upstream.port, timeout=_ANSWER_TIMEOUT_S)
            try:
                connection.request("POST", self.path, body, {"Content-Type": "application/json"})
                response = connection.getresponse()
                status, headers, content = response.status, response.headers, response.read()
            except OSError as error:
                status, headers, content = _GATEWAY_ERROR, {}, str(error).encode()
            finally:
                connection.close()
            self.answer(status, headers, content)

        def answer(self, status: int, headers: Mapping[str, str], content: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", headers.get("Content-Type", "text/plain"))
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *args: object) -> None:
            return None

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 512  # a step's first calls come all at once

        def handle_error(self, *args: object) -> None:
            """Stay quiet: a client that gave up on a call has closed its connection."""

    server = Server(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
