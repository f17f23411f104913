"""The processes that run the submitted Python: a fork server with a clean environment.

  zygote   imports packages, then waits on its control socket; each message carries the socket of a new worker to fork
  worker   runs one request after another: forks the program, reads its output while it runs, holds the deadline,
           kills and removes all that is left, and only then answers
  program  the submitted code, run as `python main.py` runs it, then ended without tearing the interpreter down

The server starts it by path (`python -I zygote.py CONTROL_FD JSON`, see `main`) and never imports it, so that no secret
and no package of the server is in the memory of a program. Nor is anything of earlier requests: a worker never
reads code or input (the program does), and it keeps output in memory that forks do not inherit. What costs time is the
pages that a fork touches, each copied on a fault; so whatever can be done once in the worker is not done per request.

A program is bounded here (time, memory, file size, output) and cleaned up after; what keeps it from the host's files,
processes and network is in isolation.py.
"""

import atexit
import ctypes
import gc
import importlib
import json
import marshal
import math
import mmap
import os
import resource
import select
import signal
import socket
import struct
import sys
import time
import types
from typing import Any, NoReturn


def _import_siblings(*names: str) -> list[types.ModuleType]:
    """Modules next to this file, as a package of their own: neither `verl_ext` nor this folder gets importable."""
    package = types.ModuleType("_sandbox")
    package.__path__ = [os.path.dirname(os.path.abspath(__file__))]
    sys.modules[package.__name__] = package
    modules = [importlib.import_module(f"{package.__name__}.{name}") for name in names]
    for name in [name for name in sys.modules if name.partition(".")[0] == package.__name__]:
        del sys.modules[name]
    return modules


isolation, folders, preload = _import_siblings("isolation", "folders", "preload")
limit = isolation.limit

SCRIPT = folders.SCRIPT
MAX_FILE_BYTES = 64 << 20  # RLIMIT_FSIZE of a program; writing beyond it raises OSError(EFBIG)
MAX_OPEN_FILES = 256
OOM_SCORE_ADJ = "1000"  # when the machine runs out of memory the kernel ends a program first, not the trainer
MEMORY_CHECK_S = 0.1  # between two sums over the processes of a request; one takes 0.1 ms a process
CHUNK = 1 << 16  # bytes, as large as a pipe
LENGTH = struct.Struct("<I")  # goes before every message between server and worker
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h

prctl = ctypes.CDLL(None, use_errno=True).prctl


def main(control: socket.socket, options: dict[str, Any]) -> None:
    """Fork a worker per message (its name, with its socket) until the server is gone; then remove the root folder.

    Args:
        options: root (folder), max_output_bytes, isolation (auto, full, none), allow_subprocess, preload (names).
    """
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # a worker is what its parent, our child, forked in new namespaces
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write(OOM_SCORE_ADJ)
    # The first compile() builds the parser's types; done here, every fork inherits them.
    exec(compile(b"def f(x):\n    return [y for y in range(x)]\nf'{f(3)}'\n", SCRIPT, "exec"), {})
    preload.preload(options["preload"])
    refusal = None
    try:
        layers = isolation.Isolation(
            options["isolation"], allow_subprocess=options["allow_subprocess"], root=options["root"]
        )
        layers.enter_zygote()
    except isolation.IsolationError as exc:
        refusal = str(exc)
    with open("/proc/self/statm") as file:
        address_space = int(file.read().split()[0]) * resource.getpagesize()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps workers
    gc.collect()
    gc.freeze()  # keeps the collector in forked processes from touching, and so copying, the zygote's pages
    preload.use_huge_pages()
    while True:
        name, fds, _, _ = socket.recv_fds(control, 64, 1)
        if not name:
            break
        connection = socket.socket(fileno=fds[0])
        if refusal:
            send(connection, {"error": refusal})
            connection.close()
            continue
        try:
            pid = os.fork()
        except OSError as exc:  # the request sees its socket close and answers SandboxError
            print(f"sandbox zygote: fork failed: {exc}", file=sys.stderr, flush=True)
            pid = None
        if pid == 0:
            try:
                control.close()
                start_worker(connection, name.decode(), layers, options["max_output_bytes"], address_space)
            finally:
                os._exit(0)
        connection.close()
    try:
        os.waitpid(-1, 0)  # returns, with an error, once all workers have seen that the server is gone
    except ChildProcessError:
        pass
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if refusal or not layers.remove_root():
        folders.remove_tree(options["root"])


