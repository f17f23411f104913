"""What the trainer sends to the recorder about a batch in verl's queue."""

import math
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from verl_ext.episode import SUMMARY, Episode, EpisodeKey, TokenRow, ToolUse, summary_of
from verl_ext.events import Ended, Finished, Saved, Selected, Selection, Started, Validated
from verl_ext.outcome import PromptEnd
from verl_ext.settings import RecorderSettings

ROW = TokenRow(model_spans=[(0, 2), (3, 4)], version_spans=[(0, 2, 5), (3, 4, 6)])
EXTRA_FIELDS = {SUMMARY: summary_of(Episode(EpisodeKey("u", 0), [ROW], use=ToolUse()))}
KEYS = [f"{uid}_{session}_0" for uid in "abcd" for session in (0, 1)]
MASK = [1, 1, 0, 1]


class Handle:
    """The recorder's handle: notes what it receives, or will receive with the next message, by the name of the call."""

    def __init__(self):
        self.told = []

        self.messages = 0
        self.tell = SimpleNamespace(remote=self._tell)

        self.sending_s = 0.0  # CPU time of a message, as pickling takes it

    def _tell(self, calls):
        began = time.thread_time()
        while time.thread_time() - began < self.sending_s:
            pass
        self.messages += 1
        self.told += [(name, *arguments) for name, arguments in calls]

    def __getattr__(self, name):
        return SimpleNamespace(remote=lambda *arguments: self.told.append((name, *arguments)))

    def of(self, name):
        waiting = [(called, *arguments) for called, arguments in self.records._untold]
        return [arguments for called, *arguments in self.told + waiting if called == name]


def DECODE(ids):
    return f"<{ids[0]}>"


def nested(rows):
    return torch.nested.as_nested_tensor([torch.tensor(row) for row in rows], layout=torch.jagged)


def selected(step, batch, stored, selection=Selection(), factors=()):  # noqa: B008
    """A batch of the queue with its advantages, as the trainer reports it."""
    names = ("advantages", "response_mask")
    advantages, masks = (torch.tensor([stored[key][name] for key in batch.keys]) for name in names)
    return Selected(step, 0, batch, selection, batch.keys, advantages, masks, dict(factors))


def ended(step, prompts=(), seen=()):
    return Ended(step, prompts=dict(prompts), seen=frozenset(seen))


@pytest.fixture
def make(cpu_platform, monkeypatch, tmp_path):
    """RunRecords over a queue of eight responses of four groups, of which the last is verl's padding."""
    import transfer_queue as tq

    from verl_ext.rollout import recorder_actor
    from verl_ext.trainer.run_records import RunRecords

    stored = {
        key: {
            "responses": [10, 11, 12 + i, 2],
            "response_mask": MASK,
            "loss_mask": MASK,
            "rollout_log_probs": [-1.0, -2.0, 0.0, -3.0],
            "advantages": [0.5] * 4 if i else [0.5, 0.25, 0.0, 0.5],
            "extra_fields": EXTRA_FIELDS,
        }
        for i, key in enumerate(KEYS)
    }

    def get(keys, partition_id, select_fields):
        there = [name for name in select_fields if name in stored[keys[0]]]
        rows = {name: [stored[key][name] for key in keys] for name in there}
        return {name: values if name == "extra_fields" else nested(values) for name, values in rows.items()}

    def put(keys, partition_id, fields):
        for name, values in fields.items():
            for key, value in zip(keys, values.tolist(), strict=True):
                stored[key][name] = value

    monkeypatch.setattr(tq, "kv_batch_get", get)
    monkeypatch.setattr(tq, "kv_batch_put", put)
    handle = Handle()
    monkeypatch.setattr(recorder_actor, "start", lambda run, settings: handle)
    tags = [{}] * 7 + [{"is_padding": True}]
    batch = tq.KVBatchMeta(partition_id="train", keys=KEYS, tags=tags, fields=["responses", "advantages"])

    def make(share):
        settings = RecorderSettings(token_share=share, keep_steps=1, max_gb=1)
        config = OmegaConf.create({"trainer": {"default_local_dir": str(tmp_path)}})
        handle.records = RunRecords(settings, config)
        handle.records.on_started(Started(0, decode=DECODE))
        return handle.records, handle, batch, stored

    return make


