"""What workers, trainer and loss report becomes the files of a step, in whatever order it arrives."""

import itertools
import logging
import pickle
import random
import time
from types import SimpleNamespace

import numpy as np
import pytest

from tests.unit.records.test_token_rows import batch, loss
from verl_ext.episode import EpisodeKey
from verl_ext.outcome import PromptEnd
from verl_ext.records import recorder, store
from verl_ext.records.recorder import Fates, Group, Recorder, pack
from verl_ext.records.schema import LOST_KEY
from verl_ext.records.token_rows import KEPT
from verl_ext.rollout import recorder_actor
from verl_ext.runs.folder import judged_files
from verl_ext.settings import RecorderSettings

SETTINGS = RecorderSettings(token_share=0.5, keep_steps=100, max_gb=1)
TRAINED, EQUAL, FAILED, SURPLUS, STALE, VOID = (
    PromptEnd[name] for name in ("TRAINED", "EQUAL", "FAILED", "SURPLUS", "STALE", "VOID")
)


def group(uid, ends=("answer", "answer"), accs=(1.0, 0.0), step=1, validate=False):
    rows = [
        {"uid": uid, "session": i, "step": step, "validate": validate, "end_reason": end, "acc": acc}
        for i, (end, acc) in enumerate(zip(ends, accs, strict=True))
    ]
    return Group(uid, step, validate, pack(rows))


def outcomes(run, step):
    rows = store.read(store.path_of(run, "trajectories", step)).to_pylist()
    return {f"{row['uid']}_{row['session']}": (row["outcome"], row["outcome_why"], row["trained_step"]) for row in rows}


def test_the_fates_find_their_rollouts_in_any_order_of_arrival(tmp_path):
    """A group may arrive until the next step is over; one sender reports the steps, in order."""
    told, ends = ["a", "b", "c", 1, 2], {1: {"a": TRAINED, "b": EQUAL}, 2: {"c": TRAINED}}
    orders = [order for order in itertools.permutations(told) if order.index(1) < order.index(2)]
    for number, order in enumerate(orders):
        run = tmp_path / str(number)
        writer = Recorder(run, SETTINGS)
        for each in order:
            if isinstance(each, str):
                writer.group(group(each))
            else:
                writer.end_step(Fates(each, ends[each], {EpisodeKey(uid, 0): 1.5 for uid in ends[each]}), 0.0)
        writer.close()
        in_time = {uid for uid in ("a", "b") if order.index(uid) < order.index(2)}
        found = outcomes(run, 1)
        assert {key[0] for key in found} == in_time and writer.lost == 2 - len(in_time)
        assert {key[0] for key in outcomes(run, 2)} == {"c"}
        if "a" in in_time:
            assert found["a_0"] == ("trained", None, 1)
            assert found["a_1"] == ("trained", "left out of the batch by the sampler's rules", None)


def test_a_rollout_that_is_not_in_the_loss_says_by_which_rule(tmp_path):
    writer, told = Recorder(tmp_path, SETTINGS), ["in the baseline alone", "left out: stale"]
    first, second = EpisodeKey("a", 0), EpisodeKey("a", 1)
    writer.group(group("a"))
    left_out = dict(zip((first, second), told, strict=True))
    writer.end_step(Fates(1, {"a": TRAINED}, {first: 0.0}, left_out=left_out), 0.0)
    assert outcomes(tmp_path, 1) == {"a_0": ("trained", told[0], 1), "a_1": ("trained", told[1], None)}


