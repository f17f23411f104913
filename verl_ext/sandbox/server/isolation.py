"""Find out which layers keep a program from the rest of the machine, and enter them.

  zygote   probes each layer in a throw-away child, then moves to a read-only root (`enter_zygote`)
  worker   takes its own user id and namespaces (`enter_worker`), and gives each program an empty folder
  program  gives up all privileges and is put under landlock and seccomp (`set_uid`, `confine`)

Namespaces are made per worker, not per request, which makes a request cheaper and leaks nothing to the next one: all
processes of a request are killed before it is answered, its files are in a tmpfs that is unmounted, and everything else
that a namespace keeps takes a capability to change, which a program lacks, or a system call that seccomp denies (IPC
objects). Without seccomp, each program gets its own IPC namespace.
"""

import ctypes
import os
import resource
import struct
from collections.abc import Callable

from . import landlock, namespaces, seccomp
from .folders import remove_folder
from .visible import readable_paths

# In the order of /v1/ping. `namespaces`: users, processes, network, IPC, host name. `root`: of the machine's files only
# the libraries, read-only, plus a folder in memory. `proc`: its own /proc (otherwise empty). `uid`: a user that owns
# nothing, for a server that runs as root.
OPTIONAL = ("namespaces", "root", "proc", "landlock", "seccomp", "uid")
STRONG = ("namespaces", "landlock", "seccomp")  # without any of these, `auto` refuses to start
MAX_TASKS = 128  # processes and threads of one worker, including its own
MAX_PENDING_SIGNALS = 256
MAX_LOCKED_BYTES = 1 << 20
# The ids that systemd lends to services while they run (systemd.io/UIDS-GIDS): no file is theirs.
FIRST_UID, NUM_UIDS = 61184, 4336
CAPABILITY_VERSION_3 = 0x20080522  # linux/capability.h
# linux/prctl.h
PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS, PR_SET_THP_DISABLE, PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL = 4, 38, 41, 47, 4
CAPSET_NUMBER = {"x86_64": 126, "aarch64": 91}[os.uname().machine]  # system call
CAPSET_HEADER, NO_CAPABILITIES = struct.pack("=Ii", CAPABILITY_VERSION_3, 0), bytes(24)

libc = ctypes.CDLL(None, use_errno=True)
prctl, syscall = libc.prctl, libc.syscall  # found once, not by every program


class IsolationError(Exception):
    """A requested layer does not work here; the message names it and says what to do."""


