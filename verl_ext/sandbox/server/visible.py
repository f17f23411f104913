"""List the machine's files that programs may read, and check that no folder that they must not see is among them."""

import os
import re
import sys
from collections.abc import Iterable

# Code, fonts and time zones; no configuration except what libc needs, no source, no home, no /var, /run, /opt. Only
# these parts of /usr and /usr/local: administrators keep repositories and data in the others.
SYSTEM = ["/bin", "/sbin", "/lib", "/lib32", "/lib64"]
SYSTEM += [f"{prefix}/{part}" for prefix in ("/usr", "/usr/local") for part in ("bin", "sbin", "lib", "lib32", "lib64")]
SYSTEM += [f"/usr/share/{name}" for name in ("zoneinfo", "fonts", "fontconfig")]
SYSTEM += [f"/etc/{name}" for name in ("ld.so.cache", "localtime", "alternatives", "mime.types", "fonts")]
# For programs in a box also what its tools read: git's templates, perl's modules, headers for a compiler.
SYSTEM_OF_BOXES = ["/usr/include", "/usr/libexec", "/etc/magic", "/etc/terminfo"]
SYSTEM_OF_BOXES += [f"/usr/share/{name}" for name in ("git-core", "perl", "perl5", "terminfo", "misc", "file", "awk")]
# Not Python's whole prefix: a pip.conf there may hold the token of a package index, and a repository may be a prefix.
PYTHON = ("bin", "lib", "lib64", "pyvenv.cfg")


def readable_paths(*, in_box: bool = False) -> list[str]:
    """Return the machine's files and folders that a program may read: the system's libraries and this interpreter's."""
    prefixes = {os.path.realpath(prefix) for prefix in (sys.prefix, sys.base_prefix)}
    prefixes |= {sys.prefix, sys.base_prefix}  # sys.path has them unresolved
    python = [f"{prefix}/{part}" for prefix in sorted(prefixes) for part in PYTHON]
    paths = SYSTEM + (SYSTEM_OF_BOXES if in_box else []) + python
    return [path for path in dict.fromkeys(paths) if os.path.exists(path)]


def find_exposed(hidden: Iterable[str]) -> tuple[str, str] | None:
    """Return the first folder of `hidden` that programs could read, and the readable path that shows it; or None.

    A folder shows if it is a readable path or below one: by its real path, or because it, a folder above it or one
    directly in it is mounted there. A readable path below a hidden folder, such as `.venv/lib` of a checkout, is fine.
    """
    readable = {path: os.path.realpath(path) for path in readable_paths(in_box=True)}
    mounts = [path for path in _mount_points() if any(_is_below(path, real) for real in readable.values())]
    mounted = {identity: path for path in mounts if (identity := _identity(path))}
    for folder in hidden:
        real = os.path.realpath(folder)
        for path, target in readable.items():
            if _is_below(real, target):
                return folder, path
        if mounted:
            related = [real]
            while related[-1] != "/":
                related.append(os.path.dirname(related[-1]))
            related = related[:-1]  # the root folder of the machine is every file system's
            if os.path.isdir(real):
                related += [entry.path for entry in os.scandir(real) if entry.is_dir(follow_symlinks=False)]
            for path in related:
                # a mount that a readable path itself is on shows nothing else
                identity = _identity(path)
                if identity and (there := mounted.get(identity)) and not _is_below(path, there):
                    return folder, there
    return None


def _is_below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def _identity(path: str) -> tuple[int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _mount_points() -> list[str]:
    try:
        with open("/proc/self/mountinfo", "rb") as file:
            # A space, a tab, a line end and a backslash are written as octal numbers.
            points = [re.sub(rb"\\(\d{3})", lambda found: bytes([int(found[1], 8)]), line.split()[4]) for line in file]
            return [os.fsdecode(point) for point in points]
    except OSError:
        return []
