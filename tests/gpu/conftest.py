"""Skips the stages where there is no GPU; and a folder and settings that they share."""

import shutil
import subprocess
from importlib import metadata
from pathlib import Path

import pytest

from tests.gpu.__main__ import prepare
from tests.gpu.stage import Context


@pytest.fixture(scope="session")
def context(tmp_path_factory: pytest.TempPathFactory) -> Context:
    """nvidia-smi is asked, and not torch: the stages are forked from here, and CUDA does not survive a fork."""
    if not shutil.which("nvidia-smi") or subprocess.run(["nvidia-smi", "-L"], capture_output=True).returncode:
        pytest.skip("no GPU here: nvidia-smi does not answer")
    if metadata.version("torch").endswith("+cpu"):
        pytest.skip("torch is the CPU's here: RETOOL_HARDWARE=gpu bash scripts/setup_env.sh installs the GPU's")
    out: Path = tmp_path_factory.mktemp("gpu")
    return Context("cuda", out, prepare(out, None))
