"""A power loss at every moment of a save: the run resumes from a checkpoint no older than the last save that returned.

The code's own calls are recorded and replayed on a model of a disk that loses whatever was not fsynced (disk.py).
"""

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.checkpoints import disk
from verl_ext.checkpoints import folder as checkpoints
from verl_ext.checkpoints.folder import path_of
from verl_ext.checkpoints.rolling import Rolling
from verl_ext.runs.journal import StepJournal

SHARD = "actor/model_world_size_1_rank_0.pt"


@pytest.fixture
def fast() -> Iterator[Path]:
    """A folder in memory: thousands of disks are laid out in it."""
    folder = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    yield folder
    shutil.rmtree(folder)


def write(checkpoint: Path, number: int) -> None:
    """Write a checkpoint's files, which contain the number of the save."""
    for name in (SHARD, "actor/optim_world_size_1_rank_0.pt", "data.pt"):
        (checkpoint / name).parent.mkdir(parents=True, exist_ok=True)
        (checkpoint / name).write_text(f"{name} of save {number}")


def save(run: Path, step: int, number: int) -> None:
    write(path_of(checkpoints.begin(run), step), number)
    checkpoints.publish(run, step)


def number_in(checkpoint: Path) -> int:
    """Return the number of the save, having checked that every file is as it was saved."""
    numbers = set()
    for name in (SHARD, "actor/optim_world_size_1_rank_0.pt", "data.pt"):
        text = (checkpoint / name).read_text()
        assert text.startswith(f"{name} of save "), (name, text)
        numbers.add(int(text.rpartition(" ")[2]))
    (number,) = numbers
    return number


def resumed(run: Path) -> int | None:
    """Return the number of the save that a run started at this point resumes from."""
    checkpoints.restore(run)
    point = checkpoints.resume_point(run)
    return None if point is None else number_in(point)


def new_run(run: Path, done: Callable[[int], None]) -> None:
    """Make saves 1, 2 and 3 of steps 2, 4 and 6; the last and the best are kept."""
    rolling = Rolling(run, keep_last=1, best_metric="val/loss", best_mode="min")
    for number, step in enumerate((2, 4, 6), 1):
        save(run, step, number)
        done(number)
        rolling.after_save(step)
        rolling.record({"val/loss": (0.2, 0.1, 0.3)[number - 1]}, step)


def the_only_step_again(run: Path, done: Callable[[int], None]) -> None:
    for number in (1, 2, 3):
        save(run, 2, number)
        done(number)


def a_broken_step_again(run: Path, done: Callable[[int], None]) -> None:
    save(run, 2, 1)
    done(1)
    save(run, 4, 2)
    (run / "global_step_4" / SHARD).write_bytes(b"")
    save(run, 4, 3)
    done(3)


@pytest.mark.parametrize("history", [new_run, the_only_step_again, a_broken_step_again])
def test_after_a_power_loss_the_last_save_that_returned_is_there(
    fast: Path, monkeypatch: pytest.MonkeyPatch, history: Callable
):
    run = fast / "run"
    run.mkdir()
    recording = disk.Recording(run)
    with monkeypatch.context() as patch:
        recording.start(patch)
        history(run, recording.mark)
        recording.mark("end")
    possible = list(disk.states(recording.calls))
    assert len(possible) > 100
    for promised, tree in possible:
        left = fast / "left"
        disk.lay_out(tree, left)
        saved = max((number for number in promised if number != "end"), default=None)
        if saved is None:  # the first save was interrupted: it is there or not, but nothing else is mistaken for it
            assert resumed(left) in (1, None)
        else:
            assert resumed(left) >= saved, tree
            checkpoints.begin(left)  # of the next save: it deletes what it does not need
            assert resumed(left) >= saved, tree
            save(left, 8, 9)
            assert Rolling.from_config({"trainer": {"default_local_dir": str(left)}}).folder == left
            Rolling(left, keep_last=1).after_save(8)
            assert resumed(left) == 9 and not (left / checkpoints.SAVING).exists()
        shutil.rmtree(left)


