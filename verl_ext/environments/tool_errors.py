"""Who is at fault if a tool of a tool YAML raises: the model, the infrastructure, or the tool itself.

For the author of a tool (verl's BaseTool, or `@function_tool`). The names, types and enums of a call's arguments are
checked against the tool's schema before the tool runs, and the model reads what was wrong. After that:

- `raise ToolError("there is no city 'Atlantis'")`: the arguments are bad. The model reads the message and continues.
- `raise ToolUnavailable("no answer in 30 s")`: the backend failed. The sample is marked as failed by the infrastructure
  and is not trained on. Connection and HTTP errors that a tool lets through mean the same, after further attempts: the
  call runs again, so a tool that changes something must bear that, or raise ToolUnavailable itself.
- Anything else is a bug of the tool, and raised with the tool's name: ValueError, KeyError, TypeError, JSONDecodeError,
  an answer of None. So you find a backend that answers with an HTML page, or without a key, and the model does not
  learn that its call was wrong.

What the model can cause must count as the model's error; otherwise the model could buy its exclusion from training. So
these are the model's errors: a missing file that the arguments name, or a folder that an argument like "" or ".." names
in place of a file; and an address in the arguments that does not answer or refuses (any HTTP 4xx or 5xx). Some errors
do not say which address they are about (urllib, sockets, time-outs). If the last attempt still raises one, it counts as
about a URL among the arguments, if there is one: a tool that sends the model's URLs to its own backend must raise
ToolUnavailable.
Some errors only the tool can attribute to the model, by raising `ToolError`: a request that its backend refuses for
its content (HTTP 400, 404, 422), an argument that is not an address at all (httpx does not say which one it was), an
address to which the one in the arguments redirects, or work that the arguments made too long.
"""

import errno
import http.client
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from verl_ext.outcome import Fault

_TRY_AGAIN = (408, 425, 429)  # HTTP status, besides 5xx
# Of HTTP clients that a tool may have imported. Their other errors of that base are the infrastructure's.
_CLIENT_ERRORS = (
    ("httpx", "HTTPError"),
    ("requests", "RequestException"),
    ("urllib3.exceptions", "HTTPError"),
    ("urllib.error", "URLError"),
)
_BAD_ADDRESSES = (
    ("httpx", "InvalidURL"),
    ("httpx", "UnsupportedProtocol"),
    ("requests.exceptions", "InvalidURL"),
    ("requests.exceptions", "MissingSchema"),
    ("requests.exceptions", "InvalidSchema"),
    ("urllib3.exceptions", "LocationParseError"),
)


# Endings of the names of arguments that hold an address, even without a scheme; and of those that may hold one.
_ADDRESSES = ("url", "uri", "host", "hostname", "endpoint")
_MAYBE_ADDRESSES = ("address", "domain", "site", "link", "server", "page")
_OF_FILES = (FileNotFoundError, NotADirectoryError, IsADirectoryError, FileExistsError, PermissionError)
# Whichever file it was: a full disk, a lost network disk, too many open files, no memory. EIO is not among them: the
# model can name a file that raises it, such as a serial port.
_OF_THE_MACHINE = (errno.ENOSPC, errno.EDQUOT, errno.ESTALE, errno.EMFILE, errno.ENFILE, errno.ENOMEM)


class ToolError(ValueError):
    """Raised by a tool: the arguments of the call are bad. The message is written for the model, which reads it."""


class ToolUnavailable(RuntimeError):
    """Raised by a tool: its backend failed, whatever the arguments were. The call is not tried again."""


def who_is_at_fault(error: Exception, arguments: Mapping[str, Any], *, is_last: bool = True) -> Fault:
    """Return MODEL, INFRASTRUCTURE or OURS for an exception of a tool; see the module's docstring.

    Args:
        arguments: the call's, as the model wrote them.
        is_last: whether no further attempt follows. In earlier attempts, an error that does not name its address may be
            a passing one of the tool's own backend.
    """
    if isinstance(error, ToolError):
        return Fault.MODEL
    if isinstance(error, ToolUnavailable):
        return Fault.INFRASTRUCTURE
    if isinstance(error, (aiohttp.InvalidURL, *_imported(_BAD_ADDRESSES))):
        return Fault.OURS
    of_client = isinstance(error, aiohttp.ClientError | http.client.HTTPException)
    if of_client or isinstance(error, _imported(_CLIENT_ERRORS)):
        return _fault_of_request(error, arguments, is_last)
    if isinstance(error, OSError):  # ConnectionError, TimeoutError, socket.gaierror, ssl.SSLError, ...
        return _fault_of_file(error, arguments) if _is_of_file(error) else _fault_of_request(error, arguments, is_last)
    return Fault.OURS