def test_every_end_of_a_prompt_is_in_the_rows_and_a_filler_is_trained_on(tmp_path):
    writer = Recorder(tmp_path, SETTINGS)
    failed = ("sandbox_failure", "verifier_unknown")
    for uid, ends, accs in (
        ("trained", ("answer", "sandbox_failure"), (1.0, None)),
        ("equal", ("answer", "answer"), (0.0, 0.0)),
        ("filler", ("answer", "answer"), (1.0, 1.0)),
        ("failed", failed, (None, None)),
        ("void", ("answer", "answer"), (0.0, 0.0)),
        ("stale", ("answer", "answer"), (1.0, 0.0)),
        ("surplus", ("answer", "answer"), (1.0, 0.0)),
        ("running", ("answer", "answer"), (1.0, 0.0)),
    ):
        writer.group(group(uid, ends, accs))
    ends = {"trained": TRAINED, "equal": EQUAL, "filler": EQUAL, "failed": FAILED, "void": VOID, "stale": STALE}
    taken = {EpisodeKey("trained", 0): 0.7, EpisodeKey("filler", 0): 0.0, EpisodeKey("filler", 1): 0.0}
    writer.end_step(Fates(3, ends | {"surplus": SURPLUS}, taken, fillers=frozenset({"filler"})), 0.0)
    found = outcomes(tmp_path, 3)
    assert found["trained_0"] == ("trained", None, 3)
    assert found["trained_1"] == ("trained", "left out of the batch: sandbox_failure", None)
    assert found["equal_0"] == ("equal", "all wrong", None)
    assert found["filler_1"] == ("equal", "all right; fills the batch with advantage 0", 3)
    why = "2 of 2 rollouts failed outside the model: 1 sandbox_failure, 1 verifier_unknown"
    assert found["failed_0"] == ("failed", why, None)
    assert [found[f"{uid}_0"][0] for uid in ("void", "stale", "surplus")] == ["void", "stale", "surplus"]
    assert "running_0" not in found
    writer.close()
    found = outcomes(tmp_path, 3)
    assert found["running_0"] == ("open", None, None) and len(found) == 16
    advantages = {row["advantage"] for row in store.rows(tmp_path) if row["uid"] == "trained"}
    assert advantages == {0.7, None}


def test_a_validation_has_a_separate_file_and_no_outcome(tmp_path):
    writer = Recorder(tmp_path, SETTINGS)
    for uid in ("v", "raised"):
        writer.group(group(uid, step=4, validate=True))
    writer.group(group("t", step=5))
    writer.end_step(Fates(4, {"v": None}, {}, validate=True), 0.0)
    (file,) = store.files_of(tmp_path)
    assert (file.step, file.validate, file.light) == (4, True, False)
    rows = store.read(file.path).to_pylist()
    assert {row["uid"] for row in rows} == {"v", "raised"}, "also a problem of which nothing is stored"
    assert {row["outcome"] for row in rows} == {None}


def test_a_light_validation_is_not_taken_for_a_whole_one(tmp_path):
    writer = Recorder(tmp_path, SETTINGS)
    writer.group(group("v", step=4, validate=True))
    writer.end_step(Fates(4, {"v": None}, {}, validate=True, light=True), 0.0)
    (file,) = store.files_of(tmp_path)
    assert (file.step, file.validate, file.light) == (4, True, True)
    assert len(store.read(file.path)) == 2 and judged_files(tmp_path) == []


def test_the_trainers_intervals_are_the_timeline_of_the_step(tmp_path):
    writer = Recorder(tmp_path, SETTINGS)
    writer.times(1, [{"what": "update", "start_s": 3.0, "end_s": 4.0}])
    (file,) = store.files_of(tmp_path, "timeline")
    assert store.read(file.path).to_pylist() == [{"step": 1, "what": "update", "start_s": 3.0, "end_s": 4.0}]


def test_tokens_are_written_with_their_step_and_a_loss_that_comes_late_is_warned_of_once(tmp_path, caplog):
    writer = Recorder(tmp_path, SETTINGS)
    writer.tokens(1, batch(), {11: "x"})
    writer.loss(1, loss(71, [-3.0, -4.0], [KEPT, KEPT]), 0.0)
    writer.end_step(Fates(1, {}, {}), 0.0)
    for _ in range(2):
        writer.loss(1, loss(70, [-3.0], [KEPT]), 0.0)
    writer.end_step(Fates(2, {}, {}), 0.0)
    assert caplog.text.count("step 1 was written before the loss had reported all of its tokens") == 1
    (file,) = store.files_of(tmp_path, "tokens")
    table = store.read(file.path)
    assert file.step == 1 and table["text"].to_pylist() == ["x", None, None, "x", None]
    assert table["log_prob"].to_pylist() == [None, None, None, -3.0, -4.0]


