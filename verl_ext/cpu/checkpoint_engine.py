"""Send weights to separate rollout servers without CUDA, for verl's mode `separate_async` on one machine.

verl 0.9.1's own engines (checkpoint_engine/{nccl,nixl,kimi,mooncake,delta,hccl}_checkpoint_engine.py) move CUDA or NPU
memory and import cupy, nixl, mooncake or torch_npu. configs/hardware/cpu_separate.yaml names this module as
`checkpoint_engine.custom_backend_module`.
"""

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncGenerator, Generator
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from verl.checkpoint_engine import CheckpointEngine, CheckpointEngineRegistry

_FOLDER = Path("/dev/shm")
_POLL_S = 0.02
_TIMEOUT_S = 600.0


# verl's `register` is no @staticmethod.
@CheckpointEngineRegistry.register("shared_file")  # pyright: ignore[reportAttributeAccessIssue]
class SharedFileCheckpointEngine(CheckpointEngine):
    """Rank 0 of the trainer writes a file in shared memory, which every rollout worker reads.

    Args:
        bucket_size: unused: the file holds all weights.
        is_master: this is rank 0 of the trainer.
    """

    def __init__(self, bucket_size: int, is_master: bool = False):
        self._is_master = is_master
        self._path = Path()

    def prepare(self) -> str:
        """Return the path of an update. Files of runs killed during one are removed once nobody waits for them."""
        for left in _FOLDER.glob("retool_weights_*"):
            with contextlib.suppress(OSError):  # gone, or another user's
                if time.time() - left.stat().st_mtime > _TIMEOUT_S:
                    left.unlink()
        return str(_FOLDER / f"retool_weights_{uuid4().hex}")

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[str]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Give all ranks the path that rank 0 of the trainer chose."""
        return {"path": metadata[:1] * actor_wg_world_size}, {"path": metadata[:1] * rollout_world_size}

    def init_process_group(self, path: str) -> None:
        self._path = Path(path)

    def finalize(self) -> None:
        if self._is_master:
            self._path.unlink()

    async def send_weights(
        self, weights: Generator[tuple[str, torch.Tensor], None, None], global_steps: int | None = None
    ) -> None:
        """Write `weights`; every rank iterates over them, because gathering one is a collective."""
        gathered = {name: weight.detach().clone() for name, weight in weights if self._is_master}
        if self._is_master:
            unfinished = self._path.with_suffix(".part")
            torch.save(gathered, unfinished)
            os.rename(unfinished, self._path)

    async def receive_weights(self, global_steps: int | None = None) -> AsyncGenerator[tuple[str, torch.Tensor], None]:
        """Yield (name, weight).

        Raises:
            TimeoutError: no weights arrived within ten minutes.
        """
        deadline = time.monotonic() + _TIMEOUT_S
        while not self._path.exists():
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"The trainer wrote no weights to {self._path} within {_TIMEOUT_S:.0f} s. See its log. With "
                    "checkpoint_engine.backend=shared_file, trainer and rollout must be on the same machine."
                )
            await asyncio.sleep(_POLL_S)
        for name, weight in torch.load(self._path).items():
            yield name, weight
