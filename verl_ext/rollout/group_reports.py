"""Prompts that an agent-loop worker rolls out, and what it reports of them to the recorder (records/recorder.py)."""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from verl_ext.episode import Episode
from verl_ext.records.recorder import Group, costs_nothing, pack
from verl_ext.records.trajectories import problem_columns, to_record


@dataclass(eq=False)
class RunningGroup:
    """The rollouts of one prompt that have ended, until the last one has."""

    running: int
    validate: bool
    keys: list[str] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)
    tags: list[dict[str, Any]] = field(default_factory=list)
    episodes: list[Episode] = field(default_factory=list)  # in the order of their ends, raised ones as well


class GroupReports:
    """Sends groups to the recorder, together with those that end soon after: a message costs more than a group.

    Args:
        recorder: its handle.
        send_after_s: how long a group waits for others while some run.
    """

    def __init__(self, recorder: Any, send_after_s: float):
        self._recorder, self._send_after_s = recorder, send_after_s
        self._running: set[RunningGroup] = set()
        self._unsent: list[tuple[RunningGroup, Mapping[str, Any]]] = []
        self._sending_s = 0.0  # CPU time of the newest message, which the next one reports

    def begin(self, group: RunningGroup) -> None:
        self._running.add(group)

    def drop(self, group: RunningGroup) -> None:
        """Wait no longer for a group, which has ended, or failed as a whole."""
        self._running.discard(group)

    def end(self, group: RunningGroup, sample: Mapping[str, Any]) -> None:
        """Report a group whose last rollout has ended. `sample`: the data set's row, with `uid` and `global_steps`."""
        self.drop(group)
        self._unsent.append((group, sample))
        if not any(each.validate == group.validate for each in self._running):  # then the step or run may be over
            self._send()
        elif len(self._unsent) == 1:
            asyncio.get_running_loop().call_later(self._send_after_s, self._send)

    def _send(self) -> None:
        """Make the rows here, one after the other: between other work a row takes more than twice the time."""
        ended, self._unsent = self._unsent, []
        began, groups = time.thread_time(), []
        for group, sample in ended:
            with costs_nothing("made"):
                problem = problem_columns(sample, validate=group.validate)
                packed = pack([problem | to_record(episode) for episode in group.episodes])
                groups.append(Group(sample["uid"], sample["global_steps"], group.validate, packed))
        with costs_nothing("sent"):
            if groups:
                made = time.thread_time()
                self._recorder.groups.remote(groups, self._sending_s + made - began)
                self._sending_s = time.thread_time() - made
