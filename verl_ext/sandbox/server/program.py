"""The program: a fork of the worker that confines itself, runs the submitted code as `python main.py` does, and ends.

See zygote.py. In a session it then waits for the next call instead.
"""

import _ast
import _signal  # pyright: ignore[reportMissingImports]  # which no stub describes
import atexit
import ctypes
import gc
import marshal
import math
import os
import resource
import signal
import socket
import struct
import sys
import types
from typing import Any, NoReturn

from . import folders
from .isolation import limit
from .wire import REQUEST

SCRIPT = folders.SCRIPT
CONTROL_FD = 3  # in a session, the program reports here that a call is done, and gets the next one
CHUNK = 1 << 16  # bytes, as large as a pipe
RETURN_CODE = struct.Struct("<i")  # sent there after a call, following the token
TOKEN_BYTES = 16
PR_SET_PDEATHSIG = 1  # linux/prctl.h

SIGINT, SIGKILL = int(signal.SIGINT), int(signal.SIGKILL)  # the enumerations of `signal` touch 12 pages more
prctl = ctypes.CDLL(None, use_errno=True).prctl


def become_program(worker: Any, request: Any, stdout: int, stderr: int, control: socket.socket | None) -> NoReturn:
    """Turn a fresh fork of the worker into the program and run it; exits with the code that CPython would give."""
    code = 1
    try:
        try:
            call = enter(worker, request, stdout, stderr)
        except BaseException as exc:
            os.write(worker.setup_w, f"{type(exc).__name__}: {exc}".encode())
            os._exit(code)
        sys.modules["__main__"], worker.module = worker.module, None
        if control:
            os.dup2(control.detach(), CONTROL_FD)
        os.closerange(CONTROL_FD + 1 if control else CONTROL_FD, CHUNK)
        if request.memory_limit_MB > 0:
            limit(resource.RLIMIT_AS, worker.address_space + (request.memory_limit_MB << 20))
        code = run_session(call, worker.folder) if control else run(call, SCRIPT)
        if not shut_down() and code == 0:
            code = 120  # CPython's code for a standard stream that could not be flushed
        if code == -signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        os._exit(code & 0xFF)


def run_session(call: dict[str, Any], folder: str) -> int:
    """Run the calls of a session, starting with `call`; returns only in a fork that a call made, its exit code.

    A return code counts only after a token, which the worker gets before any submitted code runs: what that code
    writes to CONTROL_FD by itself is not a return code.
    """
    box: list[Any] = [os.urandom(TOKEN_BYTES)]
    os.write(CONTROL_FD, box[0])
    pid, calls, script = os.getpid(), 1, SCRIPT
    while True:
        code = run_without_token(call, script, box)
        if os.getpid() != pid:  # a fork of the submitted code that did not exit ends as any program does
            return code
        calls += 1
        script = f"main{calls}.py"  # separate, so that tracebacks through earlier calls show their lines
        call = next_call(code, box, folder, script)


def run_without_token(call: dict[str, Any], script: str, box: list[Any]) -> int:
    """Call `run` while the token is in no frame and no object that Python shows.

    CPython empties a list while it sorts it: the items are then only in C variables. So the code runs as a sort key.
    A search of the memory itself can still find the token.
    """
    runner = Runner(call, script)
    box.append(runner)
    box.sort(key=hash)
    box.remove(runner)
    return runner.code


class Runner:
    """Runs its call when it is hashed."""

    def __init__(self, call: dict[str, Any], script: str) -> None:
        self.call, self.script, self.code = call, script, 1

    def __hash__(self) -> int:
        self.code = run(self.call, self.script)
        try:  # both here, because they run the program's code: a stream and a trace function may be its own
            flush(sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
        finally:
            sys.settrace(None)
            sys.setprofile(None)
        return 0


def enter(worker: Any, request: Any, stdout: int, stderr: int) -> dict[str, Any]:
    """Set up the program's session, folder, files, streams and CPU limit; return the call to run."""
    os.setsid()
    worker.layers.become_user()
    prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0)
    os.chdir(worker.folder)
    call = read_call(request.body, worker.folder, SCRIPT)
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    if not request.session:  # only the wall clock bounds each call of a session, which is stopped in between
        cpu_s = cpu_limit_s(request.run_timeout)
        limit(resource.RLIMIT_CPU, cpu_s, cpu_s + 1)  # SIGXCPU at the first, SIGKILL at the second
    _signal.signal(SIGINT, _signal.default_int_handler)
    worker.layers.confine()
    sys.path.insert(0, worker.folder)  # never in the worker, which would import, unconfined, what a program wrote there
    return call


def cpu_limit_s(run_timeout: float) -> int:
    return math.ceil(run_timeout) + 1