@pytest.mark.parametrize(("share", "groups"), [(0.0, 0), (0.01, 1), (0.25, 1), (0.5, 2), (1.0, 4)])
def test_whole_groups_are_chosen_at_least_one_and_without_padding(make, share, groups):
    records, handle, batch, stored = make(share)
    records.on_selected(selected(3, batch, stored))
    marks = {key: row["record"] for key, row in stored.items() if row.get("record", -1) >= 0}
    assert len({key[0] for key in marks}) == groups and KEYS[-1] not in marks
    assert ("record" in batch.fields) is bool(groups), "what the actor fetches"
    assert sorted(marks.values()) == [(3 << 32) + i for i in range(len(marks))]
    if not groups:
        assert "record" not in stored[KEYS[0]] and handle.of("tokens") == []
        return
    ((step, columns, texts),) = handle.of("tokens")
    assert step == 3 and columns["record"].tolist() == list(marks.values())
    assert [f"{uid}_{session}_0" for uid, session in zip(columns["uid"], columns["session"], strict=True)] == [*marks]
    assert texts == {token: f"<{token}>" for token in set(columns["id"].tolist())}


def test_each_row_of_an_episode_has_its_tokens(make):
    records, handle, batch, stored = make(1.0)
    of_row = [[(0, 4)], [(0, 1), (2, 4)]]
    rows = [TokenRow(model_spans=spans, version_spans=[(*span, 7) for span in spans]) for spans in of_row]
    summary = {SUMMARY: summary_of(Episode(EpisodeKey("a", 0), rows, use=ToolUse()))}
    stored["a_0_0"]["extra_fields"] = summary
    copy = str(EpisodeKey("a", 0, copy=1, row=1))
    stored["a_0_1"] = stored["a_0_0"] | {"responses": [10, 11, 99, 2], "advantages": [-1.0] * 4}
    stored[copy] = dict(stored["a_0_1"])
    batch.keys, batch.tags = ["a_0_1", *KEYS, copy], [{}, *batch.tags, {}]
    records.on_selected(selected(3, batch, stored))
    columns = handle.of("tokens")[0][1]
    names = list(zip(columns["uid"], columns["session"], columns["row"], strict=True))
    assert len(names) == len(set(names)) == 8 and {("a", 0, 0), ("a", 0, 1)} < set(names)
    assert stored["a_0_0"]["record"] >= 0 and (stored["a_0_1"]["record"] >= 0) != (stored[copy]["record"] >= 0)
    at = columns["id"].tolist().index(99) - 2
    assert columns["version"][at : at + 4].tolist() == [7, -1, 7, 7]
    assert columns["turn"][at : at + 4].tolist() == [0, 1, 2, 2]
    at = 4 * names.index(("a", 0, 0))
    assert columns["version"][at : at + 4].tolist() == [7] * 4 and columns["turn"][at : at + 4].tolist() == [0] * 4
    records.on_ended(ended(3))
    assert handle.of("end_step")[0][0].taken[EpisodeKey("a", 0)] == -1.0


def test_a_copy_is_recorded_as_the_episode_that_it_copies(make):
    """It is in the place of an episode that failed: its tokens are there once, and its advantage is the original's."""
    records, handle, batch, stored = make(1.0)
    copy = str(EpisodeKey("b", 1, copy=1))
    stored[copy] = dict(stored["b_1_0"])
    batch.keys, batch.tags = [copy, *KEYS], [{}, *batch.tags]
    records.on_selected(selected(3, batch, stored))
    columns = handle.of("tokens")[0][1]
    sessions = list(zip(columns["uid"], columns["session"], strict=True))
    assert len(sessions) == len(set(sessions)) == 7 and ("b", 1) in sessions
    assert sorted([stored[copy]["record"] >= 0, stored["b_1_0"]["record"] >= 0]) == [False, True]
    records.on_ended(ended(3))
    taken = handle.of("end_step")[0][0].taken
    assert len(taken) == 7 and taken[EpisodeKey("b", 1)] == 0.5


def test_the_seconds_of_a_batch_are_those_of_all_threads(make, monkeypatch):
    """TransferQueue works in a separate thread."""
    import transfer_queue as tq

    records, handle, batch, stored = make(0.01)
    get = tq.kv_batch_get

    def burn():
        while time.thread_time() < 0.05:
            pass

    def get_in_a_thread(**asked):
        (thread := threading.Thread(target=burn)).start()
        thread.join()
        return get(**asked)

    monkeypatch.setattr(tq, "kv_batch_get", get_in_a_thread)
    records.on_selected(selected(3, batch, stored))
    records.on_ended(ended(3))
    assert handle.of("end_step")[0][1] > 0.04


