"""Unpack an archive into a box, and pack what a box's programs left; both in a process of ours (box.py).

Nothing here follows a symbolic link, runs a program of the box or trusts a name in it. Of a file its mode counts, but
no owner and no setuid. A link may point only to where files of the same archive may be. What a box may not receive is
refused; what it may not give away is dropped, and named with the reason.
"""

import errno
import gzip
import os
import stat
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from typing import BinaryIO

from .folders import OPEN_FILE, OPEN_FOLDER

NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
MAX_DEPTH = 64  # folders in folders
MAX_PATH_BYTES = 3500  # PATH_MAX of Linux, less what is above the folder
MAX_NAMED = 100  # dropped or planted paths in a report
COPY_BYTES = 1 << 18
HEADER_BYTES = 512  # of an entry in an archive
MAX_TIME = 1 << 33  # of a file, in seconds since 1970
KINDS = {stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}


class ArchiveError(Exception):
    """The archive may not be unpacked here; the message says why."""


def unpack(file: BinaryIO, root: str, folders: Sequence[str]) -> list[str]:
    """Unpack a tar.gz below `root`; return the paths of its files, links and folders.

    Args:
        folders: absolute paths below `root` that exist; only into these.
    Raises:
        ArchiveError: see there.
    """
    top = os.open(root, OPEN_FOLDER)
    names, modes = [], {}
    try:
        with tarfile.open(fileobj=file, mode="r|gz") as archive:
            for member in archive:
                parts = _parts_of(member.name)
                path = "/" + "/".join(parts)
                if member.isdir() and any(f"{folder}/".startswith(path.rstrip("/") + "/") for folder in folders):
                    continue
                _check_inside(path, folders, path)
                names.append(path)
                if member.isdir():
                    os.close(_folder(top, parts))
                    modes[path] = member.mode
                else:
                    _make(top, parts, member, archive, folders)
        for path, mode in sorted(modes.items(), reverse=True):  # at last: a folder may not let even its owner write
            os.chmod(path.lstrip("/"), mode & 0o777, dir_fd=top)
    except (tarfile.TarError, EOFError, UnicodeError, ValueError, OverflowError, RecursionError) as exc:
        raise ArchiveError(f"expected a tar.gz: {exc}") from exc
    except MemoryError:
        raise ArchiveError("expected a tar.gz: a header in it is too large") from None
    except OSError as exc:
        if exc.errno in (errno.ENOSPC, errno.EFBIG):
            raise ArchiveError("its files are more or larger than the box's disk limit allows") from exc
        raise ArchiveError(f"could not be unpacked: {exc.strerror or exc}") from exc  # its names contradict each other
    finally:
        os.close(top)
    return names


def _parts_of(name: str) -> list[str]:
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if name.startswith("/") or ".." in parts or "\0" in name:
        raise ArchiveError(f"{_shown(name)}: expected a path relative to /, without '..'")
    if len(parts) > MAX_DEPTH or len(os.fsencode(name)) > MAX_PATH_BYTES:
        raise ArchiveError(f"{_shown(name)}: expected at most {MAX_DEPTH} names in a path of {MAX_PATH_BYTES} bytes")
    return parts


def _check_inside(path: str, folders: Sequence[str], named: str) -> None:
    if not is_inside(path, folders):
        raise ArchiveError(f"{_shown(named)}: expected a path below {', '.join(folders)}")


