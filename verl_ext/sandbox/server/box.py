"""The worker of a box: process 1 of its namespaces, which runs its commands, and unpacks and packs its files.

Each command is a new bash, forked here. What it leaves running is stopped until the next command, and killed when the
box is sealed, when a command exceeds its time or its memory, or when the box ends. The exit code of a command is the
one that this process reaps. Archives are handled by forks of this process that are confined as commands are.

A worker serves one box and ends with it, so nothing of it can reach another. Each command replaces the memory that it
inherits, so that this process, unlike worker.py, may make objects of a request.
"""

import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import socket
import time
from collections.abc import Callable
from typing import Any, BinaryIO, NoReturn

from . import archive, box_isolation
from .agent_runs import AgentRuns, reset_signals
from .box_isolation import BoxIsolation
from .isolation import limit
from .memory import MemoryWatch
from .output import Buffer
from .processes import KILL_S, Program, kill_all
from .program import CHUNK, PR_SET_PDEATHSIG, SIGKILL, prctl
from .wire import LENGTH
from .worker import MAX_OPEN_FILES, End, Limits, Result, Worker, adopt_orphans, fork, send

MAX_LOCKS = 1000  # of files, by all processes of the box
LOCKS_BYTES = 1 << 16  # of /proc/locks that are read: more lines than that
EXTRA_ADDRESS_SPACE = 256 << 20  # of one process, beyond the box's memory: libraries and reserved space
ARCHIVE_MEMORY = 1 << 30  # address space of the process that handles an archive
ARCHIVE_S = 60.0  # for that
CWD_BYTES = 4096
PLANTED_IN = ("/tests", "/logs", "/solution")  # where only the scoring box has files: what an agent puts there is told


class Reaper:
    """Reaps processes that the box's programs left behind; it is asked as a watch is, and finds no excess."""

    EVERY_S = 0.05

    def __init__(self, agent_runs: AgentRuns | None) -> None:
        self.agent_runs, self.next_check = agent_runs, 0.0

    def excess(self, pids: list[int]) -> str:
        others = {pids[0]} | (self.agent_runs.pids() if self.agent_runs else set())  # whose exit codes count
        for pid in pids:
            if pid not in others:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
        self.next_check = time.monotonic() + self.EVERY_S
        return ""


class LockWatch:
    """Counts the locks on files that the box's processes hold: each takes memory that nothing else counts.

    Args:
        locks: /proc/locks of the box's process namespace.
    """

    EVERY_S = 0.1

    def __init__(self, locks: int) -> None:
        self.locks, self.next_check = locks, 0.0

    def excess(self, _: list[int]) -> str:
        self.next_check = time.monotonic() + self.EVERY_S
        lines = left = 0
        while left < LOCKS_BYTES and (part := os.pread(self.locks, LOCKS_BYTES, left)):
            lines, left = lines + part.count(b"\n"), left + len(part)
        return f"lock limit: it holds more than {MAX_LOCKS} locks on files" if lines > MAX_LOCKS else ""


