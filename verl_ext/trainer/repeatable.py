"""`retool.repeatable`: a run on a CPU that has the same metrics, except times, when it is restarted with its seed.

Use it for audits, and to bisect which change altered a figure. It is slow: vLLM generates one response at a time.
configs/repeatable/cpu.yaml (`+repeatable=cpu`) sets this key and those that it needs. This module replaces what verl
0.9.1 leaves to chance in the trainer's process: names of groups (uuid4), the order in which rollouts arrive, and
decisions based on what has arrived so far. verl_ext/rollout/loop.py sets the seed of each request.

Clocks can still make runs differ: a program or a verification may reach its time limit on a busy machine, and the
model's code may print the time, an address in memory or an unseeded random number.
"""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast
from uuid import UUID

from omegaconf import DictConfig, OmegaConf

from verl_ext.episode import EpisodeKey
from verl_ext.rollout.tool_use import TIME_METRICS
from verl_ext.versions import Library

if TYPE_CHECKING:
    from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer
else:
    ReplayBuffer = object  # verl's import of its trainers imports this module

_NEEDED = {
    "trainer.v1.trainer_mode": "sync",
    "trainer.device": "cpu",
    "actor_rollout_ref.rollout.max_num_seqs": 1,
    "actor_rollout_ref.rollout.enable_prefix_caching": False,
    "actor_rollout_ref.actor.fsdp_config.full_determinism": True,
}


def check_repeatable(config: DictConfig) -> None:
    """Raise if the rest of a run's config would make two runs differ.

    Raises:
        ValueError: see the message. One cause is a prompt that is computed in pieces: vLLM 0.28.0 then rewinds the
            request's random generator (v1/worker/gpu_model_runner.py:3825), which is impossible on a CPU.
    """
    found = {key: OmegaConf.select(config, key) for key in _NEEDED}
    wrong = [f"{key}={found[key]} (needed: {value})" for key, value in _NEEDED.items() if found[key] != value]
    rollout = config.actor_rollout_ref.rollout
    longest = rollout.max_model_len or rollout.prompt_length + rollout.response_length
    if (batched := rollout.max_num_batched_tokens) < longest:
        wrong.append(f"actor_rollout_ref.rollout.max_num_batched_tokens={batched} (needed: {longest} or more)")
    if wrong:
        raise ValueError(f"retool.repeatable is true, but {', '.join(wrong)}. Use +repeatable=cpu, or correct them.")


def make_repeatable(trainer: Any) -> None:
    """Let a trainer of verl, which already has its replay buffer, name, order and decide without chance.

    Raises:
        ValueError: as `check_repeatable`.
    """
    from verl.trainer.ppo import padding_utils  # not above: verl's import of its trainers imports this module
    from verl.trainer.ppo.v1 import trainer_base

    check_repeatable(trainer.config)
    of_prompts = cast(Library, trainer_base)  # lines 1051 and 1476 (0.9.1)
    of_padding = cast(Library, padding_utils)  # line 179
    of_prompts.uuid = of_padding.uuid = CountedNames(lambda: trainer.global_steps)
    # The sampler is made by the config's own class, which may be the user's.
    sampler = type(trainer.replay_buffer)
    trainer.replay_buffer.__class__ = type(f"Repeatable{sampler.__name__}", (CompletedRounds, sampler), {})


class CountedNames:
    """Stand-in for the module `uuid`: its names sort in the order of creation, and a resumed run repeats them."""

    def __init__(self, step: Callable[[], int]):
        self._step = step
        self._at, self._count = -1, 0

    def uuid4(self) -> UUID:
        """Return a name with the step in its first half, and the number within the step in the second."""
        step = self._step()
        self._at, self._count = step, self._count + 1 if step == self._at else 0
        return UUID(int=(step << 64) + self._count)


class CompletedRounds(ReplayBuffer):
    """Mix-in before a sampler's class, which sees nothing until all submitted prompts have ended, and then in order."""

    def _sync_metadata_from_transfer_queue(self) -> None:
        super()._sync_metadata_from_transfer_queue()
        while any(self.pending_keys.values()) or any(self.running_keys.values()):
            self._wait_for_next_poll("train", time.time())  # which may raise: the process of a rollout is gone
            super()._sync_metadata_from_transfer_queue()
        for partition_id, rows in self.partitions.items():
            self.partitions[partition_id] = dict(sorted(rows.items(), key=lambda row: EpisodeKey.parse(row[0])))

    def _select_prompt_uids(self, partition_id: str, sampleable_keys: Any, batch_size: int) -> tuple:
        """Sort the keys first: verl sorts only by step, and so leaves the rest to the order of a set."""
        ordered = cast(set[str], sorted(sampleable_keys))  # verl only walks through it
        return super()._select_prompt_uids(partition_id, ordered, batch_size)


def move_measured(metrics: dict[str, Any]) -> None:
    """Put a step's seconds and memory under names that begin with `timing` and `perf/`, as most of verl's do."""
    for name in list(metrics):
        if name in TIME_METRICS:
            metrics[f"timing_{name}"] = metrics.pop(name)
        elif "/perf/" in name:  # actor/perf/cpu_memory_used_gb, of the whole machine
            worker, _, figure = name.partition("/perf/")
            metrics[f"perf/{worker}/{figure}"] = metrics.pop(name)