def test_a_full_disk_is_one_warning_and_the_next_step_is_tried_again(tmp_path, monkeypatch, caplog):
    writer, write = Recorder(tmp_path, SETTINGS), store.write

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store, "write", full)
    with caplog.at_level(logging.WARNING):
        for step in (1, 2):
            writer.group(group(f"g{step}"))
            writer.end_step(Fates(step, {f"g{step}": TRAINED}, {}), 0.0)
            writer.times(step, [])
    assert len(caplog.records) == 1 and "No space left on device" in caplog.text and "The run continues" in caplog.text
    assert writer.unwritten == 4 and writer._bytes == 0 and not writer._groups
    monkeypatch.setattr(store, "write", write)
    writer.group(group("g3"))
    writer.end_step(Fates(3, {"g3": TRAINED}, {}), 0.0)
    assert [file.step for file in store.files_of(tmp_path)] == [3]
    writer.times(3, [])
    monkeypatch.setattr(store, "write", full)
    writer.times(4, [])
    assert caplog.text.count("No space left on device") == 2, "it had room meanwhile"


def test_a_disk_that_takes_only_small_files_is_one_warning(tmp_path, monkeypatch, caplog):
    writer, write = Recorder(tmp_path, SETTINGS), store.write

    def takes_no_trajectories(path, kind, *arguments):
        if kind == "trajectories":
            raise OSError(28, "No space left on device")
        return write(path, kind, *arguments)

    monkeypatch.setattr(store, "write", takes_no_trajectories)
    for step in (1, 2, 3):
        writer.end_step(Fates(step, {}, {}), 0.0)
        writer.times(step, [])
    assert caplog.text.count("No space left on device") == 1 and writer.unwritten == 3


def test_a_full_disk_is_reported_even_after_a_bug_of_ours(tmp_path, monkeypatch, caplog):
    writer = Recorder(tmp_path, SETTINGS)
    writer.times(1, [{"what": 3, "start_s": "x", "end_s": None}])
    assert "due to a bug in verl_ext" in caplog.text

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store, "write", full)
    writer.times(2, [])
    assert "No space left on device" in caplog.text


def test_a_record_that_does_not_fit_its_columns_is_logged_and_the_next_step_is_written(tmp_path, caplog):
    writer = Recorder(tmp_path, SETTINGS)
    writer.group(Group("bad", 1, False, pack([{"uid": 3, "session": "x", "end_reason": "answer"}])))
    writer.end_step(Fates(1, {"bad": TRAINED}, {}), 0.0)
    assert "due to a bug in verl_ext" in caplog.text
    writer.group(group("a"))
    writer.end_step(Fates(2, {"a": TRAINED}, {}), 0.0)
    assert [file.step for file in store.files_of(tmp_path)] == [2]


def test_tokens_that_make_no_table_cost_no_trajectories(tmp_path, caplog):
    writer = Recorder(tmp_path, SETTINGS)
    writer.group(group("a"))
    writer.tokens(1, batch(lengths=np.array([3])), {})
    writer.end_step(Fates(1, {"a": TRAINED}, {}), 0.0)
    writer.tokens(2, batch(), {})
    writer.end_step(Fates(2, {}, {}), 0.0)
    assert outcomes(tmp_path, 1)["a_0"][0] == "trained" and writer.unwritten == 1
    assert "due to a bug in verl_ext" in caplog.text
    assert [file.step for file in store.files_of(tmp_path, "tokens")] == [2]


@pytest.mark.parametrize("error", ["GetTimeoutError", "RayActorError"])
def test_an_end_that_the_recorder_does_not_confirm_is_a_warning(monkeypatch, caplog, error):
    import ray

    def get(ref, timeout):
        raise getattr(ray.exceptions, error)()

    monkeypatch.setattr(ray, "get", get)
    recorder_actor.close(SimpleNamespace(close=SimpleNamespace(remote=lambda: None)))
    assert "the last steps may lack rollouts" in caplog.text