class BoxWorker(Worker):
    """Serves one box: `open`, then any number of `run`, then `seal`; see `api.py` for what they take and give.

    A request is a memory file: LENGTH, JSON, and an archive. The answer is LENGTH, JSON and the bytes that it counts.
    """

    def __init__(self, connection: socket.socket, layers: BoxIsolation, max_output_bytes: int, _: int) -> None:
        self.connection, self.layers, self.disk = connection, layers, None
        self.buffers = [Buffer(max_output_bytes), Buffer(max_output_bytes)]
        self.program: Program | None = None  # while a command runs
        self.left: Program | None = None  # the last command, to reach what it left behind
        self.agent_runs: AgentRuns | None = None
        self.known: list[str] = []  # the paths that came with the archive
        self.cwd = self.workdir = box_isolation.FOLDERS[0]
        self.disk_bytes = self.memory_limit_MB = 0
        self.cwd_r = -1
        self.setup_r, self.setup_w = os.pipe()
        os.set_blocking(self.setup_r, False)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # so that process 1 ignores it, and no fork raises by it
        adopt_orphans()
        limit(resource.RLIMIT_NOFILE, MAX_OPEN_FILES)
        limit(resource.RLIMIT_CORE, 0)
        layers.limit_programs()
        os.umask(0o022)

    def serve(self) -> None:
        while self.serve_one():
            pass

    def serve_one(self) -> bool:
        if self.left:
            self.watch(self.left)
        message, fds, _, _ = socket.recv_fds(self.connection, 1, 1)
        if not message or not fds:
            return False
        do = ""
        try:
            with open(fds[0], "rb") as body:
                (size,) = LENGTH.unpack(body.read(LENGTH.size))
                request = json.loads(body.read(size))
                do = request["do"]
                serve = {"open": self.open, "run": self.run_command, "seal": self.seal}[do]
                answer, *blobs = serve(request, body)
        except Exception as exc:
            # Programs of the box may have caused what fails after it is open: a control program decides.
            send(self.connection, {"error": f"{type(exc).__name__}: {exc}", "lost": do in ("run", "seal")})
            return False
        send(self.connection, answer | {"bytes": sum(map(len, blobs))})
        for blob in blobs:
            self.connection.sendall(blob)
        return True

    # --- open

    def open(self, request: dict[str, Any], body: BinaryIO) -> tuple[dict[str, Any], ...]:
        """Make the box, and unpack the rest of `body` into it; {"refused": why} if that may not be."""
        self.disk_bytes, self.memory_limit_MB = request["disk_limit_MB"] << 20, request["memory_limit_MB"]
        self.layers.open_box(self.disk_bytes)
        os.makedirs(request["workdir"], exist_ok=True)
        self.cwd = self.workdir = request["workdir"]
        try:
            self.agent_runs = AgentRuns(self.layers)
        except OSError:  # an older kernel: as-agent says that it cannot confine
            pass
        if not request["has_archive"]:
            return ({},)
        report, _ = self.in_child(lambda _: unpack(body), 0)
        self.known = report.pop("known", [])
        return (report,)

    # --- run

    def run_command(self, request: dict[str, Any], _: BinaryIO) -> tuple[Any, ...]:
        for buffer in self.buffers:
            buffer.reset()
        limits = Limits(request["run_timeout"], self.memory_limit_MB)
        started = time.monotonic()
        self.left = None
        self.program = self.start_command(request)
        self.program.signal(signal.SIGCONT)  # what earlier commands left behind continues
        end = self.wait_for_end(self.program, limits, started)
        result = self.finish(self.program, limits, end, time.monotonic() - started)
        answer = {
            "status": "TimeLimitExceeded" if result.timed_out else "Finished",
            "return_code": None if result.timed_out else result.return_code,
            "execution_time": result.execution_time,
            "stdout": [len(self.buffers[0].kept()), self.buffers[0].total],
            "stderr": [len(self.buffers[1].kept()), self.buffers[1].total],
            "spent": result.spent,
        }
        return answer, *(buffer.kept() for buffer in self.buffers)

    def watches(self, limits: Limits) -> list[Any]:
        memory = MemoryWatch(limits.memory_limit_MB << 20, uid=self.layers.uid, several=True)
        return [memory, Reaper(self.agent_runs), LockWatch(self.layers.locks)]

    def poll(self, program: Program) -> tuple[select.poll, dict[int, Any]]:
        poller, streams = super().poll(program)
        if self.agent_runs:
            self.agent_runs.register(poller, streams)
        return poller, streams

    def finish(self, program: Program, limits: Limits, end: End, execution_time: float) -> Result:
        """Stop what a command left behind, or kill everything if it exceeded a limit; read what is in its pipes."""
        timed_out, _, excess = end
        gone = True
        ended = os.waitid(os.P_PID, program.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if timed_out or excess or not ended:
            wait_status, gone = kill_all(program)
            if self.agent_runs:
                self.agent_runs.forget_all()
        else:
            _, wait_status = os.waitpid(program.pid, 0)
            program.signal(signal.SIGSTOP)
            self.left = program
        return_code = -signal.SIGKILL if wait_status is None or excess else os.waitstatus_to_exitcode(wait_status)
        self.drain(program)
        if excess:
            self.buffers[1].append(f"\nKilled: {excess}\n".encode())
        self.cwd = self.read_cwd() or self.cwd
        os.close(self.cwd_r)
        program.close()
        self.program = None
        self.raise_set_up_error()
        return Result(timed_out, return_code, execution_time, gone, not gone)

    def read_cwd(self) -> str | None:
        """Return the folder in which bash ended, or None if it did not say; the next command checks it."""
        try:
            said = os.read(self.cwd_r, CWD_BYTES)
        except BlockingIOError:
            return None
        path = os.fsdecode(said.removesuffix(b"\n"))
        return path if path.startswith("/") and "\0" not in path else None

    def start_command(self, request: dict[str, Any]) -> Program:
        out_r, out_w = os.pipe()
        err_r, err_w = os.pipe()
        self.cwd_r, cwd_w = os.pipe()
        pid = fork()
        if pid < 0:
            raise OSError(ctypes.get_errno(), "fork")
        if pid == 0:
            become_command(self, request, out_w, err_w, cwd_w)
        for fd in (out_w, err_w, cwd_w):
            os.close(fd)
        for fd in (out_r, err_r, self.cwd_r):
            os.set_blocking(fd, False)
        return Program(pid, os.pidfd_open(pid), (out_r, err_r), None, bytearray())

    # --- seal

    def seal(self, request: dict[str, Any], _: BinaryIO) -> tuple[Any, ...]:
        """Kill every process, then pack the declared paths; nothing of the box runs any more."""
        self.kill_everything()
        paths, max_bytes = request["paths"], request["max_bytes"]
        return self.in_child(lambda file: pack(file, paths, max_bytes, self.known), 2 * max_bytes + CHUNK)

    def kill_everything(self) -> None:
        """Kill all processes but this one. Raises OSError if some do not end."""
        self.left = None
        try:
            os.kill(-1, signal.SIGKILL)
        except ProcessLookupError:
            return
        deadline = time.monotonic() + KILL_S
        while True:
            try:
                reaped, _ = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not reaped:
                if time.monotonic() > deadline:
                    raise OSError("processes of the box do not end")
                time.sleep(0.0002)

    def in_child(self, handle: Callable[[BinaryIO], dict[str, Any]], max_bytes: int) -> tuple[dict[str, Any], bytes]:
        """Call `handle` with a file in a confined fork; return its report, and what it wrote to the file.

        Raises:
            OSError: it failed, or took longer than ARCHIVE_S.
        """
        written, reported = (os.memfd_create(name, os.MFD_CLOEXEC) for name in ("archive", "report"))
        pid = fork()
        if pid < 0:
            raise OSError(ctypes.get_errno(), "fork")
        if pid == 0:
            try:
                confine(self, max(max_bytes, self.disk_bytes), ARCHIVE_MEMORY)
                with open(written, "wb", closefd=False) as file:
                    report = handle(file)
            except BaseException as exc:
                report = {"error": f"{type(exc).__name__}: {exc}"}
            try:
                with open(reported, "w", closefd=False) as file:
                    json.dump(report, file)
            finally:
                os._exit(0)
        pidfd = os.pidfd_open(pid)
        try:
            poller = select.poll()
            poller.register(pidfd, select.POLLIN)
            if not poller.poll(ARCHIVE_S * 1000):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            report = json.loads(os.pread(reported, os.fstat(reported).st_size, 0) or b'{"error": "it took too long"}')
            if "error" in report:
                raise OSError(f"an archive could not be handled: {report['error']}")
            return report, os.pread(written, os.fstat(written).st_size, 0)
        finally:
            for fd in (pidfd, written, reported):
                os.close(fd)


def unpack(body: BinaryIO) -> dict[str, Any]:
    try:
        paths = archive.unpack(body, "/", box_isolation.FOLDERS)
    except archive.ArchiveError as exc:
        return {"refused": str(exc)}
    return {"known": [path for path in paths if archive.is_inside(path, PLANTED_IN)]}


def pack(file: BinaryIO, paths: list[str], max_bytes: int, known: list[str]) -> dict[str, Any]:
    packed = archive.Pack(file, "/", max_bytes=max_bytes)
    strays = archive.find_planted("/", PLANTED_IN, known)  # first: packing unlocks what it packs
    packed.pack(paths)
    return {"dropped": packed.dropped, "strays": strays}


def confine(worker: BoxWorker, max_file_bytes: int, address_space: int, *, is_readable: bool = True) -> None:
    """Give up all that a program of the box may not do; for good.

    Args:
        is_readable: see `Isolation.confine`. What a fork has open before its exec is the worker's.
    """
    os.setsid()
    prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0)
    limit(resource.RLIMIT_FSIZE, max_file_bytes)
    limit(resource.RLIMIT_AS, address_space)
    worker.layers.confine(is_readable=is_readable)