class Isolation:
    """The layers in force; made once in the zygote, inherited by what it forks. A box has others (box_isolation.py).

    Args:
        mode: "auto": all that work here; "full": all; "none": none.
        allow_subprocess: programs may start other programs.
        root: an empty folder; without the `root` layer, the programs' folders will be in it.
    Raises:
        IsolationError: `full`, and a layer does not work; `auto`, and none of the strong ones does.
    """

    layout = namespaces.PROGRAMS

    def __init__(self, mode: str, *, allow_subprocess: bool, root: str) -> None:
        self.allow_subprocess, self.root = allow_subprocess, root
        self.layers: set[str] = set()
        self.off: dict[str, str] = {}  # layer: why it is off
        self.folder = namespaces.HOME  # of the program
        self.uid = os.geteuid()  # of the programs
        self._outside = self._ruleset = self._process_ids = -1  # file descriptors
        self._filter: seccomp.FilterProgram  # from `enter_zygote` on, if that layer is on
        if mode == "none":
            return
        self._probe()
        why = "; ".join(f"{layer}: {reason}" for layer, reason in self.off.items())
        if mode == "full" and self.off:
            raise IsolationError(f"--isolation full needs all layers, but some do not work on this machine ({why})")
        if not self.layers.intersection(STRONG):
            raise IsolationError(
                f"no isolation works on this machine ({why}). If you trust all code, start with --isolation none"
            )

    def names(self) -> list[str]:
        """Return the layers in force, as /v1/ping reports them."""
        return ["rlimits", *(name for name in OPTIONAL if name in self.layers)]

    # --- in the zygote

    def _probe(self) -> None:
        """Fill `layers` and `off` by trying."""
        for proc in (True, False):
            why = failure_in_child(lambda proc=proc: self._try_namespaces(proc))
            if not why:
                self.layers.update(("namespaces", "root", "proc") if proc else ("namespaces", "root"))
                break
            self.off["proc" if proc else "namespaces and root"] = why
        attempts = {"landlock": self._try_landlock, "seccomp": self._try_seccomp}
        if self.uid == 0:
            attempts["uid"] = self._try_uid
        for layer, attempt in attempts.items():
            why = failure_in_child(attempt)
            if why:
                self.off[layer] = why
            else:
                self.layers.add(layer)

    def _try_namespaces(self, proc: bool) -> None:
        namespaces.enter_root(self.root)
        namespaces.enter_namespaces()
        pid = os.fork()
        if pid:
            os.waitpid(pid, 0)
            os._exit(0)
        namespaces.mount_proc() if proc else namespaces.hide_proc()
        namespaces.mount_home(execute=False)
        namespaces.unmount_home()

    def _try_landlock(self) -> None:
        """Enter it with all rules, so that a rule which cannot be added turns it off, and check that it works."""
        self._ruleset = self._make_ruleset(self.root)
        set_no_new_privs()
        landlock.restrict_self(self._ruleset)
        try:
            os.listdir("/")
        except PermissionError:
            return
        raise OSError("a folder without a rule can be read")

    def _try_seccomp(self) -> None:
        set_no_new_privs()
        seccomp.install(seccomp.prepare(seccomp.assemble(allow_subprocess=False)))

    def _try_uid(self) -> None:
        """Become the user, and check that it reaches the interpreter: it may be in a folder that only root enters."""
        if "root" in self.layers:
            namespaces.enter_root(self.root)
        set_uid(FIRST_UID)
        os.listdir(os.path.dirname(os.__file__))

    def enter_zygote(self) -> None:
        """Move to our own root, if that layer is on."""
        if "root" in self.layers:
            self._outside = os.open(os.path.dirname(self.root), os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            namespaces.enter_root(self.root, self.layout)
        elif "uid" in self.layers:
            os.chmod(self.root, 0o711)  # each program's own folder is below it
        if "seccomp" in self.layers:
            self._filter = self._assemble_filter()

    def _assemble_filter(self, only_pid: int | None = None) -> seccomp.FilterProgram:
        return seccomp.prepare(
            seccomp.assemble(
                allow_subprocess=self.allow_subprocess,
                only_pid=only_pid,
                owns_files=not self.layers.intersection(("root", "uid")),
                on_disk="root" not in self.layers,
            )
        )

    def remove_root(self) -> bool:
        """Remove the folder outside from within our own root; return False if the layer is off."""
        if self._outside < 0:
            return False
        os.rmdir(os.path.basename(self.root), dir_fd=self._outside)
        return True

    # --- in a worker

    def enter_worker(self, name: str) -> int:
        """Turn a fork of the zygote into a worker; may return in a child, whose parent has ended.

        Args:
            name: of its folder: a number, different for each worker, a hyphen, and text that no program can guess.
        Returns:
            its process id as the server sees it.
        """
        if self._outside >= 0:
            os.close(self._outside)  # from there a path leads to all files
        if "uid" in self.layers:
            self.uid = FIRST_UID + int(name.partition("-")[0]) % NUM_UIDS
        if "root" not in self.layers:
            self.folder = os.path.join(self.root, name)
        pid = os.getpid()
        if "namespaces" in self.layers:
            if "uid" in self.layers:
                set_uid(self.uid)
            namespaces.enter_namespaces()
            pid_r, pid_w = os.pipe()
            pid = os.fork()
            if pid:
                os.write(pid_w, struct.pack("i", pid))
                os._exit(0)
            os.close(pid_w)
            (pid,) = struct.unpack("i", os.read(pid_r, 4))
            os.close(pid_r)
            self._process_ids = namespaces.open_process_ids()
            self._enter_mounts()
        if self.layers:
            prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)  # no program with our uid can trace us or read our memory
        return pid

    def _enter_mounts(self) -> None:
        namespaces.mount_proc() if "proc" in self.layers else namespaces.hide_proc()
        if "landlock" in self.layers:
            # Valid for all requests: a mount hides rules for what it covers, so the rule for HOME is on its parent.
            self._ruleset = self._make_ruleset(os.path.dirname(self.folder))

    def _make_ruleset(self, writable: str) -> int:
        readable = readable_paths()
        if self._outside >= 0:  # in our own root
            readable += namespaces.FILES
        if "proc" in self.layers:
            readable.append("/proc")
        return landlock.make_ruleset(
            readable=readable, writable=[writable], devices=namespaces.DEVICES, execute=self.allow_subprocess
        )

    def restart_process_ids(self) -> None:
        """Give the next process in a namespace the lowest free id; otherwise ids would count what ran before."""
        if self._process_ids >= 0:
            os.pwrite(self._process_ids, b"1", 0)

    def make_folder(self) -> None:
        if "root" in self.layers:
            namespaces.mount_home(execute=self.allow_subprocess)
        else:
            os.mkdir(self.folder, 0o700)
            if self.uid != os.geteuid():
                os.chown(self.folder, self.uid, -1)

    def remove_folder(self) -> None:
        if "root" in self.layers:
            namespaces.unmount_home()
        else:
            remove_folder(self.folder)

    def limit_programs(self) -> None:
        """Set resource limits that the programs of this worker inherit, and that do not affect the worker."""
        if not self.layers:
            return
        for kind, most in (
            (resource.RLIMIT_SIGPENDING, MAX_PENDING_SIGNALS),
            (resource.RLIMIT_MEMLOCK, MAX_LOCKED_BYTES),
            (resource.RLIMIT_MSGQUEUE, 0),
        ):
            limit(kind, most)

    # --- in a program

    def become_user(self) -> None:
        """Take the program's user id, if the worker has not taken it; call it before the program makes files."""
        if "uid" in self.layers and "namespaces" not in self.layers:
            set_uid(self.uid)

    def confine(self, *, is_readable: bool = True) -> None:
        """Give up all privileges for good. From here on no file descriptor can do more than a program may.

        Args:
            is_readable: other processes of the user may open what this one has open, by /proc.
        """
        if not self.layers:
            return
        if self.layers & {"namespaces", "uid"}:  # else it would count processes that are not ours
            limit(resource.RLIMIT_NPROC, MAX_TASKS)
        if "namespaces" in self.layers and "seccomp" not in self.layers:
            namespaces.unshare(namespaces.CLONE_NEWIPC)
        set_no_new_privs()
        drop_capabilities()
        prctl(PR_SET_DUMPABLE, int(is_readable), 0, 0, 0)  # 1 also lets it read its own /proc/self
        prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0)  # the kernel keeps a page of 2 MiB as long as any part of it is mapped
        if "landlock" in self.layers:
            self._enter_ruleset()
        if "seccomp" in self.layers:
            if "namespaces" not in self.layers and not self.allow_subprocess:
                self._filter = self._assemble_filter(only_pid=os.getpid())
            seccomp.install(self._filter)

    def _enter_ruleset(self) -> None:
        if "root" not in self.layers:
            self._ruleset = self._make_ruleset(self.folder)
        landlock.restrict_self(self._ruleset)


