"""Run a program that the agent wrote, so that it cannot read or touch the tests that run it: `as-agent CMD ARGS`.

It is on the PATH of every box. The program reads the system and /app, and writes only to /app and to its own temporary
folder, /tmp/as-agent ($TMPDIR); not to /tests, /logs, /solution or the rest of /tmp, which it cannot read either. It
signals only what it starts itself, keeps stdin, stdout and stderr and no other open file, and leaves no process. Bound
its time with `timeout 10 as-agent CMD`.

Exit code: that of CMD; 128 + N after signal N; 127 or 126 if CMD cannot be run; 125 if it could not be confined.
"""

import ctypes
import os
import signal
import sys
import time

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
CREATE_RULESET, RESTRICT_SELF, OF_AS_AGENT = 444, 446, 0x61676E74  # the box's worker answers it (notify.py)
TEMPORARY, FOLDERS = "/tmp/as-agent", ("/app", "/tmp/as-agent")
END_S = 10.0  # to end all that CMD started

libc = ctypes.CDLL(None, use_errno=True)


def main() -> int:
    if len(sys.argv) < 2:
        print("usage: as-agent CMD ARGS", file=sys.stderr)
        return 125
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # what CMD leaves behind becomes a child of this process
    reader, writer = os.pipe()
    parent, pid = os.getpid(), os.fork()
    if not pid:
        code, said = 125, "could not be confined"
        try:
            confine(parent)
            code, said = 126, "cannot be run"
            os.closerange(3, writer)
            os.closerange(writer + 1, 1 << 16)
            os.execvp(sys.argv[1], sys.argv[1:])
        except BaseException as error:
            code = 127 if code == 126 and isinstance(error, FileNotFoundError) else code
            os.write(writer, f"as-agent: {sys.argv[1]} {said}: {error}\n".encode(errors="replace"))
        os._exit(code)
    os.close(writer)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, stop)
    try:
        sys.stderr.write(os.read(reader, 4096).decode(errors="replace"))  # ends when CMD runs
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        return 128 - code if code < 0 else code
    finally:
        end_all()


def confine(parent: int) -> None:
    """Put this process, and all that it starts, under the ruleset for as-agent. Raises OSError."""
    os.setsid()
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        raise OSError("its parent has ended")
    if not os.getcwd().startswith(FOLDERS):
        os.chdir(FOLDERS[0])
    os.environ["HOME"] = os.environ["TMPDIR"] = TEMPORARY
    ruleset = libc.syscall(CREATE_RULESET, 0, 0, OF_AS_AGENT)
    if ruleset < 0 or libc.syscall(RESTRICT_SELF, ruleset, 0):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def stop(number: int, _frame: object) -> None:
    sys.exit(128 + number)


def end_all() -> None:
    """Kill all that CMD started, deepest last: what has no parent any more is a child of this process."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    deadline = time.monotonic() + END_S
    while (pids := descendants()) and time.monotonic() < deadline:
        stopped: set[int] = set()
        while not stopped.issuperset(pids) and time.monotonic() < deadline:  # a stopped process does not fork
            send(pids, signal.SIGSTOP)
            stopped.update(pids)
            pids = descendants()
        send(pids, signal.SIGKILL)
        for pid in pids:
            try:
                os.waitpid(pid, os.WNOHANG)
            except ChildProcessError:  # it is a grandchild
                pass
        time.sleep(0.001)


def send(pids: list[int], number: int) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            pass


def descendants() -> list[int]:
    pids = [os.getpid()]
    for pid in pids:
        try:
            for thread in os.listdir(f"/proc/{pid}/task"):
                with open(f"/proc/{pid}/task/{thread}/children") as file:
                    pids += map(int, file.read().split())
        except OSError:  # it has ended
            pass
    return pids[1:]


if __name__ == "__main__":
    sys.exit(main())
