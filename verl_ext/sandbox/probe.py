"""Check whether a server executes a program, and what isolates it. A server that only listens may answer nothing.

This is for one check before a run: it blocks, and needs no aiohttp.
"""

import json
import urllib.error
import urllib.request
from typing import Any

from verl_ext.sandbox.client import authorization
from verl_ext.sandbox.limits import CONTROL_OUTPUT, CONTROL_PROGRAM

PING_S = 10.0
# No proxy of the environment, as in a run's client: sandboxes are on this machine or in its network.
_DIRECTLY = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class Busy(Exception):
    """The server is well, but has no free worker; the message names it."""


class NotWell(Exception):
    """The server did not execute the program; the message names it and says what it did. `status`: HTTP's, if any."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


def probe(url: str) -> list[str] | None:
    """Have a server execute CONTROL_PROGRAM.

    Args:
        url: its base, without a slash at the end.
    Returns:
        The layers of isolation in force; None if the server does not say, because it is not ours.
    Raises:
        Busy, NotWell: see there.
    """
    try:
        answer = json.loads(_request(f"{url}/run_code", {"code": CONTROL_PROGRAM, "language": "python"}))
        printed = answer["run_result"]["stdout"]
    except (TimeoutError, urllib.error.HTTPError) as error:
        answered = error if isinstance(error, urllib.error.HTTPError) else None
        if (answered is None or answered.code in (503, 504)) and ping(url):  # its ping runs a program past the queue
            raise Busy(f"{url} works, but is too busy to take a program") from None
        if answered is None:
            raise NotWell(f"{url} did not run {CONTROL_PROGRAM} within {PING_S:g} s") from None
        raise NotWell(f"{url} answers HTTP {answered.code} {answered.reason}", answered.code) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise NotWell(f"{url} does not run code: {getattr(error, 'reason', error)}") from None
    if printed != CONTROL_OUTPUT:
        raise NotWell(f"{url}: {CONTROL_PROGRAM} gave {printed!r}, {answer.get('message', '')}")
    return (ping(url) or {}).get("layers")


def ping(url: str) -> dict[str, Any] | None:
    """Return what our server says of itself, such as `layers`, `max_sessions`, `max_boxes`; None if it is not well, or
    another's."""
    try:
        said = json.loads(_request(f"{url}/v1/ping"))
        return said if isinstance(said["layers"], list) else None
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _request(url: str, body: dict | None = None) -> bytes:
    # As bytes, which urllib takes as well: a str would go out in latin-1.
    headers: dict[str, Any] = {name: value.encode() for name, value in authorization().items()}
    headers["Content-Type"] = "application/json"
    data = json.dumps(body).encode() if body is not None else None
    with _DIRECTLY.open(urllib.request.Request(url, data, headers), timeout=PING_S) as response:
        return response.read()
