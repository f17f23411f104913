"""The command `retool view RUN [RUN...]`."""

import argparse
import socket
import sys
from pathlib import Path

import uvicorn

from verl_ext.runs.folder import NoRun, short_names
from verl_ext.view.app import HOST, create_app
from verl_ext.view.data import Run


def main() -> None:
    parser = argparse.ArgumentParser(prog="retool view", description="Show runs in a browser.")
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="folder of a run, an evaluation, or the quickstart"
    )
    parser.add_argument(
        "--port", type=int, default=8400, help="port on 127.0.0.1; 0 chooses a free one (default: 8400)"
    )
    args = parser.parse_args()
    try:
        names = short_names(args.runs)
        runs = [Run(path, name, i) for i, (path, name) in enumerate(zip(args.runs, names, strict=True))]
        listener = socket.create_server((HOST, args.port))  # takes connections from now on
    except (NoRun, ValueError) as error:
        sys.exit(str(error))
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", error)
        sys.exit(f"Port {args.port} of {HOST} is not available ({why}). --port 0 chooses a free one.")
    port = listener.getsockname()[1]
    print(f"http://{HOST}:{port}/ shows {', '.join(names)}. Ctrl-C ends it.", flush=True)
    uvicorn.Server(uvicorn.Config(create_app(runs, port), log_level="warning")).run(sockets=[listener])


if __name__ == "__main__":
    main()
