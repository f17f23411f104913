"""System calls that a program may not make: a deny list, assembled here into a filter for the kernel (x86_64 only).

A denied call fails with EPERM, so Python raises PermissionError. A call that libc is known to replace when it is
missing, or that is newer than this list, fails with ENOSYS. A call that is advice, or that waits for a disk that the
program's files are not on, succeeds and does nothing. Everything else is allowed: the kernel answers those calls from a
bitmap, without running the filter. Of the calls that combine many operations (fcntl, ioctl, prctl, socket options), a
program may use only those listed here, because kernels and file systems add to them.
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
    # namespaces, mounts, file handles (which bypass the path and so every check of it)
    **{"unshare": 272, "setns": 308, "mount": 165, "umount2": 166, "pivot_root": 155, "chroot": 161, "fsopen": 430},
    **{"fsconfig": 431, "fsmount": 432, "fspick": 433, "move_mount": 429, "open_tree": 428, "mount_setattr": 442},
    **{"statmount": 457, "listmount": 458, "open_by_handle_at": 304, "name_to_handle_at": 303, "swapon": 167},
    **{"swapoff": 168, "quotactl": 179, "quotactl_fd": 443, "fanotify_init": 300},
    # large parts of the kernel that no program here needs; most local exploits of recent years begin with one
    **{"bpf": 321, "perf_event_open": 298, "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427},
    **{"userfaultfd": 323, "keyctl": 250, "add_key": 248, "request_key": 249, "init_module": 175},
    **{"finit_module": 313, "delete_module": 176, "kexec_load": 246, "kexec_file_load": 320, "iopl": 172},
    **{"ioperm": 173, "modify_ldt": 154, "personality": 135, "lookup_dcookie": 212, "uselib": 134, "nfsservctl": 180},
    # the whole machine: its clock, log and name, and writing all of its dirty pages, which no signal interrupts
    **{"reboot": 169, "syslog": 103, "acct": 163, "settimeofday": 164, "clock_settime": 227, "adjtimex": 159},
    **{"clock_adjtime": 305, "sethostname": 170, "setdomainname": 171, "vhangup": 153, "sync": 162},
    **{"syncfs": 306},
    # how full the machine's file systems are, and which kinds it knows
    **{"statfs": 137, "fstatfs": 138, "ustat": 136, "sysfs": 139},
    # marks on the machine's files, which are only readable, that another program would see: locks, events, which pages
    # are in memory (fcntl() and preadv2() are among the conditions below)
    **{"flock": 73, "inotify_init": 253, "inotify_init1": 294, "inotify_add_watch": 254, "mincore": 27},
    **{"cachestat": 451},
    # File descriptors in flight count per user, not per program: 500 of them would end all other programs' requests.
    # Python's send() is sendto().
    **{"sendmsg": 46, "sendmmsg": 307},
    # network, and sockets of services on this machine; a socketpair has its peer already
    **{"socket": 41, "connect": 42, "bind": 49, "listen": 50, "accept": 43, "accept4": 288},
    # Each entry of an epoll instance takes 200 bytes, and of two hundred files there can be millions of entries.
    # asyncio has poll() instead (preload.py).
    **{"epoll_create": 213, "epoll_create1": 291},
    # One byte in a pipe or socket can keep a page of 2 MiB that the program has unmapped, or cut off its file. Python
    # copies where sendfile() fails.
    **{"splice": 275, "tee": 276, "vmsplice": 278, "sendfile": 40},
    # memory that no limit counts or that outlives the program
    **{"memfd_create": 319, "memfd_secret": 447, "shmget": 29, "shmat": 30, "shmctl": 31, "shmdt": 67, "semget": 64},
    **{"semop": 65, "semctl": 66, "semtimedop": 220, "msgget": 68, "msgsnd": 69, "msgrcv": 70, "msgctl": 71},
    **{"mq_open": 240, "mq_unlink": 241, "io_setup": 206},
    **{"landlock_create_ruleset": 444, "landlock_add_rule": 445, "landlock_restrict_self": 446, "seccomp": 317},
}
PRETENDED = {
    # fsync() of a file in memory does nothing anyway. On a file of the machine it may wait for a slow disk, even after
    # SIGKILL.
    **{"fsync": 74, "fdatasync": 75, "sync_file_range": 277, "msync": 26, "fadvise64": 221, "readahead": 187},
    # With -1 for user and group, anybody may call these on any file; they set its ctime, which all programs see.
    **{"chown": 92, "fchown": 93, "lchown": 94, "fchownat": 260},
}
# Landlock does not stop these three groups if no mount is read-only. Modes and times are advice, which programs also
# give their own files (shutil.copy). With the server's user, a program could change the mode of that user's files.
MODES = {"chmod": 90, "fchmod": 91, "fchmodat": 268, "fchmodat2": 452}
# Anybody may set these on a file or folder that anybody may write to, such as /dev/null.
TIMES = {"utime": 132, "utimes": 235, "futimesat": 261, "utimensat": 280}
EXTENDED_ATTRIBUTES = {
    **{"setxattr": 188, "lsetxattr": 189, "fsetxattr": 190, "setxattrat": 463, "removexattr": 197},
    **{"lremovexattr": 198, "fremovexattr": 199, "removexattrat": 466},
}
DENIED_WITHOUT_SUBPROCESS = {"fork": 57, "vfork": 58, "execve": 59, "execveat": 322}
# A program in a box may also lock files, which SQLite needs: the box's worker counts the locks (box.py). Not epoll,
# since Python has poll() instead; not statfs, which would show how full the machine's disks are; not landlock, whose
# rules nothing counts, except for the one call by which as-agent asks the worker (agent_runs.py).
ALLOWED_IN_BOX = {"flock": 73, "landlock_create_ruleset": 444}
LOCKS = {"F_GETLK": 5, "F_SETLK": 6, "F_SETLKW": 7, "F_OFD_GETLK": 36, "F_OFD_SETLK": 37, "F_OFD_SETLKW": 38}
CREATE_RULESET, OF_AS_AGENT = 444, 0x61676E74  # its flags when as-agent calls it; the kernel knows no such flags
FALLOCATE = 285
CLONE3 = 435  # its flags are in memory, which a filter cannot read; libc falls back to clone()
NEWEST = 466  # removexattrat (Linux 6.13): later calls have not been reviewed; the x32 calls are also above it

# linux/sched.h. A thread must share all that it can, as every libc's threads do: with a separate table of files, it
# could open as many files again as the program may.
CLONE_FILES, CLONE_THREAD = 0x00000400, 0x00010000
CLONE_AS_LIBC = CLONE_THREAD | CLONE_FILES | 0x00040B00  # CLONE_SYSVSEM, CLONE_SIGHAND, CLONE_FS, CLONE_VM
CLONE_NEW = 0x7E020000  # user, pid, net, ipc, uts, cgroup, mount
CLOSE_RANGE_UNSHARE = 2  # linux/close_range.h: separates the table of files of a running thread
SOCK_TYPE_MASK, AF_UNIX, SOCK_STREAM = 0xF, 1, 1
# An unmapped part of a shared mapping stays in memory, and no limit counts it. Python gets private or named memory
# instead (preload.py).
MAP_TYPE, MAP_SHARED, MAP_SHARED_VALIDATE, MAP_ANONYMOUS = 0x0F, 0x01, 0x03, 0x20
SOL_SOCKET = 1
# Not SO_SNDBUF, since no limit counts what waits in a socket, nor SO_ATTACH_FILTER.
SET_OF_SOCKETS = {
    **{"SO_REUSEADDR": 2, "SO_KEEPALIVE": 9, "SO_LINGER": 13, "SO_PASSCRED": 16, "SO_RCVTIMEO": 20, "SO_SNDTIMEO": 21},
    **{"SO_RCVTIMEO_NEW": 66, "SO_SNDTIMEO_NEW": 67},
}
# Not SO_COOKIE, which counts the sockets of the machine.
GET_OF_SOCKETS = SET_OF_SOCKETS | {
    **{"SO_TYPE": 3, "SO_ERROR": 4, "SO_SNDBUF": 7, "SO_RCVBUF": 8, "SO_PEERCRED": 17, "SO_ACCEPTCONN": 30},
    **{"SO_PROTOCOL": 38, "SO_DOMAIN": 39},
}
# Not locks and leases, which others see; not F_SETPIPE_SZ, since the pages of all pipes of a user are counted together;
# not F_SETOWN and F_SETSIG, by which the kernel signals another process; not F_ADD_SEALS, which would keep the server
# from emptying the memory file of a call.
OF_FILES = {
    **{"F_DUPFD": 0, "F_GETFD": 1, "F_SETFD": 2, "F_GETFL": 3, "F_SETFL": 4, "F_DUPFD_QUERY": 1027},
    **{"F_DUPFD_CLOEXEC": 1030, "F_GETPIPE_SZ": 1032, "F_GET_SEALS": 1034},
}
# ioctl(). Not those that report network interfaces, which also work on a socketpair; none of a file system, which may
# show where on the disk a file is, or change a read-only one; none that types into a terminal.
OF_DEVICES = {
    **{"TCGETS": 0x5401, "TCGETS2": 0x802C542A, "TIOCGPGRP": 0x540F, "TIOCOUTQ": 0x5411, "TIOCGWINSZ": 0x5413},
    **{"FIONREAD": 0x541B, "FIONBIO": 0x5421, "FIONCLEX": 0x5450, "FIOCLEX": 0x5451},
}
# prctl(). Not PR_SET_DUMPABLE, which hides from the worker what its program has open, nor PR_FUTEX_HASH, whose table
# can have any size, and no limit counts it.
OF_PROCESSES = {
    **{"PR_GET_PDEATHSIG": 2, "PR_GET_DUMPABLE": 3, "PR_GET_KEEPCAPS": 7, "PR_GET_TIMING": 13, "PR_SET_NAME": 15},
    **{"PR_GET_NAME": 16, "PR_GET_SECCOMP": 21, "PR_CAPBSET_READ": 23, "PR_GET_TSC": 25, "PR_GET_SECUREBITS": 27},
    **{"PR_SET_TIMERSLACK": 29, "PR_GET_TIMERSLACK": 30, "PR_MCE_KILL_GET": 34, "PR_SET_CHILD_SUBREAPER": 36},
    **{"PR_GET_CHILD_SUBREAPER": 37, "PR_SET_NO_NEW_PRIVS": 38, "PR_GET_NO_NEW_PRIVS": 39, "PR_GET_TID_ADDRESS": 40},
    **{"PR_GET_THP_DISABLE": 42, "PR_CAP_AMBIENT": 47, "PR_GET_SPECULATION_CTRL": 52, "PR_GET_MDWE": 66},
    **{"PR_GET_MEMORY_MERGE": 68, "PR_GET_AUXV": 0x41555856},
}
PR_SET_PDEATHSIG = 1  # a program that turns it off outlives its worker, as a program's children do in any case
# Calls that report on a process, by the argument that names it: getpriority, sched_getparam, sched_getscheduler,
# sched_rr_get_interval, getpgid, getsid, ioprio_get, sched_getattr, get_robust_list, pidfd_open. Through its own
# settings, or the existence of its threads, one program could signal to another.
LOOKS = {140: 1, 143: 0, 145: 0, 148: 0, 121: 0, 124: 0, 252: 1, 315: 0, 274: 0, 434: 0}
SCHED_GETAFFINITY = 204  # libc calls it with a thread's id, and does without it when it is missing
ALL_BITS = 0xFFFFFFFF
CHUNK = 16  # calls; the kernel runs each new filter once for every call that exists, and most skip most chunks

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
    """Return what `install` takes; it is made in the worker, where it costs a program nothing."""
    return FilterProgram(len(program) // INSTRUCTION.size, program)


def install(program: FilterProgram) -> None:
    """Put the calling thread, and all it starts, under a filter for good; needs no_new_privs. Raises OSError."""
    if prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_SECCOMP)")


def assemble(
    *,
    allow_subprocess: bool,
    only_pid: int | None = None,
    owns_files: bool = False,
    on_disk: bool = False,
    in_box: bool = False,
) -> bytes:
    """Return the filter for a program.

    Args:
        allow_subprocess: fork and exec are allowed; namespaces and sockets still are not.
        only_pid: the one process that may be signalled and looked at; None: any that the program can see.
        owns_files: files of the machine belong to the program's user, and no mount keeps it from changing them.
        on_disk: the program's files are on a disk of the machine, and no mount is read-only.
        in_box: the program is in a box; see ALLOWED_IN_BOX.
    Raises:
        OSError: this machine is not an x86_64.
    """
    if platform.machine() != "x86_64":
        raise OSError(errno.ENOSYS, f"the seccomp filter is written for x86_64, not for {platform.machine()}")
    denied = set(DENIED.values()) | (set() if allow_subprocess else set(DENIED_WITHOUT_SUBPROCESS.values()))
    if in_box:
        denied -= set(ALLOWED_IN_BOX.values())
    pretended = set(PRETENDED.values())
    if owns_files:
        pretended |= set(MODES.values())
    if on_disk:
        denied |= set(EXTENDED_ATTRIBUTES.values())
        pretended |= set(TIMES.values())
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
    if on_disk:  # one fallocate() could take a lot of space before a count sees it
        code += [(JUMP_EQUAL, 0, 1, FALLOCATE), (RETURN, 0, 0, ERRNO | errno.EOPNOTSUPP)]
    for number, tests in _conditions(allow_subprocess, only_pid, in_box).items():
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


def _conditions(allow_subprocess: bool, only_pid: int | None, in_box: bool) -> dict[int, list[Test]]:
    """Return the tests of each call, by its number; the call is allowed if all of them hold."""
    itself = [Test(0, (0,))]  # 0: the calling process; another one with our uid is the worker
    no_namespace = Test(0, (0,), mask=CLONE_NEW)
    if allow_subprocess:
        clone = Test(0, (0, CLONE_FILES, CLONE_THREAD | CLONE_FILES), mask=CLONE_THREAD | CLONE_FILES)
        of_processes = (*OF_PROCESSES.values(), PR_SET_PDEATHSIG)
    else:
        clone, of_processes = Test(0, (CLONE_AS_LIBC,), mask=CLONE_AS_LIBC), tuple(OF_PROCESSES.values())
    shared = (MAP_SHARED | MAP_ANONYMOUS, MAP_SHARED_VALIDATE | MAP_ANONYMOUS)
    conditions = {
        56: [no_namespace, clone],
        436: [Test(2, (0,), mask=CLOSE_RANGE_UNSHARE)],  # close_range
        9: [Test(3, shared, wanted=False, mask=MAP_TYPE | MAP_ANONYMOUS)],  # mmap
        # A stream keeps its one peer; from a datagram socket, sendmsg() reaches any address.
        53: [Test(0, (AF_UNIX,)), Test(1, (SOCK_STREAM,), mask=SOCK_TYPE_MASK)],  # socketpair
        54: [Test(1, (SOL_SOCKET,)), Test(2, tuple(SET_OF_SOCKETS.values()))],  # setsockopt
        55: [Test(1, (SOL_SOCKET,)), Test(2, tuple(GET_OF_SOCKETS.values()))],  # getsockopt
        302: itself,  # prlimit64
        141: [*itself, Test(1, (0,))],  # setpriority: a process (not a user's all), itself
        **dict.fromkeys((203, 144, 142, 314), itself),  # sched_setaffinity, _setscheduler, _setparam, _setattr
        72: [Test(1, tuple(OF_FILES.values()))],  # fcntl
        157: [Test(0, of_processes)],  # prctl
        327: [Test(5, (0,))],  # preadv2: RWF_NOWAIT reveals what is in memory
        16: [Test(1, tuple(OF_DEVICES.values()))],  # ioctl
    }
    if in_box:
        conditions[72] = [Test(1, (*OF_FILES.values(), *LOCKS.values()))]
        conditions[CREATE_RULESET] = [Test(2, (OF_AS_AGENT,))]
    if only_pid is not None:
        # kill, tkill, tgkill, rt_sigqueueinfo, rt_tgsigqueueinfo; tkill then reaches the first thread only
        conditions |= {number: [Test(0, (only_pid,))] for number in (62, 200, 234, 129, 297)}
        looks = LOOKS | {SCHED_GETAFFINITY: 0}
        conditions |= {number: [Test(position, (0, only_pid))] for number, position in looks.items()}
    return conditions


def _test(test: Test, deny: int) -> Iterable[tuple[int, int, int, int]]:
    """Yield instructions that fall through to what follows if the test holds, and otherwise return `deny`."""
    yield LOAD, 0, 0, OFFSET_ARGUMENTS + 8 * test.argument
    if test.mask != ALL_BITS:
        yield AND, 0, 0, test.mask
    left = len(test.values)
    for value in test.values:
        left -= 1
        # wanted: an equal value jumps over the rest and the return; unwanted: it jumps to the return
        yield JUMP_EQUAL, left + (1 if test.wanted else 0), (0 if left or test.wanted else 1), value
    yield RETURN, 0, 0, deny
