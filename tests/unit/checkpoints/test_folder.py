"""Which checkpoints are whole, and which one a run resumes from, on made-up folders."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.checkpoints.saves import SHARDS, save, write_shards
from verl_ext.checkpoints import manifest
from verl_ext.checkpoints.folder import (
    SAVING,
    TRACKER,
    NotWhole,
    begin,
    choose,
    path_of,
    problem,
    publish,
    recoverable,
    require_whole,
    restore,
    resume_point,
    runs_of,
    steps,
    tracked_step,
    vouch,
    whole_steps,
)
from verl_ext.checkpoints.manifest import MANIFEST, checksum, missing_shards


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
    assert seen in said and "names step 10, which is missing or not complete; 4 is the newest complete step" in said
    with pytest.raises(NotWhole, match=seen.split(" ")[0]) as error:
        require_whole(run / "global_step_10")
    assert f"Complete ones there: {run / 'global_step_2'}, {run / 'global_step_4'}." in str(error.value)


@pytest.mark.parametrize("tracker", [None, "", "12"])
def test_without_a_step_in_the_tracker_the_newest_is_taken(run: Path, tracker: str | None):
    (run / TRACKER).unlink() if tracker is None else (run / TRACKER).write_text(tracker)
    assert tracked_step(run) == (12 if tracker else None)
    assert resumed(run)[0] == run / "global_step_10"


def test_a_tracker_that_was_set_back_is_followed(run: Path):
    (run / TRACKER).write_text("4\n")
    point, said = resumed(run)
    assert point == run / "global_step_4" and "names step 4, which takes precedence over the newest (10)" in said
    (run / "global_step_10" / "data.pt").unlink()
    assert "precedence" not in resumed(run)[1], "the newest that is complete counts"


@pytest.mark.parametrize(
    ("mode", "expected"), [("auto", "global_step_10"), ("disable", None), ("resume_path", "global_step_2")]
)
def test_resume_mode_decides(run: Path, mode: str, expected: str | None):
    assert choose(mode, str(run / "global_step_2"), run) == (expected and run / expected)


def test_a_folders_runs_are_those_of_a_quickstart_or_itself(run: Path, tmp_path_factory: pytest.TempPathFactory):
    empty = tmp_path_factory.mktemp("empty")
    assert runs_of(empty) == [empty] and runs_of(run) == [run]
    shutil.copytree(run, empty / "rl")
    assert runs_of(empty) == [empty / "rl"]
    shutil.copytree(empty / "rl", run / "rl")
    assert runs_of(run) == [run], "its own checkpoints go first"


def test_a_run_without_checkpoints_starts_from_scratch(tmp_path: Path):
    assert resumed(tmp_path)[0] is None
    write_shards(path_of(begin(tmp_path), 2))  # killed in its first save
    point, said = resumed(tmp_path)
    assert point is None and "starts from scratch" in said and f"{tmp_path / SAVING} holds" in said


def test_a_run_does_not_start_over_next_to_incomplete_checkpoints(tmp_path: Path):
    write_shards(path_of(tmp_path, 30))  # as verl saves them
    (tmp_path / TRACKER).write_text("30")
    with pytest.raises(NotWhole, match=f"global_step_30 is not complete: it has no {MANIFEST}.*--accept STEP"):
        resumed(tmp_path)


@pytest.mark.parametrize("path", [None, "outputs/run", "outputs/run/global_step_4/actor"])
def test_a_resume_path_that_is_not_a_checkpoint_is_refused(path: str | None):
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
    with pytest.raises(NotWhole, match="lacks 1 .*the first of them actor/model_world_size_2_rank_1.pt.*all nodes"):
        publish(tmp_path, 2)
    assert steps(tmp_path) == [] and tracked_step(tmp_path) is None


def test_nothing_of_a_half_written_save_is_in_the_next_one(run: Path):
    write_shards(
        path_of(begin(run), 12), ["model_world_size_8_rank_7.pt"]
    )  # killed, and started again with fewer ranks
    save(run, 12)
    assert problem(path_of(run, 12)) is None
    assert not list(path_of(run, 12).rglob("*world_size_8*"))


def test_what_cannot_be_deleted_ends_no_run(
    run: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """As on NFS, if a reader on another machine keeps a file open in a folder that is to be deleted."""

    def busy(path: Path, ignore_errors: bool = False) -> None:
        if not ignore_errors:
            raise OSError(39, "Directory not empty", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", busy)
        save(run, 12)
        save(run, 14)
    assert whole_steps(run)[-2:] == [12, 14] and tracked_step(run) == 14 and not (run / SAVING).exists()
    assert len([*run.glob(f"{SAVING}.*")]) == 2 and "Its remains are in" in caplog.text
    save(run, 16)
    assert not [*run.glob(f"{SAVING}*")], "what has become free goes with the next save"


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
    assert point == new and f"{new} is complete. A kill came before it was moved into place" in said
    assert sorted(tmp_path.rglob("*")) == before, "asking changes nothing: the doctor asks too"
    (new / "data.pt").unlink()
    assert resumed(tmp_path)[0] == old
    restore(tmp_path)
    assert steps(tmp_path) == whole_steps(tmp_path) == [2] and resumed(tmp_path)[0] == path_of(tmp_path, 2)
    begin(tmp_path)
    assert whole_steps(tmp_path) == [2]


def test_the_next_save_does_not_delete_the_only_whole_copy(tmp_path: Path):
    write_shards(path_of(begin(tmp_path), 2))
    vouch(path_of(tmp_path / SAVING, 2))  # and then a kill
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


def test_a_copy_whose_save_never_returned_is_used_only_if_it_is_needed(run: Path):
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


def test_damaged_copies_are_no_reason_to_start_over(tmp_path: Path):
    write_shards(path_of(begin(tmp_path), 2))
    vouch(path_of(tmp_path / SAVING, 2))
    (path_of(tmp_path / SAVING, 2) / "data.pt").write_bytes(bytes(7))
    with pytest.raises(NotWhole, match=r"\.saving/global_step_2 is not complete: data.pt has its 7 bytes"):
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
    assert "step     12     0.000 GB  incomplete: it has no checkpoint.json" in listed.stdout
    assert f"Resume: from {run / 'global_step_10'}, step 10." in listed.stdout
    accepted = command(str(run), "--accept", "12")
    assert accepted.returncode == 0 and problem(path_of(run, 12)) is None
    (path_of(run, 12) / "actor" / SHARDS[0]).unlink()
    refused = command(str(run), "--accept", "12")
    assert refused.returncode == 1 and f"the first of them actor/{SHARDS[0]}" in refused.stderr
    assert command(str(run), "--accept", "13").returncode == 1
