"""HTTP server that executes Python with SandboxFusion's `/run_code` contract (bytedance/SandboxFusion 469de08).

    python -m verl_ext.sandbox.server --host 127.0.0.1 --port 8080 --workers 4
    curl 127.0.0.1:8080/run_code -H 'content-type: application/json' -d '{"code": "print(6*7)", "language": "python"}'

Routes: `POST /run_code`, `GET /v1/ping` (executes code). Beyond the contract: a request may set `queue_timeout` (s), an
answer has `queue_time` (s); overload answers 504 with Retry-After. `/v1/ping` names the layers of isolation in force.
"""

import argparse
import asyncio
import binascii
import errno
import ipaddress
import json
import logging
import os
import signal
import socket
import sys
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

from aiohttp import web
from pydantic import AfterValidator, BaseModel, Field, PlainValidator, ValidationError

from verl_ext.sandbox.pool import PRELOAD, Pool, QueueTimeoutError, SandboxError

logger = logging.getLogger(__name__)

PROGRAM_NAME = "main.py"  # zygote.SCRIPT
MAX_BODY_BYTES = 64 << 20
MAX_TIMEOUT_S = 86400.0
# verl's call_sandbox_api gives up after compile_timeout + run_timeout + 10 s and retries only on 504, so a request may
# wait compile_timeout (python compiles nothing) and half of the 10 s.
QUEUE_GRACE_S = 5.0
RETRY_AFTER_S = 1


def _text(value: Any) -> str:
    """Any str, also one with lone surrogates, which JSON can carry: it runs as a file with those bytes would."""
    if not isinstance(value, str):
        raise ValueError("Input should be a valid string")
    return value


def _path_inside(path: str) -> str:
    """A relative path that stays below the request's folder."""
    parts = PurePosixPath(path).parts
    if not parts or path.startswith("/") or ".." in parts or "\0" in path:
        raise ValueError("expected a relative path below the request's folder, without '..'")
    return path


def _not_the_program(path: str) -> str:
    if str(PurePosixPath(path)) == PROGRAM_NAME:
        raise ValueError(f"{PROGRAM_NAME!r} is the submitted program itself: choose another name")
    return path


def _from_base64(content: Any) -> bytes:
    """SandboxFusion takes null, too, and makes no file of it; see `RunCodeRequest.files`."""
    if not isinstance(content, str):
        raise ValueError("Input should be a valid string")
    try:
        return binascii.a2b_base64(content)
    except ValueError as exc:
        raise ValueError(f"expected base64: {exc}") from None


Text = Annotated[str, PlainValidator(_text)]
Timeout = Annotated[float, Field(gt=0, le=MAX_TIMEOUT_S, allow_inf_nan=False)]
InputPath = Annotated[str, AfterValidator(_path_inside), AfterValidator(_not_the_program)]


class RunCodeRequest(BaseModel):
    """Body of `POST /run_code`; unknown fields are ignored."""

    code: Text
    language: Literal["python"]
    compile_timeout: Annotated[float, Field(ge=0, le=MAX_TIMEOUT_S)] = 10  # s, allowed for queueing
    run_timeout: Timeout = 10  # s, wall clock
    # Of address space, on top of what the preloaded packages take. With --allow-subprocess also of all processes.
    memory_limit_MB: Annotated[int, Field(le=1 << 30)] = 1024  # <= 0: no limit
    stdin: Text | None = None
    files: dict[InputPath, Annotated[bytes, PlainValidator(_from_base64)] | None] = {}  # path: base64; null: no file
    fetch_files: list[Annotated[str, AfterValidator(_path_inside)]] = []
    queue_timeout: Timeout | None = None  # s; default compile_timeout + 5


def main() -> None:
    """Command line; exits with 0 after a clean stop and 1 with one line on stderr when it cannot start."""
    parser = argparse.ArgumentParser(prog="python -m verl_ext.sandbox.server", description=__doc__.split("\n")[0])
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8080, help="0 picks a free port (default: %(default)s)")
    parser.add_argument("--port-file", type=Path, help="write the port to this file once requests are answered")
    parser.add_argument(
        "--workers", type=int, default=os.cpu_count(), help="programs that run at once (default: cores, %(default)s)"
    )
    parser.add_argument(
        "--max-output-bytes",
        type=int,
        default=1 << 20,
        help="kept of stdout and of stderr, each (default: %(default)s)",
    )
    parser.add_argument(
        "--isolation",
        choices=("auto", "full", "none"),
        default="auto",
        help="auto: all layers that work here, and no start without any; full: no start unless all work; "
        "none: resource limits only, for code that is trusted (default: %(default)s)",
    )
    parser.add_argument(
        "--allow-subprocess",
        action="store_true",
        help="programs may start other programs; the memory limit of all together is then checked every 0.1 s",
    )
    parser.add_argument(
        "--preload",
        default=",".join(PRELOAD),
        help="packages imported once, before any program, if they are installed (default: %(default)s)",
    )
    parser.add_argument("--parent-pid", type=int, help="stop when this process ends")
    args = parser.parse_args()
    if args.workers < 1 or args.max_output_bytes < 1:
        parser.error("--workers and --max-output-bytes must be at least 1")
    if not 0 <= args.port <= 65535:
        parser.error(f"--port: expected 0 to 65535, got {args.port}")
    logging.basicConfig(format="sandbox: %(message)s", level=logging.WARNING)
    try:
        asyncio.run(serve(args))
    except StartError as exc:
        sys.exit(f"sandbox: {exc}")


class StartError(Exception):
    """The server cannot start; the message says why and what to do."""


