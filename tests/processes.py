"""Stops a run at a moment, and ends what a test or a stage started, by pid."""

import shlex
import sys
from pathlib import Path

import psutil


def stop_at(moment: str, folder: Path) -> tuple[dict[str, str], Path]:
    """A run's environment in which it stops at a moment of tests/e2e/moments.py, and the file that appears then.

    Args:
        folder: of the run; gets the executable that its processes are started by.
    """
    stopped, python = folder / f"stopped-{moment}", folder / "python"
    stopped.unlink(missing_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    here = shlex.quote(str(Path(__file__).parent / "e2e"))
    python.write_text(
        f"#!/bin/sh\nexport VERL_USE_EXTERNAL_MODULES=verl_ext,moments PYTHONPATH={here}${{PYTHONPATH:+:$PYTHONPATH}}\n"
        f'exec {shlex.quote(sys.executable)} "$@"\n'
    )
    python.chmod(0o755)
    return {"PYTHON": str(python), "RETOOL_STOP_AT": moment, "RETOOL_STOPPED": str(stopped)}, stopped


def kill_tree(pid: int) -> None:
    """SIGKILL a process and all its descendants, by pid."""
    try:
        processes = [*psutil.Process(pid).children(recursive=True), psutil.Process(pid)]
    except psutil.NoSuchProcess:
        return
    for process in processes:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(processes, timeout=10)
