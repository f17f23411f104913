"""Which checkpoints are whole, which one a run resumes from and which ones stay, on made-up folders."""

import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from verl_ext.checkpoints import (
    MANIFEST,
    SAVING,
    TRACKER,
    NotWhole,
    Rolling,
    begin,
    kept_steps,
    missing_shards,
    path_of,
    problem,
    publish,
    require_whole,
    resume_point,
    steps,
    tracked_step,
    whole_steps,
)

SHARDS = [f"{kind}_world_size_2_rank_{rank}.pt" for kind in ("model", "optim", "extra_state") for rank in (0, 1)]


def write_shards(checkpoint: Path, names: list[str] = SHARDS) -> None:
    for name in ["actor/" + shard for shard in names] + ["data.pt"]:
        path = checkpoint / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode())


def save(folder: Path, step: int) -> None:
    write_shards(path_of(begin(folder), step))
    publish(folder, step)


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


class Killed(BaseException):
    """Stands for SIGKILL: no `except` of the code catches it."""


@pytest.mark.parametrize("there", [(2, 4), (2, 4, 6)], ids=["a new step", "a step that is there"])
def test_a_kill_at_any_operation_leaves_a_whole_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: tuple[int, ...]
):
    """Step 6 is saved and 2 and 4 are deleted; at the n-th operation on the disk, for each n, that is the end."""
    left = 0  # operations until the kill; below 0: no kill

    def counted(operation: Callable) -> Callable:
        def operate(*args: object, **kwargs: object) -> object:
            nonlocal left
            left -= 1
            if left == 0:
                raise Killed
            return operation(*args, **kwargs)

        return operate

    for owner, name in ((Path, "rename"), (Path, "replace"), (Path, "write_text"), (os, "unlink"), (os, "rmdir")):
        monkeypatch.setattr(owner, name, counted(getattr(owner, name)))

    for number in itertools.count(1):
        run, killed = tmp_path / str(number), False
        for step in there:
            save(run, step)
        left = number
        try:
            save(run, 6)
            Rolling(run, keep_last=1).after_save(6)
        except Killed:
            killed = True
        left = -1
        assert resumed(run)[0] in (path_of(run, 4), path_of(run, 6)) and whole_steps(run) == steps(run)
        assert tracked_step(run) in whole_steps(run) or 6 in there  # which is gone between two renames
        save(run, 8)
        Rolling(run, keep_last=1).after_save(8)
        assert steps(run) == [8] and not (run / SAVING).exists()
        if not killed:
            break
    assert number > 20


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
        ({}, {"keep_last": 0}, "keep_last=0; expected 1 or more"),
        ({}, {"keep_last": True}, "keep_last=True"),
        ({}, {"keep_lst": 3}, "has keep_lst; expected keep_last, best_metric and best_mode"),
        ({}, {"best_mode": "highest"}, "expected max or min"),
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
