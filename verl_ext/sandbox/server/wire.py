"""The messages between the server and a worker, for both ends; and memory that a worker's forks do not inherit.

Each program is a fork of its worker, and can search all memory of the worker, freed or not. So a worker makes no object
of a request's content, the names of the program's files, or the program's output: numbers are packed into `unshared`
memory, and text stays in memory files, for the program or for the kernel.

Request: a memory file with REQUEST; marshal of FOR_PROGRAM, in as many bytes as REQUEST says; and for each file to
fetch NAME, then as many bytes: the parts of its path, a NUL after each. The server seals the file's content. The worker
adds F_SEAL_SEAL, which nobody can undo, as soon as there is a program to blame.

A byte without a file, END_SESSION, asks for the end of the session's program; the answer is the same byte.

Answer: LENGTH and that much JSON, {"error": why, "lost": whether a program that ran may be the cause}; or LENGTH of 0,
RESULT, stdout, stderr, FETCHED for each file, and the files in order.
"""

import ctypes
import fcntl
import functools
import marshal
import mmap
import os
import re
import struct
from collections.abc import Iterable
from typing import Any

END_SESSION = b"\1"  # instead of a request
LENGTH = struct.Struct("<I")
# bytes for the program, run_timeout (s), memory_limit_MB (0: none), files to fetch, session
REQUEST = struct.Struct("<QdqI?")
NAME = struct.Struct("<H")
# timed out, return_code, execution_time (s), bytes of stdout kept and written, the same of stderr, alive, spent
RESULT = struct.Struct("<?id4Q??")
FETCHED = struct.Struct("<q")  # bytes of the file, or -errno: why it was left out
FOR_PROGRAM = ("code", "stdin", "files", "echo_last_expression")  # the keys of a request
STALL_S = 1.0  # a process that wakes later than this was stopped itself, for example with its container
SEALED = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW  # a session's program may still empty it


def pack_request(request: dict[str, Any], names: Iterable[str]) -> list[bytes]:
    """Return the parts of a memory file. The server has checked the names: relative, below the folder, not too long."""
    for_program = marshal.dumps({key: request[key] for key in FOR_PROGRAM})
    packed = []
    for name in names:
        path = b"".join(os.fsencode(part) + b"\0" for part in name.split("/") if part not in ("", "."))
        packed += [NAME.pack(len(path)), path]
    limits = request["run_timeout"], max(request["memory_limit_MB"], 0)
    return [REQUEST.pack(len(for_program), *limits, len(packed) // 2, request["session"]), for_program, *packed]


def unshared(num_bytes: int) -> mmap.mmap:
    """Return zeroed memory that forks of this process do not have."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_DONTFORK)
    return memory


def numbers_in(path: str, pattern: re.Pattern[bytes]) -> list[bytes]:
    """Return what the groups of a pattern match from the start of a file in /proc on; [] if it does not match.

    The rest of such a file can be a program's text, for example a process's name. Raises OSError.
    """
    memory = _scratch()
    with open(path, "rb", buffering=0) as file:
        size = file.readinto(memory)
    match = pattern.match(memory, 0, size)
    return list(match.groups()) if match else []


@functools.cache
def _scratch() -> mmap.mmap:
    return unshared(16384)


def address_of(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
