"""Namespaces and mounts: a separate, read-only root, and for each worker its own users, processes, network and IPC.

These functions raise OSError if the kernel or the container refuses; isolation.py then does without the layer.
"""

import contextlib
import ctypes
import os
import struct
from collections.abc import Iterable
from typing import NamedTuple

from .visible import readable_paths

# linux/sched.h, linux/mount.h, linux/fcntl.h
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 8, 1 << 12, 1 << 14, 1 << 18
MNT_DETACH = 2
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID, MOUNT_ATTR_NODEV, MOUNT_ATTR_NOEXEC = 1, 2, 4, 8
AT_FDCWD, AT_RECURSIVE = -100, 0x8000
MOUNT_SETATTR = 442  # system call, the same on every architecture; Linux 5.12
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}

USER = 1000  # the id that a program sees as its own
# The program's folder in the root built here; /tmp and /dev/shm lead there. It is below /run, where the mount hides no
# interpreter.
HOME = "/run/sandbox"
HOME_BYTES = 128 << 20  # all files of a program; they are in memory, on top of its own limit
HOME_INODES = 4096
# Not /dev/zero: a shared mapping of it is memory that no limit counts once a part is unmapped (seccomp.py).
DEVICES = [path for path in (f"/dev/{name}" for name in ("null", "full", "random", "urandom")) if os.path.exists(path)]
LINKS = {
    **{"/tmp": HOME, "/dev/shm": HOME, "/dev/fd": "/proc/self/fd"},
    **{f"/dev/{name}": f"/proc/self/fd/{fd}" for fd, name in enumerate(("stdin", "stdout", "stderr"))},
}
FILES = {
    "/etc/passwd": f"root:x:0:0:root:/root:/bin/sh\nsandbox:x:{USER}:{USER}:sandbox:{HOME}:/bin/sh\n",
    "/etc/group": f"root:x:0:\nsandbox:x:{USER}:\n",
    "/etc/hosts": "127.0.0.1 localhost\n",
}


class Layout(NamedTuple):
    """What the root of a zygote has besides the machine's files and devices."""

    folders: Iterable[str]  # empty ones
    files: dict[str, str]
    links: dict[str, str]
    in_box: bool = False


PROGRAMS = Layout((HOME,), FILES, LINKS)
libc = ctypes.CDLL(None, use_errno=True)


def enter_root(root: str, layout: Layout = PROGRAMS) -> None:
    """Move this process to a mount namespace whose root holds only what a program may see, read-only.

    For root the new namespace keeps the users, so that workers can have their own user ids; anyone else becomes the
    only user of a new user namespace.

    Args:
        root: an empty folder, which stays empty outside.
    """
    uid, gid = os.geteuid(), os.getegid()
    try:
        unshare(CLONE_NEWNS)
    except PermissionError:
        unshare(CLONE_NEWUSER | CLONE_NEWNS)
        _map_ids(f"{uid} {uid} 1", f"{gid} {gid} 1")
    mount(None, "/", None, MS_REC | MS_PRIVATE)
    mount("tmpfs", root, "tmpfs", MS_NOSUID, "size=1m,nr_inodes=4096,mode=755")
    readable = readable_paths(in_box=layout.in_box)
    for path in readable:
        inside = root + path
        os.makedirs(os.path.dirname(inside), 0o755, exist_ok=True)
        if os.path.islink(path):
            if not os.path.lexists(inside):
                os.symlink(os.readlink(path), inside)
        elif not os.path.ismount(inside):
            bind(path, inside)
    for path in DEVICES:
        os.makedirs(os.path.dirname(root + path), 0o755, exist_ok=True)
        bind(path, root + path)
    for path in (*layout.folders, *map(os.path.dirname, layout.files), "/proc"):
        os.makedirs(root + path, 0o755, exist_ok=True)
    for path, content in layout.files.items():
        with open(root + path, "w") as file:
            file.write(content)
        if content.startswith("#!"):
            os.chmod(root + path, 0o755)
    for path, target in layout.links.items():
        if not os.path.lexists(root + path):  # else this interpreter is below /tmp; programs have $TMPDIR
            os.symlink(target, root + path)
    # The kernel lets a user namespace mount /proc only if a complete one is visible; workers mount theirs over it.
    mount("/proc", f"{root}/proc", None, MS_BIND | MS_REC)
    for path in readable:
        if not os.path.islink(path):
            _restrict(root + path, MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV, AT_RECURSIVE)
    for path in DEVICES:  # still writable; but anybody may set the times of a file that anybody may write to
        _restrict(root + path, MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NOEXEC, 0)
    os.chdir(root)
    number = PIVOT_ROOT[os.uname().machine]
    check(libc.syscall(number, b".", b"."), "pivot_root")
    check(libc.umount2(b".", MNT_DETACH), "umount2")  # the old root, which is on top of the new one
    os.chdir("/")
    _restrict("/", MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV, 0)


