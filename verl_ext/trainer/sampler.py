"""The sampler of verl's v1 trainers, synchronous and asynchronous: bounded dynamic sampling, and no training on
infrastructure failures.

`trainer.v1.sampler.custom_sampler` in configs/shared/rl.yaml names this class; its settings are in
`trainer.v1.sampler.sampler_kwargs`. It differs from verl 0.9.1's own samplers (trainer/ppo/v1/replay_buffer.py):

- A rollout that failed because of infrastructure (sandbox, verifier, abort) stays out of its group's baseline and out
  of the loss. If more than half of a group is valid, valid rollouts are repeated to fill the group; otherwise the group
  is replaced (the rule of GLM-5). Whatever the policy can cause (its code fails or takes too long, it prints or calls
  too much) stays a normal sample.
- Groups that are all right or all wrong are replaced only until `max_num_gen_batches` are spent. Then some of them
  complete the batch as fillers, and the run logs that and continues, whereas verl's sampler would generate forever.
- In the mode `sync` it submits at once as many prompts as it will probably need, judging by the share of useful groups
  so far; verl submits twice the missing ones in every round. Useful groups beyond the batch can wait for the next step.
- Each domain of `retool.domains` has a quota of the batch (domains.py), which its useful groups fill first, then its
  fillers. A run without that table has one domain, whose quota is the batch.
- It polls every `poll_interval_s` instead of every 2 s, which would be most of a short step.
- It logs what became of each prompt (`outcome.PromptEnd`), and accuracy, tool use and failures over everything that was
  generated, before any group is left out.
"""

import logging
import math
import os
import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

from transfer_queue import KVBatchMeta

from verl_ext.episode import EpisodeKey
from verl_ext.events import Selection
from verl_ext.outcome import REMEDIES, STOPS_RUN, PromptEnd, RolloutEnd
from verl_ext.trainer.domains import MIN_KEEP_RATE
from verl_ext.trainer.ended_groups import USEFUL, EndedGroups
from verl_ext.trainer.exclusions import NothingStored, describe, stop_if_most_failed
from verl_ext.trainer.queue import copy_episodes, remove
from verl_ext.trainer.sampler_settings import SAMPLER_KEYS, SamplerSettings
from verl_ext.trainer.step_counts import REPLACEABLE, StepCounts, domain_metrics

logger = logging.getLogger(__name__)
logger.setLevel(os.getenv("VERL_LOGGING_LEVEL", "INFO"))

# A batch takes groups in this order. The surplus of an earlier step is older than any other useful group.
_ORDER = USEFUL + REPLACEABLE


