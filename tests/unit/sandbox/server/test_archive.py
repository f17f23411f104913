"""Archives go into a folder and come out of it: here a temporary one, in the place of a box's root."""

import gzip
import io
import os
import tarfile
from pathlib import Path

import pytest

from tests.unit.sandbox.boxes import packed, unpacked
from verl_ext.sandbox.server.archive import (
    MAX_NAMED,
    MAX_TIME,
    ArchiveError,
    Pack,
    find_planted,
    leads_inside,
    unpack,
)

FOLDERS = ("/app", "/tests")


@pytest.fixture
def root(tmp_path) -> Path:
    for folder in FOLDERS:
        (tmp_path / folder[1:]).mkdir()
    return tmp_path


def header(name: str, kind: bytes, **fields: object) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type = kind
    for field, value in fields.items():
        setattr(info, field, value)
    return info


def put(root: Path, files: dict) -> list[str]:
    return unpack(io.BytesIO(packed(files)), str(root), FOLDERS)


def test_files_folders_and_links_arrive_with_their_modes(root):
    program = header("app/run", tarfile.REGTYPE, mode=0o6751)
    folder = header("app/d", tarfile.DIRTYPE, mode=0o500)
    link = header("app/d/l", tarfile.SYMTYPE, linkname="../a")
    hard = header("app/h", tarfile.LNKTYPE, linkname="app/a")
    names = put(root, {"./app/a": "1", "run": program, "d": folder, "l": link, "h": hard, "tests/x/y": "2"})
    assert names == ["/app/a", "/app/run", "/app/d", "/app/d/l", "/app/h", "/tests/x/y"]
    assert (root / "app/run").stat().st_mode & 0o7777 == 0o751
    assert (root / "app/d").stat().st_mode & 0o777 == 0o500
    assert os.readlink(root / "app/d/l") == "../a" and (root / "app/h").read_text() == "1"
    assert (root / "tests/x/y").read_text() == "2"


@pytest.mark.parametrize("time", [str(2**63), "inf", "-1"])
def test_a_time_that_no_disk_keeps_is_replaced(root, time):
    names = put(root, {"a": header("app/a", tarfile.REGTYPE, pax_headers={"mtime": time})})
    assert names == ["/app/a"] and 0 <= (root / "app/a").stat().st_mtime <= MAX_TIME


@pytest.mark.parametrize(
    ("files", "why"),
    [
        ({"/app/a": "x"}, "relative"),
        ({"app/../../a": "x"}, r"'\.\.'"),
        ({"etc/a": "x"}, "below /app"),
        ({"apple": "x"}, "below /app"),
        ({"/".join(["app", *"d" * 99]): "x"}, "at most 64 names"),
        ({"l": header("app/l", tarfile.SYMTYPE, linkname="/etc/passwd")}, "may not point to /etc/passwd"),
        ({"l": header("app/l", tarfile.SYMTYPE, linkname="../etc/passwd")}, "may not point to"),
        ({"h": header("app/h", tarfile.LNKTYPE, linkname="etc/passwd")}, "below /app"),
        ({"h": header("app/h", tarfile.LNKTYPE, linkname="app/nothing")}, "No such file"),
        ({"p": header("app/p", tarfile.FIFOTYPE)}, "expected a file"),
        ({"c": header("app/c", tarfile.CHRTYPE, devmajor=1, devminor=3)}, "expected a file"),
        ({"l": header("app/l", tarfile.SYMTYPE, linkname="/tests"), "app/l/test.sh": "x"}, "could not be unpacked"),
        ({"app/a": "x", "app/a/b": "y"}, "could not be unpacked"),
    ],
)
def test_what_leads_out_or_is_no_file_is_refused(root, files, why):
    with pytest.raises(ArchiveError, match=why):
        put(root, files)
    assert not (root / "tests/test.sh").exists()


def test_what_is_no_archive_is_refused(root):
    name = header("x", tarfile.GNUTYPE_LONGNAME, size=1).tobuf(tarfile.GNU_FORMAT) + bytes(512)  # of what follows
    for content in (b"", b"no archive", packed({"app/a": b"x" * 9999})[:-50], gzip.compress(name * 5000)):
        with pytest.raises(ArchiveError, match=r"tar\.gz"):
            unpack(io.BytesIO(content), str(root), FOLDERS)


@pytest.mark.parametrize(
    ("path", "target", "expected"),
    [
        ("/app/l", "a", True),
        ("/app/l", "/app/a/b", True),
        ("/app/l", "/app", True),
        ("/app/d/l", "../a", True),
        ("/app/l", "./d//a", True),
        ("/app/l", "/apple", False),
        ("/app/l", "../tests/x", False),
        ("/app/l", "d/../../tests/x", False),
        ("/app/l", "d/../a", False),  # d may be a link
        ("/app/l", "../../../app/a", False),  # above the root
        ("/app/l", "/app/../tests", False),
        ("/app/l", "/../app", False),
        ("/app/l", "", False),
        ("/app/l", "/", False),
    ],
)
def test_link_leads_inside_whatever_is_on_its_way(path, target, expected):
    assert leads_inside(path, target, ["/app"]) is expected


def pack(root: Path, paths: list[str], max_bytes: int = 1 << 20) -> tuple[Pack, dict]:
    file = io.BytesIO()
    packed = Pack(file, str(root), max_bytes=max_bytes)
    packed.pack(paths)
    return packed, unpacked(file.getvalue())


def test_declared_paths_are_packed_once_and_others_are_not(root):
    put(root, {"app/a": "1", "app/d/b": "2", "tests/t": "3"})
    report, files = pack(root, ["/app/d/b", "/app/d", "/app/a", "/app/none", "/tests/t/x"])
    assert files == {"app/a": b"1", "app/d": None, "app/d/b": b"2"}
    assert list(report.dropped) == ["/tests/t/x"]  # not what is not there


def test_limit_counts_contents_and_headers_together(root):
    """512 of a header and 6 of the path /app/a: two files of 1000 bytes take 3036."""
    put(root, {"app/a": b"x" * 1000, "app/b": b"x" * 1000})
    assert pack(root, ["/app/a", "/app/b"], 3036)[0].dropped == {}
    report, files = pack(root, ["/app/a", "/app/b"], 3035)
    assert list(files) == ["app/a"] and "3035 bytes" in report.dropped["/app/b"]


def test_report_names_a_limited_number_of_what_is_dropped(root):
    for i in range(MAX_NAMED + 20):
        os.mkfifo(root / f"app/{i}")
    report, _ = pack(root, ["/app"])
    assert len(report.dropped) == MAX_NAMED + 1 and report.dropped["..."] == "20 more"


def test_planted_are_the_topmost_paths_that_did_not_come_with_the_archive(root):
    own = put(root, {"tests/a": "1", "tests/d/e/b": "2"})
    (root / "tests/d/e/new").write_text("x")
    (root / "tests/new/deep").mkdir(parents=True)
    (root / "tests/link").symlink_to("/")
    assert find_planted(str(root), ["/tests", "/nowhere"], own) == ["/tests/link", "/tests/new", "/tests/d/e/new"]
