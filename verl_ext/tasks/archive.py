"""Files as a tar.gz in memory: `pack` gives the same bytes for the same files, `unpack` refuses what no task may hold.

Paths are relative to the root of a box: `app/data.csv` becomes /app/data.csv. Nothing here touches a file system,
except that `pack` reads a folder if it is given one; a box unpacks by a confined process of its own.
"""

import gzip
import io
import os
import stat
import tarfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

MAX_BYTES = 64 * 2**20  # of all files of an archive together, with 512 to 1,023 for the name of each
MAX_FILES = 2**14
TIME = 946_684_800  # s, the start of 2000: a zip, such as Python's zipapp writes, holds no time before 1980
_OF_NAMES = 2 * tarfile.RECORDSIZE + 1024 * MAX_FILES  # what a tar may have besides the files' bytes


@dataclass(frozen=True)
class File:
    """A file; `mode` has its permissions, without setuid, setgid and sticky bit."""

    data: bytes
    mode: int = 0o644


@dataclass(frozen=True)
class Folder:
    """A folder that is to exist even if it is empty, or to have other permissions than 0o755."""

    mode: int = 0o755


@dataclass(frozen=True)
class Link:
    """A symbolic link."""

    target: str


Entry = File | Folder | Link
Files = Mapping[str, Entry | bytes | str | tuple[bytes | str, int]]


class BadArchive(ValueError):
    """An archive, or what it is to be made of, holds something that no box may get."""


def pack(files: Files | Path, prefix: str = "") -> bytes:
    """Return the files as a tar.gz, sorted by path and without owners and times, so that equal files give equal bytes.

    Args:
        files: path -> `File`, `Folder` or `Link`; bytes or text are a file of mode 0o644, and a pair of them and a mode
            a file of that mode. Or a folder, whose files are read with their permissions and its links as links.
        prefix: goes before each path, such as "tests".
    Raises:
        BadArchive: a path is absolute, has "." or "..", or goes through a file; or a folder holds a device, a socket or
            a pipe.
    """
    entries = _read(files) if isinstance(files, Path) else {path: _entry(each) for path, each in files.items()}
    entries = {f"{prefix}/{path}" if prefix else path: each for path, each in entries.items()}
    _check(entries)
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for path in sorted(entries):
            entry, info = entries[path], tarfile.TarInfo(path)
            info.mtime = TIME
            match entry:
                case File():
                    info.mode, info.size = entry.mode, len(entry.data)
                case Folder():
                    info.mode, info.type = entry.mode, tarfile.DIRTYPE
                case Link():
                    info.mode, info.type, info.linkname = 0o777, tarfile.SYMTYPE, entry.target
            tar.addfile(info, io.BytesIO(entry.data) if isinstance(entry, File) else None)
    return gzip.compress(raw.getvalue(), compresslevel=6, mtime=0)


def unpack(archive: bytes, *, max_bytes: int = MAX_BYTES) -> dict[str, Entry]:
    """Return path -> entry of a tar.gz; nothing for b"".

    Args:
        max_bytes: of all files together.
    Raises:
        BadArchive: it is none, is cut, holds more than `max_bytes` or MAX_FILES, or something that is neither a file,
            a folder nor a symbolic link; or a path is as `pack` refuses it.
    """
    if not archive:
        return {}
    entries: dict[str, Entry] = {}
    try:
        with tarfile.open(fileobj=io.BytesIO(_inflated(archive, max_bytes + _OF_NAMES)), mode="r:") as tar:
            for info in tar:
                path = info.name.removeprefix("./").rstrip("/")
                if path in ("", "."):
                    continue
                if info.isreg() and not info.sparse and (file := tar.extractfile(info)):
                    entries[path] = File(file.read(), info.mode & 0o777)
                elif info.isdir():
                    entries[path] = Folder(info.mode & 0o777)
                elif info.issym():
                    entries[path] = Link(info.linkname)
                else:
                    raise BadArchive(f"{path!r} is neither a plain file, a folder nor a symbolic link. Leave it out.")
                if len(entries) > MAX_FILES:
                    raise BadArchive(f"An archive holds more than {MAX_FILES:,} files. Use fewer.")
    except (tarfile.TarError, zlib.error, EOFError, UnicodeError) as error:
        raise BadArchive(f"{len(archive):,} bytes are no whole tar.gz: {error}.") from error
    if (size := sum(len(each.data) for each in entries.values() if isinstance(each, File))) > max_bytes:
        raise BadArchive(f"The files of an archive have {size:,} bytes; at most {max_bytes:,} are allowed.")
    _check(entries)
    return entries


def merge(*archives: bytes) -> bytes:
    """Return the files of several archives as one; of a path that several have, the last one's.

    Raises:
        BadArchive: as `unpack`, or a file of one is a folder of another.
    """
    entries: dict[str, Entry] = {}
    for each in archives:
        entries |= unpack(each)
    return pack(entries)


def _entry(value: Entry | bytes | str | tuple[bytes | str, int]) -> Entry:
    if isinstance(value, Entry):
        return value
    data, mode = value if isinstance(value, tuple) else (value, 0o644)
    return File(data.encode() if isinstance(data, str) else data, mode)


def _read(folder: Path) -> dict[str, Entry]:
    entries: dict[str, Entry] = {}
    for path in sorted(folder.rglob("*")):  # which follows no link
        mode = path.lstat().st_mode
        name = path.relative_to(folder).as_posix()
        if stat.S_ISLNK(mode):
            entries[name] = Link(os.readlink(path))
        elif stat.S_ISDIR(mode):
            entries[name] = Folder(stat.S_IMODE(mode) & 0o777)
        elif stat.S_ISREG(mode):
            entries[name] = File(path.read_bytes(), stat.S_IMODE(mode) & 0o777)
        else:
            raise BadArchive(f"{path} is neither a plain file, a folder nor a symbolic link. Leave it out.")
    return entries


def _check(entries: Mapping[str, Entry]) -> None:
    for path, entry in entries.items():
        parts = path.split("/")
        if not path or "\0" in path or set(parts) & {"", ".", ".."}:
            raise BadArchive(f"The path {path!r} of an archive is not allowed; expected one such as 'app/data.csv'.")
        if not isinstance(entry, Link) and not 0 <= entry.mode <= 0o777:
            raise BadArchive(f"The mode of {path!r} is {entry.mode:#o}; expected 0 to 0o777, without setuid.")
        for depth in range(1, len(parts)):
            above = "/".join(parts[:depth])
            if not isinstance(entries.get(above, Folder()), Folder):
                raise BadArchive(f"{path!r} is below {above!r}, which is no folder of the archive.")


def _inflated(archive: bytes, limit: int) -> bytes:
    stream = zlib.decompressobj(wbits=31)
    raw = stream.decompress(archive, limit)
    if not stream.eof and stream.unconsumed_tail:
        raise BadArchive(f"An archive unpacks to more than {limit:,} bytes. Use fewer or smaller files.")
    if not stream.eof:
        raise EOFError("it is cut")
    return raw
