"""End processes that must not outlive the process they work for."""

import multiprocessing
import os
import threading


def end_with_parent() -> None:
    """End this process with its parent. Use it as a pool's initializer, or the pool outlives a killed parent.

    A pool's processes wait for work from a pipe, which each of them also holds open for writing.
    """
    if parent := multiprocessing.parent_process():
        threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()
