"""Print a run's records as JSON lines, or make records of verl's dumps.

    retool records show RUN [--kind tokens] [--step 17] | jq .
    retool records import DUMPS OUT

DUMPS is a folder of <step>.jsonl as verl writes into `trainer.validation_data_dir` and `trainer.rollout_data_dir`, or
one such file. Report, viewer, evaluation and grading read OUT as any run.
"""

import argparse
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from verl_ext.records import store
from verl_ext.records.imported import import_dumps
from verl_ext.records.schema import SCHEMAS
from verl_ext.runs import jsonl
from verl_ext.runs.folder import files_of, training_folder


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="retool records", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    show = commands.add_parser("show", help="print records as JSON lines")
    show.add_argument("run", type=Path, metavar="RUN", help="folder of an RL run, an evaluation, or the quickstart")
    show.add_argument("--kind", choices=SCHEMAS, default="trajectories")
    show.add_argument("--step", type=int, help="all by default")
    importer = commands.add_parser("import", help="make records of verl's dumps")
    importer.add_argument("dumps", type=Path, metavar="DUMPS", help="a dump, or a folder of them")
    importer.add_argument("out", type=Path, metavar="OUT", help="folder that gets the records")
    args = parser.parse_args(argv)
    try:
        if args.command == "import":
            print(import_dumps(args.dumps, args.out))
        else:
            print_records(args.run, args.kind, args.step)
    except (OSError, ValueError) as error:
        sys.exit(str(error))


def print_records(folder: Path, kind: str, step: int | None) -> None:
    """Print a line for each row of a run's records of a kind, of one step or of all.

    Raises:
        NoRun: the folder is no run with records.
        ValueError: the run has no records of this kind and step.
    """
    run = training_folder(folder, "rl", "evaluation")
    steps = sorted({file.step for file in files_of(run, kind)})
    if not steps or step not in (None, *steps):
        has = f"of step {step}. It has steps {steps[0]} to {steps[-1]}" if steps else "(retool.recorder)"
        raise ValueError(f"{run} has no records of the kind {kind} {has}.")
    with suppress(BrokenPipeError):  # `| head` is not an error
        for file, table in store.tables(run, kind):
            if step in (None, file.step) and table.num_rows:
                print(*map(jsonl.dumps, table.to_pylist()), sep="\n", flush=True)


if __name__ == "__main__":
    main()