async def serve(args: argparse.Namespace) -> None:
    """Serve until SIGTERM, SIGINT or the end of `--parent-pid`."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    parent = watch_parent(args.parent_pid, stop) if args.parent_pid else None
    listener = listen(args.host, args.port)
    pool = Pool(
        args.workers,
        args.max_output_bytes,
        isolation=args.isolation,
        allow_subprocess=args.allow_subprocess,
        preload=[name for name in args.preload.split(",") if name],
    )
    # handler_cancellation: a client that hangs up frees its worker; shutdown_timeout: at a stop, programs are killed
    runner = web.AppRunner(make_app(pool), access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
    try:
        if why := await check_health(pool):
            raise StartError(f"the first program did not run: {why}")
        await runner.setup()
        await web.SockSite(runner, listener).start()
        port = listener.getsockname()[1]
        if args.port_file:
            partial = args.port_file.with_name(f"{args.port_file.name}.{os.getpid()}")
            partial.write_text(f"{port}\n")
            partial.replace(args.port_file)
        if not ipaddress.ip_address(listener.getsockname()[0]).is_loopback:
            logger.warning("listening on %s: everyone who reaches this port can run code on this machine", args.host)
        if args.isolation != "none" and pool.off:
            logger.warning("isolation without %s", "; ".join(f"{layer} ({why})" for layer, why in pool.off.items()))
        print(f"sandbox ready on http://{args.host}:{port}\nsandbox layers: {', '.join(pool.layers)}", flush=True)
        await stop.wait()
    finally:
        await runner.cleanup()
        await pool.close()
        listener.close()
        if args.port_file:
            args.port_file.unlink(missing_ok=True)
        if parent is not None:
            os.close(parent)


def listen(host: str, port: int) -> socket.socket:
    """A bound, listening TCP socket; raises StartError when the port is taken."""
    try:
        return socket.create_server((host, port), backlog=1024)
    except OSError as exc:
        if exc.errno == errno.EADDRINUSE:
            raise StartError(
                f"port {port} on {host} is in use. Stop what holds it, or choose another with --port (0: any free one)"
            ) from exc
        raise StartError(f"cannot listen on {host}:{port}: {exc.strerror or exc}") from exc


def watch_parent(pid: int, stop: asyncio.Event) -> int:
    """Set `stop` when process `pid` ends; returns the pidfd that is watched."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        raise StartError(f"--parent-pid {pid}: there is no such process") from None
    # A pidfd is readable from the process's end on, even if that was before this line.
    asyncio.get_running_loop().add_reader(fd, stop.set)
    return fd


async def check_health(pool: Pool) -> str | None:
    """Execute a small program past the queue; None when it answers as it should, else what it did instead."""
    try:
        result = await pool.execute(
            {
                "code": "print(6 * 7)",
                "stdin": None,
                "run_timeout": 5,
                "memory_limit_MB": -1,
                "files": {},
                "fetch_files": [],
            }
        )
    except SandboxError as exc:
        return str(exc)
    return None if result["stdout"] == "42\n" else f"print(6 * 7) gave {result}"


def make_app(pool: Pool) -> web.Application:
    """The routes over `pool`."""

    async def run_code(http_request: web.Request) -> web.Response:
        try:
            request = RunCodeRequest.model_validate(json.loads(await http_request.read()))
        except ValidationError as exc:
            errors = exc.errors(include_url=False, include_input=False, include_context=False)
            return reply({"detail": [error | {"loc": ["body", *error["loc"]]} for error in errors]}, status=422)
        except (ValueError, RecursionError) as exc:
            return reply({"detail": [{"type": "json_invalid", "loc": ["body"], "msg": f"JSON: {exc}"}]}, status=422)
        budget_s = request.queue_timeout or request.compile_timeout + QUEUE_GRACE_S
        try:
            result, queue_time = await pool.run(vars(request), queue_timeout_s=budget_s)
        except QueueTimeoutError as exc:
            return reply({"detail": f"overloaded: {exc}"}, status=504, headers={"Retry-After": str(RETRY_AFTER_S)})
        except SandboxError as exc:
            logger.error("%s", exc)
            return reply(answer("SandboxError", message=str(exc)))
        files, not_fetched = result.pop("files"), result.pop("not_fetched")
        message = "; ".join(f"{path} was not fetched: {why}" for path, why in not_fetched.items())
        status = "Success" if result["return_code"] == 0 else "Failed"
        return reply(answer(status, message=message, run_result=result, files=files, queue_time=queue_time))

    async def ping(_: web.Request) -> web.Response:
        why = await check_health(pool)
        return reply(
            {"status": "error" if why else "ok", "message": why or "", "layers": pool.layers}, 503 if why else 200
        )

    app = web.Application(client_max_size=MAX_BODY_BYTES)
    app.add_routes([web.post("/run_code", run_code), web.get("/v1/ping", ping)])
    return app


def answer(
    status: str,
    *,
    message: str = "",
    run_result: dict[str, Any] | None = None,
    files: dict[str, str] | None = None,
    queue_time: float | None = None,
) -> dict[str, Any]:
    """SandboxFusion's RunCodeResponse, with `queue_time` (s) added."""
    return {
        "status": status,
        "message": message,
        "compile_result": None,
        "run_result": run_result,
        "executor_pod_name": None,
        "files": files or {},
        "queue_time": queue_time,
    }


def reply(body: dict[str, Any], status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(text=json.dumps(body), status=status, headers=headers, content_type="application/json")


if __name__ == "__main__":
    main()