class DapoReplayBuffer(EndedGroups):
    """The sampler that the module's docstring describes.

    A repeated rollout is a copy (`EpisodeKey.copy`). With every group estimator (trainer/advantages.py) it gets the
    advantage of the original, but does not enter its baseline.

    DAPO's rule decides which groups are useful (arXiv:2503.14476, section 3.2): the constraint of Eq. 11 is on the
    number of right answers, 0 < right < G, not on rewards. A group of right answers that differ only in length
    penalties is filtered, as in the paper, although its rewards differ. The paper samples until the batch is full of
    useful groups, and has no fillers. Here a step that has spent its prompts takes equal groups as fillers, and
    `selection` names them. The trainer sets the advantages of a filler to 0 (trainer/run_updates.py), so that no
    objective trains on it. The tokens of a filler stay in the denominator of the token mean: if half of a mini-batch's
    tokens belong to fillers, the policy gradient is half of what the useful half would give without them.

    A batch takes useful groups first, the oldest ones before others, then equal groups, then groups of void turns. If
    there are several domains, it does so for each domain's quota, and then for what other domains leave free: in an
    asynchronous mode, a domain whose groups are not ready lends its part of a batch to those that are, and gets it back
    from later ones. In the mode `sync` a step waits until each domain has filled its quota or spent its share of
    `max_num_gen_batches`.

    The groups of a batch may differ in size. The functions in `checks` are called at each poll and may raise, and so
    does a poll that finds a rollout which found the run broken (verl continues with the rest).

    Args:
        sampler_kwargs: see `SamplerSettings`; a subclass lists further keys in `KEYS`.
        kwargs: what verl passes to every sampler.
    Raises:
        ValueError: as `SamplerSettings`, or a key is not in `KEYS`.
    """

    KEYS = SAMPLER_KEYS
    refill_fn: Callable[[int], int]

    def __init__(self, *, sampler_kwargs: Any, **kwargs: Any):
        if unknown := sorted(set(sampler_kwargs) - self.KEYS):
            raise ValueError(f"sampler_kwargs.{unknown[0]} is unknown; expected one of {', '.join(sorted(self.KEYS))}.")
        super().__init__(sampler_kwargs=sampler_kwargs, poll_interval=sampler_kwargs.poll_interval_s, **kwargs)
        given = {key: value for key, value in sampler_kwargs.items() if key in SAMPLER_KEYS}
        self.settings = SamplerSettings(**given)
        self.settings.check_ages(self.max_off_policy_threshold, self.max_off_policy_strategy)
        # In `separate_async` a step takes this many batches, and verl averages what they log, weighted by the rollouts
        # that each trained on (trainer/ppo/v1/utils.py:111, 0.9.1). So only the last one logs, for all of them.
        self._batches_per_step = self.trainer_config.get("parameter_sync_step", 1)
        self._batches = 0  # taken so far in this step
        self._of_step = StepCounts()  # counts of these batches
        self._of_step_by_domain: dict[str, StepCounts] = defaultdict(StepCounts)
        # Since the last batch was taken:
        self._target: int | None = None  # groups of the batch that is waited for
        self._replaced: Counter[str] = Counter()  # domain -> number of groups replaced as EQUAL or VOID
        self._is_spent = False  # whether more such groups have ended than may be replaced
        self.selection = Selection()  # of the newest batch
        self.checks: list[Callable[[], None]] = []

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[KVBatchMeta, dict[str, float]]:
        """Wait for `batch_size` prompt groups and take them.

        Returns:
            The trajectories of the groups, and metrics: those that verl or the mode `sync` adds, and with the last
            batch of a step also those of the step (`StepCounts`); none in validation.
        Raises:
            RuntimeError: more than `max_num_gen_batches` x `batch_size` groups failed, as when the sandbox is down.
            NothingStored: all rollouts of a validation raised.
        """
        if partition_id == "val":  # all groups, including failed ones: the reward manager marked their samples
            batch, metrics = super().sample(global_steps, partition_id, batch_size)
            if not batch.keys:  # verl would read an empty batch
                remedy = REMEDIES[RolloutEnd.RAISED]
                raise NothingStored(f"All rollouts of {batch_size} validation prompts raised. {remedy}.")
            return batch, metrics
        if self.trainer_mode == "sync":
            batch, metrics = self._sample_sync(global_steps, partition_id, batch_size)
        else:
            batch, metrics = super().sample(global_steps, partition_id, batch_size)
        self.domains.settle({name: counts.taken for name, counts in self._of_domain.items()})
        self._of_step += self._counts
        for name, counts in self._of_domain.items():
            self._of_step_by_domain[name] += counts
            if (seen := counts.keep_rate()) is not None:
                self.domains.learn(name, seen)
        ends = self._counts.ends
        del ends[PromptEnd.OPEN]  # not decided yet, or counted under their final end
        logger.info("step %d: what became of the prompt groups: %s", global_steps, describe(ends))
        self._counts, self._of_domain = StepCounts(), defaultdict(StepCounts)
        self._replaced, self._is_spent = Counter(), False
        self.domains.spent.clear()
        self._batches += 1
        if self._batches == self._batches_per_step:
            if self.domains.are_several:
                metrics |= domain_metrics(self.domains, self._of_step_by_domain)
            metrics = self._of_step.metrics() | metrics
            self._of_step, self._of_step_by_domain, self._batches = StepCounts(), defaultdict(StepCounts), 0
        return batch, metrics

    def choose_domain(self, step: int) -> str:
        """Return the domain of the prompt that the trainer submits next, whatever it submits it for."""
        return self.domains.choose(self.domains.count(self._uids(*_ORDER)), step)

    @property
    def num_kept(self) -> int:
        """Number of useful groups of earlier steps that wait for the next batch."""
        return len(self._uids(PromptEnd.SURPLUS))

    def num_to_submit(self, batch_size: int) -> int:
        """Return how many prompts a step of the mode `sync` submits first: a batch less the groups that wait for it."""
        return max(batch_size - self.num_kept, 0)

    def _wait_for_next_poll(self, *args: Any) -> float:
        for check in self.checks:
            check()
        return super()._wait_for_next_poll(*args)

    def _sync_metadata_from_transfer_queue(self) -> None:
        super()._sync_metadata_from_transfer_queue()
        if any(self.failure_keys.values()):
            for tag in (tag for partition in self.partitions.values() for tag in partition.values()):
                if STOPS_RUN in tag:
                    raise RuntimeError(f"{tag[STOPS_RUN]} The same command then continues from the newest checkpoint.")

    def _sample_sync(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[KVBatchMeta, dict]:
        submitted: Counter[str] | None = None  # prompts of this step by domain
        last_debug_time = time.time()
        while True:
            self._sync_metadata_from_transfer_queue()
            if submitted is None:  # the trainer has submitted some before this call; groups that were kept are not new
                submitted = self.domains.count(self.prompt_global_steps[partition_id].keys() - self._groups.keys())
            self._classify(partition_id, global_steps)
            self._clear_groups(partition_id, self._uids(PromptEnd.FAILED, PromptEnd.STALE))
            self._stop_if_most_failed(batch_size, global_steps)
            in_flight = self.pending_keys[partition_id] | self.running_keys[partition_id]
            missing = self._missing(self.domains.wanted(batch_size), submitted, self.domains.count(in_flight))
            for name, number in missing.items():
                with self.domains.only(name):
                    submitted[name] += self.refill_fn(number)
            if not missing and not in_flight:  # each domain has its groups, or has spent its prompts
                break
            if not missing:
                last_debug_time = self._wait_for_next_poll(partition_id, last_debug_time)

        useful, spare = self._uids(*USEFUL), self._uids(*REPLACEABLE)
        selected, snapshot, _ = self._select_prompt_uids(partition_id, useful | spare, batch_size)
        if fillers := len(spare & set(selected)):
            logger.warning(
                "step %d: only %d of %d groups had unequal rewards after %d prompts (max_num_gen_batches=%d); "
                "filled with %d others, whose advantages are set to 0",
                *(global_steps, len(selected) - fillers, batch_size, submitted.total()),
                *(self.settings.max_gen_batches, fillers),
            )
        surplus = useful - set(selected)
        self._end(surplus, PromptEnd.SURPLUS)
        kept = (
            surplus - self._stale_terminal_keys(global_steps + 1, partition_id) if self.settings.keep_surplus else set()
        )
        self._clear_groups(partition_id, set(self._groups) - set(selected) - kept)
        metrics = {
            "filter_groups/generated": float(submitted.total()),
            "filter_groups/surplus": float(len(surplus)),
            "filter_groups/kept": float(len(kept)),
        }
        return self._materialize_batch(partition_id, selected, snapshot), metrics

    def _missing(self, wanted: Counter[str], submitted: Counter[str], in_flight: Counter[str]) -> dict[str, int]:
        """Return domain -> prompts that a step of the mode `sync` should submit at once; without those that need none.

        They are enough to fill the domain's quota, plus one standard deviation: another wave costs a whole rollout.
        """
        useful, missing = self.domains.count(self._uids(*USEFUL)), {}
        for name, quota in wanted.items():
            rate, limit = self.domains.keep_rates[name], self.settings.max_gen_batches * quota
            expected = useful[name] + rate * in_flight[name]
            margin = math.sqrt(in_flight[name] * rate * (1 - rate))
            number = math.ceil((quota + margin - expected) / max(rate, MIN_KEEP_RATE))
            number = min(number, limit + self._of_domain[name].ends[PromptEnd.FAILED] - submitted[name])
            if expected - margin < quota - 0.5 and number > 0 and useful[name] < quota:
                missing[name] = number
        return missing

    def _stop_if_most_failed(self, batch_size: float, global_steps: int) -> None:
        """Raise if too many groups failed, not counting those of a paused domain."""
        failed = sum(
            counts.ends[PromptEnd.FAILED] for name, counts in self._of_domain.items() if name not in self.domains.paused
        )
        stop_if_most_failed(failed, self._counts.seen, self.settings.max_gen_batches * batch_size, global_steps)

    # The asynchronous trainers call `wait_for_sampleable` and `get_sampleable_count` of the base class as well as
    # `sample`. All three evict the groups that `_terminal_eviction_reasons` names, and refill one by one.

    def wait_for_sampleable(self, global_steps: int, partition_id: str, target_count: int) -> tuple[set[str], dict]:
        self._target = target_count if partition_id != "val" else None
        return super().wait_for_sampleable(global_steps, partition_id, target_count)

    def _terminal_eviction_reasons(
        self, global_steps: int, partition_id: str
    ) -> tuple[set[str], set[str], set[str], Counter]:
        if partition_id == "val":
            return super()._terminal_eviction_reasons(global_steps, partition_id)
        self._classify(partition_id, global_steps)
        self._stop_if_most_failed(math.inf if self._target is None else self._target, global_steps)
        failed, spare = self._uids(PromptEnd.FAILED), self._replaceable(partition_id)
        if len(spare) < len(self._uids(*REPLACEABLE)):
            if not self._is_spent:
                logger.warning(
                    "step %d: %d prompt groups ended, but only %d had unequal rewards (max_num_gen_batches=%d); "
                    "the missing ones are replaced by others, whose advantages are set to 0",
                    *(
                        global_steps,
                        self._counts.seen.groups,
                        self._counts.ends[PromptEnd.OPEN],
                        self.settings.max_gen_batches,
                    ),
                )
            self._is_spent = True
        stale = self._stale_terminal_keys(global_steps, partition_id)
        self._end(stale & self._uids(*USEFUL), PromptEnd.STALE)
        return stale | self._uids(PromptEnd.STALE), spare, failed, Counter()

    def _replaceable(self, partition_id: str) -> set[str]:
        """Return the equal and void groups to replace, the oldest first; the others are fillers.

        A domain replaces its share of what the batch may generate beyond itself. Then it keeps fillers for what is left
        of its quota, and replaces the rest, until the batch as a whole has generated what it may.
        """
        spare, steps = self._uids(*REPLACEABLE), self.prompt_global_steps[partition_id]
        if self._target is None:
            return spare
        wanted, more = self.domains.wanted(self._target), self.settings.max_gen_batches - 1
        room = wanted - self.domains.count(self._uids(*USEFUL))
        replaced, replaceable = self._replaced.copy(), set()
        for uid in sorted(spare, key=lambda uid: (steps[uid], uid)):
            name = self.domains.of(uid)
            if replaced[name] >= more * wanted[name]:
                self.domains.spent |= {name} if wanted[name] else set()
                if room[name] > 0 or replaced.total() >= more * self._target:
                    room[name] -= 1
                    continue
            replaced[name] += 1
            replaceable.add(uid)
        return replaceable

    def _evict_terminal_groups(self, global_steps: int, partition_id: str, eviction_reasons: tuple) -> tuple:
        self._replaced += self.domains.count(eviction_reasons[1])
        return super()._evict_terminal_groups(global_steps, partition_id, eviction_reasons)

    def _select_prompt_uids(
        self, partition_id: str, sampleable_keys: set[str], batch_size: int
    ) -> tuple[list[str], dict[str, dict], dict[str, int]]:
        """Select as verl does, the oldest first, and within a step in submission order, which is the queue's order; but
        each domain's quota first, and a filler only if no useful group of its domain is ready.
        """
        if partition_id == "val":
            return super()._select_prompt_uids(partition_id, sampleable_keys, batch_size)
        snapshot, steps = dict(self.partitions[partition_id]), dict(self.prompt_global_steps[partition_id])
        admitted = [uid for uid in steps if uid in sampleable_keys]
        admitted.sort(key=lambda uid: (_ORDER.index(self._groups[uid].end), steps[uid]))
        free, within, beyond = self.domains.wanted(batch_size), [], []
        for uid in admitted:
            (within if free[self.domains.of(uid)] > 0 else beyond).append(uid)
            free[self.domains.of(uid)] -= 1
        return (within + beyond)[:batch_size], snapshot, steps

    def _clear_groups(self, partition_id: str, uids: set[str]) -> None:
        super()._clear_groups(partition_id, uids)
        for uid in uids:
            self._groups.pop(uid, None)
        self.domains.forget(uids)

    def _materialize_batch(
        self, partition_id: str, selected_prompt_uids: list[str], partition_snapshot: dict[str, dict]
    ) -> KVBatchMeta:
        if partition_id != "val":
            self._select(partition_id, selected_prompt_uids, partition_snapshot)
        return super()._materialize_batch(partition_id, selected_prompt_uids, partition_snapshot)

    def _select(self, partition_id: str, uids: list[str], snapshot: dict[str, dict]) -> None:
        """Make the groups of a batch whole, in the queue and in the sampler's snapshot of it; note the selection."""
        useful = self._uids(*USEFUL) & set(uids)
        self._end(useful, PromptEnd.TRAINED)
        baseline_only: set[EpisodeKey] = set()
        left_out: dict[EpisodeKey, str] = {}
        sources: list[EpisodeKey] = []
        gone: set[EpisodeKey] = set()
        for uid in uids:
            group, counted = self._groups.pop(uid), self._counts_of(uid)
            for counts in counted:
                counts.taken += 1
                counts.fillers += uid not in useful
            baseline_only |= set(group.void)
            if uid in useful:  # all rollouts of a filler have advantage 0
                left_out |= dict.fromkeys(group.void, "in the baseline of its group, not in the loss: void_turn")
            ages = [self._version - age for key in group.valid if (age := group.oldest[key]) is not None]
            self._counts.ages += ages * (uid in useful)
            if self.settings.resample:
                left_out |= dict.fromkeys(group.dropped, "left out of the batch: resampling chose others")
                gone.update(group.dropped)
            elif group.excluded and not group.is_lost():
                # Copies of valid ones, drawn at random, replace the excluded. More are valid: none is drawn twice.
                # By the prompt's name: in whatever order they ended, and also in a resumed run.
                sources += random.Random(f"fill/{uid}").sample(sorted(group.valid), len(group.excluded))
                gone.update(group.excluded)
                left_out |= {key: f"left out of the batch: {reason}" for key, reason in group.excluded.items()}
                self._counts.filled += 1
        copies = copy_episodes(partition_id, sources, snapshot)
        baseline_only |= {copy for source, copy in copies.items() if source in baseline_only}
        remove(partition_id, gone, snapshot)
        self.domains.forget(set(uids))
        self.selection = Selection(frozenset(uids) - useful, frozenset(baseline_only), left_out)
