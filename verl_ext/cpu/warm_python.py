"""Start Python processes by fork from one process that has torch, transformers and vLLM imported already.

    python -m verl_ext.cpu.warm_python -m verl.trainer.main_ppo ...

An RL run on one machine has a dozen processes, each of which imports for seconds; on two cores, that is most of the
start-up. Here one server imports, and a small executable stands in for Python. The executable hands its arguments,
environment, working folder and open files to the server, which forks. The command above, Ray, torchrun and
multiprocessing's "spawn" all start their Pythons through the executable. If the server is gone, or the first argument
is -I or -P, the executable runs the real Python.

For CPU runs on one machine only: an import of verl or vLLM asks for the GPUs, and CUDA does not survive a fork. If
there is an accelerator, the command above runs its module like any other Python.
"""

import atexit
import contextlib
import fcntl
import gc
import importlib
import io
import json
import os
import re
import runpy
import selectors
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import cast

from verl_ext.cpu import is_cpu_only
from verl_ext.cpu.patches import alias_vllm_distribution

EXECUTABLE_VARIABLE = "RETOOL_WARM_PYTHON"

# Variables that the launchers' processes read at import; one that is already set keeps its value.
ENVIRONMENT = {
    "VERL_USE_EXTERNAL_MODULES": "verl_ext",
    "OMP_NUM_THREADS": "1",  # processes outnumber cores
    "OMP_WAIT_POLICY": "PASSIVE",  # a waiting thread of the actor yields to other processes
    "TORCHDYNAMO_DISABLE": "1",  # vLLM would compile small functions in the first step
    "TOKENIZERS_PARALLELISM": "false",
    "TQ_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}

# The most expensive imports that are safe to share, each with all that it imports. Ray is not safe, nor is verl, which
# imports Ray: Ray keeps its ids and variables in static C++ state, which all forks would share.
PRELOAD = (
    "tensordict",
    "torchdata.stateful_dataloader",
    "transformers.models.qwen2.modeling_qwen2",
    "datasets",
    "peft",
    "hydra",
    "vllm.v1.engine.core",
    "vllm.v1.engine.async_llm",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.qwen2",
    "vllm.entrypoints.cli.serve",
)
MAX_FILES = 253  # the most that Linux passes in one message

_STUB = """{start}
import json, os, signal, socket, sys
if sys.argv[1:2] in (["-I"], ["-P"]):  # needs a separate interpreter, such as a process with a memory limit
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
try:
    server = socket.socket(socket.AF_UNIX)
    server.connect({address!r})
except OSError:
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
numbers = []
for name in os.listdir("/proc/self/fd"):
    try:
        if os.get_inheritable(int(name)):
            numbers.append(int(name))
    except OSError:
        pass
niceness = os.getpriority(os.PRIO_PROCESS, 0)
signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # the fork may run before its pid is known here
socket.send_fds(server, [b" "], numbers)
server.sendall(json.dumps([sys.argv[1:], dict(os.environ), os.getcwd(), niceness, numbers]).encode() + b"\\n")
answers = server.makefile()
pid = int(answers.readline())
for number in signals:
    signal.signal(number, lambda number, frame: os.kill(pid, number))
signal.pthread_sigmask(signal.SIG_SETMASK, before)
status = int(answers.readline() or 1)
if status < 0:
    signal.signal(-status, signal.SIG_DFL) if -status != signal.SIGKILL else None
    os.kill(os.getpid(), -status)
os._exit(status)
"""


def stub(python: str, address: str) -> str:
    """Return the script that stands in for `python` and asks the server at `address`.

    Linux reads at least 127 bytes of a first line, up to a space. For longer paths or those with spaces, a shell reads
    two lines, which are a string to Python.
    """
    start = f"#!{python} -IS"
    if len(start.encode()) > 127 or re.search(r"\s", python):
        start = f"#!/bin/sh\n'''exec' {shlex.quote(python)} -IS \"$0\" \"$@\"\n' '''"
    return _STUB.format(start=start, python=python, address=address)


@contextlib.contextmanager
def warm_python() -> Iterator[str]:
    """Run a server for a `with` block; yield the path of the executable that stands in for Python.

    Starting returns at once: the server imports meanwhile, and requests wait for it. If `RETOOL_WARM_PYTHON` names the
    executable of another server, as in the stages of a quickstart, that one serves and none is started.
    """
    outer = os.environ.get(EXECUTABLE_VARIABLE)
    if outer and os.access(outer, os.X_OK):
        yield outer
        return
    folder = Path(tempfile.mkdtemp(prefix="retool-warm-"))
    address, executable = str(folder / "socket"), folder / "python"
    executable.write_text(stub(sys.executable, address))
    executable.chmod(0o700)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen(128)
        served = str(executable), str(listener.fileno()), str(os.getpid())
        server = subprocess.Popen(
            [sys.executable, "-m", "verl_ext.cpu.warm_python", "--serve", *served],
            env=ENVIRONMENT | os.environ,
            pass_fds=[listener.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    try:
        yield str(executable)
    finally:
        server.terminate()
        server.wait()
        shutil.rmtree(folder, ignore_errors=True)


def serve(executable: str, listener: socket.socket, parent_pid: int) -> None:
    """Import `PRELOAD`, then fork a Python per connection until the parent dies or SIGTERM comes.

    Raises:
        RuntimeError: an import started a thread, so that forks would be unsafe.
    """
    sys.executable = executable  # so that torchrun, Ray and multiprocessing in the forks also start their Pythons here
    _preload()
    selector = selectors.DefaultSelector()  # of the listener, and of each fork's pidfd and executable
    selector.register(listener, selectors.EVENT_READ)
    while os.getppid() == parent_pid:
        for key, _ in selector.select(timeout=1.0)[:1]:  # one at a time: it may unregister the next
            if key.fileobj is listener:
                client, _ = listener.accept()
                if pid := _start(client, selector):
                    pidfd = os.pidfd_open(pid)
                    for file in (pidfd, client):
                        selector.register(file, selectors.EVENT_READ, (pid, pidfd, client))
                continue
            pid, pidfd, client = key.data
            if key.fileobj is client:  # the executable was killed: so is the fork
                os.kill(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
            with contextlib.suppress(OSError):
                client.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))
            for file in (pidfd, client):
                selector.unregister(file)
            os.close(pidfd)
            client.close()
    # The parent was killed and cannot clean up itself.
    for pid in {key.data[0] for key in selector.get_map().values() if key.data}:
        os.kill(pid, signal.SIGKILL)
    shutil.rmtree(Path(executable).parent, ignore_errors=True)


def _preload() -> None:
    alias_vllm_distribution()
    # None is no module to typeshed, but to an import, which fails; vLLM takes that for "not installed".
    sys.modules["ray"] = None  # pyright: ignore[reportArgumentType]
    for name in PRELOAD:
        importlib.import_module(name)
    del sys.modules["ray"]
    if threading.active_count() > 1:
        raise RuntimeError(f"{threading.enumerate()} run after the imports of warm_python, and a fork would lose them.")
    # From 3.12 on Python warns at each fork of the libraries' thread pools, which have had no work yet.
    warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
    gc.collect()
    gc.freeze()  # so that no collection in a fork walks, and so copies, the shared pages


def _start(client: socket.socket, selector: selectors.BaseSelector) -> int | None:
    """Fork what the executable at the other end asks for; return the pid, or None if it is already gone."""
    _, files, _, _ = socket.recv_fds(client, 1, MAX_FILES)
    with client.makefile() as lines:
        request = lines.readline()
    pid = os.fork() if request.endswith("\n") else None
    if pid == 0:
        for other in (client, *(key.fileobj for key in selector.get_map().values())):
            if isinstance(other, socket.socket):
                other.close()
        selector.close()
        _become(request, files)
    for file in files:
        os.close(file)
    if pid:
        with contextlib.suppress(OSError):
            client.sendall(b"%d\n" % pid)
    return pid


def _become(request: str, files: list[int]) -> None:
    """Become, in the fork, the requested Python, with `files` as its open files. Does not return."""
    os.setpgid(0, 0)  # as Ray does for each worker, whose process group it ends when it dies
    arguments, environment, folder, niceness, numbers = json.loads(request)
    floor = max([*numbers, *files, 2]) + 1
    moved = [fcntl.fcntl(file, fcntl.F_DUPFD, floor) for file in files]  # so that they do not collide
    for file in files:
        os.close(file)
    for file, number in zip(moved, numbers, strict=True):
        os.dup2(file, number)
        os.close(file)
    with contextlib.suppress(OSError):  # it may be less nice than we are allowed to be
        os.setpriority(os.PRIO_PROCESS, 0, niceness)  # Ray's workers are nice: a sandbox next to them comes first
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # the imports have set it, and TMPDIR may differ here
    os.chdir(folder)
    sys.path[:0] = [entry for entry in environment.get("PYTHONPATH", "").split(os.pathsep) if entry]
    cast(io.TextIOWrapper, sys.stdout).reconfigure(line_buffering=True)
    status = 0
    try:
        _run(arguments)
    except SystemExit as error:
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException as error:  # the interpreter's own last resort
        sys.excepthook(type(error), error, error.__traceback__)
        status = 1
    # End as the interpreter does, but without freeing the shared pages, which would copy them first.
    with contextlib.suppress(BaseException):
        threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]  # private: what the interpreter calls
    atexit._run_exitfuncs()
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status & 0xFF)