def failure_in_child(function: Callable[[], None]) -> str:
    """Call `function` in a child, or in what it forks there; return "" or the OSError that it raised."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        outcome = "died"
        try:
            function()
            outcome = "returned"
        except OSError as exc:
            outcome = exc.strerror or str(exc)
        finally:
            os.write(writer, outcome.encode())
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as file:
        outcome = file.read().decode()
    os.waitpid(pid, 0)
    return "" if outcome == "returned" else outcome or "died"


def set_uid(uid: int) -> None:
    """Become another user and group, with no supplementary groups; raises OSError."""
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)  # the change cleared it; /proc/self/uid_map is then root's


def set_no_new_privs() -> None:
    if prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_NO_NEW_PRIVS)")


def drop_capabilities() -> None:
    """Empty all sets that can grant capabilities; not the bounding set: with no_new_privs an exec grants none."""
    if syscall(CAPSET_NUMBER, CAPSET_HEADER, NO_CAPABILITIES):
        raise OSError(ctypes.get_errno(), "capset")
    prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)


def limit(kind: int, soft: int, hard: int | None = None) -> None:
    """Set a resource limit, never above the hard limit already in force."""
    hard = soft if hard is None else hard
    ceiling = resource.getrlimit(kind)[1]
    if ceiling != resource.RLIM_INFINITY:
        soft, hard = min(soft, ceiling), min(hard, ceiling)
    resource.setrlimit(kind, (soft, hard))
