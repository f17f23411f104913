"""Delete the output folder for `--fresh`, but nothing that another command made."""

import shutil
from collections.abc import Iterator
from pathlib import Path

from verl_ext.quickstart.options import JOURNAL, OUTPUTS
from verl_ext.runs.folder import SIDES, NoRun, find_run
from verl_ext.runs.lock import LOCK


def delete_run(out: Path) -> None:
    """Delete an output folder, unless it looks like something else: --out may be mistyped.

    Raises:
        SystemExit: it lies outside outputs/ and has no stages.json, or it is or holds another run.
    """
    is_quickstart = (out / JOURNAL).exists()
    if not is_quickstart and not out.is_relative_to(OUTPUTS) and set(out.iterdir()) - {out / LOCK}:
        raise SystemExit(
            f"--fresh would delete {out}, which holds no run (no stages.json). Delete it yourself, or change --out."
        )
    if not is_quickstart and is_run(out):
        raise SystemExit(
            f"--fresh would delete {out}, a run that no quickstart made. Delete it yourself, or change --out."
        )
    own = [out / part for part in ("sft", "rl", *SIDES)] if is_quickstart else []
    if others := [str(path.relative_to(out)) for path in runs_below(out) if path not in own]:
        raise SystemExit(
            f"--fresh would delete {out}, which holds other runs ({', '.join(others)}). Set --out to the "
            "folder of this run only."
        )
    shutil.rmtree(out)


def runs_below(folder: Path) -> Iterator[Path]:
    """Yield the outermost runs in a folder, of any kind."""
    for path in sorted(folder.iterdir()):
        if path.is_dir():
            yield from [path] if is_run(path) else runs_below(path)


def is_run(path: Path) -> bool:
    try:
        find_run(path)
    except NoRun:
        return False
    except (OSError, ValueError):  # one that cannot be read may be a run
        pass
    return True
