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
- It polls every `poll_interval_s` instead of every 2 s, which would be most of a short step.
- It logs what became of each prompt (`outcome.PromptEnd`), and accuracy, tool use and failures over everything that was
  generated, before any group is left out.
"""

import logging
import math
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import transfer_queue as tq
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.replay_buffer import ReplayBufferAsync

from verl_ext.episode import Episode, EpisodeKey
from verl_ext.events import Ended, EndedCounts, Selection
from verl_ext.outcome import INFRASTRUCTURE_FAILURES, REMEDIES, STOPS_RUN, PromptEnd, RolloutEnd
from verl_ext.trainer.exclusions import NothingStored, describe, stop_if_most_failed
from verl_ext.trainer.group_rules import EndedGroup, end_group
from verl_ext.trainer.queue import copy_episodes, episodes_of, prompts_in_queue, remove
from verl_ext.trainer.sampler_settings import SAMPLER_KEYS, SamplerSettings
from verl_ext.trainer.step_counts import REPLACEABLE, StepCounts

logger = logging.getLogger(__name__)
logger.setLevel(os.getenv("VERL_LOGGING_LEVEL", "INFO"))

_MIN_KEEP_RATE = 0.1  # never expect less than one useful group in ten, or one bad step would flood the next
_KEEP_RATE_DECAY = 0.5  # weight of the newest step in the expected share of useful groups
# A batch takes groups in this order. The surplus of an earlier step is older than any other useful group.
_USEFUL = (PromptEnd.SURPLUS, PromptEnd.OPEN)
_ORDER = _USEFUL + REPLACEABLE


class DapoReplayBuffer(ReplayBufferAsync):
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

    A batch takes useful groups first, the oldest ones before others, then equal groups, then groups of void turns.

    The groups of a batch may differ in size. The functions in `checks` are called at each poll and may raise, and so
    does a poll that finds a rollout which found the run broken (verl continues with the rest).

    Args:
        sampler_kwargs: see `SamplerSettings`; a subclass lists further keys in `KEYS`.
        kwargs: what verl passes to every sampler.
    Raises:
        ValueError: as `SamplerSettings`, or a key is not in `KEYS`.
    """

    KEYS = SAMPLER_KEYS

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
        self.keep_rate = 1.0
        self._groups: dict[str, EndedGroup] = {}  # uid -> training groups that ended and are still in the queue
        # Since the last batch was taken:
        self._counts = StepCounts()
        self._limit = math.inf  # groups that may fail before a batch is taken
        self._spare_limit = math.inf  # groups that may be replaced as EQUAL or VOID before a batch is taken
        self._replaced = 0  # number of groups replaced as EQUAL or VOID
        self._is_spent = False  # whether more such groups have ended than may be replaced
        self.selection = Selection()  # of the newest batch
        # Since `take_ended`:
        self._ended = EndedCounts()
        self._accs: dict[str, list[float]] = {}
        self._prompt_ends: dict[str, PromptEnd] = {}
        self._fates: dict[str, Counter[str]] = {}  # of these prompts' rollouts
        self.seen_before: dict[str, PromptEnd] = {}  # ends of groups that were counted before the run was resumed
        self.checks: list[Callable[[], None]] = []
        self._rng = random.Random(0)  # draws the rollouts that are repeated

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
        self._counts.fillers = len(self.selection.fillers)
        self._of_step += self._counts
        ends = self._counts.ends
        del ends[PromptEnd.OPEN]  # not decided yet, or counted under their final end
        logger.info("step %d: what became of the prompt groups: %s", global_steps, describe(ends))
        self._counts, self._replaced, self._is_spent = StepCounts(), 0, False
        self._batches += 1
        if self._batches == self._batches_per_step:
            metrics = self._of_step.metrics() | metrics
            self._of_step, self._batches = StepCounts(), 0
        return batch, metrics

    def take_ended(self, step: int, metrics: Mapping[str, Any] | None = None) -> Ended:
        """Return what ended since the last call, for a step with these metrics."""
        seen, in_queue = frozenset(self._groups), len(prompts_in_queue())
        ended = Ended(step, self._ended, self._prompt_ends, self._fates, seen, in_queue, self._accs, metrics or {})
        self._ended, self._prompt_ends, self._fates, self._accs = EndedCounts(), {}, {}, {}
        return ended

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
        submitted = self.num_to_submit(batch_size)  # by the trainer, before this call
        limit = self.settings.max_gen_batches * batch_size
        last_debug_time = time.time()
        while True:
            self._sync_metadata_from_transfer_queue()
            self._classify(partition_id, global_steps)
            self._clear_groups(partition_id, self._uids(PromptEnd.FAILED, PromptEnd.STALE))
            useful, failed = self._uids(*_USEFUL), self._counts.ends[PromptEnd.FAILED]
            stop_if_most_failed(failed, self._counts.seen, limit, global_steps)
            in_flight = len(self.pending_keys[partition_id]) + len(self.running_keys[partition_id])
            # Submit enough to fill the batch, plus one standard deviation: another wave costs a whole rollout.
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

        selected, snapshot, _ = self._select_prompt_uids(partition_id, useful, batch_size)
        shortfall = batch_size - len(selected)
        if shortfall > 0:
            logger.warning(
                "step %d: only %d of %d groups had unequal rewards after %d prompts (max_num_gen_batches=%d); "
                "filled with %d others, whose advantages are set to 0",
                *(global_steps, len(selected), batch_size, submitted, self.settings.max_gen_batches, shortfall),
            )
            spare = self._uids(*REPLACEABLE)
            selected += self._select_prompt_uids(partition_id, spare, shortfall)[0]
        surplus = useful - set(selected)
        self._end(surplus, PromptEnd.SURPLUS)
        kept = (
            surplus - self._stale_terminal_keys(global_steps + 1, partition_id) if self.settings.keep_surplus else set()
        )
        if (seen := self._counts.keep_rate()) is not None:
            self.keep_rate += _KEEP_RATE_DECAY * (max(seen, _MIN_KEEP_RATE) - self.keep_rate)
        self._clear_groups(partition_id, set(self._groups) - set(selected) - kept)
        metrics = {
            "filter_groups/generated": float(submitted),
            "filter_groups/surplus": float(len(surplus)),
            "filter_groups/kept": float(len(kept)),
        }
        return self._materialize_batch(partition_id, selected, snapshot), metrics

    # The asynchronous trainers call `wait_for_sampleable` and `get_sampleable_count` of the base class as well as
    # `sample`. All three evict the groups that `_terminal_eviction_reasons` names, and refill one by one.

    def wait_for_sampleable(self, global_steps: int, partition_id: str, target_count: int) -> tuple[set[str], dict]:
        self._limit = self.settings.max_gen_batches * target_count if partition_id != "val" else math.inf
        self._spare_limit = self._limit - target_count  # the batch itself also has to be generated
        return super().wait_for_sampleable(global_steps, partition_id, target_count)

    def _terminal_eviction_reasons(
        self, global_steps: int, partition_id: str
    ) -> tuple[set[str], set[str], set[str], Counter]:
        if partition_id == "val":
            return super()._terminal_eviction_reasons(global_steps, partition_id)
        self._classify(partition_id, global_steps)
        failed, spare = self._uids(PromptEnd.FAILED), self._uids(*REPLACEABLE)
        room = max(self._spare_limit - self._replaced, 0)
        stop_if_most_failed(self._counts.ends[PromptEnd.FAILED], self._counts.seen, self._limit, global_steps)
        if len(spare) > room:
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
            steps = self.prompt_global_steps[partition_id]
            spare = set(sorted(spare, key=lambda uid: (steps[uid], uid))[:room])  # the oldest; the others are fillers
        stale = self._stale_terminal_keys(global_steps, partition_id)
        self._end(stale & self._uids(*_USEFUL), PromptEnd.STALE)
        return stale | self._uids(PromptEnd.STALE), spare, failed, Counter()

    def _evict_terminal_groups(self, global_steps: int, partition_id: str, eviction_reasons: tuple) -> tuple:
        self._replaced += len(eviction_reasons[1])
        return super()._evict_terminal_groups(global_steps, partition_id, eviction_reasons)

    def _uids(self, *ends: PromptEnd) -> set[str]:
        return {uid for uid, group in self._groups.items() if group.end in ends}

    def _end(self, uids: set[str], end: PromptEnd) -> None:
        for uid in uids:
            self._groups[uid].end = end
            self._note_end(uid)
        self._counts.ends[end] += len(uids)

    def _note_end(self, uid: str) -> None:
        self._prompt_ends[uid], self._fates[uid] = self._groups[uid].end, self._groups[uid].fates()

    def _classify(self, partition_id: str, global_steps: int) -> None:
        """Judge the groups that ended since the last call, and the age of all that wait.

        In step s the servers have the weights of step s - 1, which is their version, even if a step has several
        updates (`parameter_sync_step`).
        """
        self._version = global_steps - 1
        raised = self.failure_keys[partition_id]  # a loop of the group raised: nothing of it is used
        ended = (self.finished_keys[partition_id] | raised) - self._groups.keys()
        groups: dict[str, list[Episode]] = {uid: [] for uid in sorted(ended)}
        lost: dict[str, Counter[str]] = {uid: Counter() for uid in ended}
        # If a rollout raised, the queue may hold its key without data or tag; tags are set after the data.
        tags = self.partitions[partition_id].items()
        rows = {text: EpisodeKey.parse(text) for text, tag in tags if tag or EpisodeKey.parse(text).uid not in raised}
        found = {text: key for text, key in rows.items() if key.uid in ended}
        if found:
            data = tq.kv_batch_get(keys=[*found], partition_id=partition_id, select_fields=["extra_fields"])
            episodes = episodes_of(found.values(), data["extra_fields"])
            for episode in episodes:
                lost[episode.key.uid].update(episode.lost_servers)
                if episode.key.uid not in raised:
                    groups[episode.key.uid].append(episode)
        for uid, episodes in groups.items():
            self._groups[uid] = end_group(
                episodes,
                metric=self.settings.filter_metric,
                void_turn_filter=self.settings.void_turn_filter,
                resample=self.settings.resample,
                rng=random.Random(uid),  # the same in a resumed run
            )
        first_seen = groups.keys() - self.seen_before.keys()
        for uid in groups.keys() & self.seen_before.keys():
            if (end := self.seen_before[uid]) is not PromptEnd.OPEN:  # decided, perhaps by its rollouts' age then
                self._groups[uid].end = end
        excluded = {uid: dict(self._groups[uid].excluded) for uid in groups}
        if self.settings.max_staleness is not None:
            self._drop_too_old(first_seen)
        for uid, episodes in groups.items():
            if uid in first_seen:
                self._count_group(uid, episodes, excluded[uid], uid in raised, lost[uid])

    def _drop_too_old(self, first_seen: set[str]) -> None:
        """Drop the rollouts that are too old from all useful waiting groups; `first_seen` ones are not counted yet."""
        for uid in sorted(self._uids(*_USEFUL)):
            group = self._groups[uid]
            self._counts.dropped_as_stale += group.drop_older_than(self._version - self.settings.max_staleness)
            if (end := group.judge(lost=PromptEnd.STALE)) is PromptEnd.OPEN:
                continue
            if uid in first_seen:
                group.end = end
            else:
                self._end({uid}, end)
                self._counts.aged += end is not PromptEnd.STALE

    def _count_group(
        self, uid: str, episodes: list[Episode], why: dict[EpisodeKey, str], raised: bool, lost: Counter[str]
    ) -> None:
        """Count a group. `episodes` is empty if one raised; `why`: reasons of the excluded, without those too old."""
        end = self._groups[uid].end
        self._counts.ends[end] += 1
        if end is not PromptEnd.OPEN:
            self._note_end(uid)
        excluded = Counter(why.values())
        excluded[RolloutEnd.RAISED] = int(raised)
        for total in (self._counts.seen, self._ended):
            total += EndedCounts(len(episodes), 1, excluded, {uid} if raised else set(), lost)
        judged = [episode for episode in episodes if why.get(episode.key) not in INFRASTRUCTURE_FAILURES]
        self._counts.judged += judged
        self._accs[uid] = [episode.reward.acc for episode in judged]

    def _select_prompt_uids(
        self, partition_id: str, sampleable_keys: Iterable[str], batch_size: int
    ) -> tuple[list[str], dict[str, dict], dict[str, int]]:
        """Select as verl does, the oldest first, and within a step in submission order, which is the queue's order; but
        take a filler only if no useful group is ready.
        """
        if partition_id == "val":
            return super()._select_prompt_uids(partition_id, sampleable_keys, batch_size)
        snapshot, steps = dict(self.partitions[partition_id]), dict(self.prompt_global_steps[partition_id])
        admitted = [uid for uid in steps if uid in sampleable_keys]
        admitted.sort(key=lambda uid: (_ORDER.index(self._groups[uid].end), steps[uid]))
        return admitted[:batch_size], snapshot, steps

    def _clear_groups(self, partition_id: str, uids: set[str]) -> None:
        super()._clear_groups(partition_id, uids)
        for uid in uids:
            self._groups.pop(uid, None)

    def _materialize_batch(
        self, partition_id: str, selected_prompt_uids: list[str], partition_snapshot: dict[str, dict]
    ) -> KVBatchMeta:
        if partition_id != "val":
            self._select(partition_id, selected_prompt_uids, partition_snapshot)
        return super()._materialize_batch(partition_id, selected_prompt_uids, partition_snapshot)

    def _select(self, partition_id: str, uids: list[str], snapshot: dict[str, dict]) -> None:
        """Make the groups of a batch whole, in the queue and in the sampler's snapshot of it; note the selection."""
        useful = self._uids(*_USEFUL) & set(uids)
        self._end(useful, PromptEnd.TRAINED)
        baseline_only: set[EpisodeKey] = set()
        left_out: dict[EpisodeKey, str] = {}
        sources: list[EpisodeKey] = []
        gone: set[EpisodeKey] = set()
        for uid in uids:
            group = self._groups.pop(uid)
            baseline_only |= set(group.void)
            if uid in useful:  # all rollouts of a filler have advantage 0
                left_out |= dict.fromkeys(group.void, "in the baseline of its group, not in the loss: void_turn")
            ages = [self._version - group.oldest[key] for key in group.valid if group.oldest[key] is not None]
            self._counts.ages += ages * (uid in useful)
            if self.settings.resample:
                left_out |= dict.fromkeys(group.dropped, "left out of the batch: resampling chose others")
                gone.update(group.dropped)
            elif group.excluded and not group.is_lost():
                # Copies of valid ones, drawn at random, replace the excluded. More are valid: none is drawn twice.
                sources += self._rng.sample(list(group.valid), len(group.excluded))
                gone.update(group.excluded)
                left_out |= {key: f"left out of the batch: {reason}" for key, reason in group.excluded.items()}
                self._counts.filled += 1
        copies = copy_episodes(partition_id, sources, snapshot)
        baseline_only |= {copy for source, copy in copies.items() if source in baseline_only}
        remove(partition_id, gone, snapshot)
        chosen = set(uids)
        several = any(key.row for key in map(EpisodeKey.parse, snapshot) if key.uid in chosen)
        self.selection = Selection(frozenset(uids) - useful, frozenset(baseline_only), left_out, several)
