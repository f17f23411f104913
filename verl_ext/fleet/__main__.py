"""The servers of an RL run that goes on: look at them, add one, remove one.

    python -m verl_ext.fleet list outputs/my_run
    python -m verl_ext.fleet remove outputs/my_run 2
    python -m verl_ext.fleet add outputs/my_run

`remove` takes the number that `list` prints. Both return when the run has begun with it; `list` says how far it is.
For runs with servers of their own: separate_async with actor_rollout_ref.hybrid_engine=false.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from verl_ext.fleet.commands import NoAnswer, Refused, ask
from verl_ext.runs.folder import NoRun, training_folder

COLUMNS = ("server", "address", "state", "requests", "weights of step")


def table(rows: list[dict[str, Any]]) -> str:
    """Of `Members.rows`; what is not known is a dash, and the ranks of a server follow its requests."""
    lines = [COLUMNS]
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
        prog="python -m verl_ext.fleet", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    helps = {"list": "print the servers", "add": "start a server", "remove": "stop a server"}
    for name, about in helps.items():
        command = commands.add_parser(name, help=about, description=about)
        command.add_argument("run", type=Path, metavar="RUN", help="folder of the RL run")
        if name == "remove":
            command.add_argument("server", type=int, metavar="SERVER", help="its number, as `list` prints it")
    given = parser.parse_args(arguments)
    words = [given.command, *([str(given.server)] if given.command == "remove" else [])]
    try:
        answer = ask(training_folder(given.run, "rl"), words)
    except (NoRun, NoAnswer, Refused) as error:
        sys.exit(str(error))
    print(table(answer) if given.command == "list" else answer)


if __name__ == "__main__":
    main()