def _make(
    top: int, parts: list[str], member: tarfile.TarInfo, archive: tarfile.TarFile, folders: Sequence[str]
) -> None:
    """Make one file or link, in the place of one with the same name."""
    path = "/" + "/".join(parts)
    parent = _folder(top, parts[:-1])
    try:
        try:
            os.unlink(parts[-1], dir_fd=parent)
        except FileNotFoundError:
            pass
        if member.issym():
            if not leads_inside(path, member.linkname, folders):
                raise ArchiveError(f"{_shown(path)}: a link may not point to {_shown(member.linkname)}")
            os.symlink(member.linkname, parts[-1], dir_fd=parent)
        elif member.islnk():
            linked = _parts_of(member.linkname)
            _check_inside("/" + "/".join(linked), folders, path)
            source = _folder(top, linked[:-1])
            try:
                os.link(linked[-1], parts[-1], src_dir_fd=source, dst_dir_fd=parent, follow_symlinks=False)
            finally:
                os.close(source)
        elif member.isreg() and not member.issparse() and (content := archive.extractfile(member)):
            with open(os.open(parts[-1], NEW_FILE, 0o600, dir_fd=parent), "wb") as file:
                while chunk := content.read(COPY_BYTES):
                    file.write(chunk)
                os.fchmod(file.fileno(), member.mode & 0o777)
                file.flush()
                time = min(max(member.mtime, 0), MAX_TIME)
                os.utime(file.fileno(), (time, time))
        else:
            raise ArchiveError(f"{_shown(path)}: expected a file, a folder or a link")
    finally:
        os.close(parent)


def _folder(top: int, parts: Iterable[str]) -> int:
    """Open a folder below `top`, made if necessary. Raises OSError, also if a part of the path is a link."""
    folder = os.dup(top)
    for part in parts:
        try:
            try:
                below = os.open(part, OPEN_FOLDER, dir_fd=folder)
            except FileNotFoundError:
                os.mkdir(part, 0o755, dir_fd=folder)
                below = os.open(part, OPEN_FOLDER, dir_fd=folder)
        finally:
            os.close(folder)
        folder = below
    return folder


def is_inside(path: str, folders: Iterable[str]) -> bool:
    return any(path == folder or path.startswith(f"{folder}/") for folder in folders)


def leads_inside(path: str, target: str, folders: Iterable[str]) -> bool:
    """Return whether a link at `path` points into `folders`, whatever other such links are on the way.

    So '..' may only stand in front: after another name, which could be a link, it leads anywhere.
    """
    parts = [part for part in target.split("/") if part not in ("", ".")]
    ups = next((i for i, part in enumerate(parts) if part != ".."), len(parts))
    if ".." in parts[ups:] or not target or "\0" in target or (ups and target.startswith("/")):
        return False
    base = [] if target.startswith("/") else path.split("/")[1:-1]
    if ups > len(base):
        return False
    return is_inside("/" + "/".join(base[: len(base) - ups] + parts[ups:]), folders)


