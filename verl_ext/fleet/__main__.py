"""List, add or remove rollout servers of an RL run in progress.

    retool fleet list outputs/my_run
    retool fleet remove outputs/my_run 2
    retool fleet add outputs/my_run

`remove` takes the number that `list` prints. `add` and `remove` return when the run begins to act;
`list` shows how far it is.
For runs whose servers have dedicated GPUs: separate_async with actor_rollout_ref.hybrid_engine=false.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from verl_ext.fleet.commands import NoAnswer, Refused, ask
from verl_ext.runs.folder import NoRun, training_folder

COLUMNS = ("server", "address", "state", "requests", "weights of step")


def table(rows: list[dict[str, Any]]) -> str:
    """Format `Members.rows`; unknown values are dashes, and the requests of each rank follow a server's total."""
    lines: list[tuple[str, ...]] = [COLUMNS]
    for row in rows:
        ranks = f" = {' + '.join(map(str, row['ranks']))}" if len(row["ranks"]) > 1 else ""
        requests = None if row["requests"] is None else f"{row['requests']}{ranks}"
        cells = (row["server"], row["address"], row["state"], requests, row["version"])
        lines.append(tuple("-" if cell is None else str(cell) for cell in cells))
    widths = [max(len(line[column]) for line in lines) for column in range(len(COLUMNS))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="retool fleet", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    helps = {"list": "print the servers", "add": "start a server", "remove": "stop a server"}
    for name, about in helps.items():
        command = commands.add_parser(name, help=about, description=about)
        command.add_argument("run", type=Path, metavar="RUN", help="folder of the RL run")
        if name == "remove":
            command.add_argument("server", type=int, metavar="SERVER", help="number of the server, as `list` prints it")
    given = parser.parse_args(arguments)
    words = [given.command, *([str(given.server)] if given.command == "remove" else [])]
    try:
        answer = ask(training_folder(given.run, "rl"), words)
    except (NoRun, NoAnswer, Refused) as error:
        sys.exit(str(error))
    print(table(answer) if given.command == "list" else answer)


if __name__ == "__main__":
    main()
