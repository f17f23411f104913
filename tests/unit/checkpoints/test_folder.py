"""Which checkpoints are whole, which one a run resumes from and which ones stay, on made-up folders."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from verl_ext.checkpoints import manifest
from verl_ext.checkpoints.folder import (
    SAVING,
    TRACKER,
    NotWhole,
    Rolling,
    begin,
    kept_steps,
    path_of,
    problem,
    publish,
    recoverable,
    require_whole,
    restore,
    resume_point,
    steps,
    tracked_step,
    vouch,
    whole_steps,
)
from verl_ext.checkpoints.manifest import MANIFEST, checksum, missing_shards

SHARDS = [f"{kind}_world_size_2_rank_{rank}.pt" for kind in ("model", "optim", "extra_state") for rank in (0, 1)]


def write_shards(checkpoint: Path, names: list[str] = SHARDS) -> None:
    for name in ["actor/" + shard for shard in names] + ["data.pt"]:
        path = checkpoint / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode())


def save(folder: Path, step: int) -> None:
    write_shards(path_of(begin(folder), step))
    assert publish(folder, step) == path_of(folder, step)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's folder with whole checkpoints of steps 2, 4 and 10."""
    for step in (2, 4, 10):
        save(tmp_path, step)
    return tmp_path


def resumed(folder: Path) -> tuple[Path | None, str]:
    said: list[str] = []
    return resume_point(folder, said.append), "\n".join(said)


def test_a_published_checkpoint_is_whole_and_named(run: Path):
    assert steps(run) == whole_steps(run) == [2, 4, 10]  # by number, not as text
    assert (run / TRACKER).read_text() == "10" and not (run / SAVING).exists()
    files = json.loads((run / "global_step_10" / MANIFEST).read_text())["files"]
    assert files["actor/model_world_size_2_rank_1.pt"] == len("actor/model_world_size_2_rank_1.pt") and len(files) == 7


@pytest.mark.parametrize(
    ("name", "content", "seen"),
    [
        ("data.pt", None, "data.pt is missing"),
        ("data.pt", b"da", "data.pt has 2 of 7 bytes"),
        ("actor/optim_world_size_2_rank_1.pt", b"", "actor/optim_world_size_2_rank_1.pt has 0 of 34 bytes"),
        (MANIFEST, None, f"it has no {MANIFEST}"),
        (MANIFEST, b"{", f"its {MANIFEST} cannot be read"),
        (MANIFEST, b"{}", f"its {MANIFEST} cannot be read"),
        (MANIFEST, b"[]", f"its {MANIFEST} cannot be read"),
        (MANIFEST, bytes(900), f"its {MANIFEST} cannot be read"),
        (MANIFEST, b'{"files": {"data.pt": 7}, "crc32": {"block": 1, "blocks": 2, "files": {}}}', f"its {MANIFEST}"),
    ],
)
def test_a_checkpoint_that_lacks_something_is_not_taken(run: Path, name: str, content: bytes | None, seen: str):
    path = run / "global_step_10" / name
    path.unlink() if content is None else path.write_bytes(content)
    assert problem(run / "global_step_10").startswith(seen)
    point, said = resumed(run)
    assert point == run / "global_step_4"
    assert seen in said and "names step 10, which is not there or not whole; 4 is the newest whole step" in said
    with pytest.raises(NotWhole, match=seen.split(" ")[0]) as error:
        require_whole(run / "global_step_10")
    assert f"Whole ones there: {run / 'global_step_2'}, {run / 'global_step_4'}." in str(error.value)


@pytest.mark.parametrize("tracker", [None, "", "12"])
def test_without_a_step_in_the_tracker_the_newest_is_taken(run: Path, tracker: str | None):
    (run / TRACKER).unlink() if tracker is None else (run / TRACKER).write_text(tracker)
    assert tracked_step(run) == (12 if tracker else None)
    assert resumed(run)[0] == run / "global_step_10"


