"""Run rollouts in static batches, for ablation.py: a batch waits until all of the previous one have ended.

Do not use this in a run: it imitates a server without continuous batching.
"""

import asyncio
from typing import Any

import ray

from verl_ext.rollout.workers import LeanAgentLoopManager, LeanAgentLoopWorker

SIZE = 32  # rollouts per batch; `max_num_seqs` of the server in all rows of the ablation


class Gate:
    """A gate that admits `size` rollouts at a time. The next batch begins when all have left, tools included."""

    def __init__(self, size: int):
        self._size, self._places, self._inside = size, size, 0
        self._changed = asyncio.Condition()

    async def __aenter__(self) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self._places > 0)
            self._places -= 1
            self._inside += 1

    async def __aexit__(self, *_: object) -> None:
        async with self._changed:
            self._inside -= 1
            if self._inside == 0:
                self._places = self._size
                self._changed.notify_all()


class StaticBatchWorker(LeanAgentLoopWorker):
    """`LeanAgentLoopWorker` with a gate in front of its rollouts."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._gate = Gate(SIZE)

    async def _run_agent_loop(self, *args: Any, **kwargs: Any) -> None:
        async with self._gate:
            await super()._run_agent_loop(*args, **kwargs)


class StaticBatchManager(LeanAgentLoopManager):
    """`LeanAgentLoopManager` with `StaticBatchWorker`s."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.agent_loop_workers_class = ray.remote(StaticBatchWorker)
