"""What waits for the disk, and what happens on file systems without fsync."""

import errno
import os
import resource
from pathlib import Path

import pytest

from verl_ext.checkpoints import folder as checkpoints
from verl_ext.runs import durable


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch):
    """An fsync that answers with an error for folders, files or both."""
    monkeypatch.setattr(durable, "warned", set())
    real = os.fsync

    def fail(number: int, *, folders: bool = False, files: bool = False) -> None:
        def fsync(handle: int) -> None:
            if folders if os.path.isdir(f"/proc/self/fd/{handle}") else files:
                raise OSError(number, os.strerror(number))
            real(handle)

        monkeypatch.setattr(os, "fsync", fsync)

    return fail


def save(run: Path, step: int) -> None:
    (checkpoints.path_of(checkpoints.begin(run), step)).mkdir()
    (checkpoints.path_of(run / checkpoints.SAVING, step) / "data.pt").write_bytes(b"data")
    checkpoints.publish(run, step)


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EBADF, errno.EISDIR, errno.EACCES])
def test_a_file_system_without_fsync_of_folders_is_warned_of_once(
    tmp_path: Path, failing, caplog: pytest.LogCaptureFixture, number: int
):
    failing(number, folders=True)
    for step in (2, 4):
        save(tmp_path, step)
    assert checkpoints.whole_steps(tmp_path) == [2, 4] and checkpoints.tracked_step(tmp_path) == 4
    assert caplog.text.count("fsync of ") == 1
    assert f"({os.strerror(number)})" in caplog.text and "set trainer.default_local_dir to another disk" in caplog.text


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP])
def test_a_file_system_without_any_fsync_is_warned_of(
    tmp_path: Path, failing, caplog: pytest.LogCaptureFixture, number: int
):
    failing(number, folders=True, files=True)
    save(tmp_path, 2)
    assert checkpoints.whole_steps(tmp_path) == [2] and caplog.text.count("fsync of ") == 2


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EACCES])
def test_a_disk_that_does_not_take_the_bytes_fails_the_save_and_keeps_what_there_was(
    tmp_path: Path, failing, number: int
):
    save(tmp_path, 2)
    failing(number, files=True)
    with pytest.raises(OSError, match=r"\[Errno") as error:
        save(tmp_path, 4)
    assert error.value.errno == number
    assert checkpoints.steps(tmp_path) == checkpoints.whole_steps(tmp_path) == [2]
    assert checkpoints.tracked_step(tmp_path) == 2


def test_new_folders_are_made_with_those_above_them(tmp_path: Path):
    durable.make_folder(tmp_path / "a" / "b" / "c")
    durable.make_folder(tmp_path / "a" / "b" / "c")
    assert (tmp_path / "a" / "b" / "c").is_dir()


def test_a_file_is_replaced_and_added_to(tmp_path: Path):
    path = tmp_path / "file"
    durable.append_line(path, "one")
    durable.append_line(path, "two")
    assert path.read_text() == "one\ntwo\n"
    durable.write_text(path, "three")
    assert path.read_text() == "three" and list(tmp_path.iterdir()) == [path]


def test_a_line_that_finds_no_room_is_taken_back(tmp_path: Path):
    path = tmp_path / "file"
    durable.append_line(path, "one")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8, before[1]))  # bytes: the first four of the next line have room
    try:
        with pytest.raises(OSError, match="File too large"):
            durable.append_line(path, "a longer one")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    durable.append_line(path, "two")
    assert path.read_text() == "one\ntwo\n"


def test_a_line_that_is_not_known_to_be_on_the_disk_is_taken_back(tmp_path: Path, failing):
    """A caller that writes it again would have it twice."""
    path = tmp_path / "file"
    durable.append_line(path, "one")
    failing(errno.ENOSPC, files=True)
    with pytest.raises(OSError, match="No space left on device"):
        durable.append_line(path, "two")
    assert path.read_text() == "one\n"


def test_a_file_that_vanishes_during_a_sync_is_not_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "stays").touch()
    monkeypatch.setattr(os, "walk", lambda *_, **__: [(str(tmp_path), [], ["gone", "stays"])])
    durable.sync_tree(tmp_path)
    with pytest.raises(FileNotFoundError):
        durable.sync(tmp_path / "gone")


def test_an_error_says_which_file_could_not_be_written(tmp_path: Path, failing):
    with pytest.raises(OSError, match="No space left on device: '/dev/full'"):
        durable.append_line(Path("/dev/full"), "{}")
    failing(errno.ENOSPC, files=True)
    with pytest.raises(OSError, match=rf"No space left on device: '{tmp_path}/value.json.part'"):
        durable.write_text(tmp_path / "value.json", "{}")
