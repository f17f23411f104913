"""DAPO's dynamic sampling for verl's v1 trainer: without its waits, with an end, and without the world's failures.

`trainer.v1.sampler.custom_sampler` of configs/*_dapo.yaml names this class; its settings are
`trainer.v1.sampler.sampler_kwargs`. What it does beyond verl 0.9.1's own `ReplayBuffer`
(trainer/ppo/v1/replay_buffer.py):

- it looks every `poll_interval_s` instead of every 2 s, which is most of a step when a step is short;
- it submits as many prompts as the share of useful groups so far lets expect to be needed, at once, instead of twice
  the loss of every round;
- groups with equal rewards are kept aside, and used (they have no gradient) when `max_num_gen_batches` are spent: the
  run goes on and says so, where verl's would generate for ever;
- groups with a sample that failed for reasons outside the model (sandbox or verifier) are replaced, never trained on;
- it logs accuracy and tool use over all that was generated, before any group is left out.
"""

import logging
import math
import os
import time
from collections import defaultdict
from typing import Any

import numpy as np
import transfer_queue as tq
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

logger = logging.getLogger(__name__)
logger.setLevel(os.getenv("VERL_LOGGING_LEVEL", "INFO"))

_MIN_KEEP_RATE = 0.1  # never expect less than one useful group in ten, or one bad step would flood the next
_KEEP_RATE_DECAY = 0.5  # weight of the newest step in the expected share of useful groups