def test_the_columns_of_a_response_are_those_of_the_queue(make):
    records, handle, batch, stored = make(1.0)
    records.on_selected(selected(3, batch, stored))
    columns = handle.of("tokens")[0][1]
    assert columns["id"][:4].tolist() == [10, 11, 12, 2] and columns["mask"][:4].tolist() == [True, True, False, True]
    assert columns["turn"][:4].tolist() == [0, 0, 1, 2] and columns["version"][:4].tolist() == [5, 5, -1, 6]
    assert columns["rollout_log_prob"][:4].tolist() == [-1, -2, 0, -3]
    assert all(map(math.isnan, columns["old_log_prob"].tolist())), "the queue of this batch has none"


def test_a_second_batch_of_the_step_has_other_numbers_and_no_text_twice(make):
    records, handle, batch, stored = make(1.0)
    for _ in range(2):
        records.on_selected(selected(3, batch, stored, Selection(fillers=frozenset("c"))))
    (_, first, texts), (_, second, again) = handle.of("tokens")
    assert not set(first["record"].tolist()) & set(second["record"].tolist())
    assert texts and again == {}


def test_characters_of_several_tokens_are_read_together(cpu_platform):
    """√ is E2 88 9A and π is CF 80; a token may hold parts of two, and a broken one stays as the decoder has it."""
    from verl_ext.trainer.run_records import spelled

    pieces = {1: b"\xe2", 2: b"\x88", 3: b"\x9a", 4: b"\xcf", 5: b"\x80", 6: b"2", 7: b"\x9a\xcf"}

    def decode(ids):
        return b"".join(pieces[each] for each in ids).decode(errors="replace")

    def texts(*responses):
        ids = np.array([each for response in responses for each in response])
        return spelled(ids, np.array([*map(len, responses)]), {1, 2, 3, 4, 5, 7}, decode)

    assert texts([1, 2, 3, 6, 4, 5]) == {0: "", 1: "", 2: "√", 4: "", 5: "π"}
    assert texts([1, 2, 7, 5]) == {0: "", 1: "", 2: "", 3: "√π"}
    assert texts([1, 2], [3, 6]) == texts([1, 6, 2, 3]) == {}, "not over two responses, nor over another token"
    assert texts([3, 3, 3, 3, 3, 1, 2, 3]) == {5: "", 6: "", 7: "√"}
    assert texts([6, 6]) == {}


def test_a_bug_in_the_records_fails_no_step_and_is_reported_once(make, caplog):
    records, handle, batch, stored = make(1.0)

    def decode(ids):
        raise ValueError("no such token")

    records.on_started(Started(2, decode=decode))
    for step in (3, 4):
        records.on_selected(selected(step, batch, stored))
        records.on_ended(Ended(step, seen=None))
    assert caplog.text.count("could not be made of a batch, due to a bug in verl_ext") == 1
    assert caplog.text.count("could not be made of a step, due to a bug in verl_ext") == 1
    assert handle.of("tokens") == [] and "no such token" in caplog.text


def test_sending_counts_in_the_next_step(make):
    records, handle, _, _ = make(0.0)
    records.on_ended(ended(1))
    handle.sending_s = 0.05
    records.on_finished(Finished(1))
    records.on_ended(ended(2))
    (_, before), (_, after) = handle.of("end_step")
    assert before < 0.05 <= after


def test_a_response_has_its_advantage_where_all_its_tokens_that_train_have_one(make):
    records, handle, batch, stored = make(0.0)
    stored["b_1_0"]["response_mask"] = [0, 0, 0, 0]
    void = EpisodeKey("b", 1)
    selection = Selection(frozenset("c"), left_out={void: "void"})
    factors = {EpisodeKey("c", 0): 0.0, EpisodeKey("c", 1): 0.5}
    records.on_selected(selected(3, batch, stored, selection, factors))
    records.on_ended(ended(3, {"c": PromptEnd.EQUAL}))
    ((fates, cpu_s),) = handle.of("end_step")
    expected = dict(a_0=None, a_1=0.5, b_0=0.5, b_1=None, c_0=0.0, c_1=0.5, d_0=0.5)
    assert fates.taken == {EpisodeKey.parse(f"{key}_0"): advantage for key, advantage in expected.items()}
    assert fates.left_out == {void: "void"}
    assert fates.fillers == {"c"} and cpu_s > 0
    ends = {uid: str(end) for uid, end in fates.ends.items()}
    assert ends == {"a": "trained", "b": "trained", "c": "equal", "d": "trained"}
    records.on_ended(ended(4))
    assert handle.of("end_step")[1][0].taken == {}


