"""For all tests: what a shell may have told this process to ignore, and so all that the tests start; and torch's look
at the GPU."""

import os
import signal
from pathlib import Path

import pytest

FAST = "not slow and not nightly and not gpu"  # as pyproject.toml has it

# Test modules import verl, which asks torch for a GPU (verl 0.9.1, utils/device.py:61). torch then asks NVML, and not
# CUDA: the stages of tests/gpu are forked from this process, and no fork of a process that asked CUDA can use it.
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Processes for `-n auto`: two for unit tests, none beside this one for the end-to-end tests.

    One of those may not run beside others; scripts/test.sh runs the rest two at a time. Two processes would not share
    one file or test.
    """
    fast = config.option.markexpr == FAST
    whole = all(Path(argument).is_dir() for argument in config.args)
    of_units = all("unit" in Path(argument).parts for argument in config.args)
    return 2 if whole and (fast or of_units) else 0
