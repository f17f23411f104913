"""The routes of the sandbox server: the requests it takes, who may send them, and what the answers look like."""

import asyncio
import binascii
import hmac
import json
import logging
import os
from contextlib import AsyncExitStack
from typing import Annotated, Any, Literal

from aiohttp import web
from aiohttp.typedefs import Handler
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import AfterValidator, BaseModel, BeforeValidator, FailFast, Field, PlainValidator, ValidationError

from verl_ext.sandbox.client import SERVER_NAME
from verl_ext.sandbox.server.body import Bodies, HeldBytesError
from verl_ext.sandbox.server.clients import Client, without_quotations
from verl_ext.sandbox.server.connection import LostProgramError
from verl_ext.sandbox.server.disk import MAX_DEPTH
from verl_ext.sandbox.server.folders import SCRIPT, STDIN
from verl_ext.sandbox.server.large import in_turn
from verl_ext.sandbox.server.metrics import Metrics
from verl_ext.sandbox.server.pool import CONTROL, Pool, QueueTimeoutError, SandboxError, wrong_with_control
from verl_ext.sandbox.server.sessions import SessionLimitError, Sessions

logger = logging.getLogger(__name__)

MAX_NAME_BYTES, MAX_PATH_BYTES = 255, 3500  # NAME_MAX of Linux; PATH_MAX less what is above the request's folder
MAX_INPUT_INODES = 2048  # files and folders that `files` makes; namespaces.HOME_INODES has room for as many more
MAX_FETCHED = 200  # names in `fetch_files`: the worker has all the files open at once (worker.MAX_OPEN_FILES)
MAX_ERRORS = 10  # reported for a request; it can have thousands
MAX_TIMEOUT_S = 86400.0
# verl's call_sandbox_api gives up after compile_timeout + run_timeout + 10 s and retries only on 504, so a request may
# wait compile_timeout (python compiles nothing) and half of the 10 s.
QUEUE_GRACE_S = 5.0
PING_QUEUE_S = 10.0  # a queue that lets no program through for this long is not healthy
RETRY_AFTER_S = 1
PIECE_S = 10.0  # for a client to take one piece
PIECE_BYTES = 3 << 16  # of a file in an answer; a multiple of 3, so that its base64 is that of the file
# SandboxFusion's RunCodeResponse plus `queue_time` (s) and `session` ({call, alive}), and, for a SandboxError,
# `lost`: the program was lost; this server decides whose doing it was when it is sent again.
NO_ANSWER = {"status": "SandboxError", "message": "", "compile_result": None, "run_result": None}
NO_ANSWER |= {"executor_pod_name": None, "files": {}, "queue_time": None, "session": None}


def _text(value: Any) -> str:
    """Accept any str, even with lone surrogates, which JSON can carry: it runs as a file with those bytes would."""
    if not isinstance(value, str):
        raise ValueError("Input should be a valid string")
    return value


def _path_inside(path: str) -> str:
    """Accept a relative path that stays below the request's folder, and that a file there can have."""
    try:
        length = len(os.fsencode(path))
        parts = path[: MAX_PATH_BYTES + 1].split("/")
        longest = max(len(os.fsencode(part)) for part in parts)
    except UnicodeEncodeError:
        raise ValueError("expected a path without lone surrogates") from None
    if not _spelled(parts) or path.startswith("/") or ".." in parts or "\0" in path:
        raise ValueError("expected a relative path below the request's folder, without '..' or NUL")
    if longest > MAX_NAME_BYTES or length > MAX_PATH_BYTES:
        raise ValueError(
            f"expected names of at most {MAX_NAME_BYTES} bytes and a path of at most {MAX_PATH_BYTES} bytes, "
            f"got a name of {longest} in a path of {length}"
        )
    if len(parts) > MAX_DEPTH:
        raise ValueError(f"expected at most {MAX_DEPTH} names in a path, got {len(parts)}")
    return path


def _spelled(parts: list[str]) -> str:
    """Return a path's normal form. PurePosixPath is too slow: its `parents` take time quadratic in their number."""
    return "/".join(part for part in parts if part not in ("", "."))


def _can_be_made_together(files: dict[str, bytes | None]) -> dict[str, bytes | None]:
    """Normalize the paths; refuse one that is another's folder, is the program's name, or occurs twice."""
    named = {_spelled(path.split("/")): content for path, content in files.items()}
    if len(named) < len(files):
        raise ValueError("two of the paths are the same file")
    folders: set[str] = set()
    for path in named:
        first, _, _ = path.partition("/")
        if first in (SCRIPT, STDIN):
            raise ValueError(f"{first!r} belongs to the sandbox: choose a name other than {path!r}")
        folder = path.rpartition("/")[0]
        while folder and folder not in folders:
            folders.add(folder)
            if len(named) + len(folders) > MAX_INPUT_INODES:
                raise ValueError(f"expected at most {MAX_INPUT_INODES} files and folders, got more")
            folder = folder.rpartition("/")[0]
    for path in named:
        if path in folders:
            raise ValueError(f"{path!r} cannot be both a file and the folder of other files")
    return named