def test_the_values_of_the_best_outlive_a_power_loss(fast: Path, monkeypatch: pytest.MonkeyPatch):
    """`validation.json` is either the old one or the new one, never truncated or empty."""
    run = fast / "run"
    run.mkdir()
    recording, rolling = disk.Recording(run), Rolling(run, best_metric="val/loss")
    with monkeypatch.context() as patch:
        recording.start(patch)
        for step, value in ((2, 0.5), (4, 0.25)):
            rolling.record({"val/loss": value}, step)
            recording.mark(step)
    settings = {"trainer": {"default_local_dir": ""}, "retool": {"checkpoints": {"best_metric": "val/loss"}}}
    values = {None: [{}, {2: 0.5}], 2: [{2: 0.5}, {2: 0.5, 4: 0.25}], 4: [{2: 0.5, 4: 0.25}]}
    for promised, tree in disk.states(recording.calls):
        left = fast / "left"
        disk.lay_out(tree, left)
        settings["trainer"]["default_local_dir"] = str(left)
        assert Rolling.from_config(settings).values in values[max(promised, default=None)]
        shutil.rmtree(left)


def test_a_journals_records_outlive_a_power_loss(fast: Path, monkeypatch: pytest.MonkeyPatch):
    """Also while it is rewritten, at a resume from step 2."""
    run = fast / "run"
    run.mkdir()
    recording, journal = disk.Recording(run), StepJournal(run / "journal.jsonl")
    with monkeypatch.context() as patch:
        recording.start(patch)
        for step in (1, 2, 3):
            journal.append(step, value=step)
            recording.mark(step)
        journal.resume(2)
        journal.append(3, value=33)
        recording.mark(33)
    for promised, tree in disk.states(recording.calls):
        left = fast / "left"
        disk.lay_out(tree, left)
        there = [record["value"] for record in StepJournal(left / "journal.jsonl").resume(2)]
        assert there[: min(2, max(promised, default=0))] == [1, 2][: min(2, max(promised, default=0))]
        if 33 in promised:
            assert "33" in tree["journal.jsonl"].decode()
        shutil.rmtree(left)


def test_the_disk_loses_what_is_not_synced_and_keeps_the_rest(fast: Path, monkeypatch: pytest.MonkeyPatch):
    """The model itself: a file that is renamed without an fsync of either file or folder."""
    import os

    recording = disk.Recording(fast)
    with monkeypatch.context() as patch:
        recording.start(patch)
        (fast / "part").write_text("1234")
        os.rename(fast / "part", fast / "whole")
        recording.mark("renamed")
        for synced in (fast / "whole", fast):
            handle = os.open(synced, os.O_RDONLY)
            os.fsync(handle)
            os.close(handle)
        recording.mark("synced")
    found: dict[int, list[Any]] = {}
    for promised, tree in disk.states(recording.calls):
        found.setdefault(len(promised), []).append(tree)
    renamed = found[1]
    for content in (b"1234", b"12", b"", bytes(4)):
        assert {"whole": content} in renamed and {"part": content} in renamed
    assert {} in renamed and found[2] == [{"whole": b"1234"}]


@pytest.mark.parametrize("kind", ["sft", "rl"])
def test_verls_own_saves_outlive_a_power_loss(fast: Path, hooks: Any, monkeypatch: pytest.MonkeyPatch, kind: str):
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    from tests.unit.checkpoints.trainers import Engine, handler, loader, rl_trainer

    run = fast / "run"
    keep_last = {"trainer": {"default_local_dir": str(run)}, "retool": {"checkpoints": {"keep_last": 1}}}
    hooks.keep_checkpoints(keep_last)
    run.mkdir()
    recording = disk.Recording(run)
    with monkeypatch.context() as patch:
        recording.start(patch)
        for step in (2, 4):
            if kind == "sft":
                handler(run, loader(), Engine(run)).save_checkpoint(step)
            else:
                trainer = rl_trainer(run, Engine(run))
                trainer.global_steps = step
                PPOTrainer._save_checkpoint(trainer)
            recording.mark(step)
    for promised, tree in disk.states(recording.calls):
        left = fast / "left"
        disk.lay_out(tree, left)
        checkpoints.restore(left)
        point = checkpoints.resume_point(left)
        assert (0 if point is None else checkpoints.step_of(point)) >= max(promised, default=0)
        shutil.rmtree(left)
    assert json.loads((run / "global_step_4" / "checkpoint.json").read_text())["crc32"]["files"]