def test_a_tracker_that_was_set_back_is_followed(run: Path):
    (run / TRACKER).write_text("4\n")
    point, said = resumed(run)
    assert point == run / "global_step_4" and "names step 4, not the newest (10), and is followed" in said
    (run / "global_step_10" / "data.pt").unlink()
    assert "not the newest" not in resumed(run)[1], "the newest that is whole counts"


def test_a_run_without_checkpoints_starts_from_scratch(tmp_path: Path):
    assert resumed(tmp_path)[0] is None
    write_shards(path_of(begin(tmp_path), 2))  # killed in its first save
    point, said = resumed(tmp_path)
    assert point is None and "starts from scratch" in said and f"{tmp_path / SAVING} holds" in said


def test_a_run_does_not_start_over_beside_checkpoints_that_are_not_whole(tmp_path: Path):
    write_shards(path_of(tmp_path, 30))  # as verl saves them
    (tmp_path / TRACKER).write_text("30")
    with pytest.raises(NotWhole, match=f"global_step_30 is not whole: it has no {MANIFEST}.*--accept STEP"):
        resumed(tmp_path)


@pytest.mark.parametrize("path", [None, "outputs/run", "outputs/run/global_step_4/actor"])
def test_a_resume_path_that_is_no_checkpoint_is_refused(path: str | None):
    with pytest.raises(ValueError, match="Expected the folder of a checkpoint"):
        require_whole(path)