def test_the_end_of_a_group_that_waits_in_the_queue_is_reported_when_it_has_left(make):
    records, handle, _, _ = make(0.0)
    records.on_ended(ended(3, {"gone": PromptEnd.EQUAL, "kept": PromptEnd.SURPLUS}, {"kept"}))
    records.on_saved(Saved(3))
    records.on_ended(ended(4, {"kept": PromptEnd.TRAINED, "old": PromptEnd.STALE}))
    first, second = (fates for fates, _ in handle.of("end_step"))
    assert first.ends == {"gone": PromptEnd.EQUAL}
    assert second.ends == {"kept": PromptEnd.TRAINED, "old": PromptEnd.STALE}
    assert handle.of("save") == [[3]]


def test_what_was_decided_of_groups_that_waited_is_reported_when_they_have_left_after_a_resume(make):
    """`equal` waits in the queue as a filler; `surplus` left it with the run that was ended."""
    records, handle, _, _ = make(0.0)
    waiting = {"equal": PromptEnd.EQUAL, "surplus": PromptEnd.SURPLUS, "useful": PromptEnd.OPEN}
    records.on_started(Started(2, waiting, decode=DECODE))
    records.on_ended(ended(3, {"useful": PromptEnd.TRAINED}, {"equal"}))
    records.on_ended(ended(4))
    first, second = (fates.ends for fates, _ in handle.of("end_step"))
    assert first == {"surplus": PromptEnd.SURPLUS, "useful": PromptEnd.TRAINED}
    assert second == {"equal": PromptEnd.EQUAL} and handle.of("resume") == [[0], [2]]


def test_verls_timers_are_the_intervals_of_a_timeline(make):
    records, handle, _, _ = make(0.0)
    timers = [{"what": what, "start_s": 1.0, "end_s": 2.0} for what in ("gen", "old_log_prob", "ref", "adv", "step")]
    records.on_finished(Finished(3, intervals=timers))
    records.on_finished(Finished(4))
    (step, intervals), (_, none) = handle.of("times")
    assert step == 3 and none == [] and [each["what"] for each in intervals] == ["wait", "log_probs", "log_probs"]
    assert intervals[0]["end_s"] == 2.0 and timers[0]["what"] == "gen"


def test_a_step_is_one_message_sent_with_its_checkpoint_or_its_end(make):
    records, handle, batch, stored = make(1.0)
    before = handle.messages
    for step, has_checkpoint in ((3, False), (4, True)):
        records.on_selected(selected(step, batch, stored))
        records.on_ended(ended(step))
        assert handle.messages == before + step - 3
        if has_checkpoint:
            records.on_saved(Saved(step))
            assert [name for name, *_ in handle.told][-3:] == ["tokens", "end_step", "save"]
        records.on_finished(Finished(step))
    assert handle.messages == before + 3


def test_what_a_step_that_raised_had_reported_is_written_at_the_close(make, monkeypatch):
    records, handle, batch, stored = make(1.0)
    monkeypatch.setattr("verl_ext.rollout.recorder_actor.close", lambda actor: None)
    records.on_selected(selected(3, batch, stored))
    records.close()
    assert [name for name, *_ in handle.told] == ["resume", "tokens"]


def test_a_validation_is_recognized_by_its_prompts(make):
    records, handle, _, _ = make(0.0)
    records.on_validated(Validated(8, {}, frozenset("v"), is_light=True))
    ((fates, _),) = handle.of("end_step")
    assert (fates.step, fates.validate, fates.light, fates.ends) == (8, True, True, {"v": None})


@pytest.mark.parametrize(
    ("length", "spans", "turns"),
    [
        (4, [(0, 2), (3, 4)], [0, 0, 1, 2]),
        (5, [(0, 2), (3, 4)], [0, 0, 1, 2, 3]),  # a last reply, which nobody read
        (3, [(0, 1), (1, 3)], [0, 1, 1]),  # a reply without tokens has no turn
        (1, [], [0]),
    ],
)
def test_a_token_knows_its_turn(cpu_platform, length, spans, turns):
    from verl_ext.trainer.run_records import _turns

    assert _turns(length, spans).tolist() == turns