def test_memory_is_bounded_and_what_is_forgotten_is_counted(tmp_path, monkeypatch, caplog):
    one = len(group("a").packed)
    monkeypatch.setattr(recorder, "MAX_OPEN_BYTES", 3 * one)
    writer = Recorder(tmp_path, SETTINGS)
    for uid in "abcde":
        writer.group(group(uid))
    assert list(writer._groups) == ["c", "d", "e"] and writer._bytes == 3 * one and writer.lost == 2
    writer.end_step(Fates(1, dict.fromkeys("abcde", TRAINED), {}), 0.0)
    assert writer.lost == 2 and "2 so far" in caplog.text
    assert {key[0] for key in outcomes(tmp_path, 1)} == {"c", "d", "e"}, "nothing waits for what was forgotten"


def test_a_group_that_is_rolled_out_once_more_counts_once(tmp_path):
    writer = Recorder(tmp_path, SETTINGS)
    writer.group(group("a", accs=(0.0, 0.0)))
    writer.group(group("a", accs=(1.0, 0.0)))
    assert writer._bytes == len(group("a").packed)
    writer.end_step(Fates(1, {"a": TRAINED}, {}), 0.0)
    assert [row["acc"] for row in store.rows(tmp_path)] == [1.0, 0.0]


def test_a_file_in_the_place_of_the_folder_stops_nothing(tmp_path, caplog):
    """The file fails as a read-only disk would: root, who runs the tests, may write everywhere."""
    (tmp_path / "records").write_text("")
    writer = Recorder(tmp_path, SETTINGS)
    for step in (1, 2):
        writer.group(group(f"g{step}"))
        writer.end_step(Fates(step, {f"g{step}": TRAINED}, {}), 0.0)
    writer.close()
    assert writer.unwritten == 2 and not writer._groups and caplog.text.count("The run continues") == 1


def test_groups_that_never_come_are_counted(tmp_path, caplog):
    writer = Recorder(tmp_path, SETTINGS)
    writer.end_step(Fates(2, {"never": TRAINED}, {}), 0.0)
    assert writer.lost == 0, "it may come yet"
    writer.group(group("open"))
    writer.close()
    assert writer.lost == 1 and "had not arrived when step 2 was written" in caplog.text
    ((_, table),) = store.tables(tmp_path)
    assert table.schema.metadata[LOST_KEY] == b"1" and len(table), "also when the file is written once more"


def test_a_group_of_a_validation_that_never_comes_is_noted(tmp_path):
    writer = Recorder(tmp_path, SETTINGS)
    writer.group(group("here", validate=True))
    writer.end_step(Fates(1, dict.fromkeys(("here", "never")), {}, validate=True), 0.0)
    writer.close()
    ((file, table),) = store.tables(tmp_path)
    assert file.validate and len(table) == 2 and table.schema.metadata[LOST_KEY] == b"1"


def test_groups_that_waited_at_a_checkpoint_are_recorded_by_the_run_that_resumes_it(tmp_path, caplog):
    """Step 2 ends with a checkpoint and three groups in the queue; the run is killed in step 3, which has sent one."""
    killed = Recorder(tmp_path, SETTINGS)
    for uid in ("done", "useful", "surplus", "running"):
        killed.group(group(uid, step=2))
    killed.group(group("v", step=2, validate=True))
    killed.end_step(Fates(2, {"done": TRAINED}, {EpisodeKey("done", 0): 1.0}), 0.0)
    killed.save(2)
    killed.end_step(Fates(3, {"useful": TRAINED}, {}), 0.0)

    resumed = Recorder(tmp_path, SETTINGS)
    resumed.resume(2)
    resumed.group(group("running", accs=(1.0, 1.0), step=3))  # it was in flight, and rolls out again
    resumed.end_step(
        Fates(3, {"useful": TRAINED, "surplus": SURPLUS, "running": EQUAL}, {EpisodeKey("useful", 1): -0.5}), 0.0
    )
    resumed.close()
    found = [(row["uid"], row["session"], row["outcome"], row["step"]) for row in store.rows(tmp_path)]
    assert [each for each in found if each[1] == 0] == [
        ("done", 0, "trained", 2),
        ("useful", 0, "trained", 2),
        ("surplus", 0, "surplus", 2),
        ("running", 0, "equal", 3),
    ]
    assert len(found) == 8 and resumed.lost == 0 and not caplog.records
    assert {row["advantage"] for row in store.rows(tmp_path) if row["uid"] == "useful"} == {None, -0.5}


