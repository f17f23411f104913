"""System calls that a program may not make: a deny list, assembled here into a filter for the kernel (x86_64 only).

A denied call fails with EPERM, so that Python raises PermissionError; one that libc is known to replace when it is
missing, or that is newer than this list, fails with ENOSYS. A call that is advice, or that waits for a disk that the
program's files are not on, succeeds and does nothing. Everything else is allowed: the kernel answers those calls from a
bitmap, without running the filter.
"""

import ctypes
import errno
import platform
import struct
from collections.abc import Iterable
from typing import NamedTuple

# Numbers: arch/x86/entry/syscalls/syscall_64.tbl of Linux 6.18.
DENIED = {
    # other processes
    **{"ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311, "kcmp": 312, "pidfd_getfd": 438},
    **{"pidfd_send_signal": 424, "process_madvise": 440, "process_mrelease": 448, "move_pages": 279},
    **{"migrate_pages": 256, "ioprio_set": 251},
    # namespaces, mounts, file handles (which pass by the path and so by every check of it)
    **{"unshare": 272, "setns": 308, "mount": 165, "umount2": 166, "pivot_root": 155, "chroot": 161, "fsopen": 430},
    **{"fsconfig": 431, "fsmount": 432, "fspick": 433, "move_mount": 429, "open_tree": 428, "mount_setattr": 442},
    **{"statmount": 457, "listmount": 458, "open_by_handle_at": 304, "name_to_handle_at": 303, "swapon": 167},
    **{"swapoff": 168, "quotactl": 179, "quotactl_fd": 443, "fanotify_init": 300},
    # large parts of the kernel that no program here needs; most local exploits of recent years begin with one
    **{"bpf": 321, "perf_event_open": 298, "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427},
    **{"userfaultfd": 323, "keyctl": 250, "add_key": 248, "request_key": 249, "init_module": 175},
    **{"finit_module": 313, "delete_module": 176, "kexec_load": 246, "kexec_file_load": 320, "iopl": 172},
    **{"ioperm": 173, "modify_ldt": 154, "personality": 135, "lookup_dcookie": 212, "uselib": 134, "nfsservctl": 180},
    # the whole machine: its clock, log, name, and writing all of its dirty pages, which no signal interrupts
    **{"reboot": 169, "syslog": 103, "acct": 163, "settimeofday": 164, "clock_settime": 227, "adjtimex": 159},
    **{"clock_adjtime": 305, "sethostname": 170, "setdomainname": 171, "vhangup": 153, "sync": 162},
    **{"syncfs": 306},
    # what one program does to a file of the machine, which it may only read, and another one sees: locks, events, which
    # pages are in memory (fcntl() and preadv2() are among the conditions below)
    **{"flock": 73, "inotify_init": 253, "inotify_init1": 294, "inotify_add_watch": 254, "mincore": 27},
    **{"cachestat": 451},
    # File descriptors in flight count for the user, not for the program: 500 of them would end all other programs'
    # requests. Python's send() is sendto().
    **{"sendmsg": 46, "sendmmsg": 307},
    # network, and sockets of services on this machine; a socketpair has its peer already
    **{"socket": 41, "connect": 42, "bind": 49, "listen": 50, "accept": 43, "accept4": 288},
    # memory that no limit counts or that outlives the program
    **{"memfd_create": 319, "memfd_secret": 447, "shmget": 29, "shmat": 30, "shmctl": 31, "shmdt": 67, "semget": 64},
    **{"semop": 65, "semctl": 66, "semtimedop": 220, "msgget": 68, "msgsnd": 69, "msgrcv": 70, "msgctl": 71},
    **{"mq_open": 240, "mq_unlink": 241, "io_setup": 206},
    **{"landlock_create_ruleset": 444, "landlock_add_rule": 445, "landlock_restrict_self": 446, "seccomp": 317},
}
PRETENDED = {
    # fsync() of a file in memory does nothing anyway. Of a file of the machine it may wait for a slow disk, beyond
    # SIGKILL.
    **{"fsync": 74, "fdatasync": 75, "sync_file_range": 277, "msync": 26, "fadvise64": 221, "readahead": 187},
    # With -1 for user and group, anybody may call it on any file, whose ctime it sets for all programs to see.
    **{"chown": 92, "fchown": 93, "lchown": 94, "fchownat": 260},
}
# Where programs have the server's user and no mount is read-only, these would change any file of that user, which
# Landlock does not stop. Modes and times are advice that programs give their own files, too (shutil.copy).
ATTRIBUTES = {
    **{"chmod": 90, "fchmod": 91, "fchmodat": 268, "fchmodat2": 452},
    **{"utime": 132, "utimes": 235, "futimesat": 261, "utimensat": 280},
}
EXTENDED_ATTRIBUTES = {
    **{"setxattr": 188, "lsetxattr": 189, "fsetxattr": 190, "setxattrat": 463, "removexattr": 197},
    **{"lremovexattr": 198, "fremovexattr": 199, "removexattrat": 466},
}
DENIED_WITHOUT_SUBPROCESS = {"fork": 57, "vfork": 58, "execve": 59, "execveat": 322}
CLONE3 = 435  # its flags are in memory, which a filter cannot read; libc falls back to clone()
NEWEST = 466  # removexattrat (Linux 6.13): what comes after it has not been looked at; the x32 calls are above, too

CLONE_THREAD = 0x00010000
CLONE_NEW = 0x7E020000  # user, pid, net, ipc, uts, cgroup, mount (linux/sched.h)
SOCK_TYPE_MASK, AF_UNIX, SOCK_STREAM = 0xF, 1, 1
SIGNALS_OF_FILES = (8, 10, 15)  # fcntl() F_SETOWN, F_SETSIG, F_SETOWN_EX: have the kernel signal another process
# F_GETLK, F_SETLK, F_SETLKW, the same of OFD locks, F_SETLEASE, F_GETLEASE, F_NOTIFY, F_GET_RW_HINT to
# F_SET_FILE_RW_HINT, F_GETDELEG, F_SETDELEG: others see them, and no limit counts their memory
LOCKS_OF_FILES = (5, 6, 7, 36, 37, 38, 1024, 1025, 1026, 1035, 1036, 1037, 1038, 1039, 1040)
F_SETPIPE_SZ = 1031  # the pages of all pipes of a user are counted together
PR_SET_DUMPABLE = 4  # off, it hides from its worker what it has open (disk.py)
PR_SET_PDEATHSIG = 1  # off, it would outlive its worker
# Calls that tell of a process, by the argument that names it: getpriority, sched_getparam, sched_getscheduler,
# sched_rr_get_interval, getpgid, getsid, ioprio_get, sched_getattr, get_robust_list, pidfd_open. What a program sets
# for itself, or that one of its threads is there, would tell another something.
LOOKS = {140: 1, 143: 0, 145: 0, 148: 0, 121: 0, 124: 0, 252: 1, 315: 0, 274: 0, 434: 0}
SCHED_GETAFFINITY = 204  # libc asks it of a thread by the thread's id, and does without when it is missing
FIOSETOWN, SIOCSPGRP, TIOCSTI, TIOCLINUX = 0x8901, 0x8902, 0x5412, 0x541C  # the same; type into a terminal
# FS_IOC_SETFLAGS, FS_IOC_SETVERSION, FS_IOC_FSSETXATTR, FS_IOC_ENABLE_VERITY: a file that one may only read, too
ATTRIBUTES_OF_FILES = (0x40086602, 0x40087602, 0x401C5820, 0x40806685)
ALL_BITS = 0xFFFFFFFF
CHUNK = 16  # calls; the kernel runs each program's new filter for every call there is: most skip most chunks

# linux/bpf_common.h, linux/seccomp.h, linux/audit.h
LOAD, AND, JUMP_EQUAL, JUMP_GREATER, RETURN = 0x20, 0x54, 0x15, 0x25, 0x06
ALLOW, ERRNO, KILL_PROCESS = 0x7FFF0000, 0x00050000, 0x80000000
AUDIT_ARCH_X86_64 = 0xC000003E
OFFSET_NUMBER, OFFSET_ARCH, OFFSET_ARGUMENTS = 0, 4, 16  # in struct seccomp_data; an argument has 8 bytes
PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 22, 2

INSTRUCTION = struct.Struct("<HBBI")  # code, jump if true, jump if false (instructions to skip), operand
prctl = ctypes.CDLL(None, use_errno=True).prctl


class Test(NamedTuple):
    """A condition on the low 32 bits of one argument: `(argument & mask) in values` is as `wanted`."""

    argument: int
    values: tuple[int, ...]
    wanted: bool = True
    mask: int = ALL_BITS


class FilterProgram(ctypes.Structure):
    """struct sock_fprog."""

    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p)]


