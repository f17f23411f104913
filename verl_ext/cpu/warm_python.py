"""Start Python processes by fork from one process that has torch, transformers and vLLM imported already.

    python -m verl_ext.cpu.warm_python -m verl.trainer.main_ppo ...

An RL run on one machine is a dozen processes, and each imports for seconds: on two cores, that is most of the run's
start. Here one server imports, and a small executable stands in for Python. The executable hands its arguments,
environment, working folder and open files to the server, which forks. The command above, Ray, torchrun and
multiprocessing's "spawn" all start their Pythons through the executable. If the server is gone, or the first argument
is -I or -P, the executable runs the real Python.

For CPU runs on one machine only: a process that has touched CUDA cannot be forked.
"""

import array
import contextlib
import gc
import importlib
import json
import os
import runpy
import selectors
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from verl_ext.cpu.patches import alias_vllm_distribution

EXECUTABLE_VARIABLE = "RETOOL_WARM_PYTHON"

# What the launchers' processes read when they import; a variable that is set already keeps its value.
ENVIRONMENT = {
    "VERL_USE_EXTERNAL_MODULES": "verl_ext",
    "OMP_NUM_THREADS": "1",  # processes outnumber cores
    "OMP_WAIT_POLICY": "PASSIVE",  # a thread of the actor that waits gives way to other processes
    "TORCHDYNAMO_DISABLE": "1",  # vLLM would compile small functions in the first step
    "TOKENIZERS_PARALLELISM": "false",
    "TQ_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}

# The imports that cost most and are safe to share. Ray is not safe, nor is verl, which imports Ray: Ray draws ids and
# reads its variables in static C++ state, which all forks would share.
PRELOAD = (
    "torch",
    "tensordict",
    "torchdata.stateful_dataloader",
    "transformers.modeling_utils",
    "transformers.models.qwen2.modeling_qwen2",
    "pandas",
    "datasets",
    "peft",
    "hydra",
    "aiohttp",
    "fastapi",
    "uvicorn",
    "zmq",
    "msgspec",
    "vllm.v1.engine.core",
    "vllm.v1.engine.async_llm",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.qwen2",
    "vllm.entrypoints.openai.api_server",
    "vllm.entrypoints.cli.serve",
)

_STUB = """#!{python} -IS
import array, json, os, signal, socket, struct, sys
if sys.argv[1:2] in (["-I"], ["-P"]):  # wants an interpreter of its own, such as a process with a limit of memory
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
try:
    server = socket.socket(socket.AF_UNIX)
    server.connect({address!r})
except OSError:
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
numbers = []
for name in os.listdir("/proc/self/fd"):
    try:
        if int(name) != server.fileno() and (os.fstat(int(name)), os.get_inheritable(int(name)))[1]:
            numbers.append(int(name))
    except OSError:
        pass
request = json.dumps([sys.argv[1:], dict(os.environ), os.getcwd(), numbers]).encode()
server.sendall(struct.pack("!I", len(request)))
server.sendmsg([request[:1]], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", numbers))])
server.sendall(request[1:])
pid = struct.unpack("!i", server.recv(4, socket.MSG_WAITALL))[0]
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, lambda number, frame: os.kill(pid, number))
answer = server.recv(4, socket.MSG_WAITALL)
status = struct.unpack("!i", answer)[0] if len(answer) == 4 else 1
if status < 0:
    signal.signal(-status, signal.SIG_DFL) if -status != signal.SIGKILL else None
    os.kill(os.getpid(), -status)
os._exit(status)
"""


@contextlib.contextmanager
def warm_python() -> Iterator[str]:
    """A server for the length of a `with` block; yields the path of the executable that stands in for Python.

    Starting returns at once: the server imports meanwhile, and requests wait for it. `RETOOL_WARM_PYTHON` names the
    executable to the processes started inside; within such a block another one yields the same executable.
    """
    outer = os.environ.get(EXECUTABLE_VARIABLE)
    if outer and os.access(outer, os.X_OK):
        yield outer
        return
    folder = Path(tempfile.mkdtemp(prefix="retool-warm-"))
    address, executable = str(folder / "socket"), folder / "python"
    executable.write_text(_STUB.format(python=sys.executable, address=address))
    executable.chmod(0o700)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(128)
    environment = ENVIRONMENT | os.environ | {EXECUTABLE_VARIABLE: str(executable)}
    server = subprocess.Popen(
        [sys.executable, "-m", "verl_ext.cpu.warm_python", "--serve", str(listener.fileno()), str(os.getpid())],
        env=environment,
        pass_fds=[listener.fileno()],
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    listener.close()
    try:
        yield str(executable)
    finally:
        server.terminate()
        server.wait()
        shutil.rmtree(folder, ignore_errors=True)


def serve(listener: socket.socket, parent_pid: int) -> None:
    """Import `PRELOAD`, then fork a Python per connection until the parent dies or SIGTERM comes.

    Raises:
        RuntimeError: an import started a thread: forks would be unsafe.
    """
    executable = os.environ[EXECUTABLE_VARIABLE]
    sys.executable = executable  # so that torchrun, Ray and multiprocessing in the forks start their Pythons here too
    _preload()

    selector = selectors.DefaultSelector()
    wake_read, wake_write = os.pipe()
    for end in (wake_read, wake_write):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(wake_write)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    selector.register(listener, selectors.EVENT_READ)
    selector.register(wake_read, selectors.EVENT_READ)
    clients: dict[int, socket.socket] = {}  # pid of the fork -> the executable that waits for it
    while os.getppid() == parent_pid:
        for key, _ in selector.select(timeout=1.0):
            if key.fileobj is listener:
                client, _ = listener.accept()
                request = _receive(client)
                if request is None:
                    client.close()
                    continue
                pid = os.fork()
                if pid == 0:
                    _take_niceness_of(client)
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    selector.close()
                    for other in (listener, client, *clients.values()):
                        other.close()
                    os.close(wake_read)
                    os.close(wake_write)
                    _become(*request)
                for number in request[3]:
                    os.close(number)
                with contextlib.suppress(OSError):
                    client.sendall(struct.pack("!i", pid))
                clients[pid] = client
                selector.register(client, selectors.EVENT_READ, pid)
            elif key.fileobj == wake_read:
                os.read(wake_read, 4096)
            else:  # its executable was killed: so is the fork
                with contextlib.suppress(ProcessLookupError):
                    os.kill(key.data, signal.SIGKILL)
                selector.unregister(key.fileobj)
        _reap(clients, selector)
    # The parent was killed, and cannot clean up itself.
    for pid in clients:
        os.kill(pid, signal.SIGKILL)
    shutil.rmtree(Path(executable).parent, ignore_errors=True)


def _preload() -> None:
    alias_vllm_distribution()
    sys.modules["ray"] = None  # an import of it fails, which vLLM takes for "not installed"
    for name in PRELOAD:
        importlib.import_module(name)
    del sys.modules["ray"]
    if threading.active_count() > 1:
        raise RuntimeError(f"{threading.enumerate()} run after the imports of warm_python; a fork would lose them.")
    gc.collect()
    gc.freeze()  # no collection in a fork walks, and so copies, what all forks share


def _reap(clients: dict[int, socket.socket], selector: selectors.BaseSelector) -> None:
    while clients:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        client = clients.pop(pid)
        with contextlib.suppress(OSError):
            client.sendall(struct.pack("!i", os.waitstatus_to_exitcode(status)))
        with contextlib.suppress(KeyError):
            selector.unregister(client)
        client.close()


def _receive(client: socket.socket) -> tuple[list[str], dict[str, str], str, list[int], list[int]] | None:
    """(arguments, environment, folder, the open files here, their numbers there), or None if the other side is gone."""
    header = client.recv(4, socket.MSG_WAITALL)
    if len(header) < 4:
        return None
    length = struct.unpack("!I", header)[0]
    first, ancillary, _, _ = client.recvmsg(1, socket.CMSG_SPACE(253 * 4))
    files = array.array("i")
    for _, _, data in ancillary:
        files.frombytes(data[: len(data) - len(data) % files.itemsize])
    rest = client.recv(length - 1, socket.MSG_WAITALL)
    if len(first) + len(rest) < length:
        return None
    arguments, environment, folder, numbers = json.loads(first + rest)
    return arguments, environment, folder, list(files), numbers


def _take_niceness_of(client: socket.socket) -> None:
    """As a child would inherit it: Ray's workers are nice, so that a sandbox beside them gets the CPU first."""
    asking, _, _ = struct.unpack("3i", client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    with contextlib.suppress(OSError):  # it has ended, and so will this fork; or it is less nice than we may be
        os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, asking))


def _become(
    arguments: list[str], environment: dict[str, str], folder: str, files: list[int], numbers: list[int]
) -> None:
    """In the fork: be `python *arguments`. Does not return."""
    floor = max([*numbers, *files, 2]) + 1
    moved = [os.dup2(number, floor + i) for i, number in enumerate(files)]  # out of the way of each other
    for number in files:
        os.close(number)
    for number, wanted in zip(moved, numbers, strict=True):
        os.dup2(number, wanted)
        os.close(number)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # imports have asked for it, and TMPDIR may be another one here
    os.chdir(folder)
    sys.path[:0] = [entry for entry in environment.get("PYTHONPATH", "").split(os.pathsep) if entry]
    sys.stdout.reconfigure(line_buffering=True)
    status = 1
    try:
        run_arguments(arguments)
        status = 0
    except SystemExit as error:
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:  # the interpreter's own last resort
        sys.excepthook(*sys.exc_info())
    finally:
        with contextlib.suppress(BaseException):
            threading._shutdown()
        import atexit

        atexit._run_exitfuncs()
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status & 0xFF)


