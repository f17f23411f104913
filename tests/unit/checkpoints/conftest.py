"""Runs with checkpoints, and verl's own code with our hooks in it."""

from pathlib import Path
from typing import Any

import pytest

from tests.unit.checkpoints.saves import save


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's folder with whole checkpoints of steps 2, 4 and 10."""
    for step in (2, 4, 10):
        save(tmp_path, step)
    return tmp_path


@pytest.fixture
def hooks(tmp_path: Path) -> Any:
    """The hooks' module, in a process whose run keeps all its checkpoints."""
    from verl_ext.checkpoints import hooks

    hooks.keep_checkpoints({"trainer": {"default_local_dir": str(tmp_path)}})
    return hooks


@pytest.fixture
def one_process() -> Any:
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