def prepare(program: bytes) -> FilterProgram:
    """What `install` takes; made in the worker, it costs a program nothing."""
    return FilterProgram(len(program) // INSTRUCTION.size, program)


def install(program: FilterProgram) -> None:
    """Put the calling thread, and all it starts, under a filter for good; needs no_new_privs. Raises OSError."""
    if prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_SECCOMP)")


def assemble(*, allow_subprocess: bool, only_pid: int | None = None, owns_files: bool = False) -> bytes:
    """The filter for a program.

    Args:
        allow_subprocess: fork and exec are allowed; namespaces and sockets still are not.
        only_pid: the one process that may be signalled and looked at; None: any that the program can see.
        owns_files: files of the machine belong to the program's user, and no mount keeps it from changing them.
    Raises:
        OSError: this machine is not an x86_64.
    """
    if platform.machine() != "x86_64":
        raise OSError(errno.ENOSYS, f"the seccomp filter is written for x86_64, not for {platform.machine()}")
    denied = set(DENIED.values()) | (set() if allow_subprocess else set(DENIED_WITHOUT_SUBPROCESS.values()))
    pretended = set(PRETENDED.values())
    if owns_files:
        denied |= set(EXTENDED_ATTRIBUTES.values())
        pretended |= set(ATTRIBUTES.values())
    deny, missing, pretend = ERRNO | errno.EPERM, ERRNO | errno.ENOSYS, ERRNO | 0
    code = [
        (LOAD, 0, 0, OFFSET_ARCH),
        (JUMP_EQUAL, 1, 0, AUDIT_ARCH_X86_64),
        (RETURN, 0, 0, KILL_PROCESS),  # 32-bit calls have other numbers
        (LOAD, 0, 0, OFFSET_NUMBER),
        (JUMP_GREATER, 0, 1, NEWEST),
        (RETURN, 0, 0, missing),
        (JUMP_EQUAL, 0, 1, CLONE3),
        (RETURN, 0, 0, missing),
    ]
    for number, tests in _conditions(allow_subprocess, only_pid).items():
        refusal = missing if number == SCHED_GETAFFINITY else deny
        block = [instruction for test in tests for instruction in _test(test, refusal)] + [(RETURN, 0, 0, ALLOW)]
        code += [(JUMP_EQUAL, 0, len(block), number), *block]
    listed = sorted(denied | pretended)
    for start in range(0, len(listed), CHUNK):
        chunk = listed[start : start + CHUNK]
        code += [(JUMP_GREATER, len(chunk) + 3, 0, chunk[-1])]  # to the next chunk
        code += [(JUMP_EQUAL, len(chunk) - i + (n in pretended), 0, n) for i, n in enumerate(chunk)]
        code += [(RETURN, 0, 0, ALLOW), (RETURN, 0, 0, deny), (RETURN, 0, 0, pretend)]
    code += [(RETURN, 0, 0, ALLOW)]
    return b"".join(INSTRUCTION.pack(*instruction) for instruction in code)