def test_a_checkpoint_keeps_no_group_whose_fate_is_known(tmp_path):
    """A worker has died, and one group of step 2 never comes; the run is killed after the checkpoint of that step."""
    killed = Recorder(tmp_path, SETTINGS)
    for uid in ("trained", "open"):
        killed.group(group(uid, step=2))
    killed.end_step(Fates(2, {"trained": TRAINED, "never": TRAINED}, {EpisodeKey("trained", 0): 1.0}), 0.0)
    killed.save(2)

    resumed = Recorder(tmp_path, SETTINGS)
    resumed.resume(2)
    resumed.close()
    found = sorted((row["uid"], row["session"], row["outcome"], row["trained_step"]) for row in store.rows(tmp_path))
    assert found == [("open", 0, "open", None), ("open", 1, "open", None)] + [
        ("trained", 0, "trained", 2),
        ("trained", 1, "trained", None),
    ]
    assert killed.lost == 1


def test_what_waits_at_the_newest_checkpoint_outlives_the_files_of_its_step(tmp_path):
    killed = Recorder(tmp_path, RecorderSettings(token_share=0.5, keep_steps=2, max_gb=1))
    killed.group(group("open"))
    killed.end_step(Fates(1, {}, {}), 0.0)
    killed.save(1)
    for step in (2, 3, 4):
        killed.end_step(Fates(step, {}, {}), 0.0)
    assert [file.step for file in store.files_of(tmp_path)] == [3, 4]
    resumed = Recorder(tmp_path, SETTINGS)
    resumed.resume(1)
    resumed.end_step(Fates(2, {"open": TRAINED}, {}), 0.0)
    assert resumed.lost == 0 and set(outcomes(tmp_path, 2)) == {"open_0", "open_1"}


@pytest.fixture
def ended(tmp_path):
    """The folder of a run that came to its end with step 1, and one group open."""
    writer = Recorder(tmp_path, SETTINGS)
    for uid in ("done", "open"):
        writer.group(group(uid))
    writer.end_step(Fates(1, {"done": TRAINED}, {}), 7.0)
    writer.save(1)
    writer.close()
    return tmp_path


def test_a_finished_run_that_continues_has_no_row_twice(ended, tmp_path):
    assert outcomes(tmp_path, 1)["open_0"][0] == "open" and store.cpu_seconds(tmp_path)[1] > 7

    again = Recorder(tmp_path, SETTINGS)  # with no step left to take
    again.resume(1)
    again.close()
    assert {key for key, (end, *_) in outcomes(tmp_path, 1).items() if end == "open"} == {"open_0", "open_1"}

    longer = Recorder(tmp_path, SETTINGS)
    longer.resume(1)
    assert {key[:4] for key in outcomes(tmp_path, 1)} == {"done"} and store.cpu_seconds(tmp_path)[1] > 7
    longer.end_step(Fates(2, {"open": STALE}, {}), 0.0)
    assert {key: end for key, (end, *_) in outcomes(tmp_path, 2).items()} == {"open_0": "stale", "open_1": "stale"}


def test_a_file_of_waiting_groups_that_was_cut_is_named_and_the_rest_is_restored(ended, tmp_path, caplog):
    waiting = store.path_of(ended, "waiting", 1)
    waiting.write_bytes(waiting.read_bytes()[:-9])
    resumed = Recorder(tmp_path, SETTINGS)
    resumed.resume(1)
    assert {key[:4] for key in outcomes(tmp_path, 1)} == {"done"}, "what waits has no fate yet"
    assert str(waiting) in caplog.text and "bug in verl_ext" not in caplog.text


def test_a_run_whose_checkpoint_has_no_waiting_groups_on_file_says_what_is_lost(tmp_path, caplog):
    resumed = Recorder(tmp_path, SETTINGS)
    resumed.resume(5)
    resumed.end_step(Fates(6, {"waited": TRAINED}, {}), 0.0)
    resumed.close()
    assert resumed.lost == 1 and "1 groups are not in the records" in caplog.text