def _run(arguments: list[str]) -> None:
    """Run the arguments of a `python` command in this process.

    Raises:
        ValueError: they say neither `-c code` nor `-m module` nor a script.
    """
    first = 0
    while arguments[first:] and arguments[first].startswith("-") and arguments[first] not in ("-c", "-m"):
        first += 2 if arguments[first] in ("-X", "-W") else 1  # -u, -B, ...: no meaning for a running interpreter
    match arguments[first:]:
        case ["-c", code, *rest]:
            sys.argv = ["-c", *rest]
            sys.path.insert(0, "")
            exec(code, {"__name__": "__main__"})
        case ["-m", module, *rest]:
            sys.argv = [module, *rest]
            sys.path.insert(0, os.getcwd())
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        case [script, *rest]:
            sys.argv = [script, *rest]
            sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
            runpy.run_path(script, run_name="__main__")
        case _:
            raise ValueError(f"warm_python runs `-c code`, `-m module` or a script, but got {arguments}.")


def main() -> None:
    if sys.argv[1:2] == ["--serve"]:
        executable, listener, parent_pid = sys.argv[2:]
        serve(executable, socket.socket(fileno=int(listener)), int(parent_pid))
        return
    if not is_cpu_only():
        os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
    os.environ.update(ENVIRONMENT | os.environ)
    with warm_python() as executable:
        command = subprocess.Popen([executable, *sys.argv[1:]])
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, frame: command.send_signal(number))
        status = command.wait()
    raise SystemExit(status if status >= 0 else 128 - status)


if __name__ == "__main__":
    main()
