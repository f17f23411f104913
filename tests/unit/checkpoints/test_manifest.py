"""Checksums of files, whole and in samples, and which files a rank syncs to the disk."""

from pathlib import Path

import pytest

from verl_ext.checkpoints import manifest
from verl_ext.checkpoints.manifest import checksum
from verl_ext.runs import durable


def test_a_small_file_is_read_whole(tmp_path: Path):
    """Three blocks of 4 bytes and one of 1; `cksum`-like tools say cbf43926 of "123456789"."""
    path = tmp_path / "file"
    path.write_bytes(b"123456789")
    assert checksum(path, 4, 3) == checksum(path) == 0xCBF43926
    path.write_bytes(b"")
    assert checksum(path) == 0


def test_of_a_large_file_samples_from_start_to_end_are_read(tmp_path: Path):
    """13 bytes, 4 blocks of 2: they start at 0, 3, 7, 11 (0, 11/3, 22/3, 11), and 2, 5, 6, 9, 10 are not read."""
    path = tmp_path / "file"
    path.write_bytes(bytes(range(13)))
    whole = checksum(path, 2, 4)
    seen = set()
    for place in range(13):
        changed = bytearray(range(13))
        changed[place] = 255
        path.write_bytes(changed)
        if checksum(path, 2, 4) != whole:
            seen.add(place)
    assert seen == {0, 1, 3, 4, 7, 8, 11, 12}


def test_a_zeroed_stretch_of_a_large_file_is_seen(tmp_path: Path):
    """With 64 samples of 1 KiB in 100 KiB, any 2 KiB hold all or part of one."""
    path, whole = tmp_path / "file", bytes(range(1, 101)) * 1024
    path.write_bytes(whole)
    value = checksum(path, 1024, 64)
    for start in range(0, len(whole) - 2048, 512):
        path.write_bytes(whole[:start] + bytes(2048) + whole[start + 2048 :])
        assert checksum(path, 1024, 64) != value, start


def test_each_rank_brings_its_own_files_to_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Ranks on other machines wrote the other shards: an fsync from here need not reach them."""
    for name in ("huggingface/config.json", *(f"optim_world_size_2_rank_{rank}.pt" for rank in (0, 1)), "data_1.pt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    synced: list[str] = []
    monkeypatch.setattr(durable, "sync", lambda path: synced.append(f"{path.name}/" if path.is_dir() else path.name))
    manifest.sync_own(tmp_path, 1)
    assert sorted(synced[:-1]) == ["config.json", "data_1.pt", "huggingface/", "optim_world_size_2_rank_1.pt"]
    assert synced[-1] == f"{tmp_path.name}/", "the folder's names come after what is in it"


def test_a_disk_that_cannot_be_read_is_a_problem_of_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "data.pt").write_bytes(b"data")
    manifest.vouch(tmp_path)

    def fail(path: Path, *_: int) -> int:
        raise OSError(5, "Input/output error", str(path))

    monkeypatch.setattr(manifest, "checksum", fail)
    assert "it cannot be read ([Errno 5] Input/output error" in manifest.problem(tmp_path)
    with pytest.raises(OSError, match="Input/output error"):
        manifest.vouch(tmp_path)


def test_shards_of_another_number_of_ranks_are_refused(tmp_path: Path):
    for rank in range(2):
        (tmp_path / f"model_world_size_2_rank_{rank}.pt").touch()
    manifest.require_ranks(tmp_path, 2)
    with pytest.raises(ValueError, match="by 2 ranks, but this run has 1. Resume with the same number of GPUs"):
        manifest.require_ranks(tmp_path, 1)
    (tmp_path / "model_world_size_1_rank_0.pt").touch()
    with pytest.raises(ValueError, match="was saved by 2 ranks, but this run has 1"):
        manifest.require_ranks(tmp_path, 1)