def start_worker(connection: socket.socket, name: str, layers: Any, *for_worker: int) -> None:
    """Be a worker until its socket closes; first send its process id and the layers it is under, or {"error": why}."""
    try:
        pid = layers.enter_worker(name)
        worker = Worker(connection, layers, *for_worker)
    except OSError as exc:
        send(connection, {"error": f"a worker could not be set up: {exc}"})
        return
    send(connection, {"pid": pid, "layers": layers.names(), "off": layers.off})
    worker.serve()


def send(connection: socket.socket, message: dict[str, Any]) -> None:
    """Send LENGTH and JSON; raises OSError when the server has gone."""
    text = json.dumps(message).encode()
    connection.sendall(LENGTH.pack(len(text)) + text)


class Worker:
    """Serves requests from one socket, one at a time, until it closes or something goes wrong.

    Request: LENGTH, marshal of {run_timeout, memory_limit_MB, fetch_files}; with the first byte comes a memory file
    that holds marshal of {code, stdin, files}, for the program. Answer: LENGTH, JSON of `run`'s result or of
    {"error": why}, then the bytes whose counts the JSON gives: stdout, stderr, fetched files in order.
    """

    def __init__(self, connection: socket.socket, layers: Any, max_output_bytes: int, address_space: int) -> None:
        self.connection, self.layers, self.folder = connection, layers, layers.folder
        self.address_space = address_space  # bytes that a program has before its first line
        self.buffers = [Buffer(max_output_bytes), Buffer(max_output_bytes)]  # stdout, stderr
        self.setup_r, self.setup_w = os.pipe()
        os.set_blocking(self.setup_r, False)
        # All that follows is for the programs, which inherit it.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # process 1 of a namespace ignores what it does not handle
        if prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):  # a program's orphans become ours, so that we can kill them
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
        limit(resource.RLIMIT_FSIZE, MAX_FILE_BYTES)
        limit(resource.RLIMIT_NOFILE, MAX_OPEN_FILES)
        limit(resource.RLIMIT_CORE, 0)  # no RLIMIT_NPROC: it counts the user's processes on the whole machine
        os.environ["HOME"] = os.environ["TMPDIR"] = self.folder
        sys.argv[:] = [SCRIPT]
        gc.freeze()
        self.module = make_main_module(self.folder)  # after the freeze: its cycles are collected when the program ends

    def serve(self) -> None:
        """Answer requests until the socket closes; an error is answered and ends the worker."""
        while True:
            message, fds, _, _ = socket.recv_fds(self.connection, CHUNK, 1)
            if not message:
                return
            try:
                while len(message) < LENGTH.size + LENGTH.unpack_from(message)[0]:
                    message += self.connection.recv(CHUNK)
                request = marshal.loads(message[LENGTH.size :])
                self.layers.make_folder()
                try:
                    answer = self.run(request, fds[0])
                    files, answer["not_fetched"] = folders.open_files(self.folder, request["fetch_files"])
                finally:
                    self.layers.remove_folder()
            except Exception as exc:
                send(self.connection, {"error": f"{type(exc).__name__}: {exc}"})
                return
            answer["files"] = {path: os.fstat(fd).st_size for path, fd in files.items()}
            self.send(answer, [buffer.kept() for buffer in self.buffers], list(files.values()))
            os.close(fds[0])

    def run(self, request: dict[str, Any], body: int) -> dict[str, Any]:
        """Fork the program, read what it prints until it exits or its time is over, kill all that it started.

        Returns:
            status ("Finished" or "TimeLimitExceeded"), return_code (None after a timeout, -N after signal N),
            execution_time (s), stdout and stderr (number of bytes kept, of bytes written).
        Raises:
            RuntimeError: the program could not be set up; none of the submitted code ran.
        """
        out_r, out_w = os.pipe()
        err_r, err_w = os.pipe()
        started = time.monotonic()
        deadline = started + request["run_timeout"]
        pid = os.fork()
        if pid == 0:
            program(self, request, body, out_w, err_w)
        os.close(out_w)
        os.close(err_w)
        pidfd = os.pidfd_open(pid)
        streams = dict(zip((out_r, err_r), self.buffers, strict=True))
        poller = select.poll()
        poller.register(pidfd, select.POLLIN)
        poller.register(self.connection, 0)  # POLLHUP alone: the server closed its end, nobody waits for the answer
        for fd, buffer in streams.items():
            buffer.reset()
            os.set_blocking(fd, False)
            poller.register(fd, select.POLLIN)
        status = "Finished"
        # RLIMIT_AS bounds a process. Where there may be several, they are also counted together, and then killed.
        memory_limit = request["memory_limit_MB"] << 20
        counts_memory = memory_limit > 0 and self.layers.allow_subprocess and "proc" in self.layers.layers
        next_check = started + MEMORY_CHECK_S if counts_memory else math.inf
        while True:
            now = time.monotonic()
            if now >= deadline:
                status = "TimeLimitExceeded"
                break
            if now >= next_check:
                if memory_of_others() > memory_limit:
                    break
                next_check = time.monotonic() + MEMORY_CHECK_S
            ready = [fd for fd, _ in poller.poll(math.ceil((min(deadline, next_check) - now) * 1000))]
            for fd in ready:
                if fd in streams and not streams[fd].read_from(fd):
                    poller.unregister(fd)
            if pidfd in ready or self.connection.fileno() in ready:
                break
        execution_time = time.monotonic() - started
        return_code = os.waitstatus_to_exitcode(kill_all(pid))
        for fd, buffer in streams.items():  # what the dead left in the pipes
            try:
                while buffer.read_from(fd):
                    pass
            except BlockingIOError:  # a process that is not ours to kill holds the other end
                pass
            os.close(fd)
        os.close(pidfd)
        try:
            raise RuntimeError(f"the program could not be set up: {os.read(self.setup_r, CHUNK).decode()}")
        except BlockingIOError:  # no complaint
            pass
        if return_code == -signal.SIGXCPU:  # several threads used up the CPU time before the wall clock ran out
            status = "TimeLimitExceeded"
        return {
            "status": status,
            "return_code": None if status == "TimeLimitExceeded" else return_code,
            "execution_time": execution_time,
            "stdout": [len(self.buffers[0].kept()), self.buffers[0].total],
            "stderr": [len(self.buffers[1].kept()), self.buffers[1].total],
        }

    def send(self, answer: dict[str, Any], blobs: list[memoryview] = (), files: list[int] = ()) -> None:
        """Send one answer; raises OSError when the server has gone, which ends the worker."""
        send(self.connection, answer)
        for blob in blobs:
            self.connection.sendall(blob)
        for fd in files:
            self.connection.sendfile(open(fd, "rb"))


