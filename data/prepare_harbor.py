"""Turn folders of Harbor's tasks (schema 1.4) into rows for the environment `terminal`.

    python data/prepare_harbor.py my_tasks --out outputs/harbor/rl_train.parquet

Each folder with a task.toml is a row. One that asks for what a box of the sandbox does not have, such as another image
or a network, is named with the reason, and stops the command unless you pass --skip. Then check that the tasks can be
solved: retool environments validate outputs/harbor/rl_train.parquet

Tests that run a program of the agent must run it by `as-agent PROGRAM`, which every box has. Otherwise it could change
the tests or write the reward.
"""

import argparse
import sys
from pathlib import Path

import pyarrow as pa

from verl_ext.runs import parquet
from verl_ext.tasks import harbor, task


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+", metavar="FOLDER", help="a task, or a folder of tasks")
    parser.add_argument("--out", type=Path, required=True, help="parquet file")
    parser.add_argument("--source", default=task.SOURCE, help="data_source of the rows (default: %(default)s)")
    parser.add_argument("--split", default="train", help="extra_info.split of the rows (default: %(default)s)")
    parser.add_argument("--skip", action="store_true", help="leave out tasks that cannot be honoured")
    args = parser.parse_args()

    rows, refused = [], []
    try:
        folders = [folder for path in args.folders for folder in harbor.folders_in(path)]
    except harbor.NotHonoured as error:
        sys.exit(f"error: {error}")
    for folder in folders:
        try:
            rows.append(task.row(harbor.read(folder), source=args.source, split=args.split, index=len(rows)))
        except harbor.NotHonoured as error:
            refused.append(str(error))
    print(*(f"refused: {each}" for each in refused), sep="\n", end="\n" if refused else "")
    if not rows or (refused and not args.skip):
        advice = " Correct them, or pass --skip." if rows else ""
        sys.exit(f"error: {len(refused)} of {len(folders)} tasks cannot be honoured.{advice}")
    parquet.write(args.out, pa.Table.from_pylist(rows))
    first = task.of_row(rows[0])
    print(f"{args.out}: {len(rows)} tasks of {len(folders)}, such as {first.name}:\n  {first.instruction[:400]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
