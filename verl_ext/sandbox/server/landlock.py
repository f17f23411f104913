"""Landlock: limits by path what a program may open, besides file permissions and mounts. It needs no capability.

From version 4 on it also denies TCP, from version 6 on signals and abstract sockets out of the program's own domain.
"""

import ctypes
import errno
import os
import struct
from collections.abc import Iterable

# include/uapi/linux/landlock.h
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446  # system calls, the same on every architecture
CREATE_RULESET_VERSION = 1
RULE_PATH_BENEATH = 1
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
MAKE_CHAR, MAKE_BLOCK = 1 << 6, 1 << 11
TRUNCATE = 1 << 14
ALL_BY_VERSION = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}  # REFER, TRUNCATE, IOCTL_DEV
TCP_BIND_AND_CONNECT = 3  # from version 4
ABSTRACT_SOCKETS_AND_SIGNALS = 3  # from version 6
ON_FILES = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE

libc = ctypes.CDLL(None, use_errno=True)


def version() -> int:
    """Return the version of the kernel's Landlock, from 1 on; raises OSError if there is none or it is switched off."""
    return _call(CREATE_RULESET, None, 0, CREATE_RULESET_VERSION)


def make_ruleset(
    *,
    readable: Iterable[str],
    writable: Iterable[str],
    devices: Iterable[str],
    execute: bool,
    listable: Iterable[str] = (),
) -> int:
    """Return the file descriptor of a ruleset that denies everything except what it names.

    Args:
        readable: files and folders, with all below.
        writable: folders in which files (but not devices) may also be written, made and removed.
        devices: files to read and write.
        execute: programs may be executed from `readable` and `writable`.
        listable: folders whose names may be listed, with those of all below.
    Raises:
        OSError: there is no Landlock, or a rule could not be added; the message names its path.
    """
    abi = version()
    handled = ALL_BY_VERSION[max(v for v in ALL_BY_VERSION if v <= abi)]
    attributes = [handled]
    if abi >= 4:
        attributes.append(TCP_BIND_AND_CONNECT)
    if abi >= 6:
        attributes.append(ABSTRACT_SOCKETS_AND_SIGNALS)
    packed = struct.pack(f"={len(attributes)}Q", *attributes)
    ruleset = _call(CREATE_RULESET, packed, len(packed), 0)
    read = READ_FILE | READ_DIR | (EXECUTE if execute else 0)
    write = (ALL_BY_VERSION[3] if execute else ALL_BY_VERSION[3] & ~EXECUTE) & ~(MAKE_CHAR | MAKE_BLOCK)
    try:
        on_devices = READ_FILE | WRITE_FILE | TRUNCATE
        for paths, access in ((readable, read), (writable, write), (devices, on_devices), (listable, READ_DIR)):
            for path in paths:
                _allow(ruleset, path, access & handled)
    except OSError:
        os.close(ruleset)
        raise
    return ruleset


def restrict_self(ruleset: int) -> None:
    """Put the calling thread, and all it starts, under a ruleset for good; needs no_new_privs. Raises OSError."""
    _call(RESTRICT_SELF, ruleset, 0)


def _allow(ruleset: int, path: str, access: int) -> None:
    """Add a rule; raises OSError even for a path that does not exist, because a missing rule must not go unnoticed."""
    try:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        try:
            if not os.path.isdir(path):
                access &= ON_FILES
            _call(ADD_RULE, ruleset, RULE_PATH_BENEATH, struct.pack("=Qi", access, fd), 0)
        finally:
            os.close(fd)
    except OSError as exc:
        raise OSError(exc.errno, f"no Landlock rule for {path}: {os.strerror(exc.errno or 0)}") from exc


def _call(number: int, *arguments: int | bytes | None) -> int:
    result = libc.syscall(number, *arguments)
    if result < 0:
        code = ctypes.get_errno()
        why = "Landlock is not in this kernel, or off" if code in (errno.ENOSYS, errno.EOPNOTSUPP) else "Landlock"
        raise OSError(code, f"{why}: {os.strerror(code)}")
    return result
