"""Find out whether a full disk made something fail, and report the folder, its free space and how to free more."""

import errno
import os
import re
import shlex
import shutil
from collections.abc import Iterable
from pathlib import Path

from verl_ext.checkpoints.folder import SAVING
from verl_ext.checkpoints.manifest import MANIFEST

FULL = (errno.ENOSPC, errno.EDQUOT)
NEARLY_FULL_BYTES = 4 * 2**20  # less than any checkpoint here; a file that did not fit is often deleted half written
SIGNS = re.compile(r"No space left on device|Disk quota exceeded|\bENOSPC\b|\bEDQUOT\b|\b[Ee]rrno 28\b|\bos error 28\b")
NAMED = re.compile(r"(?:No space left on device|Disk quota exceeded)[^'\"\n]*: ['\"](/[^'\"\n]+)['\"]")


def is_full(folder: Path) -> bool:
    """Return whether almost nothing can be written there: no bytes or no inodes are left for this user."""
    seen = os.statvfs(_existing(folder))
    if seen.f_blocks == 0:  # no disk: /proc and the like
        return False
    return seen.f_bavail * seen.f_frsize < NEARLY_FULL_BYTES or (seen.f_files > 0 and seen.f_favail == 0)


def full_folder(candidates: Iterable[Path], output: str = "") -> Path | None:
    """Return the folder whose disk was full when a command failed; None if no disk was.

    Args:
        candidates: folders that the command writes to.
        output: the command's output. It counts even if the command has since freed the space.
    """
    folders = list(candidates)
    if SIGNS.search(output):
        if named := NAMED.findall(output):
            return _existing(Path(named[-1]).parent)
        return min(folders, key=lambda folder: os.statvfs(_existing(folder)).f_bavail, default=None)
    return next((folder for folder in folders if is_full(folder)), None)


def describe(folder: Path) -> str:
    """Return a message that the folder's disk is full: how much is free and which commands free some."""
    there = _existing(folder)
    mount = there.resolve()
    while not os.path.ismount(mount):
        mount = mount.parent
    usage, inodes = shutil.disk_usage(there), os.statvfs(there)
    free = f"{_size(usage.free)} of {_size(usage.total)} are free"
    if inodes.f_files > 0 and inodes.f_favail == 0:
        free += f", but none of its {inodes.f_files:,} inodes (files)"
    lines = [f"The disk is full: {there} (on {mount}), {free}."]
    if (saving := there / SAVING).is_dir() and not any(saving.rglob(MANIFEST)):
        size = sum(path.stat().st_size for path in saving.rglob("*") if path.is_file())
        lines.append(f"`rm -r {shlex.quote(str(saving))}` frees {_size(size)} of an interrupted checkpoint.")
    lines.append(
        f"`du -xh --max-depth=2 {shlex.quote(str(mount))} | sort -h | tail` lists the largest folders there. "
        "Delete what you do not need."
    )
    return " ".join(lines)


def _existing(path: Path) -> Path:
    while not path.exists():
        path = path.parent
    return path


def _size(number: int) -> str:
    return f"{number / 1e9:,.1f} GB" if number >= 1e8 else f"{number / 1e6:,.1f} MB"