def _fault_of_request(error: Exception, arguments: Mapping[str, Any], is_last: bool) -> Fault:
    host, status = _host(error), _status(error)
    named, maybe = _hosts_named(arguments)
    if host and host in named | maybe:
        return Fault.MODEL
    is_of_machine = getattr(getattr(error, "reason", error), "errno", None) in _OF_THE_MACHINE  # urllib's reason
    if is_last and not host and not is_of_machine and named:
        return Fault.MODEL
    if status is not None and 400 <= status < 500 and status not in _TRY_AGAIN:
        return Fault.OURS  # refused: only the tool can say whether it was for the content
    return Fault.INFRASTRUCTURE


def _is_of_file(error: OSError) -> bool:
    """Return whether the error is about a file: by its class, or by a file name, which connection errors never have."""
    return isinstance(error, _OF_FILES) or (error.filename is not None and not isinstance(error, ConnectionError))


def _fault_of_file(error: OSError, arguments: Mapping[str, Any]) -> Fault:
    if error.errno in _OF_THE_MACHINE:
        return Fault.INFRASTRUCTURE
    file = os.path.normpath(os.fsdecode(error.filename)) if isinstance(error.filename, str | bytes) else ""
    names = {os.path.basename(file), os.path.splitext(os.path.basename(file))[0]} - {""}
    texts = [text for _, text in _texts(arguments)]
    if names & {os.path.basename(os.path.normpath(text)) for text in texts if text}:
        return Fault.MODEL
    is_nameless = isinstance(error, IsADirectoryError | NotADirectoryError | FileExistsError) or os.path.isdir(file)
    is_nameless |= os.path.basename(file).startswith(".")
    says_folder = any(not text.strip("./") or (text.endswith("/") and "://" not in text) for text in texts)
    if file and is_nameless and says_folder:
        return Fault.MODEL
    return Fault.OURS if isinstance(error, _OF_FILES) else Fault.INFRASTRUCTURE  # ETXTBSY, EROFS, ...


def _texts(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Yield all strings among the values of a call's arguments, each with the name of its argument or key."""
    if isinstance(value, str):
        yield name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _texts(item, str(key))
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item, name)


def _hosts_named(arguments: Mapping[str, Any]) -> tuple[set[str], set[str]]:
    """Return the hosts of URLs and of arguments named as addresses, and possible hosts among the other arguments."""
    named, maybe = set(), set()
    for name, text in _texts(arguments):
        text = text.strip()
        if "://" in text:
            named.add(_host_of(text))
        elif name.lower().endswith(_ADDRESSES):
            named.add(_host_of(f"//{text}"))
        elif "." in text or ":" in text or name.lower().endswith(_MAYBE_ADDRESSES):
            maybe.add(_host_of(f"//{text}"))
    return named - {None}, maybe - {None}


def _imported(names: tuple[tuple[str, str], ...]) -> tuple[type, ...]:
    """Return the classes whose modules this process has already imported."""
    found = (getattr(sys.modules.get(module), name, None) for module, name in names)
    return tuple(each for each in found if isinstance(each, type))


def _status(error: Exception) -> int | None:
    """Return the HTTP status of an error of aiohttp, urllib, httpx or requests (the last two: in the response)."""
    for holder, name in ((error, "status"), (getattr(error, "response", None), "status_code"), (error, "code")):
        if isinstance(status := getattr(holder, name, None), int):
            return status
    return None


def _host(error: Exception) -> str | None:
    """Return the host that the request went to, if the error names it."""
    if isinstance(host := getattr(error, "host", None), str):  # aiohttp.ClientConnectorError
        return host
    try:
        request = getattr(error, "request_info", None) or getattr(error, "request", None)
    except RuntimeError:  # httpx, if there is no request
        return None
    return _host_of(str(getattr(request, "url", None) or getattr(error, "url", "")))  # the second: urllib's HTTPError


def _host_of(text: str) -> str | None:
    try:
        return urlsplit(text.strip()).hostname
    except ValueError:
        return None