def enter_namespaces() -> None:
    """Enter new namespaces; this process's next child is process 1 of a new process namespace.

    The network namespace has no interface that is up. This process has all capabilities in the user namespace, which
    counts processes and threads separately: RLIMIT_NPROC means those of one worker.
    """
    uid, gid = os.geteuid(), os.getegid()
    unshare(CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS)
    _map_ids(f"{USER} {uid} 1", f"{USER} {gid} 1")
    check(libc.sethostname(b"sandbox", 7), "sethostname")


def open_process_ids() -> int:
    """Open this process namespace's id counter for writing; return -1 if that is refused. Call before `mount_proc`."""
    try:
        fd = os.open("/proc/sys/kernel/ns_last_pid", os.O_WRONLY | os.O_CLOEXEC)
    except OSError:
        return -1
    try:
        os.pwrite(fd, b"1", 0)
    except OSError:
        os.close(fd)
        return -1
    return fd


def mount_proc() -> None:
    """Mount a /proc with only the processes of this process namespace, and nothing of the machine."""
    mount("proc", "/proc", "proc", MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC, "subset=pid,hidepid=2")


def hide_proc() -> None:
    """Mount an empty /proc, for a machine that refuses a fresh one."""
    mount("tmpfs", "/proc", "tmpfs", MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC, "size=4k,nr_inodes=2")


def mount_home(*, execute: bool, num_bytes: int = HOME_BYTES, inodes: int = HOME_INODES) -> None:
    """Mount an empty HOME."""
    flags = MS_NOSUID | MS_NODEV | (0 if execute else MS_NOEXEC)
    mount("tmpfs", HOME, "tmpfs", flags, f"size={num_bytes},nr_inodes={inodes},mode=700")


def unmount_home() -> None:
    """Drop HOME with all that is in it; what is open stays readable until it is closed."""
    check(libc.umount2(HOME.encode(), MNT_DETACH), "umount2")


def unshare(flags: int) -> None:
    check(libc.unshare(flags), "unshare")


def _map_ids(uids: str, gids: str) -> None:
    """Map user and group ids, each "inside outside count"; setgroups has to be denied first."""
    for name, content in (("setgroups", "deny"), ("uid_map", uids), ("gid_map", gids)):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(content)


def bind(source: str, target: str) -> None:
    """Show a file or folder of the machine at `target`, which is made, but not for a file the folder above it."""
    with contextlib.suppress(FileExistsError):
        if os.path.isdir(source):
            os.makedirs(target, 0o755)
        else:
            os.close(os.open(target, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
    mount(source, target, None, MS_BIND | MS_REC)


def mount(source: str | None, target: str, kind: str | None, flags: int, options: str = "") -> None:
    result = libc.mount(
        source and source.encode(), target.encode(), kind and kind.encode(), ctypes.c_ulong(flags), options.encode()
    )
    check(result, f"mount {target}")


def _restrict(path: str, attributes: int, flags: int) -> None:
    """Add mount attributes; unlike a remount, this need not repeat those that the mount has and must keep."""
    change = struct.pack("=4Q", attributes, 0, 0, 0)
    check(libc.syscall(MOUNT_SETATTR, AT_FDCWD, path.encode(), flags, change, len(change)), f"mount_setattr {path}")


def check(result: int, what: str) -> None:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