def test_a_resume_path_may_be_relative_and_end_with_a_slash(run: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(run)
    assert require_whole("global_step_4/") == Path("global_step_4")
    with pytest.raises(NotWhole, match="there is no such folder"):
        require_whole("global_step_5")


def test_shards_that_other_nodes_kept_to_themselves_are_missed(tmp_path: Path):
    staged = path_of(begin(tmp_path), 2)
    write_shards(staged, SHARDS[:1] + SHARDS[2:])
    assert missing_shards(staged) == ["actor/model_world_size_2_rank_1.pt"]
    with pytest.raises(NotWhole, match="lacks 1 of its shards, first actor/model_world_size_2_rank_1.pt.*all of them"):
        publish(tmp_path, 2)
    assert steps(tmp_path) == [] and tracked_step(tmp_path) is None


def test_nothing_of_a_half_written_save_is_in_the_next_one(run: Path):
    write_shards(
        path_of(begin(run), 12), ["model_world_size_8_rank_7.pt"]
    )  # killed, and started again with fewer ranks
    save(run, 12)
    assert problem(path_of(run, 12)) is None
    assert not list(path_of(run, 12).rglob("*world_size_8*"))


def test_a_step_that_is_saved_again_is_replaced_as_a_whole(run: Path):
    (path_of(run, 4) / "of_the_first_time").touch()
    save(run, 4)
    assert not (path_of(run, 4) / "of_the_first_time").exists()
    assert tracked_step(run) == 4 and steps(run) == [2, 4, 10] and not (run / SAVING).exists()


def test_a_kill_between_the_two_renames_of_saving_the_only_step_again(tmp_path: Path):
    """One rename has moved the old one away, the next would have put the new one in its place."""
    save(tmp_path, 2)
    write_shards(path_of(begin(tmp_path), 2))
    vouch(path_of(tmp_path / SAVING, 2))
    old, new = path_of(tmp_path / SAVING / "replaced", 2), path_of(tmp_path / SAVING, 2)
    old.parent.mkdir()
    path_of(tmp_path, 2).rename(old)
    before = sorted(tmp_path.rglob("*"))
    point, said = resumed(tmp_path)
    assert point == new and f"{new} is whole; a kill came before it was in its place" in said
    assert sorted(tmp_path.rglob("*")) == before, "asking changes nothing: the doctor asks too"
    (new / "data.pt").unlink()
    assert resumed(tmp_path)[0] == old
    restore(tmp_path)
    assert steps(tmp_path) == whole_steps(tmp_path) == [2] and resumed(tmp_path)[0] == path_of(tmp_path, 2)
    begin(tmp_path)
    assert whole_steps(tmp_path) == [2]


def test_the_next_save_does_not_delete_the_only_whole_copy(tmp_path: Path):
    write_shards(path_of(begin(tmp_path), 2))
    vouch(path_of(tmp_path / SAVING, 2))  # and a kill
    begin(tmp_path)
    assert whole_steps(tmp_path) == [2]


def test_a_broken_checkpoint_gives_way_to_its_whole_copy(tmp_path: Path):
    save(tmp_path, 2)
    write_shards(path_of(begin(tmp_path), 2))
    vouch(path_of(tmp_path / SAVING, 2))
    path_of(tmp_path / SAVING, 2).rename(tmp_path / SAVING / "kept")
    (tmp_path / SAVING / "replaced").mkdir()
    (tmp_path / SAVING / "kept").rename(path_of(tmp_path / SAVING / "replaced", 2))
    (path_of(tmp_path, 2) / "data.pt").write_bytes(b"")
    restore(tmp_path)
    assert whole_steps(tmp_path) == [2]


def test_a_copy_whose_save_never_returned_is_used_only_where_it_is_needed(run: Path):
    write_shards(path_of(begin(run), 12))
    vouch(path_of(run / SAVING, 12))
    assert recoverable(run) == {} and resumed(run)[0] == path_of(run, 10)
    assert recoverable(run, wanted=12) == {12: path_of(run / SAVING, 12)}, "resume_from_path names it"
    assert recoverable(run, wanted=10) == {}
    (run / TRACKER).write_text("12")
    assert resumed(run)[0] == path_of(run / SAVING, 12)
    (run / TRACKER).write_text("10")
    begin(run)
    assert steps(run) == [2, 4, 10] and list((run / SAVING).iterdir()) == []


def test_copies_that_are_damaged_are_no_reason_to_start_over(tmp_path: Path):
    write_shards(path_of(begin(tmp_path), 2))
    vouch(path_of(tmp_path / SAVING, 2))
    (path_of(tmp_path / SAVING, 2) / "data.pt").write_bytes(bytes(7))
    with pytest.raises(NotWhole, match=r"\.saving/global_step_2 is not whole: data.pt has its 7 bytes, but not those"):
        resumed(tmp_path)


@pytest.mark.parametrize("name", ["data.pt", "actor/optim_world_size_2_rank_1.pt"])
def test_a_file_of_zeros_is_seen_and_the_next_older_checkpoint_taken(run: Path, name: str):
    path = run / "global_step_10" / name
    path.write_bytes(bytes(path.stat().st_size))
    point, said = resumed(run)
    assert point == run / "global_step_4"
    assert f"{name} has its {path.stat().st_size} bytes, but not those that were saved: its checksum differs" in said
    assert problem(run / "global_step_10", contents=False) is None
    assert problem(run / "global_step_10", lambda needed: needed != name) is None


def test_only_the_bytes_of_the_chosen_checkpoint_are_read(run: Path, monkeypatch: pytest.MonkeyPatch):
    """They may be hundreds of GB each."""
    read = []
    monkeypatch.setattr(manifest, "checksum", lambda path, *_: read.append(path) or checksum(path))
    assert resumed(run)[0] == path_of(run, 10)
    assert len(read) == 7 and {path.relative_to(run).parts[0] for path in read} == {"global_step_10"}


def test_a_checkpoint_of_a_release_without_checksums_resumes(run: Path):
    path = run / "global_step_10" / MANIFEST
    path.write_text(json.dumps({"files": json.loads(path.read_text())["files"]}))
    assert resumed(run)[0] == run / "global_step_10"


def test_a_good_checkpoint_is_not_deleted_for_a_newer_one_that_is_damaged(run: Path):
    """Step 10, of an earlier start, has its size but zeros; 4 would be deleted for it."""
    path = run / "global_step_10" / "data.pt"
    path.write_bytes(bytes(7))
    save(run, 12)
    Rolling(run, keep_last=2).after_save(12)
    assert steps(run) == [4, 10, 12] and whole_steps(run) == [4, 12]


def test_a_checkpoint_of_this_process_is_compared_once(run: Path, monkeypatch: pytest.MonkeyPatch):
    read = []
    monkeypatch.setattr(manifest, "checksum", lambda path, *_: read.append(path.parts[-2:]) or checksum(path))
    rolling = Rolling(run, keep_last=3)
    rolling.after_save(10)
    assert {name for name, _ in read} >= {"global_step_2", "global_step_4"} and rolling.sound == {2, 4, 10}
    read.clear()
    rolling.delete_others()
    assert read == []


@pytest.mark.parametrize(
    "content", ['{"metric": "val/lo', "", "[]", '{"metric": "a", "mode": "max", "values": {"2": null}}']
)
def test_values_that_cannot_be_read_are_not_forgotten_in_silence(tmp_path: Path, content: str):
    """Without them, the best checkpoint would be deleted."""
    (tmp_path / "validation.json").write_text(content)
    with pytest.raises(ValueError, match=r"validation.json cannot be read.*Restore it, or delete it"):
        Rolling.from_config(config(tmp_path, **ACCURACY))


def test_what_is_kept():
    """Steps 10, 20, ... 60."""
    whole = range(10, 70, 10)
    assert kept_steps(whole, keep_last=3, best=20, tracked=60) == {20, 40, 50, 60}
    assert kept_steps(whole, keep_last=3, best=50, tracked=60) == {40, 50, 60}
    assert kept_steps(whole, keep_last=1, best=None, tracked=30) == {30, 60}
    assert kept_steps(whole, keep_last=None, best=None, tracked=None) == set(whole)
    assert kept_steps(whole, keep_last=9, best=70, tracked=80) == set(whole)  # 70, 80: not there


def config(folder: Path, trainer: dict | None = None, **settings: object) -> dict:
    trainer = {"default_local_dir": str(folder), "save_freq": 2, "test_freq": 2} | (trainer or {})
    return {"trainer": trainer, "retool": {"checkpoints": settings}}


ACCURACY = {"keep_last": 2, "best_metric": "val-core/*/acc/mean@*"}


def train(folder: Path, values: dict[int, float], validate_first: bool = False, **settings: object) -> None:
    """A start of a run: saves each step and logs its validation, RL after the save, SFT before it."""
    rolling = Rolling.from_config(config(folder, **(settings or ACCURACY)))
    for step, value in values.items():
        data = {"val/loss": value, "val-core/aime/acc/mean@8": value, "val-aux/aime/acc/std@8": 9.0}
        if validate_first:
            rolling.record(data, step)
        save(folder, step)
        rolling.after_save(step)
        if not validate_first:
            rolling.record(data, step)


@pytest.mark.parametrize("validate_first", [False, True])
def test_the_last_and_the_best_are_kept_across_resumes(tmp_path: Path, validate_first: bool):
    train(tmp_path, {2: 0.1, 4: 0.5}, validate_first)
    train(tmp_path, {6: 0.3, 8: 0.2}, validate_first)  # started again: 4 is the best, of the earlier start
    assert steps(tmp_path) == [4, 6, 8]
    train(tmp_path, {10: 0.2}, validate_first)
    assert steps(tmp_path) == [4, 8, 10]
    train(tmp_path, {12: 0.5, 14: 0.4}, validate_first)  # as good as 4, and newer
    assert steps(tmp_path) == [12, 14]
    assert whole_steps(tmp_path) == [12, 14] and not (tmp_path / SAVING).exists()


def test_the_lowest_loss_can_be_the_best(tmp_path: Path):
    train(tmp_path, {2: 0.1, 4: 0.5, 6: 0.3, 8: 0.2}, keep_last=1, best_metric="val/loss", best_mode="min")
    assert steps(tmp_path) == [2, 8]


def test_several_validation_sets_count_by_their_mean(tmp_path: Path):
    rolling = Rolling.from_config(config(tmp_path, **ACCURACY))
    rolling.record({"val-core/a/acc/mean@4": 0.2, "val-core/b/acc/mean@4": 0.6, "val-core/a/acc/maj@4": 1.0}, 2)
    rolling.record({"val-core/a/acc/mean@4": float("nan")}, 4)
    rolling.record({"actor/pg_loss": 1.0}, 6)
    assert rolling.values == {2: pytest.approx(0.4)}


def test_without_a_best_metric_the_last_are_kept(tmp_path: Path):
    train(tmp_path, {2: 0.9, 4: 0.5, 6: 0.3}, keep_last=1)
    assert steps(tmp_path) == [6]
    train(tmp_path, {8: 0.9, 10: 0.5, 12: 0.3}, keep_last=None)
    assert steps(tmp_path) == [6, 8, 10, 12]


def test_the_one_that_the_tracker_names_stays_and_a_broken_one_is_left_alone(run: Path):
    path = run / "global_step_2" / "data.pt"
    path.unlink()
    rolling = Rolling.from_config(config(run, keep_last=1))
    (run / TRACKER).write_text("4")
    rolling.after_save(10)
    assert steps(run) == [2, 4, 10]
    (run / TRACKER).write_text("10")
    rolling.after_save(10)
    assert steps(run) == [2, 10]


def test_a_run_set_back_leaves_later_steps_alone_until_it_saves_them(run: Path):
    train(run, {3: 0.1, 4: 0.2}, keep_last=2)
    assert steps(run) == [3, 4, 10] and tracked_step(run) == 4
    train(run, {10: 0.1, 12: 0.1}, keep_last=2)
    assert steps(run) == [10, 12]


def test_the_value_of_a_step_that_is_trained_again_is_forgotten(tmp_path: Path):
    train(tmp_path, {2: 0.3, 4: 0.9, 6: 0.8})
    save(tmp_path, 2)
    rolling = Rolling.from_config(config(tmp_path, **ACCURACY))  # resumed from 2
    save(tmp_path, 4)
    rolling.after_save(4)
    assert rolling.values == {2: 0.3} and rolling.best([2, 4, 6]) == 2
    rolling.record({"val-core/aime/acc/mean@8": 0.4}, 4)
    assert rolling.best([2, 4, 6]) == 4


def test_a_validation_alone_deletes_nothing(run: Path):
    Rolling.from_config(config(run, keep_last=1, best_metric="val/loss")).record({"val/loss": 1.0}, 4)
    assert steps(run) == [2, 4, 10]


def test_values_of_another_metric_are_forgotten(tmp_path: Path):
    train(tmp_path, {2: 0.9, 4: 0.5})
    rolling = Rolling.from_config(config(tmp_path, keep_last=1, best_metric="val/loss", best_mode="min"))
    assert rolling.values == {}
    assert Rolling.from_config(config(tmp_path, **ACCURACY)).values == {2: 0.9, 4: 0.5}


@pytest.mark.parametrize(
    ("trainer", "settings", "message"),
    [
        ({"max_actor_ckpt_to_keep": 2}, {}, r"max_actor_ckpt_to_keep=2.*Set it to null, and retool.checkpoints"),
        ({"max_ckpt_to_keep": 1}, {"keep_last": 1}, "max_ckpt_to_keep=1"),
        ({}, {"keep_last": 0}, "retool.checkpoints.keep_last is 0, expected a whole number"),
        ({}, {"keep_last": True}, "keep_last is True"),
        ({}, {"keep_lst": 3}, "keep_lst is none of .* Did you mean retool.checkpoints.keep_last"),
        ({}, {"best_mode": "highest"}, "best_mode is 'highest'; expected one of max, min"),
    ],
)
def test_settings_that_cannot_be_are_refused(tmp_path: Path, trainer: dict, settings: dict, message: str):
    with pytest.raises(ValueError, match=message):
        Rolling.from_config(config(tmp_path, trainer, **settings))


def test_a_metric_that_no_validation_has_is_refused(tmp_path: Path):
    rolling = Rolling.from_config(config(tmp_path, **ACCURACY | {"best_metric": "val-core/aime/acc/mean@16"}))
    with pytest.raises(ValueError, match=r"step 5: val-core/aime/acc/mean@8\. Set it to one of these"):
        rolling.record({"val-core/aime/acc/mean@8": 0.5}, 5)


@pytest.mark.parametrize(("test_freq", "warns"), [(20, True), (-1, True), (15, False)])
def test_validations_that_miss_checkpoints_are_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, test_freq: int, warns: bool
):
    Rolling.from_config(config(tmp_path, {"save_freq": 30, "test_freq": test_freq}, **ACCURACY))
    assert (f"save_freq=30 is no multiple of trainer.test_freq={test_freq}" in caplog.text) is warns


