"""HTTP server that executes Python with SandboxFusion's `/run_code` contract (bytedance/SandboxFusion 469de08).

    retool sandbox --host 127.0.0.1 --port 8080 --workers 4
    curl 127.0.0.1:8080/run_code -H 'content-type: application/json' -d '{"code": "print(6*7)", "language": "python"}'

Routes: `POST /run_code`, `GET /v1/ping` (executes code, names the layers of isolation in force and the limits of
sessions), `GET /metrics`, `POST /v1/sessions` (renews their leases), `DELETE /v1/sessions/ID`, and of boxes, in which
terminal tasks are worked on: `POST /v1/boxes/ID`, `POST /v1/boxes/ID/run`, `POST /v1/boxes/ID/seal`, `DELETE
/v1/boxes/ID` (request.py and box_api.py say what they take and give). Beyond the contract: a
request may set `queue_timeout` (s), `echo_last_expression` and `session_id`, an answer has `queue_time` (s) and
`session`; an overloaded server answers 504, or 503 for one session too many, with Retry-After. This module starts and
stops the server; its answers are in `api.py`.
"""

import argparse
import asyncio
import errno
import importlib.util
import ipaddress
import logging
import os
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from aiohttp import web

from verl_ext.sandbox.launch import PACKAGE_ROOT
from verl_ext.sandbox.limits import READY, TOKEN_VARIABLE
from verl_ext.sandbox.server.api import check_health, make_app
from verl_ext.sandbox.server.boxes import Boxes
from verl_ext.sandbox.server.clients import (
    USUAL_BOXES,
    USUAL_SESSIONS,
    Clients,
    DescriptorLimitError,
    max_clients,
    usual_boxes,
    usual_sessions,
)
from verl_ext.sandbox.server.pool import PRELOAD, Pool
from verl_ext.sandbox.server.sessions import Sessions
from verl_ext.sandbox.server.visible import find_exposed
from verl_ext.sandbox.server.workers import MAX_SESSIONS, Workers

logger = logging.getLogger(__name__)

INSTALLED = ("site-packages", "dist-packages")  # the folders of packages, also those of a Python below a venv
DATA_VARIABLE = "DATA_DIR"  # the launchers' variable: data sets, with the answers


def main() -> None:
    """Run the command line; exit with 0 after a clean stop, and with 1 and a line on stderr if it cannot start."""
    parser = argparse.ArgumentParser(prog="retool sandbox", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8080, help="port; 0 picks a free one (default: %(default)s)")
    parser.add_argument(
        "--workers", type=int, default=os.cpu_count(), help="programs at once (default: one per core, %(default)s)"
    )
    parser.add_argument(
        "--max-output-bytes",
        type=int,
        default=1 << 20,
        help="how much is kept of stdout and of stderr, each (default: %(default)s)",
    )
    parser.add_argument(
        "--isolation",
        choices=("auto", "full", "none"),
        default="auto",
        help="auto: use all layers that work here, and do not start if none does; full: do not start unless all "
        "work; none: only limit resources, for code that you trust (default: %(default)s)",
    )
    parser.add_argument(
        "--allow-subprocess",
        action="store_true",
        help="let programs start other programs; the memory of all of them together is then checked every 0.1 s",
    )
    parser.add_argument(
        "--preload",
        default=",".join(PRELOAD),
        help="packages to import once, before any program runs, if they are installed (default: %(default)s)",
    )
    parser.add_argument(
        "--token-file",
        type=Path,
        help=f"file with the token that every request must carry (default: ${TOKEN_VARIABLE}, if it is set)",
    )
    parser.add_argument(
        "--max-sessions",
        type=int,
        help=f"how many sessions may exist at once; 0 forbids them (default: {USUAL_SESSIONS}, or fewer if the limit "
        f"on open files is low; at most {MAX_SESSIONS})",
    )
    parser.add_argument(
        "--max-boxes",
        type=int,
        help=f"how many boxes may be open at once; 0 forbids them (default: {USUAL_BOXES}, or fewer if the limit on "
        f"open files is low; at most {MAX_SESSIONS})",
    )
    parser.add_argument(
        "--session-idle-s",
        type=float,
        default=600,
        help="end a session or box that had no call, and that its client has not renewed, for this long: its client is "
        "gone (default: %(default)s)",
    )
    parser.add_argument("--parent-pid", type=int, help="stop the server when this process ends")
    args = parser.parse_args()
    if args.workers < 1 or args.max_output_bytes < 1:
        parser.error("--workers and --max-output-bytes must be at least 1")
    if args.max_sessions is None:
        args.max_sessions = usual_sessions(args.workers)
    if args.max_boxes is None:
        args.max_boxes = usual_boxes(args.workers)
    if not 0 <= args.max_sessions <= MAX_SESSIONS or args.session_idle_s <= 0:
        parser.error(f"--max-sessions must be from 0 to {MAX_SESSIONS}, and --session-idle-s more than 0")
    if not 0 <= args.max_boxes <= MAX_SESSIONS:
        parser.error(f"--max-boxes must be from 0 to {MAX_SESSIONS}")
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
    token = read_token(args.token_file)
    parent = watch_parent(args.parent_pid, stop) if args.parent_pid else None
    try:
        limit = max_clients(args.workers, args.max_sessions + args.max_boxes)
    except DescriptorLimitError as exc:
        raise StartError(exc) from None
    listener = listen(args.host, args.port)
    preload = [name for name in args.preload.split(",") if name]
    pool = Pool(
        args.workers,
        args.max_output_bytes,
        isolation=args.isolation,
        allow_subprocess=args.allow_subprocess,
        preload=preload,
    )
    sessions = Sessions(pool, max_sessions=args.max_sessions, idle_s=args.session_idle_s)
    workers = Workers(0, args.max_output_bytes, isolation=args.isolation, boxes=True)
    boxes = Boxes(pool, workers, max_boxes=args.max_boxes, idle_s=args.session_idle_s)
    app = make_app(pool, sessions, boxes, token=token)
    # handler_cancellation: a client that hangs up frees its worker; shutdown_timeout: at a stop, programs are killed
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    try:
        if why := await check_health(pool):
            raise StartError(f"the first program did not run: {why}")
        refuse_exposed_folders(pool.workers.layers)
        await runner.setup()
        assert runner.server  # since `setup`
        clients = Clients(runner.server, listener, limit=limit)
        clients.start()
        port = listener.getsockname()[1]
        if not ipaddress.ip_address(listener.getsockname()[0]).is_loopback:
            who = "everyone who reaches this port" + (" and has the token" if token else "")
            logger.warning("listening on %s: %s can run code on this machine", args.host, who)
        warn_of_programs(pool.workers, preload, is_isolated=args.isolation != "none")
        print(f"{READY}http://{args.host}:{port}\nsandbox layers: {', '.join(pool.workers.layers)}", flush=True)
        await stop.wait()
        clients.stop()
    finally:
        await runner.cleanup()
        sessions.close()
        boxes.close()
        await asyncio.gather(pool.close(), workers.close())
        listener.close()
        if parent is not None:
            os.close(parent)