def _not_too_many(files: Any) -> Any:
    """Refuse too many files before any of them is looked at."""
    if isinstance(files, dict) and len(files) > MAX_INPUT_INODES:
        raise ValueError(f"expected at most {MAX_INPUT_INODES} files, got {len(files)}")
    return files


def _cut(name: str | int) -> str | int:
    return f"{name[:MAX_NAME_BYTES]}..." if isinstance(name, str) and len(name) > MAX_NAME_BYTES else name


def _from_base64(content: Any) -> bytes:
    """Decode a file's content. SandboxFusion also takes null, and makes no file of it; see `RunCodeRequest.files`."""
    if not isinstance(content, str):
        raise ValueError("Input should be a valid string")
    try:
        return binascii.a2b_base64(content)
    except ValueError as exc:
        raise ValueError(f"expected base64: {exc}") from None


Text = Annotated[str, PlainValidator(_text)]
Timeout = Annotated[float, Field(gt=0, le=MAX_TIMEOUT_S, allow_inf_nan=False)]
Path = Annotated[str, AfterValidator(_path_inside)]
Files = Annotated[
    dict[Path, Annotated[bytes, PlainValidator(_from_base64)] | None],
    AfterValidator(_can_be_made_together),
    BeforeValidator(_not_too_many),
]


class RunCodeRequest(BaseModel):
    """Body of `POST /run_code`; unknown fields are ignored."""

    code: Text
    language: Literal["python"]
    compile_timeout: Annotated[float, Field(ge=0, le=MAX_TIMEOUT_S, allow_inf_nan=False)] = 10  # s, for queueing
    run_timeout: Timeout = 10  # s, wall clock
    # Address space, on top of what the preloaded packages take. With --allow-subprocess also of all processes together.
    memory_limit_MB: Annotated[int, Field(le=1 << 30)] = 1024  # <= 0: no limit
    stdin: Text | None = None
    files: Files = {}  # path: base64; null: no file
    fetch_files: Annotated[list[Path], FailFast(), Field(max_length=MAX_FETCHED)] = []
    queue_timeout: Timeout | None = None  # s; default compile_timeout + 5
    session_id: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    echo_last_expression: bool = False  # print what a last bare expression gives, as a Python prompt does