def run_arguments(arguments: list[str]) -> None:
    """Run what the arguments of a `python` command say, in this process: `-c code`, `-m module` or a script.

    Raises:
        ValueError: they say none of these.
    """
    position = 0
    while position < len(arguments) and arguments[position].startswith("-"):
        option = arguments[position]
        if option in ("-c", "-m"):
            break
        position += 2 if option in ("-X", "-W") else 1  # -u, -B, -I, -E, ...: no meaning for a running interpreter
    if position >= len(arguments):
        raise ValueError(f"warm_python runs `-c code`, `-m module` or a script, but got {arguments}.")
    if arguments[position] == "-c":
        sys.argv = ["-c", *arguments[position + 2 :]]
        sys.path.insert(0, "")
        exec(
            compile(arguments[position + 1], "<string>", "exec"), {"__name__": "__main__", "__builtins__": __builtins__}
        )
    elif arguments[position] == "-m":
        sys.argv = arguments[position + 1 :]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(arguments[position + 1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments[position:]
        sys.path.insert(0, os.path.dirname(os.path.abspath(arguments[position])))
        runpy.run_path(arguments[position], run_name="__main__")


def main() -> None:
    if sys.argv[1:2] == ["--serve"]:
        serve(socket.socket(fileno=int(sys.argv[2])), int(sys.argv[3]))
        return
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    with warm_python() as executable:
        os.environ[EXECUTABLE_VARIABLE] = executable
        command = subprocess.Popen([executable, *sys.argv[1:]])
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, frame: command.send_signal(number))
        status = command.wait()
    raise SystemExit(status if status >= 0 else 128 - status)


if __name__ == "__main__":
    main()
