"""The filter for programs, if it allows or denies a call by its arguments; see also test_isolation.py."""

import pytest

from tests.unit.sandbox.server.test_isolation import ALLOWED, EPERM, evaluate, needs_x86_64
from verl_ext.sandbox.server import seccomp

EOPNOTSUPP = 0x0005005F


@needs_x86_64
@pytest.mark.parametrize(
    ("call", "without", "with_subprocess", "why"),
    [
        ((56, 0x7D0F00), ALLOWED, ALLOWED, "clone of a thread as musl does it"),
        ((56, 0x50F00), ALLOWED, ALLOWED, "clone of a thread as Go does it"),
        ((56, 0x3D0F00 & ~0x400), EPERM, EPERM, "clone of a thread with files of its own"),
        ((56, 0x3D0F00 & ~0x200), EPERM, ALLOWED, "clone of a thread with a folder of its own"),
        ((56, 0x3D0F00 & ~0x40000), EPERM, ALLOWED, "clone of a thread with semaphores of its own"),
        ((56, 0x411), EPERM, ALLOWED, "clone of a process that shares files"),
        ((436, 3, 9, 0), ALLOWED, ALLOWED, "close_range"),
        ((436, 3, 9, 4), ALLOWED, ALLOWED, "close_range, at an exec"),
        ((436, 3, 9, 2), EPERM, EPERM, "close_range in a table of its own"),
        ((436, 3, 9, 6), EPERM, EPERM, "both"),
        ((9, 0, 9, 3, 0x22), ALLOWED, ALLOWED, "mmap, private"),
        ((9, 0, 9, 3, 0x20022), ALLOWED, ALLOWED, "mmap of a stack"),
        ((9, 0, 9, 3, 0x01, 3), ALLOWED, ALLOWED, "mmap of a file, shared"),
        ((9, 0, 9, 3, 0x02, 3), ALLOWED, ALLOWED, "mmap of a file, private"),
        ((9, 0, 9, 3, 0x21), EPERM, EPERM, "mmap, shared"),
        ((9, 0, 9, 3, 0x8021), EPERM, EPERM, "mmap, shared, filled"),
        ((9, 0, 9, 3, 0x23), EPERM, EPERM, "mmap, shared, checked"),
        ((9, 0, 9, 3, 0x40021), EPERM, EPERM, "mmap, shared, huge"),
        ((285, 3, 1), ALLOWED, ALLOWED, "fallocate: the size of its file system bounds it"),
        ((213, 1), EPERM, EPERM, "epoll_create"),
        ((291, 0), EPERM, EPERM, "epoll_create1"),
        ((40, 1, 3), EPERM, EPERM, "sendfile"),
        ((275, 1), EPERM, EPERM, "splice"),
        ((276, 1), EPERM, EPERM, "tee"),
        ((278, 1), EPERM, EPERM, "vmsplice"),
        ((326, 1), ALLOWED, ALLOWED, "copy_file_range, which copies"),
    ],
)
def test_filter_allows_no_memory_that_nothing_counts(call, without, with_subprocess, why):
    assert evaluate(seccomp.assemble(allow_subprocess=False), *call) == without, why
    assert evaluate(seccomp.assemble(allow_subprocess=True), *call) == with_subprocess, why


