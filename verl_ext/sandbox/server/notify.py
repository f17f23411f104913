"""Hand a prepared ruleset of landlock to `as-agent`, in the place of a system call that no program of a box may make.

A program in a box may make no ruleset: its rules would be memory that nothing counts. So the box's worker makes the one
that as-agent needs, and waits for a call of landlock_create_ruleset() with the flags `seccomp.OF_AS_AGENT`, which the
kernel reports to it (seccomp_unotify(2)). It answers with a descriptor of that ruleset.
"""

import ctypes
import errno
import fcntl
import struct

from . import seccomp

# linux/seccomp.h
SECCOMP, SET_MODE_FILTER, NEW_LISTENER, USER_NOTIF = 317, 1, 8, 0x7FC00000
RECEIVE, SEND, ADD_FD = 0xC0502100, 0xC0182101, 0x40182103  # ioctl()
NOTIFICATION = struct.Struct(
    "=QIIiIQ6Q"
)  # struct seccomp_notif: id, pid, flags; number, architecture, address, arguments
ANSWER = struct.Struct("=QqiI")  # struct seccomp_notif_resp: id, value, error, flags
ADDED = struct.Struct("=QIIII")  # struct seccomp_notif_addfd: id, flags, source, target, flags of the target
ADD_FD_AND_SEND = 2

libc = ctypes.CDLL(None, use_errno=True)


class Listener:
    """Answers all such calls of the processes that this process forks from now on; it must make none itself.

    It reads like one of a program's streams (output.py), so that a worker waits for it as for those.

    Args:
        ruleset: file descriptor.
    Raises:
        OSError: the kernel cannot (Linux before 5.14).
    """

    def __init__(self, ruleset: int) -> None:
        self.ruleset = ruleset
        ask = [
            (seccomp.LOAD, 0, 0, seccomp.OFFSET_NUMBER),
            (seccomp.JUMP_EQUAL, 0, 3, seccomp.CREATE_RULESET),
            (seccomp.LOAD, 0, 0, seccomp.OFFSET_ARGUMENTS + 8 * 2),
            (seccomp.JUMP_EQUAL, 0, 1, seccomp.OF_AS_AGENT),
            (seccomp.RETURN, 0, 0, USER_NOTIF),
            (seccomp.RETURN, 0, 0, seccomp.ALLOW),
        ]
        program = seccomp.prepare(b"".join(seccomp.INSTRUCTION.pack(*instruction) for instruction in ask))
        self.fd = libc.syscall(SECCOMP, SET_MODE_FILTER, NEW_LISTENER, ctypes.byref(program))
        if self.fd < 0:
            raise OSError(ctypes.get_errno(), "seccomp(SECCOMP_FILTER_FLAG_NEW_LISTENER)")

    def read_from(self, fd: int) -> int:
        """Answer one call; return 0 if there can be no other one."""
        notification = bytearray(NOTIFICATION.size)
        try:
            fcntl.ioctl(fd, RECEIVE, notification)
            number = NOTIFICATION.unpack(notification)[0]
            fcntl.ioctl(fd, ADD_FD, ADDED.pack(number, ADD_FD_AND_SEND, self.ruleset, 0, 0))
        except OSError as exc:
            if exc.errno in (errno.ENOENT, errno.EINTR, errno.EINPROGRESS):  # the caller was killed meanwhile
                return 1
            if exc.errno in (errno.EMFILE, errno.ENFILE):  # the caller's own doing
                fcntl.ioctl(fd, SEND, ANSWER.pack(number, 0, -exc.errno, 0))
                return 1
            return 0
        return 1
