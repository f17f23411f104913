"""The processes that run the submitted Python: a fork server with a clean environment.

  zygote   imports packages, then waits on its control socket; each message carries the socket of a new worker to fork
  worker   (worker.py) runs one request after another: forks the program, reads its output while it runs, holds the
           deadline, kills and removes all that is left, and only then answers
  program  (program.py) the submitted code, run as `python main.py` runs it, then ended without tearing the
           interpreter down

The server starts it by path (`python -I zygote.py CONTROL_FD JSON`, see `main`) and never imports it, so that no secret
and no package of the server is in a program's memory. Earlier requests are not there either: a worker never reads code
or input (the program does), and it keeps output in memory that forks do not inherit. The cost of a fork is the pages
that it touches, each copied on a fault, so whatever can be done once in the worker is not done per request.

A program is bounded here (time, memory, file size, output) and cleaned up after; isolation.py keeps it from the host's
files, processes and network. A session's program stays for the next request, stopped in between.
"""

import contextlib
import gc
import importlib
import json
import os
import resource
import signal
import socket
import sys
import types
from typing import Any


def _import_siblings(*names: str) -> list[types.ModuleType]:
    """Import modules next to this file as a separate package: neither `verl_ext` nor this folder becomes importable."""
    package = types.ModuleType("_sandbox")
    package.__path__ = [os.path.dirname(os.path.abspath(__file__))]
    sys.modules[package.__name__] = package
    modules = [importlib.import_module(f"{package.__name__}.{name}") for name in names]
    for name in [name for name in sys.modules if name.partition(".")[0] == package.__name__]:
        del sys.modules[name]
    return modules


NAMES = ("isolation", "folders", "preload", "worker")
# Only for boxes: a program's fork would have it in its memory.
BOX = ("box",) if __name__ == "__main__" and json.loads(sys.argv[2])["boxes"] else ()
isolation, folders, preload, worker, *box = _import_siblings(*NAMES, *BOX)

OOM_SCORE_ADJ = "1000"  # if the machine runs out of memory, the kernel kills a program first, not the trainer


def main(control: socket.socket, options: dict[str, Any]) -> None:
    """Fork a worker per message (its name, with its socket) until the server is gone; then remove the root folder.

    Args:
        options: root (folder), max_output_bytes, isolation (auto, full, none), allow_subprocess, preload (names), and
            boxes: the workers are for boxes (box.py), not for programs.
    """
    worker.adopt_orphans()  # with namespaces, a worker is forked by our child, which then ends
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write(OOM_SCORE_ADJ)
    # The first compile() builds the parser's types; done here, every fork inherits them.
    exec(compile(b"def f(x):\n    return [y for y in range(x)]\nf'{f(3)}'\n", folders.SCRIPT, "exec"), {})
    preload.preload(options["preload"])
    refusal, kind = None, worker.Worker
    try:
        if box:
            kind = box[0].BoxWorker
            layers = box[0].BoxIsolation(options["isolation"], root=options["root"])
        else:
            layers = isolation.Isolation(
                options["isolation"], allow_subprocess=options["allow_subprocess"], root=options["root"]
            )
        layers.enter_zygote()
        if "seccomp" in layers.layers:
            preload.unlock_sqlite()
            preload.do_without_epoll()
            preload.do_without_statvfs()
            preload.count_shared_memory(between_processes=options["allow_subprocess"])
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
            worker.send(connection, {"error": refusal})
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
                worker.start(connection, name.decode(), kind, layers, options["max_output_bytes"], address_space)
            finally:
                os._exit(0)
        connection.close()
    with contextlib.suppress(ChildProcessError):
        os.waitpid(-1, 0)  # returns, with an error, once all workers have ended because the server is gone
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if refusal or not layers.remove_root():
        folders.remove_tree(options["root"])


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])), json.loads(sys.argv[2]))
