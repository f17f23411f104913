"""Import packages once, in the zygote, because a program would spend most of its time importing them.

Each is also used once, because much is imported, cached or built at first use.
"""

import contextlib
import ctypes
import importlib
import mmap
import multiprocessing.heap
import os
import selectors
import sys
import tempfile
from typing import Any

HUGE_PAGE = 2 << 20  # bytes, on x86_64 and on aarch64 with pages of 4 KiB
MADV_COLLAPSE, MAP_TYPE = 25, 0x0F  # linux/mman.h
CODE = {
    "numpy": """
import numpy.linalg, numpy.random
numpy.linalg.inv(numpy.eye(8) * 2) @ numpy.ones((8, 8))
numpy.linalg.eigvals(numpy.eye(4))
numpy.random.default_rng(0).normal(size=3)
str(numpy.arange(6.0).reshape(2, 3).sum(axis=0))
""",
    "sympy": """
from sympy import Eq, Rational, expand, factor, integrate, simplify, sin, solve, sqrt, symbols
x, y = symbols("x y")
factor(x**3 - 1), solve(x**2 - 2, x), solve([Eq(x + y, 3), Eq(x - y, 1)], [x, y]), integrate(x * sin(x), x)
expand((x + y) ** 3), str(simplify(sin(x) ** 2 + (1 - sin(x) ** 2))), sqrt(Rational(8, 9)).evalf()
""",
    "scipy": "import scipy.linalg, scipy.optimize, scipy.special, scipy.stats\nscipy.stats.norm.cdf(0.0)",
}


def preload(names: list[str]) -> None:
    """Import and use the packages of `names` that are installed; raises whatever an installed one raises."""
    for name in ("math", "random", *names):
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(name)
            exec(CODE.get(name, ""), {})


def unlock_sqlite() -> None:
    """Have SQLite lock no file by default, because locks are denied: nobody else uses the files of a program.

    This changes nothing if Python has no SQLite, or one that exposes no C functions.
    """
    with contextlib.suppress(ImportError, AttributeError, OSError):
        library = ctypes.CDLL(importlib.import_module("_sqlite3").__file__)
        library.sqlite3_vfs_find.restype = ctypes.c_void_p
        if lockless := library.sqlite3_vfs_find(b"unix-none"):
            library.sqlite3_vfs_register(ctypes.c_void_p(lockless), 1)


def do_without_epoll() -> None:
    """Have asyncio wait by poll(), because epoll is denied."""
    selectors.DefaultSelector = selectors.PollSelector


def do_without_statvfs() -> None:
    """Have multiprocessing share memory in the program's folder, because statvfs() of /dev/shm is denied."""
    multiprocessing.heap.Arena._dir_candidates = []  # pyright: ignore[reportAttributeAccessIssue]  # a private one


def count_shared_memory(*, between_processes: bool) -> None:
    """Have `mmap.mmap(-1, ...)` give memory that a limit counts, because shared memory without a file is denied."""
    CountedMemory.between_processes = between_processes
    mmap.mmap = CountedMemory


class CountedMemory(mmap.mmap):
    """A `mmap.mmap` that replaces shared memory without a file by other memory.

    If a program is one process, private memory makes no difference to it. Otherwise an unnamed file of its folder holds
    the memory, which is then limited as files are.
    """

    between_processes = False

    def __new__(
        cls,
        fileno: int,
        length: int,
        flags: int = mmap.MAP_SHARED,
        prot: int = mmap.PROT_READ | mmap.PROT_WRITE,
        access: int = mmap.ACCESS_DEFAULT,
        *args: Any,
        **options: Any,
    ) -> "CountedMemory":
        if fileno != -1 or flags & MAP_TYPE == mmap.MAP_PRIVATE or access == mmap.ACCESS_COPY:
            return super().__new__(cls, fileno, length, flags, prot, access, *args, **options)
        if cls.between_processes:
            flags &= ~mmap.MAP_ANONYMOUS
            with tempfile.TemporaryFile() as file:
                file.truncate(length)
                return super().__new__(cls, file.fileno(), length, flags, prot, access, *args, **options)
        if access == mmap.ACCESS_READ:
            prot = mmap.PROT_READ
        flags = flags & ~MAP_TYPE | mmap.MAP_PRIVATE
        return super().__new__(cls, fileno, length, flags, prot, mmap.ACCESS_DEFAULT, *args, **options)


def use_huge_pages() -> None:
    """Move this process's memory into pages of 2 MiB, if the kernel can (Linux 6.1) and /proc is not empty.

    A fork then copies 512 times fewer page table entries, which saves 1.5 ms of a request that takes 8. Pages that a
    fork of this process writes to are split in the fork, whose own forks then cost more again.
    """
    madvise = ctypes.CDLL(None).madvise
    try:
        with open("/proc/self/maps") as file:
            lines = [line.split() for line in file]
    except FileNotFoundError:  # in a worker whose own /proc was refused
        return
    for addresses, permissions, _, _, inode, *_ in lines:
        if permissions != "rw-p" or inode != "0":
            continue
        start, end = (int(address, 16) for address in addresses.split("-"))
        for huge in range(-(-start // HUGE_PAGE) * HUGE_PAGE, end - HUGE_PAGE + 1, HUGE_PAGE):
            # This fails for memory that is not in use, which does no harm.
            madvise(ctypes.c_void_p(huge), ctypes.c_size_t(HUGE_PAGE), MADV_COLLAPSE)


def renew() -> None:
    """Make new random states, in the worker before each fork, because no two programs may have the same.

    Also forget the temporary folder that was found elsewhere.
    """
    modules = sys.modules
    modules["random"].seed()
    if "numpy.random" in modules:
        modules["numpy"].random.seed(int.from_bytes(os.urandom(4)))  # as many bits as an int may have; 0.5 ms less
    if "sympy.core.random" in modules:
        modules["sympy.core.random"].rng.seed()
    if "tempfile" in modules:
        vars(modules["tempfile"]).update(tempdir=None, _name_sequence=None)
