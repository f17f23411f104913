"""The groups that ended and are still in the queue: judged by `group_rules.py`, counted by `step_counts.py`.

This is the part of the sampler (sampler.py) that looks at what has come back. It takes no batch and asks for no prompt.
"""

import random
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

import transfer_queue as tq
from verl.trainer.ppo.v1.replay_buffer import ReplayBufferAsync

from verl_ext.episode import Episode, EpisodeKey
from verl_ext.events import Ended, EndedCounts
from verl_ext.outcome import INFRASTRUCTURE_FAILURES, PromptEnd, RolloutEnd
from verl_ext.trainer.domains import ONLY, Domains
from verl_ext.trainer.exclusions import describe
from verl_ext.trainer.group_rules import EndedGroup, end_group
from verl_ext.trainer.queue import episodes_of, prompts_in_queue
from verl_ext.trainer.sampler_settings import SamplerSettings
from verl_ext.trainer.step_counts import StepCounts

USEFUL = (PromptEnd.SURPLUS, PromptEnd.OPEN)


class EndedGroups(ReplayBufferAsync):
    """Base of the sampler. Args and Raises: see `sampler.DapoReplayBuffer`."""

    settings: SamplerSettings

    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs)
        self.domains = Domains({ONLY: 1.0})  # a trainer whose run has several replaces it
        self._groups: dict[str, EndedGroup] = {}  # uid -> training groups that ended and are still in the queue
        # Since the last batch was taken, in all and of each domain:
        self._counts = StepCounts()
        self._of_domain: dict[str, StepCounts] = defaultdict(StepCounts)
        # Since `take_ended`:
        self._ended = EndedCounts()
        self._accs: dict[str, list[float]] = {}
        self._prompt_ends: dict[str, PromptEnd] = {}
        self._fates: dict[str, Counter[str]] = {}  # of these prompts' rollouts
        self.seen_before: dict[str, PromptEnd] = {}  # ends of groups that were counted before the run was resumed

    def take_ended(self, step: int, metrics: Mapping[str, Any] | None = None) -> Ended:
        """Return what ended since the last call, for a step with these metrics."""
        seen, in_queue = frozenset(self._groups), len(prompts_in_queue())
        ended = Ended(step, self._ended, self._prompt_ends, self._fates, seen, in_queue, self._accs, metrics or {})
        self._ended, self._prompt_ends, self._fates, self._accs = EndedCounts(), {}, {}, {}
        return ended

    def _uids(self, *ends: PromptEnd) -> set[str]:
        return {uid for uid, group in self._groups.items() if group.end in ends}

    def _end(self, uids: set[str], end: PromptEnd) -> None:
        for uid in uids:
            self._groups[uid].end = end
            self._note_end(uid)
            for counts in self._counts_of(uid):
                counts.ends[end] += 1

    def _counts_of(self, uid: str) -> tuple[StepCounts, StepCounts]:
        """Return what a group is counted in."""
        return self._counts, self._of_domain[self.domains.of(uid)]

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
        self._drop_too_old(first_seen)
        for uid, episodes in groups.items():
            if uid in first_seen:
                self._count_group(uid, episodes, excluded[uid], uid in raised, lost[uid])
                counts = self._of_domain[name := self.domains.of(uid)]
                failed = self._groups[uid].end is PromptEnd.FAILED
                if uid not in raised:  # a bug of ours is no reason to go on without a domain
                    self.domains.ended(name, failed, describe(counts.seen.excluded), global_steps)

    def _drop_too_old(self, first_seen: set[str]) -> None:
        """Drop the rollouts that are too old from all useful waiting groups; `first_seen` ones are not counted yet."""
        for uid in sorted(self._uids(*USEFUL)):
            group, limit = self._groups[uid], self._max_staleness(uid)
            if limit is None:
                continue
            self._counts.dropped_as_stale += group.drop_older_than(self._version - limit)
            if (end := group.judge(lost=PromptEnd.STALE)) is PromptEnd.OPEN:
                continue
            if uid in first_seen:
                group.end = end
            else:
                self._end({uid}, end)
                for counts in self._counts_of(uid):
                    counts.aged += end is not PromptEnd.STALE

    def _max_staleness(self, uid: str) -> int | None:
        return self.domains.max_staleness.get(self.domains.of(uid), self.settings.max_staleness)

    def _count_group(
        self, uid: str, episodes: list[Episode], why: dict[EpisodeKey, str], raised: bool, lost: Counter[str]
    ) -> None:
        """Count a group. `episodes` is empty if one raised; `why`: reasons of the excluded, without those too old."""
        end = self._groups[uid].end
        if end is not PromptEnd.OPEN:
            self._note_end(uid)
        excluded = Counter(why.values())
        excluded[RolloutEnd.RAISED] = int(raised)
        judged = [episode for episode in episodes if why.get(episode.key) not in INFRASTRUCTURE_FAILURES]
        ended = EndedCounts(len(episodes), 1, excluded, {uid} if raised else set(), lost)
        self._ended += ended
        for counts in self._counts_of(uid):
            counts.ends[end] += 1
            counts.seen += ended
            counts.judged += judged
        self._accs[uid] = [episode.given_reward.acc for episode in judged]