class Pack:
    """Packs declared paths below `root` into a tar.gz.

    Args:
        max_bytes: of all contents and headers together; a file that would exceed it is dropped.
    """

    def __init__(self, file: BinaryIO, root: str, *, max_bytes: int) -> None:
        self._file, self._root, self._left, self._max_bytes = file, root, max_bytes, max_bytes
        self._paths: list[str] = []
        self.dropped: dict[str, str] = {}
        self._more = 0  # dropped, but not named

    def pack(self, paths: Iterable[str]) -> None:
        """Pack these paths, absolute below `root`, with all below. A path that does not exist is not in `dropped`."""
        self._paths = sorted(set(paths))
        self._paths = [path for path in self._paths if not is_inside(os.path.dirname(path), self._paths)]
        with (
            gzip.GzipFile(fileobj=self._file, mode="wb", compresslevel=6, mtime=0) as packed,
            tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive,
        ):
            top = os.open(self._root, OPEN_FOLDER)
            try:
                for path in self._paths:
                    self._pack_declared(archive, top, path)
            finally:
                os.close(top)
        if self._more:
            self.dropped["..."] = f"{self._more} more"

    def _pack_declared(self, archive: tarfile.TarFile, top: int, path: str) -> None:
        *above, name = path.strip("/").split("/")
        folder = os.dup(top)
        try:
            for part in above:
                below = self._open(folder, part, OPEN_FOLDER)
                os.close(folder)
                folder = below
            os.lstat(name, dir_fd=folder)
        except FileNotFoundError:
            pass
        except OSError:
            self._drop(path, "a folder above it is a link or a file")
        else:
            self._pack(archive, folder, name, path, 0)
        finally:
            os.close(folder)

    def _pack(self, archive: tarfile.TarFile, folder: int, name: str, path: str, depth: int) -> None:
        status = os.lstat(name, dir_fd=folder)
        info = tarfile.TarInfo(path.lstrip("/"))
        info.mode, info.mtime = stat.S_IMODE(status.st_mode) & 0o777, max(int(status.st_mtime), 0)
        size = HEADER_BYTES + len(os.fsencode(path)) + (status.st_size if not stat.S_ISDIR(status.st_mode) else 0)
        if path.count("/") > MAX_DEPTH or len(os.fsencode(path)) > MAX_PATH_BYTES:
            self._drop(path, f"more than {MAX_DEPTH} names, or a path of more than {MAX_PATH_BYTES} bytes")
        elif depth and status.st_dev != os.fstat(folder).st_dev:
            self._drop(path, "not of the box")
        elif size > self._left:
            self._drop(path, f"over the limit of {self._max_bytes} bytes for all artifacts")
        elif stat.S_ISLNK(status.st_mode):
            info.type, info.linkname = tarfile.SYMTYPE, os.readlink(name, dir_fd=folder)
            if leads_inside(path, info.linkname, self._paths):
                self._left -= size
                archive.addfile(info)
            else:
                self._drop(path, "a link that leaves the artifacts")
        elif stat.S_ISDIR(status.st_mode):
            self._left -= size
            info.type = tarfile.DIRTYPE
            archive.addfile(info)
            below = self._open(folder, name, OPEN_FOLDER)
            try:
                for entry in sorted(os.listdir(below)):
                    self._pack(archive, below, entry, f"{path}/{entry}", depth + 1)
            finally:
                os.close(below)
        elif stat.S_ISREG(status.st_mode):
            self._left -= size
            info.size = status.st_size
            with open(self._open(folder, name, OPEN_FILE), "rb") as file:
                archive.addfile(info, file)
        else:
            self._drop(path, f"{KINDS.get(stat.S_IFMT(status.st_mode), 'no file')}, not a file")

    def _open(self, folder: int, name: str, flags: int) -> int:
        """Open what is below a folder; unlock it if its owner may not read it, or enter it. Raises OSError."""
        try:
            opened = os.open(name, flags, dir_fd=folder)
            if flags & os.O_DIRECTORY and not os.fstat(opened).st_mode & stat.S_IXUSR:
                os.fchmod(opened, 0o700)
            return opened
        except PermissionError:
            found = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
            try:
                os.chmod(f"/proc/self/fd/{found}", 0o700)
            finally:
                os.close(found)
            return os.open(name, flags, dir_fd=folder)

    def _drop(self, path: str, why: str) -> None:
        if len(self.dropped) < MAX_NAMED:
            self.dropped[_shown(path)] = why
        else:
            self._more += 1


def find_planted(root: str, folders: Iterable[str], known: Iterable[str]) -> list[str]:
    """Return paths below `folders` that are not `known`, at most MAX_NAMED; of a folder only itself."""
    own = set(known)
    return [_shown(path) for path, _ in zip(_planted(root, folders, own), range(MAX_NAMED), strict=False)]


def _planted(root: str, folders: Iterable[str], own: set[str]) -> Iterator[str]:
    waiting = list(folders)
    above = {"/".join(parts[:i]) for parts in (path.split("/") for path in own) for i in range(2, len(parts))}
    while waiting:
        folder = waiting.pop(0)
        try:
            entries = sorted(os.scandir(root.rstrip("/") + folder), key=lambda entry: entry.name)
        except OSError:  # not a folder, or locked: then what is in it cannot be told
            continue
        for entry in entries:
            path = f"{folder}/{entry.name}"
            if path not in own and path not in above:
                yield path
            elif entry.is_dir(follow_symlinks=False):
                waiting.append(path)


def _shown(path: str) -> str:
    """Return a path as text for a message: no surrogates, and not too long."""
    text = os.fsencode(path).decode("utf-8", "replace")
    return text if len(text) <= 200 else f"{text[:200]}..."
