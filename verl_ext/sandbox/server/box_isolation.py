"""The walls of a box (box.py): those of a program that may start others, and a root in which tasks find their folders.

All that is writable is one file system in memory, as large as the box's disk limit, and shows as FOLDERS. The machine's
/dev/null and the files of its system are shared by all boxes, so a lock on them can be seen from another box: two
programs that run at the same time and have agreed on it can pass bits that way, as they can by using the CPU.
"""

import contextlib
import os
import sys
from collections.abc import Iterable, Iterator

from . import landlock, namespaces
from .archive import is_inside
from .isolation import Isolation
from .seccomp import FilterProgram, assemble, prepare
from .visible import readable_paths

NEEDED = ("namespaces", "root", "proc", "landlock", "seccomp")  # layers without which there are no boxes
FOLDERS = ("/app", "/tests", "/logs", "/solution", "/tmp", "/home/agent")
AGENT_HOME = "/home/agent"
TEMPORARY = "/tmp/as-agent"  # /tmp of the programs that as-agent runs (as_agent.py)
INODES = 1 << 14
TOOLS = "/run/box"
CWD_FD = 198  # where a command's bash says in which folder it ends; a number that scripts do not use
BASH = "/bin/bash"
ENVIRONMENT = {
    "PATH": f"{TOOLS}/bin:{sys.prefix}/bin:" + os.environ.get("PATH", os.defpath),
    "HOME": AGENT_HOME,
    "USER": "agent",
    "LOGNAME": "agent",
    "SHELL": BASH,
    "LANG": "C.UTF-8",
    "TERM": "dumb",
    "TZ": "UTC",
    "BASH_ENV": f"{TOOLS}/bash_env",
    "GIT_TEMPLATE_DIR": "",
    "GIT_AUTHOR_NAME": "agent",
    "GIT_AUTHOR_EMAIL": "agent@localhost",
    "GIT_COMMITTER_NAME": "agent",
    "GIT_COMMITTER_EMAIL": "agent@localhost",
    "GIT_CONFIG_COUNT": "2",
    "GIT_CONFIG_KEY_0": "safe.directory",
    "GIT_CONFIG_VALUE_0": "*",
    "GIT_CONFIG_KEY_1": "init.defaultBranch",
    "GIT_CONFIG_VALUE_1": "main",
}
# bash reads it before a command, whose own trap of its end replaces this one.
BASH_ENV = f"unset BASH_ENV\ntrap 'builtin pwd -P 2>/dev/null >&{CWD_FD} || :' EXIT\n"


def obstacle() -> str:
    """Return why there can be no boxes although all layers work; "" if there can be."""
    return "" if os.access(BASH, os.X_OK) else f"there is no {BASH}"


def _files() -> dict[str, str]:
    user = namespaces.USER
    with open(os.path.join(os.path.dirname(__file__), "as_agent.py")) as file:
        as_agent = file.read()
    return {
        "/etc/passwd": f"root:x:0:0:root:/root:/bin/sh\nagent:x:{user}:{user}:agent:{AGENT_HOME}:{BASH}\n",
        "/etc/group": f"root:x:0:\nagent:x:{user}:\n",
        "/etc/hosts": "127.0.0.1 localhost\n",
        "/etc/shells": f"/bin/sh\n{BASH}\n",
        f"{TOOLS}/as_agent.py": as_agent,
        f"{TOOLS}/bin/as-agent": f'#!/bin/sh\nexec {sys.executable} -IS {TOOLS}/as_agent.py "$@"\n',
        f"{TOOLS}/bash_env": BASH_ENV,
    }


class BoxIsolation(Isolation):
    """See Isolation. A worker holds one box, so its namespaces are those of the box, and end with it."""

    def __init__(self, mode: str, *, root: str) -> None:
        links = namespaces.LINKS | {"/dev/shm": "/tmp", "/var/tmp": "/tmp"}
        del links["/tmp"]
        self.layout = namespaces.Layout((namespaces.HOME, "/var", *FOLDERS), _files(), links, in_box=True)
        self.locks = -1  # /proc/locks of the box's own processes
        self.for_as_agent = self.without_tests = -1  # a ruleset, and a mount namespace (agent_runs.py)
        super().__init__(mode, allow_subprocess=True, root=root)

    def _assemble_filter(self, only_pid: int | None = None) -> FilterProgram:
        return prepare(assemble(allow_subprocess=True, in_box=True))

    def _enter_mounts(self) -> None:
        namespaces.mount("proc", "/proc", "proc", namespaces.MS_RDONLY)
        self.locks = os.open("/proc/locks", os.O_RDONLY | os.O_CLOEXEC)
        namespaces.mount_proc()

    def open_box(self, disk_bytes: int) -> None:
        """Mount the box's file system, and put this process and all that it forks under the box's rules.

        It is one domain of landlock for all commands: those of different ones could not see each other.

        Raises:
            OSError: see there.
        """
        home, system = namespaces.HOME, readable_paths(in_box=True)
        namespaces.mount_home(execute=True, num_bytes=disk_bytes, inodes=INODES)
        with _kept(system):
            for folder in FOLDERS:
                os.makedirs(home + folder)
                namespaces.mount(home + folder, folder, None, namespaces.MS_BIND)
        namespaces.unmount_home()  # what is mounted from it stays
        os.mkdir(TEMPORARY)
        self.without_tests = _without_tests(system)
        system += [*self.layout.files, "/proc"]
        writable = (*FOLDERS, TEMPORARY)  # the last is also mounted by itself
        rules = {"readable": system, "devices": namespaces.DEVICES, "execute": True, "listable": ["/"]}
        self.for_as_agent = landlock.make_ruleset(writable=["/app", TEMPORARY], **rules)
        landlock.restrict_self(landlock.make_ruleset(writable=writable, **rules))

    def _enter_ruleset(self) -> None:
        """Do nothing: the worker has entered it."""


def _without_tests(system: Iterable[str]) -> int:
    """Return a mount namespace in which /tmp is TEMPORARY, and the box's other folders but /app are empty."""
    here = os.open("/proc/self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
    namespaces.unshare(namespaces.CLONE_NEWNS)
    with _kept(system):
        for folder in FOLDERS:
            if folder not in ("/app", "/tmp"):
                namespaces.mount("tmpfs", folder, "tmpfs", namespaces.MS_RDONLY, "size=4k,nr_inodes=1,mode=555")
        namespaces.mount(TEMPORARY, "/tmp", None, namespaces.MS_BIND)
    there = os.open("/proc/self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
    namespaces.check(namespaces.libc.setns(here, namespaces.CLONE_NEWNS), "setns")
    os.close(here)
    return there


@contextlib.contextmanager
def _kept(system: Iterable[str]) -> Iterator[None]:
    """Show again what the block covers of the system's files: the interpreter can be below a folder of the box."""
    covered = {path: os.open(path, os.O_PATH | os.O_CLOEXEC) for path in system if is_inside(path, FOLDERS)}
    yield
    for path, fd in covered.items():
        os.makedirs(os.path.dirname(path), exist_ok=True)
        namespaces.bind(f"/proc/self/fd/{fd}", path)
        os.close(fd)