def become_command(worker: BoxWorker, request: dict[str, Any], stdout: int, stderr: int, cwd: int) -> NoReturn:
    """Turn a fresh fork of the worker into bash."""
    try:
        address_space = (worker.memory_limit_MB << 20) + EXTRA_ADDRESS_SPACE
        confine(worker, worker.disk_bytes + CHUNK, address_space, is_readable=False)
        reset_signals()
        os.dup2(stdout, 1)
        os.dup2(stderr, 2)
        os.dup2(cwd, box_isolation.CWD_FD)
        try:
            os.dup2(open_stdin(request["stdin"]), 0)
            enter_folder(worker)
        except OSError as exc:  # the box's own doing, such as a full disk
            os.write(2, f"the command could not be started: {exc.strerror}\n".encode())
            os._exit(126)
        command = request["command"].encode("utf-8", "surrogatepass")
        environment = os.environ | box_isolation.ENVIRONMENT
    except BaseException as exc:
        os.write(worker.setup_w, f"{type(exc).__name__}: {exc}".encode())
        os._exit(1)
    try:
        os.closerange(3, box_isolation.CWD_FD)
        os.closerange(box_isolation.CWD_FD + 1, CHUNK)
        os.execve(box_isolation.BASH, ["bash", "-c", command], environment)
    except BaseException as exc:  # the command is over 128 KiB or has a NUL byte in it, or the box has no memory left
        os.write(2, f"the command could not be started: {exc}\n".encode())
    finally:
        os._exit(126)


def open_stdin(text: str) -> int:
    """Return a file with this text, on the box's own disk. Raises OSError."""
    if not text:
        return os.open(os.devnull, os.O_RDONLY)
    fd = os.open(box_isolation.TEMPORARY.rpartition("/")[0], os.O_TMPFILE | os.O_RDWR, 0o600)
    with open(fd, "wb", closefd=False) as file:
        file.write(text.encode("utf-8", "surrogatepass"))
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def enter_folder(worker: BoxWorker) -> None:
    """Enter the folder in which the last command ended; if it is gone, say so, and enter another one."""
    for path in (worker.cwd, worker.workdir, *box_isolation.FOLDERS):
        try:
            os.chdir(path)
        except OSError:
            continue
        if path != worker.cwd:
            os.write(2, os.fsencode(f"{worker.cwd} is gone: in {path} now\n"))
        return