class Buffer:
    """The first `max_bytes` bytes of a stream and the count of all, in memory that forks do not inherit."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes, self.total = max_bytes, 0
        memory = mmap.mmap(-1, max_bytes + CHUNK, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_DONTFORK)
        self.memory = memoryview(memory)

    def reset(self) -> None:
        self.total = 0

    def read_from(self, fd: int) -> int:
        """Read once what `fd` has, beyond `max_bytes` over what came before; 0 at the end of the stream."""
        start = min(self.total, self.max_bytes)
        count = os.readv(fd, [self.memory[start : start + CHUNK]])
        self.total += count
        return count

    def kept(self) -> memoryview:
        return self.memory[: min(self.total, self.max_bytes)]


def make_main_module(folder: str) -> types.ModuleType:
    """`__main__` as it is before the first line of `python main.py`."""
    module = types.ModuleType("__main__")
    path = os.path.join(folder, SCRIPT)
    loader = sys.modules["_frozen_importlib_external"].SourceFileLoader("__main__", path)
    vars(module).update(__file__=path, __cached__=None, __loader__=loader, __annotations__={})
    vars(module).update(__builtins__=sys.modules["builtins"])
    return module


def program(worker: Worker, request: dict[str, Any], body: int, stdout: int, stderr: int) -> NoReturn:
    """Turn a fresh fork of the worker into the program and run it; leaves with the exit code CPython would give."""
    code = 1
    try:
        try:
            source = enter(worker, request["run_timeout"], body, stdout, stderr)
        except BaseException as exc:
            os.write(worker.setup_w, f"{type(exc).__name__}: {exc}".encode())
            os._exit(code)
        sys.modules["__main__"], worker.module = worker.module, None
        os.closerange(3, CHUNK)
        try:
            if request["memory_limit_MB"] > 0:
                limit(resource.RLIMIT_AS, worker.address_space + (request["memory_limit_MB"] << 20))
            execute(source)
            code = 0
        except SystemExit as exc:
            code = exit_code(exc)
        except BaseException as exc:
            code = -signal.SIGINT if isinstance(exc, KeyboardInterrupt) else 1
            print_exception(exc)
        if not shut_down() and code == 0:
            code = 120  # CPython's code for a standard stream that could not be flushed
        if code == -signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        os._exit(code & 0xFF)


def enter(worker: Worker, run_timeout: float, body: int, stdout: int, stderr: int) -> bytes:
    """Session, folder, files, streams and CPU limit of the program; returns its source."""
    os.setsid()
    worker.layers.become_user()
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    request = marshal.loads(os.pread(body, os.fstat(body).st_size, 0))
    source = request["code"].encode("utf-8", "surrogatepass")
    os.chdir(worker.folder)
    for path, content in request["files"].items():  # the server has checked the paths
        if content is not None:
            os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
            folders.write_file(path, content)
    folders.write_file(SCRIPT, source)
    if request["stdin"]:  # else /dev/null, as the zygote's
        stdin = os.memfd_create("stdin")
        os.write(stdin, request["stdin"].encode("utf-8", "surrogatepass"))
        os.lseek(stdin, 0, os.SEEK_SET)
        os.dup2(stdin, 0)
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    cpu_s = math.ceil(run_timeout) + 1
    limit(resource.RLIMIT_CPU, cpu_s, cpu_s + 1)  # SIGXCPU at the first, SIGKILL at the second
    signal.signal(signal.SIGINT, signal.default_int_handler)
    worker.layers.confine()
    preload.renew()
    sys.path.insert(0, worker.folder)  # never in the worker, which would import, unconfined, what a program wrote there
    return source


def execute(source: bytes) -> None:
    """Execute `source` in `__main__`; its frames come right after those of this module."""
    exec(compile(source, SCRIPT, "exec", dont_inherit=True), vars(sys.modules["__main__"]))


def exit_code(exc: SystemExit) -> int:
    """As Py_HandleSystemExit: None is 0, an int is itself, anything else is printed to stderr and 1."""
    if exc.code is None or isinstance(exc.code, int):
        return exc.code or 0
    print(exc.code, file=sys.stderr)
    return 1


def print_exception(exc: BaseException) -> None:
    """Print the traceback from the program's own frames on; a SyntaxError of the program itself has none."""
    frames = exc.__traceback__
    while frames and frames.tb_frame.f_globals is globals():
        frames = frames.tb_next
    exc.__traceback__ = frames
    try:
        sys.excepthook(type(exc), exc, frames)
    except BaseException:  # a broken hook of the program's: the default one reports what it was called for
        sys.__excepthook__(type(exc), exc, frames)


