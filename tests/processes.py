"""Ending what a test or a stage started, by pid."""

import psutil


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