@pytest.mark.parametrize(
    ("options", "missed"),
    [
        ({"light_validation": {"enable": True, "full_every": 20}}, "light_validation.full_every=20"),
        ({"light_validation": {"enable": True, "full_every": 30}}, None),
        ({"validation_schedule": {"enable": True, "phases": [[0, 10], [50, 20]]}}, "validation_schedule.phases=10, 20"),
        ({"validation_schedule": {"enable": False, "phases": [[0, 20]]}}, None),
    ],
)
def test_options_that_replace_the_validations_are_looked_at(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, options: dict, missed: str | None
):
    settings = config(tmp_path, {"save_freq": 30, "test_freq": 5}, **ACCURACY)
    settings["retool"] |= options
    Rolling.from_config(settings)
    assert (missed in caplog.text) if missed else not caplog.text


def test_a_config_without_our_keys_keeps_all(tmp_path: Path):
    assert Rolling.from_config({"trainer": {"default_local_dir": str(tmp_path)}}) == Rolling(tmp_path)


def command(*arguments: str) -> subprocess.CompletedProcess:
    environment = os.environ | {"PYTHONWARNINGS": "error"}
    command = [sys.executable, "-m", "verl_ext.checkpoints", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=30)


def test_the_command_takes_the_quickstarts_folder_as_well(run: Path):
    quickstart = run.parent / "quickstart"
    shutil.copytree(run, quickstart / "sft")
    shutil.copytree(run, quickstart / "rl")
    shown = command(str(quickstart))
    assert shown.returncode == 0, shown.stderr
    for part in ("sft", "rl"):
        assert (
            f"{quickstart / part}:" in shown.stdout and f"Resume: from {quickstart / part}/global_step_" in shown.stdout
        )
    assert f"--accept needs one run's folder: {quickstart}/sft or" in command(str(quickstart), "--accept", "1").stderr


def test_the_command_says_what_is_there_and_accepts_what_a_user_vouches_for(run: Path):
    write_shards(path_of(run, 12))
    listed = command(str(run))
    assert listed.returncode == 0 and listed.stderr == ""
    assert "step     12     0.000 GB  not whole: it has no checkpoint.json" in listed.stdout
    assert f"Resume: from {run / 'global_step_10'}, step 10." in listed.stdout
    accepted = command(str(run), "--accept", "12")
    assert accepted.returncode == 0 and problem(path_of(run, 12)) is None
    (path_of(run, 12) / "actor" / SHARDS[0]).unlink()
    refused = command(str(run), "--accept", "12")
    assert refused.returncode == 1 and f"first actor/{SHARDS[0]}" in refused.stderr
    assert command(str(run), "--accept", "13").returncode == 1
