"""Show the checkpoints of a run, and where it would resume.

    retool checkpoints outputs/qwen2-32b_dapo               # what is there, and where a run would resume
    retool checkpoints outputs/old_run --accept 300         # vouch for one that was saved without verl_ext

For the quickstart's folder, both runs are shown.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from verl_ext.checkpoints.folder import path_of, resume_point, runs_of, steps
from verl_ext.checkpoints.manifest import NotWhole, problem, vouch


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="retool checkpoints", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="trainer.default_local_dir of the run, or the quickstart's folder")
    parser.add_argument("--accept", type=int, metavar="STEP", help="declare that this step is complete as it is")
    args = parser.parse_args(argv)
    folders = runs_of(args.folder)
    try:
        if args.accept is not None:
            if len(folders) > 1:
                raise SystemExit(f"--accept needs one run's folder: {' or '.join(map(str, folders))}.")
            if not path_of(folders[0], args.accept).is_dir():
                raise SystemExit(f"There is no {path_of(folders[0], args.accept)}; steps there: {steps(folders[0])}.")
            vouch(path_of(folders[0], args.accept))
        for folder in folders:
            if folder != args.folder:
                print(f"{folder}:")
            for step in steps(folder):
                size = sum(path.stat().st_size for path in path_of(folder, step).rglob("*") if path.is_file())
                seen = problem(path_of(folder, step))
                print(f"step {step:>6}  {size / 1e9:8.3f} GB  {'complete' if seen is None else f'incomplete: {seen}'}")
            resume_point(folder, print)
    except NotWhole as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