def test_a_start_removes_half_files_and_a_resume_later_steps(tmp_path):
    for step in (1, 2, 3):
        store.write(store.path_of(tmp_path, "trajectories", step), "trajectories", [])
    half = store.path_of(tmp_path, "tokens", 4).with_suffix(".parquet.tmp")
    half.parent.mkdir()
    half.write_bytes(b"PAR1")
    Recorder(tmp_path, SETTINGS).resume(2)
    assert [file.step for file in store.files_of(tmp_path)] == [1, 2] and not half.exists()


def test_a_run_that_starts_over_says_how_many_files_of_an_earlier_one_it_removes(tmp_path, caplog):
    for step in (1, 2, 3):
        store.write(store.path_of(tmp_path, "trajectories", step), "trajectories", [])
    Recorder(tmp_path, SETTINGS).resume(2)
    assert not caplog.records
    Recorder(tmp_path, SETTINGS).resume(0)
    assert "begins at step 0, so 2 files of an earlier start" in caplog.text and not store.files_of(tmp_path)
    Recorder(tmp_path, SETTINGS).resume(0)
    assert len(caplog.records) == 1


def test_files_say_the_cpu_seconds_of_recorder_and_senders(tmp_path):
    writer = Recorder(tmp_path, SETTINGS)
    writer.groups([group("a")], 5.0)
    writer.end_step(Fates(1, {"a": TRAINED}, {}), 2.0)
    writer.groups([group("b"), group("c", validate=True)], 3.0)
    writer.end_step(Fates(1, {}, {}, validate=True), 0.0)
    writer.end_step(Fates(2, {"b": TRAINED}, {}), 0.0)
    found = store.cpu_seconds(tmp_path)
    assert 10.0 < found[1] < 12.0 and found[2] < 1.0, "a validation after a step counts with it"


def test_it_rests_after_a_step_and_after_nothing_else(tmp_path, monkeypatch):
    pauses = []
    monkeypatch.setattr(recorder.time, "sleep", pauses.append)
    writer = Recorder(tmp_path, SETTINGS, rest_s=2.5)
    writer.groups([group("a")], 0.0)
    writer.tell([("tokens", (1, batch(), {})), ("end_step", (Fates(1, {"a": TRAINED}, {}), 0.0)), ("save", (1,))])
    assert pauses == []
    now = time.time()
    for ended in (now, now - 100, now + 100):  # one that is behind catches up; a clock may be set
        writer.tell([("times", (1, [{"what": "update", "start_s": 3.0, "end_s": ended}]))])
    writer.tell([("times", (2, []))])
    assert pauses == [pytest.approx(2.5, abs=0.5), 0.0, 2.5, 0.0]
    assert {each.step for each in store.files_of(tmp_path, "timeline")} == {1, 2}


def test_the_actor_rests(monkeypatch, tmp_path):
    import ray

    made = []
    chosen = SimpleNamespace(remote=lambda *arguments: made.append(arguments))
    monkeypatch.setattr(ray, "remote", lambda kind: SimpleNamespace(options=lambda **_: chosen))
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "0" * 56))
    recorder_actor.start(tmp_path, SETTINGS)
    assert made == [(tmp_path, SETTINGS, recorder.REST_S)] and recorder.REST_S > 0


@pytest.mark.parametrize("seed", range(5))
def test_no_row_is_lost_or_doubled_over_many_steps(tmp_path, seed):
    rng = random.Random(seed)
    writer, uids = Recorder(tmp_path, SETTINGS), [f"u{i}" for i in range(60)]
    for step in range(1, 7):
        own = uids[10 * step - 10 : 10 * step]
        rng.shuffle(own)
        for uid in own:
            writer.group(group(uid, step=step))
        writer.end_step(Fates(step, dict.fromkeys(own[:8], TRAINED), {}), 0.0)
    writer.close()
    found = [(row["uid"], row["session"]) for row in store.rows(tmp_path)]
    assert sorted(found) == sorted((uid, session) for uid in uids for session in (0, 1))


def test_a_group_is_bytes_until_it_is_written():
    assert [row["session"] for row in pickle.loads(group("a").packed)] == [0, 1]