def make_app(pool: Pool, sessions: Sessions, *, token: str | None = None) -> web.Application:
    """Return the application that serves `pool`.

    Args:
        token: what every request must carry as `Authorization: Bearer ...`; None: nothing.
    """
    metrics, bodies = Metrics(pool, sessions), Bodies()
    health: asyncio.Task | None = None  # one check for all pings that arrive while it runs

    async def run_code(http_request: web.Request) -> web.StreamResponse:
        outcome = "hung_up"  # unless there is an answer
        try:
            response, outcome = await _run_code(http_request)
            return response
        except web.HTTPException:  # 408, 413: a body that is too slow, or over the limit
            outcome = "rejected"
            raise
        except ConnectionError:  # the client hung up while it was sent the answer
            raise
        except Exception:  # a bug, or no descriptors left: the answer is 500
            outcome = "sandbox_error"
            raise
        finally:
            metrics.requests.labels(outcome).inc()

    async def _run_code(http_request: web.Request) -> tuple[web.StreamResponse, str]:
        client: Client = http_request.protocol
        client.waits()
        async with AsyncExitStack() as stack:
            try:
                request = await stack.enter_async_context(bodies.read(http_request, RunCodeRequest.model_validate))
            except ValidationError as exc:
                errors = exc.errors(include_url=False, include_input=False, include_context=False)[:MAX_ERRORS]
                return reject(*(error | {"loc": ["body", *map(_cut, error["loc"])]} for error in errors))
            except (ValueError, web.RequestPayloadError) as exc:
                return reject({"type": "json_invalid", "loc": ["body"], "msg": f"JSON: {exc}"})
            except HeldBytesError as exc:
                return overloaded(exc, 503)
            client.works()
            return await execute(request, http_request)

    async def execute(request: RunCodeRequest, http_request: web.Request) -> tuple[web.StreamResponse, str]:
        if request.session_id is not None and not sessions.max_sessions:
            why = "this server has no sessions: start it with --max-sessions"
            return reject({"type": "value_error", "loc": ["body", "session_id"], "msg": why})
        budget_s = request.queue_timeout or request.compile_timeout + QUEUE_GRACE_S
        try:
            if request.session_id is None:
                result, queue_time = await pool.run(vars(request), queue_timeout_s=budget_s)
            else:
                result, queue_time = await sessions.run(request.session_id, vars(request), queue_timeout_s=budget_s)
        except QueueTimeoutError as exc:
            return overloaded(exc, 504)
        except SessionLimitError as exc:
            return overloaded(exc, 503)
        except SandboxError as exc:
            logger.error("%s", without_quotations(exc))
            why = {"message": str(exc), "lost": isinstance(exc, LostProgramError)}
            return web.json_response(NO_ANSWER | why), "sandbox_error"
        metrics.queue_time.observe(queue_time)
        metrics.run_time.observe(result["execution_time"])
        files, not_fetched, alive = result.pop("files"), result.pop("not_fetched"), result.pop("alive")
        status, outcome = ("Success", "ok") if result["return_code"] == 0 else ("Failed", "code_error")
        outcome = "timeout" if result["status"] == "TimeLimitExceeded" else outcome
        body = NO_ANSWER | {"status": status, "run_result": result, "queue_time": queue_time}
        body["message"] = "; ".join(f"{path} was not fetched: {why}" for path, why in not_fetched.items())
        if request.session_id is not None:
            body["session"] = {"call": result.pop("call"), "alive": alive}
        text = await in_turn(len(result["stdout"]) + len(result["stderr"]), json.dumps, body)
        if not files:
            return web.json_response(text=text), outcome
        client: Client = http_request.protocol
        client.waits()
        return await send_with_files(http_request, text, files), outcome

    def overloaded(exc: Exception, status: int) -> tuple[web.Response, str]:
        headers = {"Retry-After": str(RETRY_AFTER_S)}
        return web.json_response({"detail": f"overloaded: {exc}"}, status=status, headers=headers), "overloaded"

    def reject(*details: dict[str, Any]) -> tuple[web.Response, str]:
        return web.json_response({"detail": details}, status=422), "rejected"

    async def end_session(http_request: web.Request) -> web.Response:
        ended = await sessions.end(http_request.match_info["session_id"])
        return web.json_response({"ended": ended}, status=200 if ended else 404)

    async def ping(_: web.Request) -> web.Response:
        nonlocal health
        if health is None or health.done():
            health = asyncio.create_task(check_health(pool))
        why = await asyncio.shield(health)
        body = {"status": "error" if why else "ok", "message": why or "", "layers": pool.layers}
        return web.json_response(body, status=503 if why else 200)

    async def get_metrics(_: web.Request) -> web.Response:
        return web.Response(body=metrics.text(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    @web.middleware
    async def check_sender(http_request: web.Request, handler: Handler) -> web.StreamResponse:
        client: Client = http_request.protocol
        client.is_chunked = "Transfer-Encoding" in http_request.headers
        if "Origin" in http_request.headers:  # a page in a browser on this machine, where loopback protects nothing
            return web.json_response({"detail": "requests from web pages are refused"}, status=403)
        if token is not None:
            sent = http_request.headers.get("Authorization", "")
            if not hmac.compare_digest(os.fsencode(sent), os.fsencode(f"Bearer {token}")):
                headers = {"WWW-Authenticate": "Bearer"}
                body = {"detail": "expected the header Authorization: Bearer <token>"}
                return web.json_response(body, status=401, headers=headers)
        client.works()
        try:
            return await handler(http_request)
        finally:
            client.waits()

    async def name_server(_: web.Request, response: web.StreamResponse) -> None:
        response.headers["Server"] = SERVER_NAME

    app = web.Application(middlewares=[check_sender])
    app.on_response_prepare.append(name_server)
    app.add_routes(
        [
            web.post("/run_code", run_code),
            web.get("/v1/ping", ping),
            web.get("/metrics", get_metrics),
            web.delete("/v1/sessions/{session_id}", end_session),
        ]
    )
    return app


async def send_with_files(http_request: web.Request, text: str, files: dict[str, memoryview]) -> web.StreamResponse:
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
        client: Client = http_request.protocol
        client.drop()  # also ends this task
    await response.write_eof()
    return response


def _length(piece: bytes | memoryview) -> int:
    return (len(piece) + 2) // 3 * 4 if isinstance(piece, memoryview) else len(piece)


async def check_health(pool: Pool) -> str | None:
    """Send the control program through the queue; return None if it ran as it should, else what it did instead."""
    try:
        result, _ = await pool.run(CONTROL, queue_timeout_s=PING_QUEUE_S)
        return wrong_with_control(result)
    except QueueTimeoutError as exc:
        return f"overloaded: {exc}; {pool.running} requests run and {pool.waiting} wait"
    except SandboxError as exc:
        return str(exc)
