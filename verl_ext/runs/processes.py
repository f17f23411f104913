"""Processes that must not outlive the one that they work for."""

import multiprocessing
import os
import threading


def end_with_parent() -> None:
    """Initializer of a pool: without it, its processes outlive the one that has the pool, if that is killed.

    They wait for work from a pipe, which each of them also holds open for writing.
    """
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()