def warn_of_programs(workers: Workers, preload: Sequence[str], *, is_isolated: bool) -> None:
    """Log what programs will miss, and what they will be able to do."""
    if absent := [name for name in preload if not importlib.util.find_spec(name.partition(".")[0])]:
        logger.warning(
            "%s: not installed, so programs that import them will fail. Install them in the server's Python "
            "environment, or list in --preload only the packages that programs may expect",
            ", ".join(absent),
        )
    if workers.off:
        off = "; ".join(f"{layer} ({why})" for layer, why in workers.off.items())
        logger.warning("layers that are off: %s", off)
    if is_isolated and "root" not in workers.layers:
        if "landlock" in workers.layers:
            limit = "their disk space and files are counted while they run, so they can briefly exceed the limit"
        else:
            limit = "they can read and write what their user can, such as all of /tmp, without a limit"
        logger.warning("programs have no separate file system: %s", limit)


def refuse_exposed_folders(layers: Sequence[str]) -> None:
    """Raise StartError if programs could read the ground truths: this package's checkout, or $DATA_DIR."""
    if not {"root", "landlock"}.intersection(layers):
        return  # they can read all that their user can; the server warns about it
    # An installed package, unlike a checkout, has only code.
    hidden = {} if PACKAGE_ROOT.name in INSTALLED else {str(PACKAGE_ROOT): "this package's checkout"}
    if os.environ.get(DATA_VARIABLE):
        hidden[os.environ[DATA_VARIABLE]] = f"the data folder, ${DATA_VARIABLE}"
    if exposed := find_exposed(hidden):
        folder, through = exposed
        raise StartError(
            f"programs could read {folder} ({hidden[folder]}, which holds answers), because they may read {through}. "
            "Move the folder to a place that programs cannot read, such as /srv or a home folder, or start the server "
            "from another Python environment"
        )


def read_token(file: Path | None) -> str | None:
    """Return the token that requests must carry, or None. Raises StartError for a file without one."""
    source = f"--token-file {file}" if file else f"${TOKEN_VARIABLE}"
    try:
        token = (file.read_text(encoding="utf-8") if file else os.environ.get(TOKEN_VARIABLE, "")).strip()
    except OSError as exc:
        raise StartError(f"{source}: {exc.strerror}") from exc
    except UnicodeDecodeError:
        raise StartError(f"{source} is not UTF-8: expected a token") from None
    if not token and (file or TOKEN_VARIABLE in os.environ):
        raise StartError(f"{source} is empty: expected a token")
    if not token.isprintable():  # no header can carry it
        raise StartError(f"{source} contains line breaks or control characters: expected a token")
    return token or None


def listen(host: str, port: int) -> socket.socket:
    """Return a bound, listening TCP socket; raises StartError if the port is taken."""
    try:
        return socket.create_server((host, port), backlog=128)  # further connections would wait too long to be of use
    except OSError as exc:
        if exc.errno == errno.EADDRINUSE:
            raise StartError(
                f"port {port} on {host} is in use. Stop the process that holds it, or choose another port"
            ) from exc
        raise StartError(f"cannot listen on {host}:{port}: {exc.strerror or exc}") from exc


def watch_parent(pid: int, stop: asyncio.Event) -> int:
    """Set `stop` when process `pid` ends; return the watched pidfd."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        raise StartError(f"--parent-pid {pid}: there is no such process") from None
    # A pidfd is readable from the process's end on, even if that was before this line.
    asyncio.get_running_loop().add_reader(fd, stop.set)
    return fd


if __name__ == "__main__":
    main()
