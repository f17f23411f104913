"""Files as bytes: equal files give equal bytes, and what no box may get is refused."""

import gzip
import io
import tarfile
import zipfile
from pathlib import Path

import pytest

from verl_ext.tasks.archive import BadArchive, File, Folder, Link, merge, pack, unpack


def tar_of(*infos: tarfile.TarInfo, data: bytes = b"") -> bytes:
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w:gz") as tar:
        for info in infos:
            tar.addfile(info, io.BytesIO(data) if info.isreg() else None)
    return raw.getvalue()


def member(name: str, kind: bytes = tarfile.REGTYPE, **fields: object) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type = kind
    for key, value in fields.items():
        setattr(info, key, value)
    return info


def test_an_archive_has_the_files_that_were_packed() -> None:
    files = {"app/b.txt": b"two", "app/a.sh": (b"one", 0o755), "app/c": "text", "app/empty": Folder(0o700)}
    expected = {
        "app/a.sh": File(b"one", 0o755),
        "app/b.txt": File(b"two"),
        "app/c": File(b"text"),
        "app/empty": Folder(0o700),
        "app/link": Link("b.txt"),
    }
    assert unpack(pack({**files, "app/link": Link("b.txt")})) == expected


def test_equal_files_give_equal_bytes_in_any_order() -> None:
    assert pack({"a": b"1", "b": b"2"}) == pack({"b": b"2", "a": b"1"})
    assert pack(unpack(pack({"a": (b"1", 0o600)}))) == pack({"a": (b"1", 0o600)})


def test_files_have_a_time_that_a_zip_can_hold(tmp_path: Path) -> None:
    with tarfile.open(fileobj=io.BytesIO(pack({"app/a": "a"}))) as tar:
        tar.extractall(tmp_path, filter="data")
    zipfile.ZipFile(tmp_path / "a.zip", "w").write(tmp_path / "app/a")  # refuses a time before 1980


def test_a_folder_is_packed_with_modes_and_links(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir(mode=0o750)
    (tmp_path / "sub" / "run.sh").write_text("true")
    (tmp_path / "sub" / "run.sh").chmod(0o711)
    (tmp_path / "link").symlink_to("sub/run.sh")
    found = unpack(pack(tmp_path, "tests"))
    assert found["tests/sub/run.sh"] == File(b"true", 0o711)
    assert found["tests/link"] == Link("sub/run.sh")
    assert found["tests/sub"] == Folder(0o750)


def test_the_later_archive_wins() -> None:
    assert unpack(merge(pack({"a": b"1", "b": b"1"}), b"", pack({"b": b"2"}))) == {"a": File(b"1"), "b": File(b"2")}


@pytest.mark.parametrize("path", ["/etc/passwd", "../up", "a/../../b", "a//b", "", "a/./b", "a\0b"])
def test_a_path_out_of_the_archive_is_refused(path: str) -> None:
    with pytest.raises(BadArchive, match="not allowed"):
        pack({path: b""})


@pytest.mark.parametrize("name", ["/etc/passwd", "../up", "a/../../b"])
def test_a_path_out_of_a_foreign_archive_is_refused(name: str) -> None:
    with pytest.raises(BadArchive, match="not allowed"):
        unpack(tar_of(member(name)))


@pytest.mark.parametrize("kind", [tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE])
def test_devices_pipes_and_hard_links_are_refused(kind: bytes) -> None:
    with pytest.raises(BadArchive, match="neither a plain file"):
        unpack(tar_of(member("x", kind, linkname="y")))


def test_a_file_below_a_link_is_refused() -> None:
    with pytest.raises(BadArchive, match="no folder of the archive"):
        unpack(tar_of(member("a", tarfile.SYMTYPE, linkname="/etc"), member("a/passwd")))


def test_setuid_is_dropped_from_a_foreign_archive_and_refused_in_ours() -> None:
    assert unpack(tar_of(member("x", mode=0o4755)))["x"] == File(b"", 0o755)
    with pytest.raises(BadArchive, match="setuid"):
        pack({"x": (b"", 0o4755)})


def test_an_archive_that_unpacks_to_too_much_is_refused() -> None:
    with pytest.raises(BadArchive, match="at most 10 are allowed"):
        unpack(pack({"x": b"0" * 11}), max_bytes=10)
    bomb = gzip.compress(bytes(64 * 2**20))
    with pytest.raises(BadArchive, match="unpacks to more than"):
        unpack(bomb, max_bytes=10)


@pytest.mark.parametrize(
    "data",
    [b"no tar", pack({"x": b"1" * 5000})[:-20], gzip.compress(b"no tar" * 200)],
    ids=["no archive", "cut", "no tar in it"],
)
def test_what_is_no_whole_archive_is_refused(data: bytes) -> None:
    with pytest.raises(BadArchive, match="no whole tar.gz"):
        unpack(data)


def test_no_bytes_are_no_files() -> None:
    assert unpack(b"") == {}