class DapoReplayBuffer(ReplayBuffer):
    """See the module's docstring.

    Args:
        sampler_kwargs: `poll_interval_s`, and `filter_groups`: verl's `algorithm.filter_groups`, of which `metric` is
            the key of `reward_extra_info` whose equality makes a group useless (DAPO, arXiv:2503.14476, Eq. 11) and
            `max_num_gen_batches` the most prompts generated in a step, in train batches.
        kwargs: what verl passes to every sampler.
    Raises:
        ValueError: `max_num_gen_batches` is below 1, or the trainer is asynchronous.
    """

    def __init__(self, *, sampler_kwargs: Any, **kwargs: Any):
        super().__init__(sampler_kwargs=sampler_kwargs, poll_interval=sampler_kwargs.poll_interval_s, **kwargs)
        if self.trainer_mode != "sync":
            raise ValueError(
                f"trainer.v1.trainer_mode is {self.trainer_mode!r}, but DapoReplayBuffer samples for 'sync' only. "
                "Remove trainer.v1.sampler.custom_sampler to use verl's own."
            )
        filter_groups = sampler_kwargs.filter_groups
        self.filter_metric = filter_groups.metric if filter_groups.enable else None
        self.max_gen_batches = filter_groups.max_num_gen_batches
        if self.max_gen_batches < 1:
            raise ValueError(
                f"algorithm.filter_groups.max_num_gen_batches is {self.max_gen_batches}; expected at least 1: the "
                "batches that a step may generate before it takes what it has."
            )
        self.keep_rate = 1.0

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[KVBatchMeta, dict[str, float]]:
        """Wait for `batch_size` prompt groups and take them.

        Returns:
            The trajectories of the groups, and metrics (`train/`, `tool/`, `filter_groups/`; none in validation).
        Raises:
            RuntimeError: more than `max_num_gen_batches` x `batch_size` groups had failed samples: the sandbox is down.
        """
        if partition_id == "val":  # all groups, failed ones too: the reward manager marked their samples
            return super().sample(global_steps, partition_id, batch_size)

        infos: dict[str, list[dict]] = {}  # prompt uid -> reward_extra_info of each of its trajectories
        useful: set[str] = set()
        equal: set[str] = set()
        failed = 0
        submitted = batch_size  # by the trainer, before it called
        limit = self.max_gen_batches * batch_size
        last_debug_time = time.time()
        while True:
            self._sync_metadata_from_transfer_queue()
            fresh = self._terminal_infos(partition_id, known=infos)
            infos.update(fresh)
            for uid, group in fresh.items():
                if _failed_outside_model(group):
                    failed += 1
                    self._clear_groups(partition_id, {uid})
                elif self._is_equal(group):
                    equal.add(uid)
                else:
                    useful.add(uid)
            if failed > limit:
                raise RuntimeError(
                    f"{failed} of {submitted} prompt groups of step {global_steps} failed for reasons outside the "
                    "model (sandbox or verifier; the agent loop's warnings say which). Start the sandbox, then resume "
                    "the run."
                )
            in_flight = len(self.pending_keys[partition_id]) + len(self.running_keys[partition_id])
            # Submit what fills the batch with a margin of one standard deviation: another wave costs a whole rollout.
            expected = len(useful) + self.keep_rate * in_flight
            margin = math.sqrt(in_flight * self.keep_rate * (1 - self.keep_rate))
            missing = math.ceil((batch_size + margin - expected) / max(self.keep_rate, _MIN_KEEP_RATE))
            missing = min(missing, limit + failed - submitted)
            if expected - margin < batch_size - 0.5 and missing > 0 and len(useful) < batch_size:
                submitted += self.refill_fn(missing)
                continue
            if in_flight == 0 and (len(useful) >= batch_size or submitted >= limit + failed):
                break
            last_debug_time = self._wait_for_next_poll(partition_id, last_debug_time)

        metrics = self._metrics(infos, useful, equal, failed, submitted)
        self.keep_rate += _KEEP_RATE_DECAY * (max(metrics["filter_groups/keep_rate"], _MIN_KEEP_RATE) - self.keep_rate)
        selected, snapshot, _ = self._select_prompt_uids(partition_id, useful, batch_size)
        shortfall = batch_size - len(selected)
        metrics["filter_groups/filled_with_equal"] = float(shortfall)
        if shortfall > 0:
            logger.warning(
                "step %d: only %d of %d groups had unequal rewards after %d prompts (max_num_gen_batches=%d); "
                "filled with %d that have no gradient",
                *(global_steps, len(selected), batch_size, submitted, self.max_gen_batches, shortfall),
            )
            selected += sorted(equal)[:shortfall]
        self._clear_groups(partition_id, (useful | equal) - set(selected))
        return self._materialize_batch(partition_id, selected, snapshot), metrics

    def _terminal_infos(self, partition_id: str, known: dict[str, list[dict]]) -> dict[str, list[dict]]:
        """`reward_extra_info` of every trajectory of the groups that ended since the last look."""
        ended = (self.finished_keys[partition_id] | self.failure_keys[partition_id]) - known.keys()
        groups: dict[str, list[dict]] = {uid: [] for uid in ended}
        keys = [key for key in self.partitions[partition_id] if key.split("_")[0] in ended]
        if keys:
            data = tq.kv_batch_get(keys=keys, partition_id=partition_id, select_fields=["extra_fields"])
            for key, value in zip(keys, data["extra_fields"], strict=True):
                groups[key.split("_")[0]].append(getattr(value, "data", value)["reward_extra_info"])
        for uid in ended & self.failure_keys[partition_id]:
            groups[uid] = []  # a loop of the group raised: nothing of it is used
        return groups

    def _is_equal(self, group: list[dict]) -> bool:
        return self.filter_metric is not None and len({info[self.filter_metric] for info in group}) == 1

    def _metrics(
        self, infos: dict[str, list[dict]], useful: set[str], equal: set[str], failed: int, submitted: int
    ) -> dict[str, float]:
        columns: dict[str, list[float]] = defaultdict(list)
        for uid in useful | equal:
            for info in infos[uid]:
                for name in ("acc", "tool_calls", "tool_errors", "tool_timeouts", "response_tokens", "truncated"):
                    columns[name].append(float(info[name]))
        calls = np.array(columns["tool_calls"])
        return {
            "train/acc": float(np.mean(columns["acc"])),
            "train/truncation_rate": float(np.mean(columns["truncated"])),
            "train/model_tokens": float(np.mean(columns["response_tokens"])),
            "tool/code_ratio": float(np.mean(calls > 0)),
            "tool/calls": float(calls.mean()),
            "tool/error_rate": float(np.sum(columns["tool_errors"]) / max(calls.sum(), 1)),
            "tool/timeout_rate": float(np.sum(columns["tool_timeouts"]) / max(calls.sum(), 1)),
            "filter_groups/generated": float(submitted),
            "filter_groups/keep_rate": len(useful) / max(len(useful) + len(equal), 1),
            "filter_groups/failed": float(failed),
        }


def _failed_outside_model(group: list[dict]) -> bool:
    return not group or any(info["sandbox_failure"] or info["unverified"] for info in group)
