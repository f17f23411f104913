"""What the answers of the server look like."""

import asyncio
import binascii
import json
from typing import Any

from aiohttp import web

from verl_ext.sandbox.server.clients import client_of
from verl_ext.sandbox.server.large import in_turn
from verl_ext.sandbox.server.request import MAX_NAME_BYTES

MAX_ERRORS = 10  # reported for a request; it can have thousands
RETRY_AFTER_S = 1
PIECE_S = 10.0  # for a client to take one piece
PIECE_BYTES = 3 << 16  # of a file in an answer; a multiple of 3, so that its base64 is that of the file
# SandboxFusion's RunCodeResponse plus `queue_time` (s) and `session` ({call, alive, idle_s}), and, for a SandboxError,
# `lost`: the program was lost; this server decides whose doing it was when it is sent again, except in a session.
NO_ANSWER = {"status": "SandboxError", "message": "", "compile_result": None, "run_result": None}
NO_ANSWER |= {"executor_pod_name": None, "files": {}, "queue_time": None, "session": None}


async def answer(
    result: dict[str, Any], queue_time: float, http_request: web.Request
) -> tuple[web.StreamResponse, str]:
    """Return the answer about a program that ran, and its outcome."""
    files, not_fetched, _, session = (result.pop(key, None) for key in ("files", "not_fetched", "alive", "session"))
    status, outcome = ("Success", "ok") if result["return_code"] == 0 else ("Failed", "code_error")
    outcome = "timeout" if result["status"] == "TimeLimitExceeded" else outcome
    body = NO_ANSWER | {"status": status, "run_result": result, "queue_time": queue_time, "session": session}
    body["message"] = "; ".join(f"{path} was not fetched: {why}" for path, why in not_fetched.items())
    text = await in_turn(len(result["stdout"]) + len(result["stderr"]), json.dumps, body)
    if not files:
        return web.json_response(text=text), outcome
    client_of(http_request).waits()
    return await _send_with_files(http_request, text, files), outcome


async def _send_with_files(http_request: web.Request, text: str, files: dict[str, memoryview]) -> web.StreamResponse:
    """Answer with the JSON object `text` and `files` in base64, piece by piece, as fast as the client takes them.

    Sent whole, the largest answer would block the event loop for a second and take several times its size in memory.
    """
    head, _, tail = text.partition('"files": {}')  # not within a string, where quotation marks are escaped
    pieces = [head.encode() + b'"files": {']
    for i, (path, content) in enumerate(files.items()):
        pieces.append(f'{", " if i else ""}{json.dumps(path)}: "'.encode())
        pieces += [content[start : start + PIECE_BYTES] for start in range(0, len(content), PIECE_BYTES)]
        pieces.append(b'"')
    pieces.append(b"}" + tail.encode())
    response = web.StreamResponse(headers={"Content-Type": "application/json; charset=utf-8"})
    response.content_length = sum(map(_length, pieces))
    await response.prepare(http_request)
    try:
        for piece in pieces:
            async with asyncio.timeout(PIECE_S):
                await response.write(
                    binascii.b2a_base64(piece, newline=False) if isinstance(piece, memoryview) else piece
                )
    except TimeoutError:
        client_of(http_request).drop()  # also ends this task
    await response.write_eof()
    return response


def _length(piece: bytes | memoryview) -> int:
    return (len(piece) + 2) // 3 * 4 if isinstance(piece, memoryview) else len(piece)


def overloaded(exc: Exception, status: int) -> tuple[web.Response, str]:
    headers = {"Retry-After": str(RETRY_AFTER_S)}
    return web.json_response({"detail": f"overloaded: {exc}"}, status=status, headers=headers), "overloaded"


def reject(*details: dict[str, Any]) -> tuple[web.Response, str]:
    return web.json_response({"detail": details}, status=422), "rejected"


def cut(name: str | int) -> str | int:
    return f"{name[:MAX_NAME_BYTES]}..." if isinstance(name, str) and len(name) > MAX_NAME_BYTES else name
