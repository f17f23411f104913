"""For all tests: what a shell may have told this process to ignore, and so all that the tests start."""

import gc
import signal
from pathlib import Path

import pytest

FAST = "not slow and not nightly"  # as pyproject.toml has it

signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup


def pytest_collection_finish() -> None:
    """Look for garbage less often, and never in what is imported: full collections took up to a fifth of the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 1000)


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Return the processes for `-n auto`: three for unit tests, of which many wait, and none for end-to-end tests.

    Some of those may not run beside others; scripts/test.sh runs the rest two at a time. Processes would not share one
    file or test.
    """
    fast = config.option.markexpr == FAST
    whole = all(Path(argument).is_dir() for argument in config.args)
    of_units = all("unit" in Path(argument).parts for argument in config.args)
    return 3 if whole and (fast or of_units) else 0
