"""The body of a request: from bytes to a parsed request, within bounds on time, size and the number of values."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from aiohttp import web

from verl_ext.sandbox.server.large import LARGE_BYTES, in_turn

Request = TypeVar("Request")

MAX_BODY_BYTES = 64 << 20
MAX_HELD_BYTES = 8 * MAX_BODY_BYTES  # of the bodies over LARGE_BYTES of all requests together
UNCOUNTED_BYTES = 1 << 16  # a smaller body is parsed in a few milliseconds, whatever it holds
MAX_VALUES = 1 << 14  # members, elements and strings of a larger one: enough for request.MAX_INPUT_INODES, twice
MAX_DIGITS = 4300  # of an integer: reading one takes time quadratic in their number
BODY_S = 30.0  # for a body to arrive, from the end of its headers on

_REST_OF_STRING = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)


class HeldBytesError(Exception):
    """The large bodies of other requests take all the memory reserved for large bodies."""


class Bodies:
    """Reads the bodies of all requests, of which the large ones share MAX_HELD_BYTES."""

    def __init__(self) -> None:
        self._held = 0

    @asynccontextmanager
    async def read(self, http_request: web.Request, validate: Callable[[Any], Request]) -> AsyncIterator[Request]:
        """Read and parse a body, which counts as held until the block ends; yield what `validate` makes of its JSON.

        Raises:
            ValueError: it is not JSON by RFC 8259, or has too many values; or `validate` raises it.
            HeldBytesError: see there.
            web.HTTPException: it is over MAX_BODY_BYTES (413), or did not arrive within BODY_S (408).
        """
        encoding = http_request.headers.get("Content-Encoding", "identity")
        if encoding.strip().lower() != "identity":  # unpacked, a small body may be of any size
            raise ValueError(f"expected a body without Content-Encoding, got one in {encoding[:40]!r}")
        declared = http_request.content_length or 0
        if declared > MAX_BODY_BYTES:
            raise web.HTTPRequestEntityTooLarge(MAX_BODY_BYTES, declared)
        body, held = bytearray(), 0
        try:
            try:
                async with asyncio.timeout(BODY_S):
                    while chunk := await http_request.content.readany():
                        body += chunk
                        if len(body) > MAX_BODY_BYTES:
                            raise web.HTTPRequestEntityTooLarge(MAX_BODY_BYTES, len(body))
                        if len(body) > LARGE_BYTES:
                            self._held += len(body) - held
                            held = len(body)
                            if self._held > MAX_HELD_BYTES:
                                raise HeldBytesError(f"other requests hold {MAX_HELD_BYTES >> 20} MiB of bodies")
            except TimeoutError:
                raise web.HTTPRequestTimeout(text=f"expected the body within {BODY_S:g} s") from None
            request = await in_turn(len(body), _load, body, validate)
            del body
            yield request
        finally:
            self._held -= held


def _load(body: bytearray, validate: Callable[[Any], Request]) -> Request:
    return validate(parse(body))


def parse(body: bytearray) -> Any:
    """Parse JSON by RFC 8259: UTF-8, no NaN, each key once. Raises ValueError."""
    if len(body) > UNCOUNTED_BYTES:
        check_number_of_values(body)
    try:
        text = body.decode("utf-8-sig")
        return json.loads(text, object_pairs_hook=_unique, parse_int=_integer, parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise ValueError(f"expected UTF-8: {error.reason} at byte {error.start}") from None
    except RecursionError:
        raise ValueError("arrays and objects are nested too deeply") from None


def check_number_of_values(body: bytearray) -> None:
    """Raise ValueError above MAX_VALUES: a list of 8 MB takes a second and 200 MB. Text costs little, however long.

    This counts the strings and, outside them, what begins or separates values.
    """
    if sum(map(body.count, (b"[", b"{", b",", b'"'))) <= MAX_VALUES:
        return
    values = position = 0
    while position < len(body):
        quote = body.find(b'"', position)
        end = len(body) if quote < 0 else quote
        values += 1 + sum(body.count(sign, position, end) for sign in (b"[", b"{", b","))
        if values > MAX_VALUES:
            raise ValueError(f"expected at most {MAX_VALUES} values")
        string = _REST_OF_STRING.match(body, quote + 1) if quote >= 0 else None
        if string is None:  # no string follows, or it has no end
            return
        position = string.end()


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        raise ValueError("an object has the same key twice")
    return members


def _integer(digits: str) -> int:
    if len(digits) > MAX_DIGITS:  # Python's own limit, which other code in this process can change
        raise ValueError(f"an integer has more than {MAX_DIGITS} digits")
    return int(digits)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