def _conditions(allow_subprocess: bool, only_pid: int | None) -> dict[int, list[Test]]:
    """Calls that are allowed when every test holds, by number."""
    itself = [Test(0, (0,))]  # 0: the calling process; another one with our uid is the worker
    no_namespace = Test(0, (0,), mask=CLONE_NEW)
    conditions = {
        56: [no_namespace] if allow_subprocess else [no_namespace, Test(0, (CLONE_THREAD,), mask=CLONE_THREAD)],
        # A stream has one peer for good; from a datagram socket, sendmsg() reaches any address.
        53: [Test(0, (AF_UNIX,)), Test(1, (SOCK_STREAM,), mask=SOCK_TYPE_MASK)],  # socketpair
        302: itself,  # prlimit64
        141: [*itself, Test(1, (0,))],  # setpriority: a process (not a user's all), itself
        **dict.fromkeys((203, 144, 142, 314), itself),  # sched_setaffinity, _setscheduler, _setparam, _setattr
        72: [Test(1, SIGNALS_OF_FILES + LOCKS_OF_FILES + (F_SETPIPE_SZ,), wanted=False)],  # fcntl
        157: [Test(0, (PR_SET_DUMPABLE, PR_SET_PDEATHSIG, PR_SET_SECCOMP), wanted=False)],  # prctl
        327: [Test(5, (0,))],  # preadv2: RWF_NOWAIT tells what is in memory
        16: [Test(1, (FIOSETOWN, SIOCSPGRP, TIOCSTI, TIOCLINUX, *ATTRIBUTES_OF_FILES), wanted=False)],  # ioctl
    }
    if only_pid is not None:
        # kill, tkill, tgkill, rt_sigqueueinfo, rt_tgsigqueueinfo; tkill then reaches the first thread only
        conditions |= dict.fromkeys((62, 200, 234, 129, 297), [Test(0, (only_pid,))])
        looks = LOOKS | {SCHED_GETAFFINITY: 0}
        conditions |= {number: [Test(position, (0, only_pid))] for number, position in looks.items()}
    return conditions


def _test(test: Test, deny: int) -> Iterable[tuple[int, int, int, int]]:
    """Instructions that go on after the last one when the test holds, and else return `deny`."""
    yield LOAD, 0, 0, OFFSET_ARGUMENTS + 8 * test.argument
    if test.mask != ALL_BITS:
        yield AND, 0, 0, test.mask
    left = len(test.values)
    for value in test.values:
        left -= 1
        # wanted: an equal value jumps over the rest and the return; unwanted: it jumps to the return
        yield JUMP_EQUAL, left + (1 if test.wanted else 0), (0 if left or test.wanted else 1), value
    yield RETURN, 0, 0, deny
