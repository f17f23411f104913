"""What LeanAgentLoopWorker sends to the recorder."""

import asyncio
import pickle
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.unit.rollout.rollouts import samples_of
from verl_ext.rollout.group_reports import GroupReports, RunningGroup

SENDING_S = 0.02


class Recorder:
    """A handle of the actor: what it is sent, and the CPU seconds that came with it."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.cpu_s: list[float] = []
        self.groups = SimpleNamespace(remote=self._take)

    def _take(self, groups: Any, cpu_s: float) -> None:
        began = time.thread_time()
        while time.thread_time() - began < SENDING_S:  # as pickling does
            pass
        self.sent.append(groups)
        self.cpu_s.append(cpu_s)

    def rows(self) -> list[dict]:
        ((group,),) = self.sent
        return pickle.loads(group.packed)


def test_a_group_goes_to_the_recorder_in_one_message_and_not_into_the_storage(roll_out_prompt) -> None:
    recorder = Recorder()
    _, (_, (fields, _)), _ = roll_out_prompt(samples_of([2, 1]), recorder=recorder)
    texts = [(row["uid"], row["session"], row["step"], row["turns"][0]["text"]) for row in recorder.rows()]
    assert texts == [("p", 1, 7, "x"), ("p", 0, 7, "xx")]
    assert [row["score"] for row in recorder.rows()] == [1.0, 2.0]
    ((group,),) = recorder.sent
    assert (group.uid, group.step, group.validate) == ("p", 7, False) and recorder.cpu_s[0] > 0
    assert all(extra["episode"]["turns"] == [] for extra in fields.get("extra_fields").tolist())


async def test_groups_that_end_one_after_the_other_are_one_message_and_the_last_one_waits_for_none() -> None:
    recorder = Recorder()
    reports = GroupReports(recorder, send_after_s=0.05)
    groups = {uid: RunningGroup(1, validate=False) for uid in "abcd"}
    for group in (RunningGroup(1, validate=True), *groups.values()):  # a validation's, for which none of these waits
        reports.begin(group)

    def end(uid: str) -> None:
        reports.end(groups[uid], {"uid": uid, "global_steps": 1})

    end("a")
    end("b")
    assert recorder.sent == []
    while not recorder.sent:
        await asyncio.sleep(0.01)
    end("c")
    end("d")
    await asyncio.sleep(0.1)  # the timer finds nothing left
    assert [[group.uid for group in groups] for groups in recorder.sent] == [["a", "b"], ["c", "d"]]
    assert recorder.cpu_s[0] < SENDING_S < recorder.cpu_s[1], "to send a message counts in the next one"


def test_groups_that_end_together_are_sent_before_they_are_stored_when_no_other_runs(roll_out_prompt) -> None:
    """Once the rollouts are stored the run may end, and with it the recorder."""
    recorder = Recorder()
    roll_out_prompt(samples_of([2, 1]), recorder=recorder, uids=("p", "q"))
    assert [group.uid for groups in recorder.sent for group in groups] == ["p", "q"]


@pytest.mark.parametrize("raises_after_s", [0.0, 0.05], ids=["first", "last"])
def test_a_rollout_that_raised_is_recorded_with_those_of_its_group(roll_out_prompt, raises_after_s) -> None:
    async def fail() -> list[int]:
        await asyncio.sleep(raises_after_s)
        raise OSError("a bug")

    recorder = Recorder()
    roll_out_prompt([fail, *samples_of([2])], recorder=recorder)
    ends = {row["session"]: (row["end_reason"], row.get("exception")) for row in recorder.rows()}
    assert ends[0] == ("raised", "OSError: a bug") and ends[1][0] != "raised" and len(ends) == 2


def test_a_rollout_whose_rows_cannot_be_made_is_recorded_once(roll_out_prompt, monkeypatch) -> None:
    from verl.experimental.agent_loop.agent_loop import AgentLoopOutput

    monkeypatch.setattr(AgentLoopOutput, "as_dict", lambda output: 1 / 0)
    recorder = Recorder()
    roll_out_prompt(samples_of([2, 1]), recorder=recorder)
    assert sorted((row["session"], row["end_reason"]) for row in recorder.rows()) == [(0, "raised"), (1, "raised")]


@pytest.mark.parametrize(("index", "recorded"), [("9a9b6eb4-a1cb", True), (np.arange(2), False)])
def test_a_column_that_no_record_can_hold_fails_no_rollout(roll_out_prompt, caplog, index, recorded) -> None:
    recorder = Recorder()
    _, (keys, _), status = roll_out_prompt(samples_of([2, 1]), recorder=recorder, index=index)
    assert keys == "train:['p_1_0', 'p_0_0']" and status == ("train:p", "finished")
    assert bool(recorder.sent) is recorded and ("due to a bug in verl_ext" in caplog.text) is not recorded


def test_a_recorder_that_cannot_be_reached_fails_no_rollout(roll_out_prompt, caplog) -> None:
    def remote(groups: Any, cpu_s: float) -> None:
        raise RuntimeError("the actor is gone")

    recorder = SimpleNamespace(groups=SimpleNamespace(remote=remote))
    _, (keys, _), status = roll_out_prompt(samples_of([2, 1]), recorder=recorder)
    assert keys == "train:['p_1_0', 'p_0_0']" and status == ("train:p", "finished")
    assert "the actor is gone" in caplog.text