def shut_down() -> bool:
    """What Py_FinalizeEx does for a program: join threads, atexit, destructors, flush. False: a flush failed."""
    if "threading" in sys.modules:
        sys.modules["threading"]._shutdown()
    atexit._run_exitfuncs()
    flushed = flush(sys.stdout, sys.stderr)
    sys.modules.pop("__main__", None)  # with the last reference go its objects: open files get flushed, __del__ runs
    gc.collect()
    return flush(sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__) and flushed


def flush(*streams: Any) -> bool:
    """Flush what is not closed; False when one could not be."""
    flushed = True
    for stream in streams:
        try:
            if stream is not None and not stream.closed:
                stream.flush()
        except Exception:
            flushed = False
    return flushed


def memory_of_others() -> int:
    """Bytes that all other processes of this process namespace have, what they share counted once."""
    total = 0
    for name in os.listdir("/proc"):
        if name.isdecimal() and name != "1":
            try:
                with open(f"/proc/{name}/smaps_rollup") as file:
                    total += sum(int(line.split()[1]) for line in file if line.startswith("Pss:"))
            except OSError:  # it has ended
                pass
    return total << 10


def kill_all(pid: int) -> int:
    """Kill the program's session and every process that descends from it; returns the program's wait status."""
    if os.getpid() == 1:  # of a process namespace, where all others are the program's; all at once, so that none forks
        try:
            os.kill(-1, signal.SIGKILL)
        except ProcessLookupError:
            pass
    for kill in (os.killpg, os.kill):  # the group does not exist yet when the time was over before setsid()
        try:
            kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    _, status = os.waitpid(pid, 0)
    while True:  # what left the session is now our child, or becomes it when its parent is killed
        try:
            reaped, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return status
        if not reaped and os.getpid() == 1:
            os.waitpid(-1, 0)
        elif not reaped:
            with open(f"/proc/self/task/{os.getpid()}/children") as file:
                for child in file.read().split():
                    os.kill(int(child), signal.SIGKILL)
            os.waitpid(-1, 0)


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])), json.loads(sys.argv[2]))