@needs_x86_64
@pytest.mark.parametrize(
    ("number", "position", "allowed", "refused"),
    [
        # F_SETLK, F_SETOWN, F_SETSIG, F_SETOWN_EX, F_SETLEASE, F_NOTIFY, F_SETPIPE_SZ, F_ADD_SEALS, F_SET_RW_HINT
        (72, 1, seccomp.OF_FILES, (5, 6, 7, 8, 10, 15, 36, 37, 38, 1024, 1026, 1031, 1033, 1036)),
        # SIOCGIFCONF, SIOCGIFADDR, SIOCGIFHWADDR, SIOCGIFNAME, SIOCETHTOOL, SIOCGARP, FIOSETOWN, SIOCSPGRP, TIOCSTI,
        # TIOCLINUX, FIEMAP, FIBMAP, FIGETBSZ, FS_IOC_GETFLAGS, FS_IOC_SETFLAGS, FS_IOC_FSGETXATTR, FS_IOC_FSSETXATTR,
        # FS_IOC_GETFSUUID, FICLONE, FIFREEZE, FITRIM, FIOASYNC, UNIX's SIOCUNIXFILE
        (16, 1, seccomp.OF_DEVICES, (0x8912, 0x8915, 0x8927, 0x8910, 0x8946, 0x8954, 0x8901, 0x8902, 0x5412, 0x541C)),
        (16, 1, {}, (0xC020660B, 1, 2, 0x80086601, 0x40086602, 0x801C581F, 0x401C5820, 0x80111500, 0x40049409)),
        (16, 1, {}, (0xC0045877, 0xC0185879, 0x5452, 0x89E0)),
        # PR_SET_DUMPABLE, PR_SET_KEEPCAPS, PR_SET_SECCOMP, PR_SET_MM, PR_SET_PTRACER, PR_SET_THP_DISABLE,
        # PR_SET_MEMORY_MERGE, PR_SCHED_CORE, PR_FUTEX_HASH, PR_SET_VMA
        (157, 0, seccomp.OF_PROCESSES, (4, 8, 22, 35, 0x59616D61, 41, 67, 62, 78, 0x53564D41)),
    ],
)
def test_filter_allows_of_the_calls_that_stand_for_many_only_what_it_lists(number, position, allowed, refused):
    for allow_subprocess in (False, True):
        program = seccomp.assemble(allow_subprocess=allow_subprocess)
        for expected, values in ((ALLOWED, allowed.values() if allowed else ()), (EPERM, refused)):
            for value in values:
                for upper_half in (0, 0xFFFFFFFF << 32):  # the kernel ignores it
                    arguments = [3] * position + [value | upper_half]
                    assert evaluate(program, number, *arguments) == expected, (number, value)


@needs_x86_64
def test_filter_allows_only_listed_options_of_sockets():
    program = seccomp.assemble(allow_subprocess=False)
    for option in range(100):
        for number, listed in ((54, seccomp.SET_OF_SOCKETS), (55, seccomp.GET_OF_SOCKETS)):
            expected = ALLOWED if option in listed.values() else EPERM
            assert evaluate(program, number, 3, 1, option) == expected, option
            for level in (0, 6, 41, 270):  # IP, TCP, IPv6, netlink
                assert evaluate(program, number, 3, level, option) == EPERM
    assert not {7, 8, 26, 32, 33, 50, 73} & set(seccomp.SET_OF_SOCKETS.values())


@needs_x86_64
def test_filter_lets_what_a_program_starts_die_with_it():
    """Where it may start something: PR_SET_PDEATHSIG."""
    assert evaluate(seccomp.assemble(allow_subprocess=True), 157, 1, 15) == ALLOWED
    assert evaluate(seccomp.assemble(allow_subprocess=False), 157, 1, 9) == EPERM


@needs_x86_64
def test_filter_lets_no_program_take_space_of_a_disk_at_once():
    """With EOPNOTSUPP, libc writes zeros instead, up to the limits of a file and of the disk."""
    for mode in (0, 1, 3, 0x10):
        assert evaluate(seccomp.assemble(allow_subprocess=False, on_disk=True), 285, 3, mode) == EOPNOTSUPP


@needs_x86_64
@pytest.mark.parametrize(
    ("call", "program", "in_box", "why"),
    [
        ((73, 3, 2), EPERM, ALLOWED, "flock"),
        *(((72, 3, number), EPERM, ALLOWED, f"fcntl {number}, of locks") for number in (5, 6, 7, 36, 37, 38)),
        ((72, 3, 1024), EPERM, EPERM, "F_SETLEASE"),
        ((72, 3, 1031), EPERM, EPERM, "F_SETPIPE_SZ"),
        ((444, 0, 0, 0x61676E74), EPERM, ALLOWED, "the call by which as-agent asks"),
        ((444, 0, 0, 0), EPERM, EPERM, "landlock_create_ruleset"),
        ((444, 0, 0, 1), EPERM, EPERM, "its version"),
        ((445, 3, 1), EPERM, EPERM, "landlock_add_rule"),
        ((446, 3, 0), EPERM, EPERM, "landlock_restrict_self"),
        ((317, 1, 8), EPERM, EPERM, "seccomp"),
        ((157, 22, 2), EPERM, EPERM, "prctl(PR_SET_SECCOMP)"),
        ((291, 0), EPERM, EPERM, "epoll_create1"),
        ((137, 0), EPERM, EPERM, "statfs"),
        ((308, 3, 0), EPERM, EPERM, "setns"),
    ],
)
def test_filter_of_a_box_allows_locks_and_one_call_more(call, program, in_box, why):
    assert evaluate(seccomp.assemble(allow_subprocess=True), *call) == program, why
    assert evaluate(seccomp.assemble(allow_subprocess=True, in_box=True), *call) == in_box, why