def read_call(body: int, folder: str, script: str) -> dict[str, Any]:
    """Read the call from the memory file `body`; write its files and the code, which becomes `source` (bytes)."""
    call = marshal.loads(os.pread(body, os.fstat(body).st_size, REQUEST.size))  # the rest is for the worker
    call["source"] = call["code"].encode("utf-8", "surrogatepass")
    for path, content in call["files"].items():  # the server has checked the paths
        if content is not None:
            path = os.path.join(folder, path)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            folders.write_file(path, content)
    folders.write_file(f"{folder}/{script}", call["source"])
    if call["stdin"]:
        stdin = folders.open_unlinked(f"{folder}/{folders.STDIN}", call["stdin"].encode("utf-8", "surrogatepass"))
    else:  # opened anew: an open one is the same for all programs, with its offset and flags
        stdin = os.open(os.devnull, os.O_RDONLY)
    os.dup2(stdin, 0)
    os.close(stdin)
    return call


def next_call(return_code: int, box: list[Any], folder: str, script: str) -> dict[str, Any]:
    """Report to the worker that a call of the session is done, and return the next one; exit if there is none.

    A program that has made this impossible (no space or file descriptors left, a timer that raises) ends with exit code
    1 and the reason on stderr: the code of the call has not run, which must not look like success.
    """
    try:
        control = socket.socket(fileno=CONTROL_FD)
        control.send(box[0] + RETURN_CODE.pack(return_code))
        message, fds, _, _ = socket.recv_fds(control, 1, 1)
        control.detach()
        if not message:
            os._exit(0)
        call = read_call(fds[0], folder, script)
        os.close(fds[0])
        sys.stdin = open(0, encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115  the program's
        return call
    except BaseException as exc:
        try:
            os.write(2, f"the session cannot take another call: {type(exc).__name__}: {exc}\n".encode())
        finally:
            os._exit(1)


def run(call: dict[str, Any], script: str) -> int:
    """Execute code in `__main__` and print the exception that ends it; return the exit code (-SIGINT: interrupted)."""
    try:
        execute(call["source"], script, call["echo_last_expression"])
    except SystemExit as exc:
        return exit_code(exc)
    except BaseException as exc:
        print_exception(exc)
        return -signal.SIGINT if isinstance(exc, KeyboardInterrupt) else 1
    return 0


def execute(source: bytes, script: str, echo: bool) -> None:
    """Execute `source` in `__main__`; its frames come right after those of this module.

    Args:
        echo: print the value of a last statement that is an expression, unless it is None, as a Python prompt does.
    """
    namespace = vars(sys.modules["__main__"])
    code, last = source, None
    tree = compile(source, script, "exec", _ast.PyCF_ONLY_AST, dont_inherit=True) if echo else None
    if isinstance(tree, _ast.Module):
        if tree.body and isinstance(tree.body[-1], _ast.Expr):
            last = _ast.Interactive([tree.body.pop()])
        code = tree
    exec(compile(code, script, "exec", dont_inherit=True), namespace)
    if last:
        exec(compile(last, script, "single", dont_inherit=True), namespace)


def exit_code(exc: SystemExit) -> int:
    """Return Py_HandleSystemExit's code: None is 0, an int its last byte, anything else is printed to stderr and 1."""
    if exc.code is None or isinstance(exc.code, int):
        code = exc.code or 0
        return code & 0xFF if -(1 << 63) <= code < 1 << 63 else 0xFF
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
    except BaseException:  # the program's hook is broken: the default one reports the exception
        sys.__excepthook__(type(exc), exc, frames)


def shut_down() -> bool:
    """Do what Py_FinalizeEx does: join threads, atexit, destructors, flush. Return False if a flush failed."""
    if "threading" in sys.modules:
        sys.modules["threading"]._shutdown()
    atexit._run_exitfuncs()
    flushed = flush(sys.stdout, sys.stderr)
    sys.modules.pop("__main__", None)  # its objects go with the last reference: open files get flushed, __del__ runs
    gc.collect()
    return flush(sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__) and flushed


def flush(*streams: Any) -> bool:
    """Flush the streams that are not closed; return False if one could not be flushed."""
    flushed = True
    for stream in streams:
        try:
            if stream is not None and not stream.closed:
                stream.flush()
        except Exception:
            flushed = False
    return flushed


def make_main_module(folder: str) -> types.ModuleType:
    """Return `__main__` as it is before the first line of `python main.py`."""
    module = types.ModuleType("__main__")
    path = os.path.join(folder, SCRIPT)
    loader = sys.modules["_frozen_importlib_external"].SourceFileLoader("__main__", path)
    vars(module).update(__file__=path, __cached__=None, __loader__=loader, __annotations__={})
    vars(module).update(__builtins__=sys.modules["builtins"])
    return module
